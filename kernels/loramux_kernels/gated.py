"""Semantics: y = activation(gate) * up, elementwise: the middle of a gated feed-forward network (Shazeer, 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import ACTIVATIONS, DTYPES

Activation = Literal["silu", "gelu_tanh"]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Multiply the activated `gate` `[T, width]` with `up` `[T, width]`; last dimensions contiguous, any row strides.

    The activation is computed in float32 and rounded to the inputs' dtype, as by an operator of its own.
    """
    if runs_triton(gate):
        from loramux_kernels.cuda import gated as triton_gated

        return triton_gated.gated(gate, up, activation)
    if (native := native_for(gate)) is None:
        return gated_reference(gate, up, activation)
    rows, width = gate.shape
    y = gate.new_empty(rows, width)
    native.loramux_gated(
        DTYPES[gate.dtype],
        ACTIVATIONS[activation],
        *(gate.data_ptr(), gate.stride(0)),
        *(up.data_ptr(), up.stride(0)),
        *(rows, width),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def gated_reference(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`gated` in torch, on any device and in any floating dtype."""
    values = gate.float()
    active = functional.silu(values) if activation == "silu" else functional.gelu(values, approximate="tanh")
    return active.to(gate.dtype) * up
