"""Semantics: y = x @ weight + bias, with one shape of tiles and one order of sums for any number of rows.

A library such as cuBLAS chooses its kernel by the number of rows, so a row's result depends on the other rows of its
step in the last bits. Here a program computes a tile of y. It adds up blocks of inputs in their order, in float32. The
sizes of tile and block depend on the dtype alone, and a row of a tile does not read the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch

TILES = {torch.float32: (16, 32, 32)}
"""Rows, columns and inputs of a tile, by dtype."""
HALF_TILE = (64, 64, 64)


def fixed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `[rows, columns]`. Arguments as for the public operator, on a GPU."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    if y.numel():
        prepare_fixed_product(x, weight, bias, y).run()
    return y


def prepare_fixed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Launch:
    """Return the launch that fills `y`: a program for each tile."""
    block_rows, block_columns, block_inputs = TILES.get(x.dtype, HALF_TILE)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "y": y,
        "rows": len(x),
        "width": x.shape[1],
        "columns": weight.shape[1],
        "x_row": x.stride(0),
        "x_input": x.stride(1),
        "weight_input": weight.stride(0),
        "weight_column": weight.stride(1),
        "bias_column": 0 if bias is None else bias.stride(0),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "BLOCK_INPUTS": block_inputs,
    }
    # Neighbouring programs read the same columns of the weight.
    grid = (triton.cdiv(len(x), block_rows), triton.cdiv(weight.shape[1], block_columns))
    return Launch(_fixed_product, grid, arguments, num_warps=4, num_stages=2 if x.dtype == torch.float32 else 3)


@triton.jit(do_not_specialize=["rows"])
def _fixed_product(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, rows: tl.tensor, width: tl.tensor,
    columns: tl.tensor, x_row: tl.tensor, x_input: tl.tensor, weight_input: tl.tensor, weight_column: tl.tensor,
    bias_column: tl.tensor,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    is_row, is_column = row < rows, column < columns
    x_rows = x + row[:, None] * x_row
    weight_columns = weight + column[None, :] * weight_column
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, width, BLOCK_INPUTS):
        k = (start + tl.arange(0, BLOCK_INPUTS)).to(tl.int64)
        is_input = k < width
        inputs = tl.load(x_rows + k[None, :] * x_input, mask=is_row[:, None] & is_input[None, :], other=0.0)
        factors = tl.load(
            weight_columns + k[:, None] * weight_input, mask=is_input[:, None] & is_column[None, :], other=0.0
        )
        # Triton's default would round float32 inputs to TF32.
        total = tl.dot(inputs, factors, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column * bias_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = y + row[:, None] * columns + column[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
