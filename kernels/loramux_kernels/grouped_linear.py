"""Semantics: y[s[e]:s[e + 1]] = x[s[e]:s[e + 1]] @ weight[e].T + bias[e], with s = starts: one product an expert."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with its weight, in one launch on a GPU.

    `x` `[rows, in_features]`, last dimension contiguous; `weight` `[experts, out_features, in_features]`, any strides;
    `bias` `[experts, out_features]`; `starts` int64`[experts + 1]` on the device. Sums are float32. Returns
    `[rows, out_features]`, in which rows from `starts[-1]` on are undefined.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import grouped_linear as triton_grouped_linear

        return triton_grouped_linear.grouped_linear(x, weight, bias, starts)
    return grouped_linear_reference(x, weight, bias, starts)


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """`grouped_linear` in torch, on any device; waits for it."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (first, last) in enumerate(pairwise(starts.tolist())):
        y[first:last] = functional.linear(x[first:last], weight[expert], None if bias is None else bias[expert])
    return y
