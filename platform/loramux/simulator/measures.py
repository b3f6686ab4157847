"""What a simulation counts: times to the microsecond, exactly, in memory that does not grow with the tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """Of a time, in milliseconds; None where nothing was measured."""

    p50: float | None
    p99: float | None


class Times:
    """Durations as a count for each microsecond, so that every quantile is exact."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """One duration."""
        microseconds = round(seconds * 1e6)
        self.counts[microseconds] = self.counts.get(microseconds, 0) + 1

    def milliseconds(self, share: float) -> float | None:
        """The lowest duration that at least `share` of all do not exceed."""
        missing = math.ceil(share * sum(self.counts.values()))
        for microseconds in sorted(self.counts):
            missing -= self.counts[microseconds]
            if missing <= 0:
                return microseconds / 1000
        return None

    @property
    def quantiles(self) -> Quantiles:
        """Median and P99."""
        return Quantiles(self.milliseconds(0.5), self.milliseconds(0.99))


def merged(times: Iterable[Times]) -> Times:
    """All of them together."""
    total: Counter[int] = Counter()
    for one in times:
        total.update(one.counts)
    merged = Times()
    merged.counts = dict(total)
    return merged


@dataclass(slots=True)
class Tally:
    """One tenant's requests."""

    accepted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    with_deadline: int = 0
    in_deadline: int = 0
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)
