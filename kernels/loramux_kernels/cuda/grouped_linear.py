"""Semantics: y[s[e]:s[e + 1]] = x[s[e]:s[e + 1]] @ weight[e].T + bias[e], with s = starts: one product an expert.

A program computes a tile of one expert's rows by a block of columns. Which expert that is it finds in `starts`: the
tiles of all experts are numbered one after the other, so the host needs to know the most that there can be, and no
expert's number of rows. Programs beyond the last tile return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch

FEW_ROWS = 16
"""Rows an expert has on average up to which its weight's bytes, not its products, are what it costs."""


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with its weight, in one launch. Arguments as for the public operator, on a
    GPU."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    if len(x):
        prepare_grouped_linear(x, weight, bias, starts, y).run()
    return y


def prepare_grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor, y: torch.Tensor
) -> Launch:
    """The launch that fills `y`: a program for each tile of rows that there may be, and block of columns."""
    assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert bias is None or bias.is_contiguous(), "rows are contiguous"
    experts, columns, width = weight.shape
    is_float32 = x.dtype == torch.float32
    is_small = is_float32 or len(x) <= FEW_ROWS * experts
    block_rows = FEW_ROWS if is_small else 64
    block_columns, block_inputs = (32, 32) if is_float32 else (64, 128) if is_small else (128, 64)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "y": y,
        "starts": starts,
        "x_row": x.stride(0),
        "width": width,
        "columns": columns,
        "weight_expert": weight.stride(0),
        "weight_column": weight.stride(1),
        "weight_input": weight.stride(2),
        "EXPERTS": experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(experts),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "BLOCK_INPUTS": block_inputs,
    }
    # Every expert's last tile may be partly filled.
    most_tiles = min(len(x), len(x) // block_rows + experts)
    grid = (triton.cdiv(columns, block_columns), most_tiles)
    return Launch(_grouped_linear, grid, arguments, num_warps=4, num_stages=2 if is_float32 else 4 if is_small else 3)


@triton.jit
def _grouped_linear(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, starts: tl.tensor, x_row: tl.tensor,
    width: tl.tensor, columns: tl.tensor, weight_expert: tl.tensor, weight_column: tl.tensor, weight_input: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(1)
    e = tl.arange(0, BLOCK_EXPERTS)
    firsts = tl.load(starts + e, mask=e < EXPERTS, other=0).to(tl.int32)
    lasts = tl.load(starts + e + 1, mask=e < EXPERTS, other=0).to(tl.int32)
    tiles = tl.cdiv(lasts - firsts, BLOCK_ROWS)
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32))
    if expert < EXPERTS:
        is_own = e == expert
        before = tl.sum(tl.where(is_own, ends - tiles, 0))
        row = tl.sum(tl.where(is_own, firsts, 0)) + (tile - before) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = row < tl.sum(tl.where(is_own, lasts, 0))
        column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column = column < columns
        x_rows = x + row.to(tl.int64)[:, None] * x_row
        own_weight = weight + expert.to(tl.int64) * weight_expert + column.to(tl.int64)[None, :] * weight_column
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for start in range(0, width, BLOCK_INPUTS):
            k = start + tl.arange(0, BLOCK_INPUTS)
            is_input = k < width
            inputs = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            factors = own_weight + k.to(tl.int64)[:, None] * weight_input
            factors = tl.load(factors, mask=is_input[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(inputs, factors, total, input_precision="ieee")
        if bias is not None:
            own_bias = bias + expert.to(tl.int64) * columns + column
            total += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
        out = y + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
