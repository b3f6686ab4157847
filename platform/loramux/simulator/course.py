"""How a simulation went over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.simulator.measures import Tally

BUSIEST = 8
"""Tenants whose service is drawn."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at a running simulation."""

    seconds: float
    pool_use: float
    waiting: int
    running: int
    tokens: dict[str, int]
    """Generated so far, by tenant; of the first BUSIEST tenants that got any."""


@dataclass(slots=True)
class Course:
    """Looks at least `interval` seconds of simulated time apart."""

    interval: float
    moments: list[Moment] = field(default_factory=list)
    _next_at: float = 0.0
    _watched: list[str] = field(default_factory=list)

    def due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now >= self._next_at

    def look(self, now: float, pool_use: float, counts: tuple[int, int], tallies: Mapping[str, Tally]) -> None:
        """Keep a moment; `counts` are those that wait and those that run."""
        self._next_at = now + self.interval
        if len(self._watched) < BUSIEST:
            self._watched = list(tallies)[:BUSIEST]
        tokens = {tenant: tallies[tenant].output_tokens for tenant in self._watched}
        self.moments.append(Moment(now, pool_use, *counts, tokens))
