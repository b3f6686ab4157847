"""Engines as a server sees them: their latest statistics, brought up to date with what the server has sent since.

An `EngineView` has the latest statistics of an engine, which are a second old or older, with the time of their arrival.
Times are by the server's clock, not the engine's, because clocks of two machines are not compared. Routing, shares and
autoscaling decide only from views. An `EngineLoad` corrects a view for the router: it replaces the server's own
requests at the time of the view by its current requests.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

import msgspec

from loramux.engine.memory.prefix_digests import DEPTHS, identity_mask
from loramux.engine.messages import EngineStats, KvIdentity, Request, ServiceClass

HISTORY = 4096
"""Number of remembered events of an engine's traffic, which is more than arrive between two statistics."""
PARALLEL_LOADS = 4
"""Loads that an engine runs at a time (`adapters.max_loading`)."""
REPORT_DELAY_S = 2.0
"""Seconds until a report contains a beginning that was computed at once: a report's interval, and the prefill."""
MAX_BEGINNINGS = 65_536
"""Maximum number of beginnings that an engine is expected to report."""
SMOOTHING_S = 5.0
"""Seconds after which a reported step time, and a change of placement that no report contains yet, count half."""

NameT = TypeVar("NameT", str, str | None)


class EngineState(enum.StrEnum):
    """The stages of an engine's life. Only READY engines get requests."""

    STARTING = "starting"
    """The engine's model is being loaded."""
    READY = "ready"
    DRAINING = "draining"
    """The engine finishes its current requests, and gets no more."""
    RESTING = "resting"
    """The engine is not needed now, and not started."""
    LOST = "lost"
    """The engine died, or was silent for too long."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at the time `at`."""

    engine: str
    base: str
    """Name of the base model that it serves."""
    state: EngineState = EngineState.READY
    at: float = 0.0
    """Time by the server's clock when the statistics arrived."""
    resident: Mapping[str, int] = {}
    """Pages of the revisions that are in the pool or are being loaded, by digest."""
    activated: frozenset[str] = frozenset()
    """Digests of the resident activated LoRAs."""
    pinned: frozenset[str] = frozenset()
    """Digests of the revisions that pins keep in the pool."""
    prefixes: frozenset[int] = frozenset()
    """Digests of cached beginnings of prompts (`engine.memory.prefix_digests`)."""
    queue_tokens: int = 0
    """Prompt tokens still to compute."""
    waiting: int = 0
    waiting_tenants: int = 0
    """Number of tenants with waiting requests, which share free rows."""
    running: int = 0
    max_running: int = 1
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed per second; 0: not measured yet."""
    wait_s: float = 0.0
    """Seconds until every request that waits has begun, by the engine's own estimates."""
    load_s: float = 0.0
    """Mean seconds of a load of an adapter; 0: no adapter was loaded yet."""
    step_s: float = 0.0
    """Mean seconds of a step; 0: not measured yet."""
    weights_s: float = 0.0
    """Seconds of a step in which the weights of the base are read."""
    page_s: float = 0.0
    """Seconds that reading one more page adds to a step; 0: not measured yet."""
    row_pages: float = 0.0
    """Mean pages of KV of a running request."""
    pages: int = 0
    free_pages: int = 0
    """Number of pages that are free or can be evicted immediately."""

    @property
    def requests(self) -> int:
        """Requests that wait or run."""
        return self.waiting + self.running

    @property
    def pages_used(self) -> float:
        """Share of the pool that running requests, their adapters and pins hold."""
        return 1.0 - self.free_pages / self.pages if self.pages else 0.0


