"""loramux plan: the settings and the number of GPUs for a workload."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from loramux.simulator.hardware import MODELS
from loramux.simulator.plan_report import figures_of, settings_of
from loramux.simulator.planner import Goals, Plan, Planner, Plans, Trial
from loramux.simulator.traffic import Arrivals, arrivals_of_log, read_workload
from loramux_api.cli.common import json_option, put
from loramux_api.cli.workloads import (
    Hardware,
    Milliseconds,
    choose_hardware,
    device_options,
    save_workload,
    usage_log,
    workload_options,
)


@click.command()
@workload_options
@device_options
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]CONFIG",
    help=f"A config.json, its folder, or {', '.join(MODELS)}; once for each base, NAME as in the workload.",
)
@click.option(
    "--ttft-ms", type=Milliseconds, default=2000, show_default=True, help="Goal: P99 time to the first token."
)
@click.option("--itl-ms", type=Milliseconds, default=100, show_default=True, help="Goal: P99 time between two tokens.")
@click.option("--compare-static", is_flag=True, help="Simulate static batching too: as many GPUs, and the fewest.")
@json_option
def plan(  # noqa: PLR0913, PLR0917 - one for each option
    workload: Path | None,
    from_usage: str | None,
    base: str | None,
    save_to: Path | None,
    config: Path | None,
    gpu: str | None,
    profile: str | None,
    models: tuple[str, ...],
    ttft_ms: float,
    itl_ms: float,
    dollars_per_hour: float | None,
    quantization: str | None,
    kv_cache_dtype: str | None,
    tensor_parallel_size: int,
    compare_static: bool,
    as_json: bool,
) -> None:
    """Recommend settings and a number of GPUs for a workload. Each candidate is simulated.

    FILE is a log of requests (.jsonl or .csv with arrival_s, prompt_tokens, output_tokens, and where known tenant,
    adapter, rank, base, service_class, max_tokens) or a description (.toml with duration_s and [[clients]]).
    --from-usage takes the log from the database of --config: times and sizes, no names and no texts. --profile takes
    the times that `loramux measure` measured; those of --gpu are estimates.

    \b
    Example:
      loramux plan --workload requests.jsonl --gpu h200 --model llama-3.1-8b --ttft-ms 1000 > engine.toml
      loramux plan --from-usage 7d --base qwen3-8b --save-workload week.jsonl --profile this-machine.json
      loramux plan --workload week.jsonl --gpu h100 --model chat=llama-3.1-8b --model code=/models/Qwen3-8B
    """
    hardware = choose_hardware(
        gpu, profile, models, dollars_per_hour, quantization, kv_cache_dtype, tensor_parallel_size
    )
    if (workload is None) == (from_usage is None):
        raise click.UsageError("give either --workload FILE or --from-usage TIME")
    if workload is not None:
        arrivals = read_workload(workload)
    else:
        log = usage_log(config, from_usage or "", base)
        if save_to is not None:
            save_workload(log, save_to, from_usage or "", as_json)
        arrivals = arrivals_of_log(log)
    goals = Goals(ttft_ms=ttft_ms, itl_ms=itl_ms)
    found = {name: _search(hardware, name, arrivals, goals, compare_static) for name in hardware.models}
    if len(found) == 1:
        [one] = found.values()
        put(as_json, one, _text(hardware, one))
        return
    together = Plans(plans=found, dollars_per_hour=sum(one.dollars_per_hour for one in found.values()))
    parts = [f"# Base {name}\n{_text(hardware, one)}" for name, one in found.items()]
    put(as_json, together, "\n\n".join([*parts, f"# All bases: ${together.dollars_per_hour:,.2f} an hour"]))


def _text(hardware: Hardware, found: Plan) -> str:
    figures = figures_of(found, hardware.gpu, is_shared_by_ranks=hardware.device.is_shared_by_ranks)
    return f"{figures}\n{settings_of(found, hardware.kv_cache_dtype, hardware.quantization)}"


def _search(hardware: Hardware, name: str, arrivals: Arrivals, goals: Goals, compare_static: bool) -> Plan:
    asked = arrivals.of_base(name) if name else arrivals
    planner = Planner(hardware.device, hardware.models[name], asked, goals)
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), "{task.completed} simulations", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("searching", total=1 + planner.num_knob_trials)

        def show(trial: Trial) -> None:
            gpus = trial.settings.gpus
            progress.update(
                task, advance=1, description=f"{gpus} GPU{'s' * (gpus > 1)}, p99 {trial.ttft_ms_p99:,.0f} ms"
            )

        found = planner.plan(show, gpu=hardware.gpu, others=hardware.others(), with_static=compare_static)
    return msgspec.structs.replace(found, times=hardware.times_of(hardware.models[name]))
