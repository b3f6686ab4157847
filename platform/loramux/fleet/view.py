"""A server's view of an engine: the latest statistics, which are a second old or older, with the time of their arrival.

Routing, shares and autoscaling decide only from views. Times are by the server's clock, not the engine's, because
clocks of two machines are not compared.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping

import msgspec

from loramux.engine.messages import EngineStats


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
