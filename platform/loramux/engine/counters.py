"""What the scheduler counts, since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.distribution import SECONDS, Histogram


@dataclass(slots=True)
class SchedulerCounters:
    """Refusals for lack of time, and waits."""

    refused: int = 0
    """Would have missed their deadline."""
    missed: int = 0
    """Missed it while they waited."""
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """From arrival to the first step."""
