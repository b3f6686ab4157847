"""From measured steps to `MeasuredSteps`: the times of single parts, so that their sum gives the measured times.

A step of one prompt's n tokens has the time token_s(n), and one that decodes n sequences takes row_s(n) longer. Both
are kept as measured, at knots, because the time of a product is no line over its rows. The other parts are lines:

- a longer context at the same rows gives the seconds of a token that is read and of a query and key together, and a
  prompt over several steps divides them, because each of its tokens reads the context with many queries;
- adapters give four more numbers by least squares without negative results (the active-set method of Lawson and
  Hanson without its inner loop, which four unknowns do not need): any adapter, each, each rank, each row and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loramux.simulator.hardware import Device, Front, MeasuredSteps, Model, StepWork

MEMORY_UTILIZATION = 0.9
"""Share of a device's memory that a scenario uses if it says nothing else."""
LEAST_SECONDS = 1e-6
"""Least seconds of a step: what a disturbed measurement leaves of it after its other parts may be negative."""
LEAST_GROWTH = 2
"""Factor of a context from which its length is compared with a short one."""
MOST_BANDWIDTH = 1e12
"""Bytes per second above which a transfer counts as free."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One kind of step: what it computes, and its median time."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A prompt that took several steps of equal size."""

    chunk: int
    """Tokens of a step."""
    chunks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The load of an adapter into the pool."""

    adapter_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """All measured steps of one engine."""

    prompts: Sequence[MeasuredStep]
    """Steps of one whole prompt each, in order of its tokens."""
    decodes: Sequence[MeasuredStep]
    """Steps that decode with a short context, in order of their rows."""
    contexts: Sequence[MeasuredStep]
    """Steps that decode with long contexts."""
    long_prompts: Sequence[LongPrompt]
    adapters: Sequence[MeasuredStep]
    """Steps with adapters."""


def fit_steps(model: Model, measured: StepMeasurements) -> MeasuredSteps:
    """Return the times of the parts of a step."""
    context_s, pair_s = _attention(measured)
    bare = _fit_bare(model, measured, context_s, pair_s)
    parts = [
        (1.0, step.work.num_adapters, step.work.adapter_bytes / model.adapter_bytes(1), step.work.adapter_ranks)
        for step in measured.adapters
    ]
    excess = [step.seconds - bare.seconds(_without_adapters(step.work)) for step in measured.adapters]
    # Each step counts alike, not each second: a long step's error must not be paid by the short ones.
    weights = [1.0 / step.seconds for step in measured.adapters]
    adapters_s, adapter_s, rank_s, row_rank_s = _positive_least_squares(
        np.array(parts).reshape(-1, 4), np.array(excess), weights
    )
    return msgspec.structs.replace(
        bare, adapters_s=adapters_s, adapter_s=adapter_s, rank_s=rank_s, row_rank_s=row_rank_s
    )


def fit_device(
    steps: MeasuredSteps,
    loads: Sequence[AdapterLoad],
    *,
    pool_bytes: int,
    is_shared_by_ranks: bool,
    front: Front | None,
) -> Device:
    """Return the measured device.

    The bandwidth and the operations are those that the measured steps reach, all else included; they estimate the steps
    of other models. A load's time is the link's, because the storage is not measured.
    """
    model, tokens = steps.model, steps.token_s
    (n0, s0), (n1, s1) = tokens[max(0, len(tokens) - 2)], tokens[-1]
    token_s = (s1 - s0) / (n1 - n0) if s1 > s0 else s1 / n1
    overhead_s, byte_s = _line([(load.adapter_bytes, load.seconds) for load in loads])
    return Device(
        memory_bytes=(pool_bytes + model.weight_bytes) / MEMORY_UTILIZATION,
        memory_bandwidth=model.active_bytes / tokens[0][1],
        flops=2 * model.num_active_weights / token_s,
        link_bandwidth=1.0 / byte_s,
        disk_bandwidth=MOST_BANDWIDTH,
        memory_efficiency=1.0,
        flops_efficiency=1.0,
        step_overhead_s=0.0,
        load_overhead_s=overhead_s,
        is_shared_by_ranks=is_shared_by_ranks,
        measured=steps,
        front=front,
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (seconds at 0, seconds per byte) of a line through the medians of each size; neither is negative."""
    sizes = sorted({size for size, _ in points})
    medians = {size: float(np.median([seconds for other, seconds in points if other == size])) for size in sizes}
    low, high = sizes[0], sizes[-1]
    slope = (medians[high] - medians[low]) / (high - low) if high > low else medians[low] / low
    slope = max(slope, 1.0 / MOST_BANDWIDTH)
    return max(0.0, medians[low] - slope * low), slope


