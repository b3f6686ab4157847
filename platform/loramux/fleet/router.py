"""The choice of an engine for a request: an engine that has its adapter and its cached prefix, and a short queue.

1. **Order.** Rendezvous hashing (Thaler and Ravishankar, 1998): an adapter has a fixed random order of the engines, the
   same in every server. An engine that comes or goes moves only its own share of the adapters.
2. **Copies.** The first k engines of the order are the adapter's homes. k follows the adapter's load: its requests in
   flight, divided by half of the number that an engine should hold. The load rises at once and falls with a half-life,
   so k does not oscillate.
3. **Bounded load** (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): an engine with more than `balance` times the mean of
   requests gets no request. So an adapter whose homes are busy with other traffic uses the next engines of its order.
4. **Choice.** The request's id draws two homes. This is Mitzenmacher's two choices, and prevents that all servers with
   old views choose the same engine. The request goes to the home with the earlier predicted first token: queue, load of
   the adapter if it is not in the pool, prefill of the uncached tokens. If another engine would be `patience` times
   earlier, the request goes there.

Requests for the base need no adapter, but profit from cached prefixes. The order of engines for such requests depends
on the tenant and the beginning of the prompt. Engines that got a request with a longer equal beginning are candidates
too.

A view is up to a second old. The server corrects the view: it replaces its own requests at the time of the view by its
current requests.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import msgspec

from loramux.engine.messages import KvIdentity, Request
from loramux.fleet.view import EngineState, EngineView

MAX_REVISIONS = 16_384
"""Revisions, and beginnings of prompts of the base, whose load is remembered."""
MAX_PREFIXES = 65_536
"""Maximum number of beginnings of prompts for which the router remembers their engines."""
HISTORY = 4096
"""Number of remembered events of an engine's traffic, which is more than arrive between two statistics."""
PARALLEL_LOADS = 4
"""Loads that an engine runs at a time (`adapters.max_loading`)."""
PREFIX_LENGTHS = tuple(sorted(step << shift for step in (32, 48) for shift in range(13)))
"""Numbers of tokens at which beginnings of prompts are compared: at least two thirds of a shared beginning is found."""


NameT = TypeVar("NameT", str, str | None)


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Limits and times of the router."""

    balance: float = 1.5
    """Maximum number of requests of an engine, in multiples of the mean."""
    light_load: int = 8
    """Number of requests that an engine may always hold. Below this number another copy of an adapter saves no time."""
    home_share: float = 0.5
    """Part of an engine's bound that one adapter may fill before it gets another engine."""
    half_life_s: float = 10.0
    """Seconds after which the load of an adapter without requests counts half."""
    patience: float = 2.0
    """Factor by which the first token must be earlier on another engine for a request to leave its adapter's homes."""


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that routing depends on."""

    id: str
    identity: KvIdentity
    """Identity under which the prompt's KV is shared. Its digest is that of the adapter, or None."""
    prompt_tokens: int
    prefix: tuple[int, ...] = ()
    """`prefix_hashes` of the request's prompt."""

    @classmethod
    def of(cls, request: Request, prefix: tuple[int, ...] = ()) -> RoutingRequest:
        """Return the properties of `request` that the router needs."""
        prompt_tokens = len(request.prompt_token_ids)
        return cls(id=request.id, identity=request.kv_identity, prompt_tokens=prompt_tokens, prefix=prefix)

    @property
    def key(self) -> str:
        """Key of the requests that belong together: requests of a revision, or requests for the base with the same
        beginning.
        """
        tenant, digest, scope = self.identity
        return digest or f"{tenant}/{scope}/{self.prefix[0] if self.prefix else 0:x}"


