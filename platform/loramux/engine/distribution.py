"""Measured values in buckets of fixed size: cheap to count, cheap to send."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """counts[i] values were at most bounds[i] and above the bound before it; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float
    """The sum of the values."""


@dataclass(slots=True)
class Histogram:
    """Counts values by `bounds`, which ascend."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """All of `other`'s, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def distribution(self) -> Distribution:
        """As of now."""
        return Distribution(self.bounds, list(self.counts), self.total)
