"""A plan in words: its settings as TOML, and the reason for its number of GPUs."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.simulator.planner import ADAPTER_RANK, Alternative, Goals, Plan, Trial
from loramux.simulator.report import Resource

FULL_POOL = 0.9
"""Share of the pool in use from which a lack of memory counts as a reason."""

RESOURCES: dict[Resource, str] = {
    "memory": "memory for KV and adapters",
    "bandwidth": "memory's bandwidth",
    "arithmetic": "arithmetic of prompts",
    "link": "host link that loads adapters",
    "front": "server's own process",
}

Goal = Literal["first_token", "inter_token"]


class PlanReason(msgspec.Struct, frozen=True, kw_only=True):
    """The goal that decides a plan's number of GPUs, and the figures that show it."""

    bound_by: Goal
    """The goal with less margin, or the one that is missed."""
    text: str


def reason_of(found: Plan) -> PlanReason:
    """Return the reason for the plan's number of GPUs.

    The reason is the closest candidate with fewer GPUs, which misses a goal. If there is none, it is the goal that the
    plan itself comes closest to. A step of a prompt that no number of GPUs makes short enough comes first.
    """
    reason = _reason_of_gpus(found)
    step = _prompt_step_text(found)
    return msgspec.structs.replace(reason, text=f"{step} {reason.text}") if step else reason


def _reason_of_gpus(found: Plan) -> PlanReason:
    best, goals = found.recommended, found.goals
    fewer = [trial for trial in found.tried if trial.settings.gpus < best.settings.gpus]
    if found.goals_met and fewer:
        most = max(trial.settings.gpus for trial in fewer)
        # a simulation of all engines with the router says more than one of a single engine with its part of the traffic
        shown = max(
            (one for one in fewer if one.settings.gpus == most), key=lambda one: (one.simulated, -one.excess(goals))
        )
        return PlanReason(bound_by=_bound_by(shown, goals), text=f"With {_gpus(most)} {_figures(shown, goals)}")
    start = "These settings" if found.goals_met else "No candidate keeps both goals. The closest one"
    return PlanReason(bound_by=_bound_by(best, goals), text=f"{start}: {_figures(best, goals)}")


def _prompt_step_text(found: Plan) -> str | None:
    """Return the sentence on a step that misses the goal between two tokens alone, and what helps; None without one."""
    step, chunk = found.prompt_step, found.recommended.settings.max_mixed_prefill_tokens
    if step is None:
        return None
    if chunk is not None:
        way_out = f"max_mixed_prefill_tokens is {chunk} in this plan"
    else:
        way_out = "only a faster GPU, fewer bits a weight (--quantization) or ranks (--tensor-parallel-size) help"
    return (
        f"One step with {step.tokens} prompt tokens takes {step.ms:,.0f} ms, and the goal between two tokens is "
        f"{found.goals.itl_ms:,g} ms. More GPUs do not help, because the {RESOURCES[step.bound_by]} binds: {way_out}."
    )


def _bound_by(trial: Trial, goals: Goals) -> Goal:
    is_first = trial.ttft_ms_p99 / goals.ttft_ms >= trial.itl_ms_p99 / goals.itl_ms
    return "first_token" if is_first else "inter_token"


def _figures(trial: Trial, goals: Goals) -> str:
    memory = f" The {RESOURCES[trial.bound_by]} binds."
    if trial.pool_use >= FULL_POOL:
        memory += f" {trial.pool_use:.0%} of the memory for KV and adapters is in use"
        memory += f", and {trial.preemption_rate:.1%} of the requests are preempted." if trial.preemption_rate else "."
    return (
        f"the first token's P99 is {trial.ttft_ms_p99:,.0f} ms of {goals.ttft_ms:,g} ms, and that between two tokens "
        f"{trial.itl_ms_p99:,.1f} ms of {goals.itl_ms:,g} ms.{memory}"
    )


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"


def settings_of(found: Plan, kv_cache_dtype: str = "auto", quantization: str = "none") -> str:
    """Return the recommended settings as a part of the settings file, TOML."""
    best, ranks = found.recommended.settings, found.memory.num_ranks
    return "\n".join(
        [
            *(["[model]", f'quantization = "{quantization}"', ""] if quantization != "none" else []),
            "[engine]",
            f"max_num_batched_tokens = {best.max_num_batched_tokens}",
            *([f"max_mixed_prefill_tokens = {chunk}"] if (chunk := best.max_mixed_prefill_tokens) else []),
            f"max_num_seqs = {best.max_num_seqs}",
            f"block_size = {best.block_size}",
            *([f'kv_cache_dtype = "{kv_cache_dtype}"'] if kv_cache_dtype != "auto" else []),
            *([f"tensor_parallel_size = {ranks}"] if ranks > 1 else []),
        ]
    )


