"""loramux plan: which settings, and how many GPUs, a workload needs."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from loramux.simulator import DEVICES, MODELS, Goals, Plan, Planner, Trial, model_of, read_workload
from loramux_api.cli.options import json_option, put

_Milliseconds = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--workload", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE")
@click.option("--gpu", type=click.Choice(list(DEVICES)), required=True, help="The device.")
@click.option("--model", required=True, metavar="CONFIG", help=f"A config.json, its folder, or {', '.join(MODELS)}.")
@click.option("--ttft-ms", type=_Milliseconds, default=2000, show_default=True, help="P99 to the first token.")
@click.option("--itl-ms", type=_Milliseconds, default=100, show_default=True, help="P99 between two tokens.")
@click.option("--dollars-per-hour", type=click.FloatRange(min=0), help="Of one GPU; default: a round list price.")
@json_option
def plan(
    workload: Path,
    gpu: str,
    model: str,
    ttft_ms: float,
    itl_ms: float,
    dollars_per_hour: float | None,
    as_json: bool,
) -> None:
    """Recommend settings and a number of GPUs for a workload, each tried in the simulator.

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
    found = _search(Planner(device, model_of(model), read_workload(workload), goals))
    put(as_json, found, _toml(found, gpu))


def _search(planner: Planner) -> Plan:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), "{task.completed} simulations", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("searching", total=1 + planner.num_knob_trials)

        def tell(trial: Trial) -> None:
            gpus = trial.settings.gpus
            progress.update(
                task, advance=1, description=f"{gpus} GPU{'s' * (gpus > 1)}, p99 {trial.ttft_ms_p99:,.0f} ms"
            )

        return planner.plan(tell)


def _toml(found: Plan, gpu: str) -> str:
    best, goals = found.recommended, found.goals
    shares = "interactive {:g}, standard {:g}, batch {:g}".format(*best.settings.class_shares)
    verdict = "kept" if found.goals_met else "NOT kept by anything that was tried; this came closest"
    return "\n".join(
        [
            f"# GPUs: {best.settings.gpus} x {gpu}. {len(found.tried)} simulations.",
            f"# Goals (P99: first token {goals.ttft_ms:g} ms, inter-token {goals.itl_ms:g} ms): {verdict}.",
            f"# First token   p50 {best.ttft_ms_p50:,.1f} ms, p99 {best.ttft_ms_p99:,.1f} ms",
            f"# Inter-token   p50 {best.itl_ms_p50:,.1f} ms, p99 {best.itl_ms_p99:,.1f} ms",
            f"# Preemptions   {best.preemption_rate:.2%} of requests",
            f"# Pool in use   {best.pool_use:.0%}; adapters resident on a GPU: {best.adapters_resident}",
            f"# Class shares  {shares}",
            f"# Cost          ${best.dollars_per_million_tokens:.3f} per million tokens",
            f"# Throughput    {best.tokens_per_s:,.0f} tokens/s, prompt and output together",
            "[engine]",
            f"max_num_batched_tokens = {best.settings.max_num_batched_tokens}",
            f"max_num_seqs = {best.settings.max_num_seqs}",
            f"block_size = {best.settings.block_size}",
        ]
    )
