"""Semantics: y = x @ W.T + bias with W = scale * (value(code) - offset), decoded tile by tile while it is multiplied.

A program computes a tile of y and walks along the inputs. It reads a tile of codes and the scales of its groups, and
decodes them in registers into weights of x's dtype. Sums are float32. Decoded weights are never written to memory.

`grouped_coded_linear` does this for a mixture's experts. A program computes a tile of one expert's rows, which it finds
as `grouped_linear` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.e4m3 import from_e4m3
from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.mixture import expert_tile
from loramux_kernels.quantized_weight import EXPONENT_SCALES, TABLES, QuantizedWeight, is_nibbles

FEW_ROWS = 16
BLOCK_INPUTS = 64


def coded_linear(
    x: torch.Tensor, weight: QuantizedWeight, values: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply `x` `[T, in_features]`, its inputs in the order of the codes, with `weight`; see `Coded`.

    `values` float32`[16]` is the coding's table, or any tensor if the coding has none. `bias` is
    float32`[out_features]`.
    """
    y = x.new_empty(x.shape[0], weight.shape[0])
    if len(x):
        prepare_coded_linear(x, weight, values, bias, y).run()
    return y


def _code_arguments(weight: QuantizedWeight) -> dict[str, Any]:
    """Return a launch's arguments for the codes of a weight."""
    return {
        "codes": weight.codes,
        "scales": weight.scales,
        "offsets": weight.scales if weight.offsets is None else weight.offsets,
        "width": weight.in_features,
        "codes_row": weight.codes.stride(0),
        "groups": weight.scales.shape[1],
        "group": weight.group,
        "CODING": weight.coding,
        "IS_TABLE": weight.coding in TABLES,
        "IS_NIBBLES": is_nibbles(weight.coding),
        "HAS_EXPONENTS": weight.coding in EXPONENT_SCALES,
        "HAS_OFFSETS": weight.offsets is not None,
        "IN_ONE_GROUP": weight.group >= weight.in_features or weight.group % BLOCK_INPUTS == 0,
    }


