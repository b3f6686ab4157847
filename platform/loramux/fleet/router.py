"""The choice of an engine for a request: an engine that has its adapter and its cached prefix, and a short queue.

1. **Homes** (`placement`). Each adapter, and each beginning of prompts of the base, has as many engines as its load
   needs. They are chosen by the predicted work of a step and by the room in the pool.
2. **Bounded load** (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): an engine with more than `balance` times the mean of
   requests gets no request. So an adapter whose homes are busy with other traffic uses the next engines of its order.
3. **Choice.** The request's id draws two homes. This is Mitzenmacher's two choices, and prevents that all servers with
   old views choose the same engine. The engine that has cached most of the prompt is compared with them: servers differ
   in a key's homes, and a home that a key was moved to has cached nothing yet. If no candidate has the adapter, engines
   that have it are compared too. The request goes to the engine with the earliest predicted first token: queue, load of
   the adapter if it is not in the pool, prefill of the tokens that this engine has not cached. If another engine would
   be `patience` times earlier, the request goes there.
4. **Class batch** goes to the home with the least predicted work, or for the base to the engine with the least of all.

Engines report digests of the beginnings of prompts that they have cached (`engine.memory.prefix_digests`). Beginnings
that were sent since the report count too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from operator import is_

from loramux.fleet.placement import Placement, RoutingPolicy, draw, engine_order
from loramux.fleet.view import EngineLoad, EngineState, EngineView, RoutingRequest, SentRequest

KEY_DEPTH = 3
"""Place in `DEPTHS` of the beginning by which prompts of the base belong together."""
MAX_LOOKS = 8
"""Engines that are asked if they would answer much earlier than the homes."""


class Router:
    """One server's choices. `choose` changes no later choice; `sent`, `started` and `ended` report a request's way."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self.placement = Placement(self.policy)
        self._open: dict[str, SentRequest] = {}
        self._engines: dict[str, EngineLoad] = {}
        """Every engine that was ever in a view."""
        self._homes_of: tuple[RoutingRequest | None, list[str]] = None, []
        """The request of the last choice, and its homes."""
        self._seen: tuple[EngineView, ...] = ()
        """Views from which `_fleet` was made."""
        self._is_stale = True
        """True if `_fleet` must be made anew, even from the same views."""
        self._fleet = FleetEstimate({}, (), frozenset(), {}, 0, 0, 0.0, 0.0)

    @property
    def num_moves(self) -> int:
        """Number of adapters and prefixes that were moved to another engine so far."""
        return self.placement.num_moves

    # questions

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:
        """Return the engine for `request`; None if no engine is ready."""
        fleet = self._estimate(engines)
        loads = fleet.loads
        if len(loads) < 2:
            return next(iter(loads), None)
        bound = max(self.policy.light_load, self.policy.balance * (fleet.requests + 1) / len(loads))
        homes = self._homes(request, fleet, now)
        self._homes_of = request, homes
        if request.is_background:
            return self._calmest(request, homes, loads)
        candidates = [e for e in self._candidates(request, homes, fleet) if loads[e].requests + 1 <= bound]
        if not candidates:
            free = (e for e in engine_order(key_of(request), fleet.names) if loads[e].requests + 1 <= bound)
            candidates = list(islice(free, len(homes)))
        best, seconds = self._soonest(request, candidates, fleet)
        rate = loads[best].view.prefill_tokens_per_s or fleet.tokens_per_s
        if seconds > self.policy.patience * (request.prompt_tokens / rate + fleet.load_s):
            free = (e for e in engine_order(key_of(request), fleet.names) if loads[e].requests + 1 <= bound)
            enough = seconds / self.policy.patience
            looks = islice(free, MAX_LOOKS)
            return next((e for e in looks if self._predict(request, loads[e], fleet) < enough), best)
        return best

    # events

    def sent(self, request: RoutingRequest, engine: str, now: float) -> None:
        """Note that `request` was sent to `engine`."""
        loads = self._fleet.loads
        load = self._engines.get(engine)
        cached = self._cached(request, load, self._fleet) if load is not None else 0
        sent = SentRequest(engine, key_of(request), request, request.prompt_tokens - cached)
        self._open[request.id] = sent
        known, homes = self._homes_of
        if known is not request:
            homes = self._homes(request, self._fleet, now) if loads else []
        self.placement.note_sent(sent, homes, loads, now)
        if load is not None:
            load.send(sent, now, request.base_prefix(self._fleet.activated))
            self._fleet.requests += engine in loads
        self.placement.rebalance(loads, now)

    def started(self, request_id: str, now: float) -> None:
        """Note that a request's first token has come."""
        if (sent := self._open.get(request_id)) and not sent.is_started:
            sent.is_started = True
            if load := self._engines.get(sent.engine):
                load.start(sent, now)

    def ended(self, request_id: str, now: float) -> None:
        """Note that a request has ended, or left its engine."""
        self.started(request_id, now)
        if sent := self._open.pop(request_id, None):
            if load := self._engines.get(sent.engine):
                load.end(now)
                self._fleet.requests -= sent.engine in self._fleet.loads
            self.placement.note_ended(sent, now)

    def forget(self, engine: str) -> None:
        """Forget an engine that is lost for good, or came back empty."""
        if load := self._engines.get(engine):
            load.clear()
        for request_id, sent in list(self._open.items()):
            if sent.engine == engine:
                del self._open[request_id]
                self.placement.note_ended(sent, -math.inf)
        self.placement.forget(engine)
        self._is_stale = True

    # estimates

    def _estimate(self, engines: Sequence[EngineView]) -> FleetEstimate:
        """Return the ready engines, up to date with their views and with what this server has sent and heard since."""
        if not self._is_stale and len(engines) == len(self._seen) and all(map(is_, engines, self._seen)):
            return self._fleet
        loads: dict[str, EngineLoad] = {}
        activated: set[str] = set()
        pinned: dict[str, list[str]] = {}
        requests = rows = measured = loading = 0
        tokens_per_s = load_s = 0.0
        for view in engines:
            engine = view.engine
            load = self._engines.get(engine)
            if load is None:
                load = self._engines[engine] = EngineLoad(view)
            elif load.view is not view:
                load.update(view)
            if view.state is not EngineState.READY:
                continue
            loads[engine] = load
            requests += load.requests
            rows += view.max_running
            if rate := view.prefill_tokens_per_s:
                tokens_per_s, measured = tokens_per_s + rate, measured + 1
            if seconds := view.load_s:
                load_s, loading = load_s + seconds, loading + 1
            if view.activated:
                activated |= view.activated
            for digest in view.pinned:
                pinned.setdefault(digest, []).append(engine)
        self._seen, self._is_stale = tuple(engines), False
        self._fleet = FleetEstimate(
            loads=loads,
            names=tuple(loads),
            activated=activated,
            pinned=pinned,
            requests=requests,
            rows=rows,
            tokens_per_s=tokens_per_s / measured if measured else math.inf,
            load_s=load_s / loading if loading else 0.0,
        )
        return self._fleet

    def _homes(self, request: RoutingRequest, fleet: FleetEstimate, now: float) -> list[str]:
        """Return the engines that should have the request's adapter, or its prompt's beginning."""
        key = key_of(request)
        homes = self.placement.known_homes(key, fleet.loads, now)
        copies = self._copies(key, fleet, now)
        if len(homes) >= copies:
            return homes[:copies]
        return self.placement.homes(key, homes, copies, fleet.loads, _holders(request, fleet), now)

    def _copies(self, key: str, fleet: FleetEstimate, now: float) -> int:
        policy, count = self.policy, len(fleet.loads)
        working = min(fleet.requests, fleet.rows)
        home_load = policy.home_share * max(policy.light_load, policy.balance * working / count)
        others = max(0.0, fleet.requests / max(1, len(self._open)) - 1.0)
        return self.placement.copies(key, home_load, others, count, now)

    def _candidates(self, request: RoutingRequest, homes: Sequence[str], fleet: FleetEstimate) -> Iterable[str]:
        """Return two homes, the engine that has cached most of the prompt, and engines that hold the adapter: by a pin,
        or if no candidate has it.
        """
        digest, loads = request.identity.digest, fleet.loads
        near = list(fleet.pinned.get(digest, ())) if digest else []
        if request.prefix:
            # An adapter's own KV is only where the adapter is or was, which are its homes.
            is_of_base = digest is None or digest in fleet.activated
            engines = fleet.names if is_of_base else homes if len(homes) > 2 else ()
            if (longest := _longest_cached(request, engines, fleet)) is not None:
                near.append(longest)
        drawn = homes
        if len(homes) > 2:
            number = draw(request.id)
            first, second = number % len(homes), number // len(homes) % (len(homes) - 1)
            drawn = [homes[first], homes[second + (second >= first)]]
        candidates = dict.fromkeys([*near, *drawn])
        if digest is not None:
            for engine in candidates:
                if digest in loads[engine].view.resident:
                    return candidates
            candidates.update(dict.fromkeys(_holders(request, fleet)))
        return candidates

    def _calmest(self, request: RoutingRequest, homes: Sequence[str], loads: Mapping[str, EngineLoad]) -> str:
        """Return the engine for class batch: the home with the least work, or for the base an engine with far less."""

        def work(engine: str) -> tuple[float, int]:
            return loads[engine].work_s, loads[engine].requests

        home, calmest = min(homes, key=work), min(loads, key=work)
        is_busy = work(home)[0] > self.policy.tolerance * work(calmest)[0]
        return calmest if is_busy and request.identity.digest is None else home

    def _soonest(self, request: RoutingRequest, candidates: Iterable[str], fleet: FleetEstimate) -> tuple[str, float]:
        """Return the candidate with the earliest first token, and its seconds; among equal candidates the one with
        fewer requests.
        """
        predicted = {engine: self._predict(request, fleet.loads[engine], fleet) for engine in candidates}
        if len(predicted) == 1:
            return next(iter(predicted.items()))
        close = 1.1 * min(predicted.values())
        equals = [engine for engine in predicted if predicted[engine] <= close]
        best = min(equals, key=lambda engine: fleet.loads[engine].requests)
        return best, predicted[best]

    def _predict(self, request: RoutingRequest, load: EngineLoad, fleet: FleetEstimate) -> float:
        """Return the seconds to the first token: the queue, the adapter's load if needed, and the uncached prefill."""
        view, digest = load.view, request.identity.digest
        rate = view.prefill_tokens_per_s or fleet.tokens_per_s
        wait = load.wait_s(request.identity.tenant, rate)
        prefill = (request.prompt_tokens - self._cached(request, load, fleet)) / rate
        if digest is None or digest in view.resident or digest in load.traffic.loading:
            return wait + prefill
        return max(wait, (view.load_s or fleet.load_s) * (1.0 + load.loads_ahead())) + prefill

    def _cached(self, request: RoutingRequest, load: EngineLoad, fleet: FleetEstimate) -> int:
        """Return the tokens of the longest beginning of the prompt that the engine has cached, or will have when it
        has begun the requests that were sent since its last report.
        """
        cached = load.cached_tokens(request, request.prefix)
        if request.base_identity is None or not fleet.activated:
            return cached
        return max(cached, load.cached_tokens(request, request.base_prefix(fleet.activated)))


