"""A simulation over time: samples of the pool, the queue and the tenants' tokens, and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loramux.simulator.report import TenantTally
from loramux.simulator.scenario import ScenarioError

BUSIEST = 8
"""Tenants whose service is plotted."""


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One look at a running simulation."""

    seconds: float
    pool_use: float
    waiting: int
    running: int
    tokens: dict[str, int]
    """Generated so far, by tenant; of the first BUSIEST tenants that got any."""


@dataclass(slots=True)
class Timeline:
    """Looks at least `interval` seconds of simulated time apart."""

    interval: float
    moments: list[TimelinePoint] = field(default_factory=list)
    _next_at: float = 0.0
    _watched: list[str] = field(default_factory=list)

    def due(self, now: float) -> bool:
        """Is it time for another sample?"""
        return now >= self._next_at

    def look(self, now: float, pool_use: float, counts: tuple[int, int], tallies: Mapping[str, TenantTally]) -> None:
        """Keep a moment; `counts` are those that wait and those that run."""
        self._next_at = now + self.interval
        if len(self._watched) < BUSIEST:
            self._watched = list(tallies)[:BUSIEST]
        tokens = {tenant: tallies[tenant].output_tokens for tenant in self._watched}
        self.moments.append(TimelinePoint(now, pool_use, *counts, tokens))


def plot_report(course: Timeline, title: str, path: Path) -> None:
    """Tokens by tenant, requests and the pool over time, as a picture file.

    Raises ScenarioError where matplotlib is missing or the file's kind is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ScenarioError("--plot needs matplotlib: pip install 'loramux[plot]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    service, requests, pool = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1])
    seconds = [moment.seconds for moment in course.moments]
    tenants = sorted({tenant for moment in course.moments for tenant in moment.tokens})
    for tenant in tenants:
        service.plot(seconds, [moment.tokens.get(tenant, 0) for moment in course.moments], label=tenant)
    service.set_ylabel("tokens generated")
    service.legend(loc="upper left", fontsize="small")
    requests.plot(seconds, [moment.waiting for moment in course.moments], label="waiting")
    requests.plot(seconds, [moment.running for moment in course.moments], label="running")
    requests.set_ylabel("requests")
    requests.legend(loc="upper left", fontsize="small")
    pool.fill_between(seconds, [100 * moment.pool_use for moment in course.moments], alpha=0.5)
    pool.set_ylabel("pool in use, %")
    pool.set_ylim(0, 100)
    pool.set_xlabel("seconds")
    service.set_title(title)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ScenarioError(f"cannot write the plot {path}: {error}") from None
