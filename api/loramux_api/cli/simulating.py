"""loramux simulate and plan: the engine's scheduler on a model of a device."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS
from loramux.simulator.plan_report import figures_of, settings_of
from loramux.simulator.planner import Goals, Plan, Planner, Trial
from loramux.simulator.report import SimulationReport, plot_report
from loramux.simulator.scenario import Scenario, ScenarioError, load_scenario, model_of, scenario_names
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import read_workload
from loramux_api.cli.common import json_option, note, put

_Milliseconds = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("name", required=False)
@click.option("--scenario", help="Name of a shipped scenario, or a TOML file.", metavar="FILE|NAME")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value of the scenario; repeatable."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", help="Draw the simulation over time."
)
@json_option
def simulate(
    name: str | None, scenario: str | None, overrides: tuple[str, ...], plot: Path | None, as_json: bool
) -> None:
    """Run a scenario through the engine's scheduler on a model of a device. Deterministic; needs no GPU.

    Without a name it lists the shipped scenarios. The page docs/simulator.md explains scenarios and figures.

    \b
    Example:
      loramux simulate fairness-two-clients --set pool_tokens=1000000 --json
      loramux simulate --scenario my.toml --plot course.png
    """
    chosen = name or scenario
    if chosen is None:
        put(as_json, scenario_names(), "\n".join(["Shipped scenarios:", *scenario_names()]))
        return
    loaded = load_scenario(chosen, overrides)
    simulation = Simulation(loaded)
    report = _simulate(simulation)
    if plot is not None:
        plot_report(simulation.timeline, loaded.description, plot)
        note(as_json, f"The plot is in {plot}.")
    put(as_json, report, _report_text(loaded, report))


def _simulate(simulation: Simulation) -> SimulationReport:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(simulation.arrivals))
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
    return "\n".join(lines)


def _ms(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:,.1f} ms"


@click.command()
@click.option(
    "--workload",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Request log or description.",
)
@click.option("--gpu", type=click.Choice(list(DEVICES)), required=True, help="Device model.")
@click.option("--model", required=True, metavar="CONFIG", help=f"A config.json, its folder, or {', '.join(MODELS)}.")
@click.option(
    "--ttft-ms", type=_Milliseconds, default=2000, show_default=True, help="Goal: P99 time to the first token."
)
@click.option("--itl-ms", type=_Milliseconds, default=100, show_default=True, help="Goal: P99 time between two tokens.")
@click.option("--dollars-per-hour", type=click.FloatRange(min=0), help="Price of one GPU; default: a list price.")
@click.option(
    "--quantization",
    type=click.Choice(["none", *WEIGHT_BITS]),
    default="none",
    show_default=True,
    help="Form of the linears' weights.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="Form of keys and values.",
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Ranks of an engine, each on a GPU of its own.",
)
@json_option
def plan(  # noqa: PLR0913, PLR0917 - one for each option
    workload: Path,
    gpu: str,
    model: str,
    ttft_ms: float,
    itl_ms: float,
    dollars_per_hour: float | None,
    quantization: str,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    as_json: bool,
) -> None:
    """Recommend settings and a number of GPUs for a workload. Each candidate is simulated.

    FILE is a log of requests (.jsonl or .csv with arrival_s, prompt_tokens, output_tokens, and where known tenant,
    adapter, rank, service_class, max_tokens) or a description (.toml with duration_s and [[clients]]).

    \b
    Example:
      loramux plan --workload requests.jsonl --gpu h200 --model llama-3.1-8b --ttft-ms 1000 > engine.toml
    """
    device = DEVICES[gpu]
    if dollars_per_hour is not None:
        device = msgspec.structs.replace(device, dollars_per_hour=dollars_per_hour)
    goals = Goals(ttft_ms=ttft_ms, itl_ms=itl_ms)
    kv_bytes = 1 if kv_cache_dtype == "fp8" else None
    shape = msgspec.structs.replace(
        model_of(model), bits_per_weight=WEIGHT_BITS.get(quantization), bytes_per_kv_element=kv_bytes
    )
    if tensor_parallel_size > 1:
        try:
            shape = shape.share_of(tensor_parallel_size)
        except ValueError as error:
            raise ScenarioError(f"--tensor-parallel-size: {error}") from error
        device = device.of_rank(tensor_parallel_size)
    found = _search(Planner(device, shape, read_workload(workload), goals))
    put(as_json, found, f"{figures_of(found, gpu)}\n{settings_of(found, kv_cache_dtype)}")


def _search(planner: Planner) -> Plan:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), "{task.completed} simulations", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("searching", total=1 + planner.num_knob_trials)

        def show(trial: Trial) -> None:
            gpus = trial.settings.gpus
            progress.update(
                task, advance=1, description=f"{gpus} GPU{'s' * (gpus > 1)}, p99 {trial.ttft_ms_p99:,.0f} ms"
            )

        return planner.plan(show)
