"""Measured values: histograms of fixed size, and every counter of the engine in one place.

All parts of the engine share one `Counters` object and count in it; `statistics` reads it once per second.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of values by size: counts[i] is the number of values above bounds[i - 1] and at most bounds[i]. The last
    count is the number of values above all bounds.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float
    """The sum of the values."""


@dataclass(slots=True)
class Histogram:
    """Counts of values by `bounds`, which ascend."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Count all values of `other`, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def distribution(self) -> Distribution:
        """The counts of this moment, as a message."""
        return Distribution(self.bounds, list(self.counts), self.total)


@dataclass(slots=True)
class Counters:
    """Totals since the start, with which bills are reconciled and which benchmarks read.

    `EngineStats` has most of these totals under the same names, and explains them.
    """

    # steps
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    distinct_adapters: int = 0
    max_distinct_adapters: int = 0
    max_distinct_adapters_beside_base: int = 0
    step_adapters: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    adapter_bytes_read: int = 0

    # scheduling
    preemptions: int = 0
    refused_over_capacity: int = 0
    missed_deadlines: int = 0
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    claims_revoked: int = 0
    """Loaded adapters whose claim was revoked before a request had run under them, because fairness demanded it."""

    # memory
    images_encoded: int = 0
    images_found: int = 0
    kv_evictions: int = 0
    kv_pages_swapped_out: int = 0
    kv_pages_swapped_in: int = 0
    adapter_loads: int = 0
    adapter_load_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    adapter_hits: int = 0
    adapter_misses: int = 0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
