"""What the scheduler is steered by: limits, shares, bounds and how far it looks ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.engine.request import ServiceClass
from loramux.settings import SchedulerSettings


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
    tau: float = 2048.0
    """Units over weight that one may be ahead of another who waits; further ahead it sits out."""
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

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Policy:
        """What an operator asks for."""
        return cls(
            class_shares={c: getattr(settings.class_shares, c) for c in ServiceClass},
            tau=settings.tau,
            deadlines_ms={c: limit for c in ServiceClass if (limit := getattr(settings.deadlines_ms, c)) is not None},
        )
