"""Mixtures of experts: rows are ordered by expert, each expert multiplies its own rows, and the results are added up by
token.

Semantics:

    route            a row for each (token, choice), ordered by expert and within an expert by token
    grouped_linear   y[s[e]:s[e + 1]] = x[s[e]:s[e + 1]] @ weight[e].T + bias[e], with s = starts
    combine          out[t] = sum over j of w[t, j] * y[row(t, j)]

`grouped_coded_linear` is `grouped_linear` for quantized weights. No operator waits for the device, so a step with a
mixture can be recorded in a CUDA graph.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton
from loramux_kernels.quantized_weight import QuantizedWeight
from loramux_kernels.tables import Routes


def route(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None = None) -> Routes:
    """Order the choices `experts` int64`[T, k]` by expert, and by token within an expert.

    Tokens with a negative number in `kv_slots` int64`[T]` only pad the step: no expert computes them.
    """
    if runs_triton(experts):
        from loramux_kernels.cuda import mixture as triton

        return triton.route(experts, num_experts, kv_slots)
    return route_reference(experts, num_experts, kv_slots)


def route_reference(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None = None) -> Routes:
    """Compute `route` in torch, on any device."""
    if kv_slots is not None:
        experts = experts.masked_fill((kv_slots < 0)[:, None], num_experts)
    chosen, order = experts.reshape(-1).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    starts = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=order.device))
    return Routes(order // experts.shape[1], chosen, places.view(experts.shape), starts)


def combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """Return `[T, width]` of the dtype of `y`: each token's rows of `y`, weighted by `weights` `[T, k]` and added up.

    `y` `[T * k, width]` is in the order of `routes`. Sums are float32. Rows of padding are undefined.
    """
    if runs_triton(y):
        from loramux_kernels.cuda import mixture as triton

        return triton.combine(y, routes, weights)
    return combine_reference(y, routes, weights)


def combine_reference(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """Compute `combine` in torch, on any device."""
    return (y[routes.places].float() * weights.float()[..., None]).sum(dim=1).to(y.dtype)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with its weight, in one launch on a GPU.

    `x` `[rows, in_features]`, last dimension contiguous; `weight` `[experts, out_features, in_features]`, any strides;
    `bias` `[experts, out_features]`; `starts` int64`[experts + 1]` on the device. Sums are float32. Returns
    `[rows, out_features]`, in which rows from `starts[-1]` on are undefined.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import mixture as triton

        return triton.grouped_linear(x, weight, bias, starts)
    return grouped_linear_reference(x, weight, bias, starts)


def grouped_coded_linear(
    x: torch.Tensor, weight: QuantizedWeight, values: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Compute `grouped_linear` for weights that are codes, decoded while they are multiplied.

    `weight` has the outputs of all experts one after the other, `[experts * out_features, in_features]`, in the order
    of its inputs. `values` is `table_of(weight)`, which must not be made anew in a recorded step.
    """
    if runs_triton(x):
        from loramux_kernels.cuda.coded_linear import grouped_coded_linear as launch

        return launch(x, weight, values, bias, starts)
    return grouped_linear_reference(
        x, weight.dequantize().unflatten(0, (len(starts) - 1, -1)).to(x.dtype), bias, starts
    )


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Compute `grouped_linear` in torch, on any device; waits for the device."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (first, last) in enumerate(pairwise(starts.tolist())):
        y[first:last] = functional.linear(x[first:last], weight[expert], None if bias is None else bias[expert])
    return y