def prefix_hashes(identity: KvIdentity, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Hash the first 32, 48, 64, 96, ... tokens; hashes are equal only for equal tokens of one identity."""
    digest = blake2b(repr(tuple(identity)).encode(), digest_size=8)
    hashes, start = [], 0
    for end in PREFIX_LENGTHS:
        if end > len(token_ids):
            break
        digest.update(array("q", token_ids[start:end]).tobytes())
        hashes.append(int.from_bytes(digest.digest(), "big"))
        start = end
    return tuple(hashes)


class Router:
    """One server's choices. `choose` changes nothing; `sent`, `started` and `ended` report the course of a request."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self._open: dict[str, _Sent] = {}
        self._traffic: dict[str, _Traffic] = {}
        self._demand: OrderedDict[str, _Demand] = OrderedDict()
        self._prefixes: OrderedDict[int, dict[str, None]] = OrderedDict()

    # questions

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:
        """Return the engine for `request`; None if no engine is ready."""
        ready = [view for view in engines if view.state is EngineState.READY]
        if len(ready) < 2:
            return ready[0].engine if ready else None
        fleet = self._estimate(ready)
        names = tuple(fleet.loads)
        order = engine_order(request.key, names)
        homes = order[: self._copies(request.key, fleet, now)]
        candidates = [engine for engine in self._candidates(request, homes, fleet) if not fleet.is_full(engine)]
        best = self._soonest(request, candidates, fleet)
        if best is None:
            return self._soonest(request, [e for e in order if not fleet.is_full(e)][: len(homes)], fleet)
        least = fleet.own_seconds(best, request.prompt_tokens)
        seconds = self._predict(request, fleet.loads[best], fleet)
        if seconds > self.policy.patience * least:
            free = (engine for engine in order if not fleet.is_full(engine))
            enough = seconds / self.policy.patience
            return next((e for e in free if self._predict(request, fleet.loads[e], fleet) < enough), best)
        return best

    # events

    def sent(self, request: RoutingRequest, engine: str, now: float) -> None:
        """Note that `request` was sent to `engine`."""
        cached = self._cached(request, engine)
        self._open[request.id] = _Sent(engine, request.key, request.identity, request.prompt_tokens - cached)
        self._traffic.setdefault(engine, _Traffic()).add(self._open[request.id], now)
        demand = self._demand.setdefault(request.key, _Demand())
        self._demand.move_to_end(request.key)
        demand.change(+1, now, self.policy.half_life_s)
        if len(self._demand) > MAX_REVISIONS:
            self._forget_demand()
        for prefix in request.prefix:
            self._prefixes.setdefault(prefix, {})[engine] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def started(self, request_id: str, now: float) -> None:
        """Note that a request's first token has come."""
        if (sent := self._open.get(request_id)) and not sent.is_started:
            sent.is_started = True
            self._traffic[sent.engine].start(sent, now)

    def ended(self, request_id: str, now: float) -> None:
        """Note that a request has ended, or left its engine."""
        self.started(request_id, now)
        if sent := self._open.pop(request_id, None):
            self._traffic[sent.engine].remove(now)
            if demand := self._demand.get(sent.key):
                demand.change(-1, now, self.policy.half_life_s)

    def forget(self, engine: str) -> None:
        """Forget an engine that is lost for good, or came back empty."""
        self._traffic.pop(engine, None)
        self._open = {key: sent for key, sent in self._open.items() if sent.engine != engine}
        for engines in self._prefixes.values():
            engines.pop(engine, None)

    # estimates

    def _estimate(self, ready: Sequence[EngineView]) -> _Fleet:
        """Bring the views up to date with what this server has sent and heard since."""
        loads = {view.engine: self._load(view) for view in ready}
        count = len(loads)
        total = sum(load.requests for load in loads.values())
        working = sum(min(load.requests, load.view.max_running) for load in loads.values())
        rates = [view.prefill_tokens_per_s for view in ready if view.prefill_tokens_per_s]
        times = [view.load_s for view in ready if view.load_s]
        policy = self.policy
        return _Fleet(
            loads=loads,
            bound=max(policy.light_load, policy.balance * (total + 1) / count),
            home_load=policy.home_share * max(policy.light_load, policy.balance * working / count),
            others=max(0.0, total / max(1, len(self._open)) - 1.0),
            tokens_per_s=sum(rates) / len(rates) if rates else math.inf,
            load_s=sum(times) / len(times) if times else 0.0,
        )

    def _load(self, view: EngineView) -> _Load:
        traffic = self._traffic.get(view.engine)
        if traffic is None:
            return _Load(view, view.requests, view.queue_tokens, Counter(), Counter())
        requests_then, tokens_then = traffic.at(view.at)
        requests = max(0, view.requests - requests_then) + traffic.requests
        tokens = max(0, view.queue_tokens - tokens_then) + traffic.tokens
        return _Load(view, requests, tokens, traffic.loading, traffic.tenants)

    def _copies(self, key: str, fleet: _Fleet, now: float) -> int:
        demand = self._demand.get(key)
        if demand is None:
            return 1
        # Other servers are assumed to send similar traffic. A single request gives no information about other servers.
        level = demand.level(now, self.policy.half_life_s)
        level += max(0.0, level - 1.0) * fleet.others
        return max(1, min(len(fleet.loads), math.ceil(level / fleet.home_load)))

    def _candidates(self, request: RoutingRequest, homes: Sequence[str], fleet: _Fleet) -> Iterable[str]:
        """Return two homes, engines that hold the adapter by a pin, and engines that were sent an equal beginning."""
        digest = request.identity.digest
        near = {engine for engine, load in fleet.loads.items() if digest in load.view.pinned} if digest else set()
        for prefix in reversed(request.prefix):
            if known := self._prefixes.get(prefix):
                near.update(engine for engine in known if engine in (fleet.loads if digest is None else homes))
                break
        if digest is None and len(homes) == 1:
            homes = [*homes, *_shuffled(request.id, fleet.loads)[:2]]
            return dict.fromkeys([*near, *homes])
        return dict.fromkeys([*near, *(homes if len(homes) < 3 else _shuffled(request.id, homes)[:2])])

    def _soonest(self, request: RoutingRequest, candidates: Iterable[str], fleet: _Fleet) -> str | None:
        """Return the candidate with the earliest first token; among equal candidates the one with fewer requests."""
        predicted = {engine: self._predict(request, fleet.loads[engine], fleet) for engine in candidates}
        if len(predicted) < 2:
            return next(iter(predicted), None)
        close = 1.1 * min(predicted.values())
        equals = [engine for engine in _shuffled(request.id, predicted) if predicted[engine] <= close]
        return min(equals, key=lambda engine: fleet.loads[engine].requests)

    def _predict(self, request: RoutingRequest, load: _Load, fleet: _Fleet) -> float:
        """Return the seconds to the first token: the queue, the adapter's load if needed, and the uncached prefill."""
        view, digest = load.view, request.identity.digest
        rate = view.prefill_tokens_per_s or fleet.tokens_per_s
        wait = load.queue_tokens / rate
        if view.waiting:
            waiting = max(1, view.waiting + load.requests - view.requests)
            # Tenants take turns: each of a tenant's own requests waits for one request of every other tenant.
            turns = (load.tenants.get(request.identity.tenant, 0) + 1) * max(1, view.waiting_tenants)
            wait = max(wait, view.wait_s * waiting / view.waiting) * min(1.0, turns / waiting)
        prefill = (request.prompt_tokens - min(self._cached(request, view.engine), self._held(request, view))) / rate
        if digest is None or digest in view.resident or digest in load.loading:
            return wait + prefill
        ahead = sum(other not in view.resident for other in load.loading if other is not None)
        return max(wait, (view.load_s or fleet.load_s) * (1.0 + ahead / PARALLEL_LOADS)) + prefill

    def _cached(self, request: RoutingRequest, engine: str) -> int:
        """Return the tokens of the longest beginning of `request` that was sent to `engine` before."""
        for length, prefix in zip(
            reversed(PREFIX_LENGTHS[: len(request.prefix)]), reversed(request.prefix), strict=True
        ):
            if engine in self._prefixes.get(prefix, ()):
                # An engine always computes at least one token of a prompt.
                return min(length, request.prompt_tokens - 1)
        return 0

    @staticmethod
    def _held(request: RoutingRequest, view: EngineView) -> int:
        """Return the number of cached tokens that the engine reports for the request's identity; 0 if they were
        evicted.
        """
        return view.prefixes.get(request.identity, 0)

    def _forget_demand(self) -> None:
        """Forget the revision whose last request is oldest, among those with no request in flight."""
        for key, demand in self._demand.items():
            if not demand.in_flight:
                del self._demand[key]
                return


def place_pins(digests: Iterable[str], engines: Sequence[str], balance: float = 1.25) -> dict[str, list[str]]:
    """Return the digests that each engine should keep. Each digest is kept by one engine that is early in its order,
    and no engine gets far more than others.
    """
    wanted = sorted(digests)
    placed: dict[str, list[str]] = {engine: [] for engine in engines}
    most = math.ceil(balance * len(wanted) / max(1, len(engines)))
    for digest in wanted:
        for engine in engine_order(digest, tuple(engines)):
            if len(placed[engine]) < most:
                placed[engine].append(digest)
                break
    return placed


def _rank(key: str, engine: str) -> bytes:
    return blake2b(f"{key}\0{engine}".encode(), digest_size=8).digest()


@lru_cache(maxsize=16_384)
def engine_order(key: str, engines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines in the order of `key`: random, but the same in every process."""
    return tuple(sorted(engines, key=lambda engine: _rank(key, engine)))


def _shuffled(request_id: str, engines: Iterable[str]) -> list[str]:
    """Return the engines in a random order that depends on the request's id."""
    return sorted(engines, key=lambda engine: _rank(request_id, engine))


@dataclass(eq=False, slots=True)
class _Sent:
    """A request that was sent and has not ended."""

    engine: str
    key: str
    identity: KvIdentity
    tokens: int
    """Number of tokens of the request's prompt that must be computed."""
    is_started: bool = False


@dataclass(eq=False, slots=True)
class _Demand:
    """Requests of a revision in flight, and their peak, which fades."""

    in_flight: int = 0
    peak: float = 0.0
    changed_at: float = 0.0

    def level(self, now: float, half_life: float) -> float:
        """Return the requests in flight, or the faded peak if it is larger."""
        return max(self.in_flight, self.peak * 0.5 ** max(0.0, (now - self.changed_at) / half_life))

    def change(self, requests: int, now: float, half_life: float) -> None:
        """Count requests that came or ended."""
        self.in_flight += requests
        self.peak, self.changed_at = self.level(now, half_life), now


@dataclass(eq=False, slots=True)
class _Traffic:
    """This server's requests on one engine, now and during the last seconds."""

    requests: int = 0
    tokens: int = 0
    """Prompt tokens of requests that have not started."""
    loading: Counter[str | None] = field(default_factory=Counter)
    """Revisions of requests that have not started, with their number; None: the base."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Tenants of requests that have not started, with their number."""
    _times: list[float] = field(default_factory=list)
    _past: list[tuple[int, int]] = field(default_factory=list)

    def at(self, when: float) -> tuple[int, int]:
        """Return (requests, tokens) at the time `when`."""
        index = bisect_right(self._times, when)
        return self._past[index - 1] if index else (0, 0)

    def add(self, sent: _Sent, now: float) -> None:
        """Count a request."""
        self.requests += 1
        self.tokens += sent.tokens
        self.loading[sent.identity.digest] += 1
        self.tenants[sent.identity.tenant] += 1
        self._note(now)

    def start(self, sent: _Sent, now: float) -> None:
        """Count a first token."""
        self.tokens -= sent.tokens
        _take_one(self.loading, sent.identity.digest)
        _take_one(self.tenants, sent.identity.tenant)
        self._note(now)

    def remove(self, now: float) -> None:
        """Count an end."""
        self.requests -= 1
        self._note(now)

    def _note(self, now: float) -> None:
        self._times.append(now)
        self._past.append((self.requests, self.tokens))
        if len(self._times) > HISTORY:
            del self._times[: HISTORY // 2], self._past[: HISTORY // 2]


def _take_one(counter: Counter[NameT], name: NameT) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


@dataclass(eq=False, slots=True)
class _Load:
    """One engine's view, brought up to date."""

    view: EngineView
    requests: int
    queue_tokens: int
    loading: Mapping[str | None, int]
    """Revisions of requests that this server sent and that have not started."""
    tenants: Mapping[str, int]
    """Tenants of these requests."""


@dataclass(eq=False, slots=True)
class _Fleet:
    """All ready engines, and figures over all of them."""

    loads: dict[str, _Load]
    bound: float
    """Requests that an engine may hold."""
    home_load: float
    """Requests of one adapter that an engine may hold before the adapter gets another engine."""
    others: float
    """Requests of other servers, divided by this server's."""
    tokens_per_s: float
    """Mean prefill speed, in tokens per second."""
    load_s: float
    """Mean seconds of a load."""

    def is_full(self, engine: str) -> bool:
        """Return whether one more request would exceed the bound."""
        return self.loads[engine].requests + 1 > self.bound

    def own_seconds(self, engine: str, prompt_tokens: int) -> float:
        """Return the seconds that a request alone would take, with a load of its adapter."""
        return prompt_tokens / (self.loads[engine].view.prefill_tokens_per_s or self.tokens_per_s) + self.load_s
