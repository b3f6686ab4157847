"""Semantics: y = activation(gate) * up, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch

BLOCK_COLUMNS = 1024


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Multiply an activated gate with what passes it, in one launch. Arguments as for the public operator, on a GPU."""
    y = gate.new_empty(gate.shape)
    if len(gate):
        prepare_gated(gate, up, activation, y).run()
    return y


def prepare_gated(gate: torch.Tensor, up: torch.Tensor, activation: str, y: torch.Tensor) -> Launch:
    """The launch that fills `y`: a program for each row and block of columns."""
    assert gate.stride(1) == up.stride(1) == y.stride(1) == 1, "rows are contiguous"
    rows, width = gate.shape
    arguments = {
        "gate": gate,
        "up": up,
        "y": y,
        "gate_row": gate.stride(0),
        "up_row": up.stride(0),
        "width": width,
        "IS_SILU": activation == "silu",
        "BLOCK_COLUMNS": BLOCK_COLUMNS,
    }
    return Launch(_gated, (rows, triton.cdiv(width, BLOCK_COLUMNS)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _gated(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, gate_row: tl.tensor, up_row: tl.tensor, width: tl.tensor,
    IS_SILU: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < width
    x = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        active = x / (1.0 + tl.exp(-x))
    else:
        # gelu(x) ~ x * sigmoid(2 u): tanh(u) = 2 * sigmoid(2 u) - 1
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-2.0 * u))
    passed = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    product = active.to(y.dtype.element_ty).to(tl.float32) * passed
    tl.store(y + row * width + column, product.to(y.dtype.element_ty), mask=inside)
