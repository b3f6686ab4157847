"""Semantics: logits[s] changed in place by penalties on the tokens that request s has seen, and by its bias.

Only the tokens concerned are touched: they are counted on a zeroed sheet of counters, and whoever takes a counter off
the sheet applies it, so that each (row, token) is changed once whatever the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.sampling import SamplingBatch

BLOCK = 1024

_PROMPT = tl.constexpr(1 << 30)


def prepare_steer(logits: torch.Tensor, batch: SamplingBatch) -> list[Launch]:
    """The launches that change float32 `logits` `[S, vocab]`."""
    shared = {"logits": logits, "logits_stride": logits.stride(0), "BLOCK": BLOCK}
    launches = []
    if (p := batch.penalties) is not None:
        counting = {
            "rows": p.rows,
            "token_ids": p.token_ids,
            "length": len(p.rows),
            "counts": torch.zeros_like(logits, dtype=torch.int32),
        }
        prices = {"repetition": p.repetition, "presence": p.presence, "frequency": p.frequency}
        grid = (triton.cdiv(len(p.rows), BLOCK),)
        count = {
            **counting,
            "generated": p.generated.view(torch.uint8),
            "counts_stride": logits.shape[1],
            "BLOCK": BLOCK,
        }
        launches.append(Launch(_count, grid, count, num_warps=4, num_stages=1))
        penalise = {**shared, **counting, **prices, "counts_stride": logits.shape[1]}
        launches.append(Launch(_penalise, grid, penalise, num_warps=4, num_stages=1))
    if (b := batch.bias) is not None:
        bias = {**shared, "rows": b.rows, "token_ids": b.token_ids, "values": b.values, "length": len(b.rows)}
        launches.append(Launch(_bias, (triton.cdiv(len(b.rows), BLOCK),), bias, num_warps=4, num_stages=1))
    return [launch for launch in launches if launch.grid[0]]


@triton.jit
def _count(
    rows: tl.tensor, token_ids: tl.tensor, generated: tl.tensor, counts: tl.tensor, length: tl.tensor,
    counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < length
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    counter = counts + row * counts_stride + tl.load(token_ids + index, mask=inside, other=0)
    written = tl.load(generated + index, mask=inside, other=0) != 0
    tl.atomic_add(counter, 1, mask=inside & written, sem="relaxed")
    tl.atomic_or(counter, _PROMPT, mask=inside & ~written, sem="relaxed")


@triton.jit
def _penalise(
    logits: tl.tensor, rows: tl.tensor, token_ids: tl.tensor, counts: tl.tensor, repetition: tl.tensor,
    presence: tl.tensor, frequency: tl.tensor, length: tl.tensor, logits_stride: tl.tensor,
    counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < length
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ids + index, mask=inside, other=0)
    taken = tl.atomic_xchg(counts + row * counts_stride + token, 0, mask=inside, sem="relaxed")
    first = inside & (taken != 0)
    written = (taken & (_PROMPT - 1)).to(tl.float32)
    place = logits + row * logits_stride + token
    logit = tl.load(place, mask=first, other=0.0)
    factor = tl.load(repetition + row, mask=first, other=1.0)
    logit = tl.where(logit > 0, logit / factor, logit * factor)
    once = tl.load(presence + row, mask=first, other=0.0)
    each = tl.load(frequency + row, mask=first, other=0.0)
    logit -= each * written + tl.where(written > 0, once, 0.0)
    tl.store(place, logit, mask=first)


@triton.jit
def _bias(
    logits: tl.tensor, rows: tl.tensor, token_ids: tl.tensor, values: tl.tensor, length: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < length
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    place = logits + row * logits_stride + tl.load(token_ids + index, mask=inside, other=0)
    logit = tl.load(place, mask=inside, other=0.0)
    tl.store(place, logit + tl.load(values + index, mask=inside, other=0.0), mask=inside)
