"""loramux simulate: the engine's scheduler on a model of a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from loramux.simulator.comparison import ComparedRouting, compare_routings
from loramux.simulator.description import describe_log
from loramux.simulator.hardware import DEVICES, Device, Model
from loramux.simulator.planner import Goals
from loramux.simulator.profiles import read_profile
from loramux.simulator.report import SimulationReport, plot_report
from loramux.simulator.scenario import Scenario, load_scenario, model_of, scenario_names, scenario_of
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import LoggedRequest, arrivals_of_log, read_log
from loramux_api.cli.common import json_option, note, put
from loramux_api.cli.workloads import Milliseconds, save_workload, usage_log, workload_options


@click.command()
@click.argument("name", required=False)
@click.option("--scenario", help="Name of a shipped scenario, or a TOML file.", metavar="FILE|NAME")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value of the scenario; repeatable."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", help="Draw the simulation over time."
)
@workload_options
@click.option("--profile", metavar="FILE|NAME", help="A measured device and its model, instead of the scenario's.")
@click.option("--gpu", type=click.Choice(list(DEVICES)), help="A device, estimated, instead of the scenario's.")
@click.option(
    "--model", metavar="CONFIG", help="A model instead of the scenario's: a config.json, its folder or a name."
)
@click.option("--compare", is_flag=True, help="Run every routing: the router, residency, random, least-loaded.")
@click.option(
    "--ttft-ms",
    type=Milliseconds,
    help="With --compare: the load at this P99 of the first token.",
    metavar="MS",
)
@click.option(
    "--itl-ms", type=Milliseconds, help="With --compare: the load at this P99 between two tokens.", metavar="MS"
)
@json_option
def simulate(  # noqa: PLR0913, PLR0917 - one for each option
    name: str | None,
    scenario: str | None,
    overrides: tuple[str, ...],
    plot: Path | None,
    workload: Path | None,
    from_usage: str | None,
    base: str | None,
    save_to: Path | None,
    config: Path | None,
    profile: str | None,
    gpu: str | None,
    model: str | None,
    compare: bool,
    ttft_ms: float | None,
    itl_ms: float | None,
    as_json: bool,
) -> None:
    """Run a scenario through the engine's scheduler on a model of a device. Deterministic; needs no GPU.

    Without a name it lists the shipped scenarios. The page docs/simulator.md explains scenarios and figures. A workload
    (--workload, --from-usage) is served by the device of --profile, or by --gpu and --model.

    \b
    Example:
      loramux simulate fairness-two-clients --set pool_tokens=1000000 --json
      loramux simulate --scenario my.toml --plot course.png
      loramux simulate fleet-ranks --compare --ttft-ms 1000 --itl-ms 100
      loramux simulate --from-usage 7d --profile this-machine.json --set max_num_seqs=32
    """
    chosen = name or scenario or (None if workload is None else str(workload))
    log = None
    if from_usage is not None:
        log = usage_log(config, from_usage, base)
        if save_to is not None:
            save_workload(log, save_to, from_usage, as_json)
    elif workload is not None and workload.suffix != ".toml":
        log = read_log(workload)
    if sum(one is not None for one in (name, scenario, workload, from_usage)) > 1:
        raise click.UsageError("give one of NAME, --scenario, --workload and --from-usage")
    if chosen is None and log is None:
        put(as_json, scenario_names(), "\n".join(["Shipped scenarios:", *scenario_names()]))
        return
    source = str(chosen or f"--from-usage {from_usage}")
    loaded = _scenario(source, log, overrides, _devices(profile, gpu, model))
    if compare:
        _compare(loaded, ttft_ms, itl_ms, as_json)
        return
    if ttft_ms or itl_ms:
        raise click.UsageError("--ttft-ms and --itl-ms find a load for each routing; add --compare")
    simulation = Simulation(loaded, None if log is None else arrivals_of_log(log))
    report = _simulate(simulation)
    if plot is not None:
        plot_report(simulation.timeline, loaded.description, plot)
        note(as_json, f"The plot is in {plot}.")
    put(as_json, report, _report_text(loaded, report))


def _scenario(
    source: str, log: Sequence[LoggedRequest] | None, overrides: tuple[str, ...], devices: dict[str, Any]
) -> Scenario:
    """Return the scenario of the name or file `source`, or of a log that was read from there."""
    if log is None:
        return load_scenario(source, overrides, devices)
    return scenario_of(msgspec.to_builtins(describe_log(log)) | devices, source, overrides)


def _compare(loaded: Scenario, ttft_ms: float | None, itl_ms: float | None, as_json: bool) -> None:
    """Run every routing, and put their figures side by side."""
    goals = None
    if ttft_ms or itl_ms:
        goals = Goals(ttft_ms=ttft_ms or math.inf, itl_ms=itl_ms or math.inf)
    compared = compare_routings(loaded, goals, on_simulation=partial(_note_simulation, as_json))
    put(as_json, compared, _comparison_text(loaded, compared))


def _devices(profile: str | None, gpu: str | None, model: str | None) -> dict[str, Any]:
    """Return the device and the model that replace those of a scenario, as plain data."""
    if profile is not None and gpu is not None:
        raise click.UsageError("give either --profile, a measured device, or --gpu, an estimate from a data sheet")
    chosen: dict[str, Device | Model] = {}
    if profile is not None:
        measured = read_profile(profile)
        chosen = {"device": measured.device, "model": measured.model}
    if gpu is not None:
        chosen["device"] = DEVICES[gpu]
    if model is not None:
        chosen["model"] = model_of(model)
    return {name: msgspec.to_builtins(one) for name, one in chosen.items()}


def _note_simulation(as_json: bool, name: str, report: SimulationReport) -> None:
    note(as_json, f"{name}: first token p99 {_ms(report.ttft_ms.p99)}, inter-token p99 {_ms(report.itl_ms.p99)}")


def _comparison_text(scenario: Scenario, compared: Sequence[ComparedRouting]) -> str:
    has_loads = any(one.requests_per_s_in_goals is not None for one in compared)
    titles = ("routing", "tokens/s", "ttft p50", "ttft p99", "itl p99", "loads", "moves", "prefill")
    lines = [scenario.description, "  ".join(f"{title:>12}" for title in titles + ("in goals",) * has_loads)]
    for one in compared:
        report = one.report
        cells = [
            one.routing,
            f"{report.throughput_tokens_per_s:,.0f}",
            *(_ms(value) for value in (report.ttft_ms.p50, report.ttft_ms.p99, report.itl_ms.p99)),
            f"{report.adapter_loads:,}",
            f"{report.moves:,}",
            f"{report.prompt_tokens_computed:,}",
        ]
        if one.requests_per_s_in_goals is not None:
            cells.append(f"{one.requests_per_s_in_goals:,.1f}/s")
        lines.append("  ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _simulate(simulation: Simulation) -> SimulationReport:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=simulation.arrivals.num_requests)
        return simulation.run(lambda answered: progress.advance(task, answered))


def _report_text(scenario: Scenario, report: SimulationReport) -> str:
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
    for name, stage in report.per_stage.items():
        computed = stage.prompt_tokens - stage.cached_tokens
        lines.append(
            f"{name:<15}first token p50 {_ms(stage.ttft_ms.p50)}, p99 {_ms(stage.ttft_ms.p99)}; "
            f"{computed:,} of {stage.prompt_tokens:,} prompt tokens computed"
        )
    if report.per_stage:
        whole = report.conversation_ms
        lines.append(f"conversation   p50 {_ms(whole.p50)}, p99 {_ms(whole.p99)}")
    return "\n".join(lines)


def _ms(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:,.1f} ms"
