"""loramux simulate and plan: the engine's scheduler on a model of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from loramux.common.units import DAY, HOUR, MINUTE
from loramux.data.entities import ServedRequest
from loramux.engine.messages import ServiceClass
from loramux.simulator.comparison import ComparedRouting, compare_routings
from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS
from loramux.simulator.plan_report import figures_of, settings_of
from loramux.simulator.planner import Goals, Plan, Planner, Trial
from loramux.simulator.report import SimulationReport, plot_report
from loramux.simulator.scenario import Scenario, ScenarioError, load_scenario, model_of, scenario_names
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import LoggedRequest, arrivals_of_log, read_workload
from loramux_api.cli.common import config_option, json_option, note, put, with_billing

MOST_LOGGED = 100_000
"""Maximum number of requests that a plan takes from the ledger; the newest are taken."""
MOST_DAYS = 90
UNKNOWN_RANK = 16
_AGES = {"m": MINUTE, "h": HOUR, "d": DAY}

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
@click.option("--compare", is_flag=True, help="Run every routing: the router, residency, random, least-loaded.")
@click.option(
    "--ttft-ms",
    type=_Milliseconds,
    help="With --compare: the load at this P99 of the first token.",
    metavar="MS",
)
@click.option(
    "--itl-ms", type=_Milliseconds, help="With --compare: the load at this P99 between two tokens.", metavar="MS"
)
@json_option
def simulate(
    name: str | None,
    scenario: str | None,
    overrides: tuple[str, ...],
    plot: Path | None,
    compare: bool,
    ttft_ms: float | None,
    itl_ms: float | None,
    as_json: bool,
) -> None:
    """Run a scenario through the engine's scheduler on a model of a device. Deterministic; needs no GPU.

    Without a name it lists the shipped scenarios. The page docs/simulator.md explains scenarios and figures.

    \b
    Example:
      loramux simulate fairness-two-clients --set pool_tokens=1000000 --json
      loramux simulate --scenario my.toml --plot course.png
      loramux simulate fleet-ranks --compare --ttft-ms 1000 --itl-ms 100
    """
    chosen = name or scenario
    if chosen is None:
        put(as_json, scenario_names(), "\n".join(["Shipped scenarios:", *scenario_names()]))
        return
    loaded = load_scenario(chosen, overrides)
    if compare:
        goals = None
        if ttft_ms or itl_ms:
            goals = Goals(ttft_ms=ttft_ms or math.inf, itl_ms=itl_ms or math.inf)
        compared = compare_routings(loaded, goals, on_simulation=partial(_note_simulation, as_json))
        put(as_json, compared, _comparison_text(loaded, compared))
        return
    if ttft_ms or itl_ms:
        raise click.UsageError("--ttft-ms and --itl-ms find a load for each routing; add --compare")
    simulation = Simulation(loaded)
    report = _simulate(simulation)
    if plot is not None:
        plot_report(simulation.timeline, loaded.description, plot)
        note(as_json, f"The plot is in {plot}.")
    put(as_json, report, _report_text(loaded, report))


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
    "--workload", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Request log or description."
)
@click.option("--from-usage", metavar="TIME", help="Instead: the requests of the last TIME, such as 7d or 12h.")
@click.option("--base", metavar="NAME", help="With --from-usage: only requests to this base and its adapters.")
@click.option(
    "--save-workload",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --from-usage: write the request log, .jsonl.",
)
@config_option(required=False)
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
    workload: Path | None,
    from_usage: str | None,
    base: str | None,
    save_workload: Path | None,
    config: Path | None,
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
    adapter, rank, service_class, max_tokens) or a description (.toml with duration_s and [[clients]]). --from-usage
    takes the log from the database of --config: times and sizes, no names and no texts.

    \b
    Example:
      loramux plan --workload requests.jsonl --gpu h200 --model llama-3.1-8b --ttft-ms 1000 > engine.toml
      loramux plan --from-usage 7d --base qwen3-8b --save-workload week.jsonl --gpu h100 --model /models/Qwen3-8B
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
    if (workload is None) == (from_usage is None):
        raise click.UsageError("give either --workload FILE or --from-usage TIME")
    if workload is not None:
        arrivals = read_workload(workload)
    else:
        log = _usage_log(config, from_usage or "", base)
        if save_workload is not None:
            save_workload.write_bytes(msgspec.json.Encoder().encode_lines(log))
            note(as_json, f"The requests are in {save_workload}.")
        arrivals = arrivals_of_log(log)
    found = _search(Planner(device, shape, arrivals, goals))
    put(as_json, found, f"{figures_of(found, gpu)}\n{settings_of(found, kv_cache_dtype)}")


def _usage_log(config: Path | None, age: str, base: str | None) -> list[LoggedRequest]:
    """Return the requests that the database's servers served in the last `age`, the newest MOST_LOGGED at most."""
    number, unit = age[:-1], age[-1:]
    if not (number.isdecimal() and unit in _AGES and 0 < int(number) <= MOST_DAYS * DAY // _AGES[unit]):
        message = f"{age!r} is no time such as 7d, 12h or 30m, up to {MOST_DAYS}d"
        raise click.BadParameter(message, param_hint="--from-usage")
    if config is None:
        raise click.UsageError("--from-usage reads a server's database; give its settings with --config")
    since = time.time_ns() // 1000 - int(number) * _AGES[unit]
    served = with_billing(config, lambda desk: desk.usage.served_since(since, base, MOST_LOGGED))
    if not served:
        raise ScenarioError(f"no request was served in the last {age}" + (f" on the base {base!r}" if base else ""))
    return _anonymous(served)


def _anonymous(served: Sequence[ServedRequest]) -> list[LoggedRequest]:
    """Return the requests with numbers instead of ids of tenants and adapters."""
    tenants: dict[str, str] = {}
    adapters: dict[str, str] = {}
    log = []
    for one in served:
        is_background = one.tier.rpartition("/")[2] in ("batch", "flex", "shadow")
        digest = one.adapter_digest
        log.append(
            LoggedRequest(
                arrival_s=(one.opened_at - served[0].opened_at) / 1e6,
                prompt_tokens=one.prompt_tokens,
                output_tokens=max(1, one.output_tokens),
                tenant=tenants.setdefault(one.tenant_id, f"tenant-{len(tenants)}"),
                adapter=adapters.setdefault(digest, f"adapter-{len(adapters)}") if digest else "",
                rank=one.rank or UNKNOWN_RANK,
                service_class=ServiceClass.BATCH if is_background else ServiceClass.STANDARD,
                max_tokens=max(1, one.max_tokens),
            )
        )
    return log


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
