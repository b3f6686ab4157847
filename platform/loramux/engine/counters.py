"""What the scheduler and its residency count."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.distribution import SECONDS, Histogram


@dataclass(slots=True)
class SchedulerCounters:
    """Refusals for lack of time, and waits, since the start."""

    refused: int = 0
    """Would have missed their deadline."""
    missed: int = 0
    """Missed it while they waited."""
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """From arrival to the first step."""


@dataclass(slots=True)
class ResidencyCounters:
    """Since the start."""

    loads: int = 0
    load_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    hits: int = 0
    """Requests that found their revision READY when they came."""
    misses: int = 0
    evictions: int = 0
    failures: int = 0
