"""Semantics: a mixture's rows (token, choice) by expert, and back: out[t] = sum over j of w[t, j] * y[row(t, j)].

`route` orders, experts compute their rows with `grouped_linear`, and `combine` adds up. Nothing of it waits for the
device, so that a step with a mixture is recorded like any other.
"""

from __future__ import annotations

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.tables import Routes


def route(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None = None) -> Routes:
    """Order the choices `experts` int64`[T, k]` by expert, and by token within one.

    Tokens with a negative number in `kv_slots` int64`[T]` only pad the step: no expert computes them.
    """
    if runs_triton(experts):
        from loramux_kernels.cuda import routing as triton_routing

        return triton_routing.route(experts, num_experts, kv_slots)
    return route_reference(experts, num_experts, kv_slots)


def route_reference(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None = None) -> Routes:
    """`route` in torch, on any device."""
    if kv_slots is not None:
        experts = experts.masked_fill((kv_slots < 0)[:, None], num_experts)
    chosen, order = experts.reshape(-1).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    starts = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=order.device))
    return Routes(order // experts.shape[1], chosen, places.view(experts.shape), starts)


def combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """Return `[T, width]` of the dtype of `y`: the sums of its rows `[T * k, width]`, in the order of `routes`, by
    `weights` `[T, k]`. Sums are float32. Rows of padding are undefined."""
    if runs_triton(y):
        from loramux_kernels.cuda import routing as triton_routing

        return triton_routing.combine(y, routes, weights)
    return combine_reference(y, routes, weights)


def combine_reference(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """`combine` in torch, on any device."""
    return (y[routes.places].float() * weights.float()[..., None]).sum(dim=1).to(y.dtype)
