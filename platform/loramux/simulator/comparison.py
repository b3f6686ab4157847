"""A scenario under each routing, in one run: the same requests, and the load that each routing serves within goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from loramux.simulator.planner import Goals
from loramux.simulator.report import SimulationReport
from loramux.simulator.scenario import ROUTINGS, Scenario
from loramux.simulator.simulation import Simulation

STEPS = 5
"""Halvings of the range in which the largest load is: the result is exact to a thirty-second of the range."""
MOST_FACTOR = 16.0


class ComparedRouting(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one routing."""

    routing: str
    report: SimulationReport
    """Figures at the scenario's own load."""
    requests_per_s_in_goals: float | None = None
    """Largest load that was found to keep the goals, in requests per second; None: no goals were given."""


def compare_routings(
    scenario: Scenario,
    goals: Goals | None,
    routings: Sequence[str] = ROUTINGS,
    on_simulation: Callable[[str, SimulationReport], None] = lambda *_: None,
) -> list[ComparedRouting]:
    """Simulate the scenario with each routing; `on_simulation` gets every report, with the name of its simulation.

    With `goals`, find for each routing the largest multiple of all clients' rates at which both P99 keep the goals.
    """
    compared = []
    for routing in routings:

        def simulate(factor: float, routing: str = routing) -> SimulationReport:
            report = Simulation(_scaled(scenario, routing, factor)).run()
            on_simulation(f"{routing} at {factor:.2f} of the load", report)
            return report

        own = simulate(1.0)
        most = None
        if goals is not None:
            most = _largest_factor(own, simulate, goals) * sum(client.rate for client in scenario.clients)
        compared.append(ComparedRouting(routing=routing, report=own, requests_per_s_in_goals=most))
    return compared


def _largest_factor(own: SimulationReport, simulate: Callable[[float], SimulationReport], goals: Goals) -> float:
    """Return the largest load that keeps the goals, as a multiple of the scenario's. `own` is the report at 1."""
    kept, missed = (1.0, 2.0) if goals.are_kept(own) else (0.0, 1.0)
    while kept and missed < MOST_FACTOR and goals.are_kept(simulate(missed)):
        kept, missed = missed, 2.0 * missed
    while not kept and missed > 1.0 / MOST_FACTOR:
        if goals.are_kept(simulate(missed / 2.0)):
            kept = missed / 2.0
        else:
            missed /= 2.0
    for _ in range(STEPS if kept else 0):
        middle = (kept + missed) / 2.0
        if goals.are_kept(simulate(middle)):
            kept = middle
        else:
            missed = middle
    return kept


def _scaled(scenario: Scenario, routing: str, factor: float) -> Scenario:
    clients = tuple(msgspec.structs.replace(client, rate=factor * client.rate) for client in scenario.clients)
    return msgspec.structs.replace(scenario, routing=routing, clients=clients)