def _fit_bare(model: Model, measured: StepMeasurements, context_s: float, pair_s: float) -> MeasuredSteps:
    """Return the times without adapters, if attention takes these."""

    def rest(step: MeasuredStep) -> float:
        return step.seconds - context_s * step.work.context_tokens - pair_s * step.work.attention_pairs

    token_s = _rising((step.work.num_tokens, rest(step)) for step in measured.prompts)
    bare = MeasuredSteps(
        model=model,
        token_s=token_s,
        row_s=((1, 0.0),),
        context_s=context_s,
        pair_s=pair_s,
        adapters_s=0.0,
        adapter_s=0.0,
        rank_s=0.0,
        row_rank_s=0.0,
    )
    rows = ((step.work.num_sampled, step.seconds - bare.seconds(step.work)) for step in measured.decodes)
    return msgspec.structs.replace(bare, row_s=tuple((count, max(0.0, seconds)) for count, seconds in rows))


def _rising(knots: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return knots whose seconds never fall, because more tokens take no less time: isotonic regression by pooling
    adjacent violators, so that one disturbed measurement moves its neighbours little.
    """
    pools: list[tuple[float, list[int]]] = []
    for count, measured in knots:
        seconds, counts = measured, [count]
        while pools and pools[-1][0] > seconds:
            before, others = pools.pop()
            seconds = (before * len(others) + seconds * len(counts)) / (len(others) + len(counts))
            counts = others + counts
        pools.append((seconds, counts))
    return tuple((count, max(LEAST_SECONDS, seconds)) for seconds, counts in pools for count in counts)


def _attention(measured: StepMeasurements) -> tuple[float, float]:
    """Return the seconds of a token of context, and of a query and a key."""
    near = {step.work.num_sampled: step for step in measured.decodes}
    slopes = []
    for far in measured.contexts:
        short = near[far.work.num_sampled]
        # The answers of a fast engine may have grown as long as the contexts: nothing is to be learned then.
        if far.work.context_tokens > LEAST_GROWTH * short.work.context_tokens:
            longer = far.work.context_tokens - short.work.context_tokens
            slopes.append((far.seconds - short.seconds) / longer)
    together = max(0.0, float(np.median(slopes))) if slopes else 0.0
    prompts = {step.work.num_tokens: step.seconds for step in measured.prompts}
    pairs = []
    for prompt in measured.long_prompts:
        tokens_before = prompt.chunk * prompt.chunks * (prompt.chunks - 1) // 2
        slope = (prompt.seconds - prompt.chunks * prompts[prompt.chunk]) / tokens_before
        pairs.append((slope - together) / (prompt.chunk - 1))
    pair_s = min(together, max(0.0, float(np.median(pairs)))) if pairs else 0.0
    return together - pair_s, pair_s


def _without_adapters(work: StepWork) -> StepWork:
    return msgspec.structs.replace(work, adapter_bytes=0, adapter_ranks=0, num_adapters=0)


def _positive_least_squares(parts: np.ndarray, seconds: np.ndarray, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of each column of `parts`, float64[n, k]: none is negative."""
    used = list(range(parts.shape[1]))
    found = np.zeros(parts.shape[1])
    scale = np.array(weights)
    while used and len(parts):
        solved, *_ = np.linalg.lstsq(parts[:, used] * scale[:, None], seconds * scale, rcond=None)
        if solved.min() >= 0.0:
            found[used] = solved
            break
        used.pop(int(solved.argmin()))
    return tuple(found.tolist())
