"""A server's traffic on each engine, and the engines' views brought up to date with it.

A view is up to a second old. The server corrects the view: it replaces its own requests at the time of the view by its
current requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from loramux.engine.memory.prefix_digests import identity_mask
from loramux.engine.messages import KvIdentity, Request, ServiceClass
from loramux.fleet.view import EngineView

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


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that routing depends on."""

    id: str
    identity: KvIdentity
    """Identity under which the prompt's KV is shared. Its digest is that of the adapter, or None."""
    base_identity: KvIdentity | None = None
    """Identity under which an activated LoRA shares the KV of its prompt's beginning; None for the base."""
    prompt_tokens: int
    prefix: tuple[int, ...] = ()
    """`prefix_digests` of the request's prompt."""
    block_size: int = 1
    """Tokens of a page."""
    is_background: bool = False
    """True for class batch, whose first token is not awaited."""

    @classmethod
    def of(cls, request: Request, block_size: int = 1) -> RoutingRequest:
        """Return the properties of `request` that the router needs."""
        return cls(
            id=request.id,
            identity=request.kv_identity,
            base_identity=request.base_kv_identity if request.adapter else None,
            prompt_tokens=len(request.prompt_token_ids),
            prefix=request.prefix_digests,
            block_size=block_size,
            is_background=request.service_class is ServiceClass.BATCH,
        )

    def masks(self, view: EngineView) -> tuple[int, ...]:
        """Return the masks of the identities under which the engine may have cached the prompt's beginning."""
        if self.base_identity is not None and self.identity.digest in view.activated:
            return identity_mask(self.base_identity), identity_mask(self.identity)
        return (identity_mask(self.identity),)


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that was sent and has not ended."""

    engine: str
    key: str
    identity: KvIdentity
    tokens: int
    """Number of tokens of the request's prompt that must be computed."""
    is_background: bool = False
    is_started: bool = False
    prompt_tokens: int = 0
    block_size: int = 1


@dataclass(eq=False, slots=True)
class Traffic:
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

    def add(self, sent: SentRequest, now: float) -> None:
        """Count a request."""
        self.requests += 1
        self.tokens += sent.tokens
        self.loading[sent.identity.digest] += 1
        self.tenants[sent.identity.tenant] += 1
        self._note(now)

    def start(self, sent: SentRequest, now: float) -> None:
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


class EngineLoad:
    """One engine: its latest view, this server's traffic on it, and what both say together."""

    __slots__ = ("beginnings", "placed_s", "queue_tokens", "requests", "step_s", "traffic", "view")

    def __init__(self, view: EngineView) -> None:
        self.traffic = Traffic()
        self.beginnings: dict[int, float] = {}
        """Digests of beginnings of prompts that were sent and that no report can contain yet, with their times."""
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
        self.beginnings = {digest: at for digest, at in self.beginnings.items() if at >= since}
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

    def send(self, sent: SentRequest, now: float) -> None:
        """Count a request of this server."""
        self.traffic.add(sent, now)
        self.requests += 1
        self.queue_tokens += sent.tokens

    def start(self, sent: SentRequest, now: float) -> None:
        """Count the first token of a request of this server."""
        self.traffic.start(sent, now)
        self.queue_tokens -= sent.tokens

    def end(self, now: float) -> None:
        """Count the end of a request of this server."""
        self.traffic.remove(now)
        self.requests -= 1

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