def figures_of(found: Plan, gpu: str, *, is_shared_by_ranks: bool) -> str:
    """Return the figures of the recommendation as comments of a settings file."""
    best, goals, ranks = found.recommended, found.goals, found.memory.num_ranks
    shares = "interactive {:g}, standard {:g}, batch {:g}".format(*best.settings.class_shares)
    gpus = best.settings.gpus if is_shared_by_ranks else best.settings.gpus * ranks
    verdict = "met" if found.goals_met else "NOT met by any candidate; this one is closest"
    return "\n".join(
        [
            f"# GPUs: {gpus} x {gpu}. {len(found.tried)} simulations.",
            f"# Times         {found.times}",
            *_rank_lines(found, is_shared_by_ranks=is_shared_by_ranks),
            f"# Why           {reason_of(found).text}",
            f"# Binding       {RESOURCES[best.bound_by]}",
            f"# Goals (P99: first token {goals.ttft_ms:g} ms, inter-token {goals.itl_ms:g} ms): {verdict}.",
            f"# First token   p50 {best.ttft_ms_p50:,.1f} ms, p99 {best.ttft_ms_p99:,.1f} ms",
            f"# Inter-token   p50 {best.itl_ms_p50:,.1f} ms, p99 {best.itl_ms_p99:,.1f} ms",
            f"# Preemptions   {best.preemption_rate:.2%} of requests",
            f"# Pool in use   {best.pool_use:.0%}; adapters resident on a GPU: {best.adapters_resident}",
            f"# Class shares  {shares}",
            f"# Cost          ${best.dollars_per_million_tokens:.3f} per million tokens, "
            f"${found.dollars_per_hour:,.2f} an hour",
            f"# Throughput    {best.tokens_per_s:,.0f} tokens/s, prompt and output together",
            *(f"# Cheaper       {alternative_text(one, goals)}" for one in found.alternatives),
            *(f"# {line}".rstrip() for line in _batching_table(found)),
        ]
    )


def alternative_text(one: Alternative, goals: Goals) -> str:
    """Return what an alternative costs, and which goal it misses by how much."""
    trial = one.trial
    name = f"{trial.settings.gpus:,} x {one.gpu} for ${one.dollars_per_hour:,.2f} an hour"
    if one.excess <= 1:
        return f"{name} keeps both goals: plan with it"
    if _bound_by(trial, goals) == "first_token":
        goal, taken, limit = "the first token", trial.ttft_ms_p99, goals.ttft_ms
    else:
        goal, taken, limit = "the time between two tokens", trial.itl_ms_p99, goals.itl_ms
    missed = f"by {one.excess - 1:.1%}" if one.excess < 2 else f"{one.excess:,.1f} times over"
    return f"{name} misses {goal} {missed}: P99 {taken:,.0f} ms, goal {limit:,g} ms"


def _batching_table(found: Plan) -> list[str]:
    """Return continuous and static batching as a table; nothing if static batching was not simulated."""
    if not found.static:
        return []
    titles = ("batching", "GPUs", "ttft p50", "ttft p99", "itl p99", "tokens/s", "$/hour", "$/million", "goals")
    lines = ["", "".join(f"{title:>12}" for title in titles)]
    price = found.dollars_per_hour / found.recommended.settings.gpus
    for trial in (found.recommended, *found.static):
        cells = (
            trial.settings.batching,
            f"{trial.settings.gpus:,}",
            *(f"{value:,.0f} ms" for value in (trial.ttft_ms_p50, trial.ttft_ms_p99, trial.itl_ms_p99)),
            f"{trial.tokens_per_s:,.0f}",
            f"{price * trial.settings.gpus:,.2f}",
            f"{trial.dollars_per_million_tokens:.3f}",
            "met" if trial.excess(found.goals) <= 1 else "missed",
        )
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return lines


def _rank_lines(found: Plan, *, is_shared_by_ranks: bool) -> list[str]:
    memory = found.memory
    where = f"on each of an engine's {memory.num_ranks} ranks" if memory.num_ranks > 1 else "on each"
    lines = [
        f"# Memory        weights {memory.weight_bytes / 1e9:.1f} GB, pool {memory.pool_bytes / 1e9:.1f} GB = "
        f"{memory.pages:,} pages, or {memory.adapters:,} adapters of rank {ADAPTER_RANK}, {where}",
    ]
    if memory.num_ranks > 1 and not is_shared_by_ranks:
        lines.append("# Engines of several ranks have not run on GPUs yet: the time of their sums is assumed.")
    return lines