def prepare_coded_linear(
    x: torch.Tensor, weight: QuantizedWeight, values: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> Launch:
    """Return the launch that fills `y`: a program for each tile of rows and columns."""
    assert x.stride(1) == y.stride(1) == weight.codes.stride(1) == 1, "rows are contiguous"
    rows, columns = y.shape
    is_small = rows <= FEW_ROWS or x.dtype == torch.float32  # products of float32 keep a larger tile's sums twice
    block_rows, block_columns = (FEW_ROWS, 32) if is_small else (64, 64)
    arguments = {
        **_code_arguments(weight),
        "x": x,
        "values": values,
        "bias": weight.scales if bias is None else bias,
        "y": y,
        "rows": rows,
        "x_row": x.stride(0),
        "columns": columns,
        "HAS_BIAS": bias is not None,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "BLOCK_INPUTS": BLOCK_INPUTS,
    }
    grid = (triton.cdiv(rows, block_rows), triton.cdiv(columns, block_columns))
    return Launch(
        _coded_linear, grid, arguments, num_warps=4 if is_small else 8, num_stages=2, programs=None if is_small else 1
    )


@triton.jit
def _decoded(
    code_rows: tl.tensor, of_groups: tl.tensor, scales: tl.tensor, offsets: tl.tensor, values: tl.tensor,
    start: tl.tensor, is_input: tl.tensor, is_column: tl.tensor, group: tl.tensor,
    CODING: tl.constexpr, IS_TABLE: tl.constexpr, IS_NIBBLES: tl.constexpr, HAS_EXPONENTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, IN_ONE_GROUP: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the weights float32`[inputs, columns]` of the inputs from `start` on: codes from `code_rows`, scales from
    `of_groups`. IN_ONE_GROUP if each column of such a block has a single scale, which is then loaded once.
    """
    k = start + tl.arange(0, BLOCK_INPUTS)
    inside = is_input[:, None] & is_column[None, :]
    if IS_NIBBLES:
        both = tl.load(code_rows + (k // 2)[:, None], mask=inside, other=0).to(tl.int32)
        code = (both >> ((k % 2) * 4)[:, None]) & 15
    else:
        code = tl.load(code_rows + k[:, None], mask=inside, other=0).to(tl.int32)
    if IS_TABLE:
        value = tl.load(values + code)
    elif CODING == "int4":
        value = (code - 8).to(tl.float32)
    elif CODING == "int8":
        # sign-extends the byte
        value = ((code ^ 128) - 128).to(tl.float32)
    else:
        value = from_e4m3(code)
    if IN_ONE_GROUP:
        at = of_groups + start // group
        has_scale = is_column[None, :]
    else:
        at = of_groups + (k // group)[:, None]
        has_scale = inside
    if HAS_OFFSETS:
        value = value - tl.load(offsets + at, mask=has_scale, other=0.0)
    if HAS_EXPONENTS:
        # Zero alone stands for 2^-127, a float without an exponent.
        exponent = tl.load(scales + at, mask=has_scale, other=0).to(tl.int32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + at, mask=has_scale, other=0.0)
    return value * scale


@triton.jit(do_not_specialize=["rows"])
def _coded_linear(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, offsets: tl.tensor, values: tl.tensor, bias: tl.tensor,
    y: tl.tensor, rows: tl.tensor, x_row: tl.tensor, width: tl.tensor, columns: tl.tensor, codes_row: tl.tensor,
    groups: tl.tensor, group: tl.tensor,
    CODING: tl.constexpr, IS_TABLE: tl.constexpr, IS_NIBBLES: tl.constexpr, HAS_EXPONENTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, IN_ONE_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = row < rows, column < columns
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    code_rows = codes + column.to(tl.int64)[None, :] * codes_row
    of_groups = column.to(tl.int64)[None, :] * groups
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, width, BLOCK_INPUTS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        is_input = k < width
        weight = _decoded(
            code_rows, of_groups, scales, offsets, values, start, is_input, is_column, group,
            CODING, IS_TABLE, IS_NIBBLES, HAS_EXPONENTS, HAS_OFFSETS, IN_ONE_GROUP, BLOCK_INPUTS,
        )  # fmt: skip
        tile = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        # Triton's default would round float32 inputs to TF32.
        total = tl.dot(tile, weight.to(tile.dtype), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
    at = y + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_coded_linear(
    x: torch.Tensor, weight: QuantizedWeight, values: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with its weight, in one launch. Arguments as for the public operator, on a
    GPU."""
    y = x.new_empty(x.shape[0], weight.shape[0] // (len(starts) - 1))
    if len(x):
        prepare_grouped_coded_linear(x, weight, values, bias, starts, y).run()
    return y


def prepare_grouped_coded_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor,
    y: torch.Tensor,
) -> Launch:
    """Return the launch that fills `y`: a program for each possible tile of rows and each block of columns."""
    assert x.stride(1) == y.stride(1) == weight.codes.stride(1) == 1, "rows are contiguous"
    assert bias is None or bias.is_contiguous(), "rows are contiguous"
    (rows, columns), experts = y.shape, len(starts) - 1
    is_small = rows <= FEW_ROWS * experts or x.dtype == torch.float32
    block_rows, block_columns = (FEW_ROWS, 32) if is_small else (64, 64)
    arguments = {
        **_code_arguments(weight),
        "x": x,
        "values": values,
        "bias": bias,
        "y": y,
        "starts": starts,
        "x_row": x.stride(0),
        "columns": columns,
        "EXPERTS": experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(experts),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "BLOCK_INPUTS": BLOCK_INPUTS,
    }
    # Every expert's last tile may be partly filled.
    grid = (triton.cdiv(columns, block_columns), min(rows, rows // block_rows + experts))
    return Launch(
        _grouped_coded_linear,
        grid,
        arguments,
        num_warps=4 if is_small else 8,
        num_stages=2,
        programs=None if is_small else 1,
    )


@triton.jit
def _grouped_coded_linear(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, offsets: tl.tensor, values: tl.tensor, bias: tl.tensor,
    y: tl.tensor, starts: tl.tensor, x_row: tl.tensor, width: tl.tensor, columns: tl.tensor, codes_row: tl.tensor,
    groups: tl.tensor, group: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, CODING: tl.constexpr, IS_TABLE: tl.constexpr,
    IS_NIBBLES: tl.constexpr, HAS_EXPONENTS: tl.constexpr, HAS_OFFSETS: tl.constexpr, IN_ONE_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    expert, row, is_row = expert_tile(starts, tl.program_id(1), EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS)
    if expert < EXPERTS:
        column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column = column < columns
        own_column = expert.to(tl.int64) * columns + column
        x_rows = x + row.to(tl.int64)[:, None] * x_row
        code_rows, of_groups = codes + own_column[None, :] * codes_row, own_column[None, :] * groups
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for start in range(0, width, BLOCK_INPUTS):
            k = start + tl.arange(0, BLOCK_INPUTS)
            is_input = k < width
            weight = _decoded(
                code_rows, of_groups, scales, offsets, values, start, is_input, is_column, group,
                CODING, IS_TABLE, IS_NIBBLES, HAS_EXPONENTS, HAS_OFFSETS, IN_ONE_GROUP, BLOCK_INPUTS,
            )  # fmt: skip
            tile = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            total = tl.dot(tile, weight.to(tile.dtype), total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + own_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        at = y + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(at, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