def _holders(request: RoutingRequest, fleet: FleetEstimate) -> list[str]:
    """Return the engines that have the request's adapter, or for the base the beginning that makes its key."""
    if (digest := request.identity.digest) is not None:
        return [engine for engine, load in fleet.loads.items() if digest in load.view.resident]
    return _caching(key_beginning(request), fleet.names, fleet)


def _caching(beginning: int, engines: Iterable[str], fleet: FleetEstimate) -> list[str]:
    """Return those of `engines` that have cached a beginning of prompts, or were sent it."""
    loads = fleet.loads
    return [e for e in engines if beginning in (load := loads[e]).view.prefixes or beginning in load.beginnings]


def _longest_cached(request: RoutingRequest, engines: Iterable[str], fleet: FleetEstimate) -> str | None:
    """Return one of `engines` that has cached most of the prompt; None if none has the beginning of the base's keys.

    The KV of the beginning is that of the request's model. An activated LoRA also reads the base's.
    """
    place = _key_place(request.prefix)
    caching = {
        prefix: found
        for prefix in (request.prefix, request.base_prefix(fleet.activated))
        if prefix and (found := _caching(prefix[place], engines, fleet))
    }
    for deepest in range(len(request.prefix) - 1, place, -1):
        for prefix, having in caching.items():
            if longest := _caching(prefix[deepest], having, fleet):
                return longest[0]
    return next((having[0] for having in caching.values()), None)


def _key_place(prefix: Sequence[int]) -> int:
    return min(KEY_DEPTH, len(prefix) - 1)


def key_beginning(request: RoutingRequest) -> int:
    """Return the digest of the beginning by which prompts of the base belong together; 0: the prompt is shorter."""
    return request.prefix[_key_place(request.prefix)] if request.prefix else 0


def key_of(request: RoutingRequest) -> str:
    """Return the key of the requests that belong together: requests of a revision, or requests for the base with the
    same beginning.
    """
    tenant, digest, scope = request.identity
    return digest or f"{tenant}/{scope}/{key_beginning(request):x}"


@dataclass(eq=False, slots=True)
class FleetEstimate:
    """All ready engines, and figures over all of them."""

    loads: Mapping[str, EngineLoad]
    names: tuple[str, ...]
    activated: AbstractSet[str]
    """Digests of the activated LoRAs that are in any pool."""
    pinned: Mapping[str, list[str]]
    """Engines that hold a revision by a pin."""
    requests: int
    """Requests that wait or run now."""
    rows: int
    """Maximum number of rows of a step, over all engines."""
    tokens_per_s: float
    """Mean prefill speed, in tokens per second."""
    load_s: float
    """Mean seconds of a load."""
