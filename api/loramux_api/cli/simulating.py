"""loramux simulate: the engine's scheduler against a device model."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from loramux.simulator import Report, Scenario, Simulation, load_scenario, plot_report, scenario_names
from loramux_api.cli.options import json_option, note, put


@click.command()
@click.argument("name", required=False)
@click.option("--scenario", help="A shipped scenario's name, or a TOML file.", metavar="FILE|NAME")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value of the scenario; may be repeated."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", help="Draw how it went.")
@json_option
def simulate(
    name: str | None, scenario: str | None, overrides: tuple[str, ...], plot: Path | None, as_json: bool
) -> None:
    """Run a scenario through the engine's own scheduler, on a model of a device: exact, repeatable, without a GPU.

    Without a name it lists the scenarios that are shipped. docs/simulator.md explains scenarios and figures.

    \b
    Example:
      loramux simulate fairness-two-clients --set pool_tokens=1000000 --json
      loramux simulate --scenario my.toml --plot course.png
    """
    chosen = name or scenario
    if chosen is None:
        put(as_json, scenario_names(), "\n".join(["Scenarios that are shipped:", *scenario_names()]))
        return
    loaded = load_scenario(chosen, overrides)
    simulation = Simulation(loaded)
    report = _run(simulation)
    if plot is not None:
        plot_report(simulation.course, loaded.description, plot)
        note(as_json, f"The plot is in {plot}.")
    put(as_json, report, _text(loaded, report))


def _run(simulation: Simulation) -> Report:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(simulation.arrivals))
        return simulation.run(lambda answered: progress.advance(task, answered))


def _text(scenario: Scenario, report: Report) -> str:
    lines = [
        scenario.description,
        f"throughput     {report.throughput_tokens_per_s:,.1f} tokens/s",
        f"first token    p50 {_ms(report.ttft_ms.p50)}, p99 {_ms(report.ttft_ms.p99)}",
        f"inter-token    p50 {_ms(report.itl_ms.p50)}, p99 {_ms(report.itl_ms.p99)}",
        f"pool in use    {report.pool_use:.1%}",
        f"preemptions    {report.preemption_rate:.2%} of requests",
        f"service gap    {report.service_gap_max:,.0f} units, at most {report.service_gap_bound:,.0f}",
        f"requests       {report.accepted:,} accepted, {report.refused:,} refused",
    ]
    if report.in_deadline is not None:
        lines.append(f"in deadline    {report.in_deadline:.1%} of the accepted")
    return "\n".join(lines)


def _ms(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:,.1f} ms"