def view_of(engine: str, base: str, state: EngineState, stats: EngineStats, at: float) -> EngineView:
    """Build the view of an engine from statistics that arrived `at`."""
    facts = stats.routing
    return EngineView(
        engine=engine,
        base=base,
        state=state,
        at=at,
        resident=facts.resident,
        activated=frozenset(facts.activated),
        pinned=frozenset(facts.pinned),
        prefixes=frozenset(array("Q", facts.prefixes)),
        queue_tokens=facts.queue_tokens,
        waiting=stats.waiting,
        waiting_tenants=facts.waiting_tenants,
        running=stats.running,
        max_running=facts.max_running,
        prefill_tokens_per_s=facts.prefill_tokens_per_s,
        wait_s=facts.wait_s,
        load_s=stats.adapter_load_seconds / stats.adapter_loads if stats.adapter_loads else 0.0,
        step_s=facts.step_s,
        page_s=facts.page_s,
        weights_s=facts.weights_s,
        row_pages=stats.pages_kv / max(1, stats.running),
        pages=stats.pages_total,
        free_pages=stats.pages_free + stats.pages_kv_cached + stats.pages_adapters_idle,
    )


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that routing depends on."""

    id: str
    identity: KvIdentity
    """Identity under which the prompt's KV is shared. Its digest is that of the adapter, or None."""
    base_identity: KvIdentity | None = None
    """Identity under which an activated LoRA shares the KV of its prompt's beginning; None for the base."""
    prompt_tokens: int
    prefix: tuple[int, ...] = ()
    """Digests of the prompt's beginnings as engines report them: `prefix_digests` under `identity`."""
    block_size: int = 1
    """Tokens of a page."""
    is_background: bool = False
    """True for class batch, whose first token is not awaited."""

    @classmethod
    def of(cls, request: Request, block_size: int = 1) -> RoutingRequest:
        """Return the properties of `request` that the router needs."""
        identity = request.kv_identity
        mask = identity_mask(identity)
        return cls(
            id=request.id,
            identity=identity,
            base_identity=request.base_kv_identity if request.adapter else None,
            prompt_tokens=len(request.prompt_token_ids),
            prefix=tuple([digest ^ mask for digest in request.prefix_digests]),
            block_size=block_size,
            is_background=request.service_class is ServiceClass.BATCH,
        )

    def tokens_at(self, place: int) -> int:
        """Return the tokens of the beginning at `place`. An engine computes at least one token of a prompt."""
        return min(DEPTHS[place] * self.block_size, self.prompt_tokens - 1)

    def base_prefix(self, activated: Container[str | None]) -> tuple[int, ...]:
        """Return the digests under the base's identity if the adapter is among the `activated` LoRAs, whose prompts
        begin with KV of the base.
        """
        if self.base_identity is None or self.identity.digest not in activated:
            return ()
        shift = identity_mask(self.identity) ^ identity_mask(self.base_identity)
        return tuple([digest ^ shift for digest in self.prefix])


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that was sent and has not ended."""

    engine: str
    key: str
    request: RoutingRequest
    tokens: int
    """Number of tokens of the request's prompt that must be computed."""
    is_started: bool = False


@dataclass(eq=False, slots=True)
class Traffic:
    """This server's requests on one engine, now and during the last seconds."""

    requests: int = 0
    tokens: int = 0
    """Prompt tokens of requests that have not started."""
    loading: dict[str | None, int] = field(default_factory=dict)
    """Revisions of requests that have not started, with their number; None: the base."""
    tenants: dict[str, int] = field(default_factory=dict)
    """Tenants of requests that have not started, with their number."""
    _times: list[float] = field(default_factory=list)
    _past: list[tuple[int, int]] = field(default_factory=list)

    def at(self, when: float) -> tuple[int, int]:
        """Return (requests, tokens) at the time `when`."""
        index = bisect_right(self._times, when)
        return self._past[index - 1] if index else (0, 0)

    def add(self, sent: SentRequest, now: float) -> None:
        """Count a request."""
        self.requests += 1
        self.tokens += sent.tokens
        identity = sent.request.identity
        self.loading[identity.digest] = self.loading.get(identity.digest, 0) + 1
        self.tenants[identity.tenant] = self.tenants.get(identity.tenant, 0) + 1
        self._note(now)

    def start(self, sent: SentRequest, now: float) -> None:
        """Count a first token."""
        self.tokens -= sent.tokens
        _take_one(self.loading, sent.request.identity.digest)
        _take_one(self.tenants, sent.request.identity.tenant)
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


def _take_one(counts: dict[NameT, int], name: NameT) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]


