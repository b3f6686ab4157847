"""Semantics: y = norm(x) = x / sqrt(mean(x^2) + eps) * weight, row by row; with a delta, x += factor * delta first.

Rows whose adapters bring a weight of their own are multiplied by that one, which is read from the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.tables import Norm, OwnWeights


def rms_norm(
    x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float, own: OwnWeights | None = None
) -> torch.Tensor:
    """Normalise rows, with the addition before it, in one launch. Arguments as for the public operator, on a GPU."""
    y = x.new_empty(x.shape)
    if len(x):
        prepare_rms_norm(x, norm, delta, factor, y, own).run()
    return y


def prepare_rms_norm(
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None,
    factor: float,
    y: torch.Tensor,
    own: OwnWeights | None = None,
) -> Launch:
    """The launch that fills `y`, and changes `x` where there is a delta: a program for each row."""
    assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert delta is None or delta.stride(1) == 1, "rows are contiguous"
    width = x.shape[1]
    arguments = {
        "x": x,
        "delta": delta,
        "weight": norm.weight,
        "y": y,
        "pool": None if own is None else own.pool,
        "offsets": None if own is None else own.offsets,
        "row_slots": None if own is None else own.segments.row_slots(x.device),
        "norm": 0 if own is None else own.norm,
        "num_owned": 0 if own is None else own.segments.rows * own.vectors,
        "vectors": 0 if own is None else own.vectors,
        "num_norms": 0 if own is None else own.offsets.shape[1],
        "added": 0.0 if own is None else own.added,
        "x_row": x.stride(0),
        "delta_row": 0 if delta is None else delta.stride(0),
        "y_row": y.stride(0),
        "width": width,
        "eps": norm.eps,
        "factor": factor,
        "HAS_DELTA": delta is not None,
        "ROUNDS_FIRST": norm.rounds_first,
        "BLOCK": triton.next_power_of_2(width),
    }
    return Launch(_rms_norm, (len(x),), arguments, num_warps=min(8, max(1, width // 512)), num_stages=1)


@triton.jit(do_not_specialize=["norm", "num_owned"])
def _rms_norm(
    x: tl.tensor, delta: tl.tensor, weight: tl.tensor, y: tl.tensor, pool: tl.tensor, offsets: tl.tensor,
    row_slots: tl.tensor, norm: tl.tensor, num_owned: tl.tensor, vectors: tl.tensor, num_norms: tl.tensor,
    added: tl.tensor, x_row: tl.tensor, delta_row: tl.tensor, y_row: tl.tensor, width: tl.tensor, eps: tl.tensor,
    factor: tl.tensor,
    HAS_DELTA: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        change = tl.load(delta + row * delta_row + column, mask=inside, other=0.0).to(tl.float32) * factor
        values += change.to(y.dtype.element_ty).to(tl.float32)
        rounded = values.to(y.dtype.element_ty)
        tl.store(x + row * x_row + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    values *= 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    if ROUNDS_FIRST:
        values = values.to(y.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    if pool is not None:
        slot = tl.load(row_slots + row // vectors, mask=row < num_owned, other=-1)
        start = tl.load(offsets + slot * num_norms + norm, mask=slot >= 0, other=-1)
        if start >= 0:
            factors = tl.load(pool + start + column, mask=inside, other=0.0).to(tl.float32) + added
    values *= factors
    tl.store(y + row * y_row + column, values.to(y.dtype.element_ty), mask=inside)
