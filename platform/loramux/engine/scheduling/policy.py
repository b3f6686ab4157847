"""The scheduler's settings: limits, shares, bounds, and how far it looks ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.engine.request import ServiceClass
from loramux.settings import Settings
from loramux.units import QUIET_SECONDS


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The familiar knobs."""

    max_num_seqs: int
    """Rows of a step."""
    max_num_batched_tokens: int
    max_model_len: int


def _shares() -> dict[ServiceClass, float]:
    return {ServiceClass.INTERACTIVE: 8.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 1.0}


@dataclass(frozen=True, slots=True)
class Policy:
    """Service is counted in units: a prompt token computed is one, a token generated two (as in VTC, OSDI 2024)."""

    class_shares: Mapping[ServiceClass, float] = field(default_factory=_shares)
    """Shares, never strict priority: every class with work moves."""
    max_service_lead: float = 8192.0
    """Units over weight that a party may be ahead of another that waits; further ahead it sits out. Below the units of
    one large request, requests are preempted all the time: the Azure conversations preempt a fifth of their requests
    then."""
    max_lift: float = 131_072.0
    """Units over weight by which service on other engines may move a tenant behind the first that waits here. What it
    waits for at most is that much service of others: some seconds of a GPU."""
    affinity_window: float = 512.0
    """Units over weight by which one may be admitted early because its adapter is in the batch already, once the
    batch's adapters cost more than `adapter_overhead_target`."""
    adapter_overhead_target: float = 0.1
    """Bytes of a step's adapters over the bytes it reads anyway, beyond which affinity_window applies."""
    weight_pages: float = math.inf
    """The base's weights, which every step reads, in pages; infinite where unknown: adapters then cost nothing."""
    reserved_pages: Mapping[ServiceClass, float] = field(default_factory=dict)
    """Share of the pool kept for a class while it holds less."""
    tenant_guaranteed_pages: float = 0.0
    """Share of the pool, times its weight, that a tenant gets back from tenants that hold more than theirs."""
    tenant_max_pages: float = 1.0
    """Share of the pool that a tenant may hold, the guaranteed pages and the borrowed ones."""
    deadlines_ms: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Milliseconds to the first token, for requests of a class that do not bring a deadline of their own."""
    background_prefill_tokens: int = 128
    """The most prompt tokens of class batch in a step beside a class above it (`RequestQueue.background`)."""
    background_step_share: float = 0.25
    """Share of the time that a step takes however few its tokens are, by which those prompt tokens may lengthen it. A
    GPU that reads 16 GB of weights computes about 80 tokens in that time, a CPU far fewer."""
    quiet_seconds: float = QUIET_SECONDS
    """After a class has run, class batch gives way to it for so long: between two questions of a conversation nothing
    runs, and the next one waits for the step that it meets."""
    load_units_per_page: float = 1.0
    """Units that loading an adapter is charged: a page crosses the host link in about the time of one token's prefill
    (2 MiB at 50 GB/s against 16 GFLOP at 400 TFLOP/s: 42 and 40 microseconds)."""
    prefix_cache: bool = False
    """Keep full pages of KV for requests that begin with the same tokens."""
    max_draft_tokens: int = 0
    """The longest draft of a sequence in a step; 0: no speculative decoding."""
    lookahead: int = 32
    """Tenants a step looks at beyond those it admits, to have their adapters loaded."""
    window: int = 8
    """Requests of one tenant a step looks at for one whose adapter is ready."""

    def max_pages(self, num_pages: int) -> int:
        """The most pages that one tenant may hold, of `num_pages`."""
        return int(num_pages * self.tenant_max_pages)

    @classmethod
    def from_settings(cls, settings: Settings, weight_pages: float) -> Policy:
        """The operator's settings, for a model whose weights are as large as `weight_pages`."""
        asked = settings.scheduler
        return cls(
            class_shares={c: getattr(asked.class_shares, c) for c in ServiceClass},
            max_service_lead=asked.max_service_lead,
            max_lift=asked.max_lift,
            affinity_window=asked.affinity_window,
            adapter_overhead_target=asked.adapter_overhead_target,
            weight_pages=weight_pages,
            reserved_pages={c: getattr(asked.reserved_pages, c) for c in ServiceClass},
            tenant_guaranteed_pages=asked.tenant_guaranteed_pages,
            tenant_max_pages=asked.tenant_max_pages,
            deadlines_ms={c: limit for c in ServiceClass if (limit := getattr(asked.deadlines_ms, c)) is not None},
            prefix_cache=settings.engine.prefix_cache,
            max_draft_tokens=settings.engine.max_draft_tokens if settings.engine.speculation == "ngram" else 0,
        )