class EngineLoad:
    """One engine: its latest view, this server's traffic on it, and what both say together."""

    __slots__ = ("beginnings", "placed_s", "queue_tokens", "requests", "step_s", "traffic", "view")

    def __init__(self, view: EngineView) -> None:
        self.traffic = Traffic()
        self.beginnings: dict[int, float] = {}
        """Digests of beginnings of prompts that were sent and that no report can contain yet, with their times: the
        oldest first.
        """
        self.step_s = view.step_s
        """Seconds of a step, smoothed over views."""
        self.placed_s = 0.0
        """Seconds of a step that placements have added or taken away and that `step_s` does not contain yet."""
        self.view = view
        self.requests = self.queue_tokens = 0
        """Requests that wait or run now, and prompt tokens to compute now."""
        self._correct()

    def update(self, view: EngineView) -> None:
        """Take a newer view."""
        keep = 0.5 ** (max(0.0, view.at - self.view.at) / SMOOTHING_S)
        if view.step_s:
            self.step_s = view.step_s + keep * (self.step_s - view.step_s) if self.step_s else view.step_s
        self.placed_s *= keep
        self.view = view
        since = view.at - view.wait_s - REPORT_DELAY_S
        if len(self.beginnings) > MAX_BEGINNINGS:
            self.beginnings.clear()
        for digest in list(takewhile(lambda digest: self.beginnings[digest] < since, self.beginnings)):
            del self.beginnings[digest]
        self._correct()

    def clear(self) -> None:
        """Forget the traffic of an engine that is lost, or came back empty."""
        self.traffic = Traffic()
        self.beginnings.clear()
        self.placed_s = 0.0
        self._correct()

    def _correct(self) -> None:
        requests_then, tokens_then = self.traffic.at(self.view.at)
        self.requests = max(0, self.view.requests - requests_then) + self.traffic.requests
        self.queue_tokens = max(0, self.view.queue_tokens - tokens_then) + self.traffic.tokens

    def send(self, sent: SentRequest, now: float, base_prefix: Iterable[int]) -> None:
        """Count a request of this server. Its beginnings will be cached, those in `base_prefix` as the base's."""
        self.traffic.add(sent, now)
        self.requests += 1
        self.queue_tokens += sent.tokens
        for digest in (*sent.request.prefix, *base_prefix):
            self.beginnings.pop(digest, None)
            self.beginnings[digest] = now

    def start(self, sent: SentRequest, now: float) -> None:
        """Count the first token of a request of this server."""
        self.traffic.start(sent, now)
        self.queue_tokens -= sent.tokens

    def end(self, now: float) -> None:
        """Count the end of a request of this server."""
        self.traffic.remove(now)
        self.requests -= 1

    def cached_tokens(self, request: RoutingRequest, prefix: Sequence[int]) -> int:
        """Return the tokens of the longest of the beginnings `prefix` of a prompt that the engine has cached, or was
        sent since its report.
        """
        reported, sent = self.view.prefixes, self.beginnings
        for place in range(len(prefix) - 1, -1, -1):
            if (digest := prefix[place]) in reported or digest in sent:
                return request.tokens_at(place)
        return 0

    @property
    def work_s(self) -> float:
        """Predicted seconds of a step with everything that is placed here, without those for the base's weights."""
        return max(0.0, self.step_s + self.placed_s - self.view.weights_s)

    def wait_s(self, tenant: str, rate: float) -> float:
        """Return the seconds until a new request of `tenant` is in a step, at `rate` prompt tokens per second."""
        view, wait = self.view, self.queue_tokens / rate
        if view.waiting:
            waiting = max(1, view.waiting + self.requests - view.requests)
            # Tenants take turns: each of a tenant's own requests waits for one request of every other tenant.
            turns = (self.traffic.tenants.get(tenant, 0) + 1) * max(1, view.waiting_tenants)
            wait = max(wait, view.wait_s * waiting / view.waiting) * min(1.0, turns / waiting)
        return wait

    def loads_ahead(self) -> float:
        """Return the loads of adapters that a further load waits for, in rounds of `PARALLEL_LOADS`."""
        resident = self.view.resident
        return sum(digest is not None and digest not in resident for digest in self.traffic.loading) / PARALLEL_LOADS
