"""What the scheduler is steered by: limits, shares, bounds and how far it looks ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.engine.request import ServiceClass
from loramux.settings import Settings


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
    tau: float = 8192.0
    """Units over weight that one may be ahead of another who waits; further ahead it sits out. Below what one large
    request takes, requests are sent back all the time: the Azure conversations lose a fifth of their requests to it."""
    quantum: float = 512.0
    """Units over weight by which one may be admitted early because its adapter is in the batch already, once the
    batch's adapters cost more than `overhead_target`."""
    overhead_target: float = 0.1
    """Bytes of a step's adapters over the bytes it reads anyway, beyond which others go before (see quantum)."""
    weight_pages: float = math.inf
    """The base's weights, which every step reads, in pages; infinite where nobody said: adapters then cost nothing."""
    reserved_pages: Mapping[ServiceClass, float] = field(default_factory=dict)
    """Share of the pool kept for a class while it holds less."""
    tenant_guaranteed_pages: float = 0.0
    """Share of the pool, times its weight, that a tenant gets back from those who hold more than theirs."""
    tenant_max_pages: float = 1.0
    """Share of the pool that a tenant may hold, the guaranteed pages and the borrowed ones."""
    deadlines_ms: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Milliseconds to the first token, for requests of a class that do not bring a deadline of their own."""
    load_units_per_page: float = 1.0
    """What loading an adapter is charged: a page crosses the host link in about the time of one token's prefill
    (2 MiB at 50 GB/s against 16 GFLOP at 400 TFLOP/s: 42 and 40 microseconds)."""
    prefix_cache: bool = False
    """Whether full pages of KV are kept for others that begin alike."""
    lookahead: int = 32
    """Tenants a step looks at beyond those it admits, to have their adapters loaded."""
    window: int = 8
    """Requests of one tenant a step looks at for one whose adapter is ready."""

    def max_pages(self, num_pages: int) -> int:
        """The most that one tenant may hold of so many."""
        return int(num_pages * self.tenant_max_pages)

    @classmethod
    def from_settings(cls, settings: Settings, weight_pages: float) -> Policy:
        """What an operator asks for, for a model whose weights are as large as `weight_pages`."""
        asked = settings.scheduler
        return cls(
            class_shares={c: getattr(asked.class_shares, c) for c in ServiceClass},
            tau=asked.tau,
            quantum=asked.quantum,
            overhead_target=asked.overhead_target,
            weight_pages=weight_pages,
            reserved_pages={c: getattr(asked.reserved_pages, c) for c in ServiceClass},
            tenant_guaranteed_pages=asked.tenant_guaranteed_pages,
            tenant_max_pages=asked.tenant_max_pages,
            deadlines_ms={c: limit for c in ServiceClass if (limit := getattr(asked.deadlines_ms, c)) is not None},
            prefix_cache=settings.engine.prefix_cache,
        )
