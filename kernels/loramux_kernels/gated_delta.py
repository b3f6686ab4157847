"""Linear attention by the gated delta rule.

Semantics: S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T; out_t = S_t^T q_t.

The memory is one matrix S `[Dk, Dv]` per head. S decays with each token, and the value that S returns for a key is
moved towards the key's new value (Gated DeltaNet, Yang et al., 2025). Tokens of a prompt are computed in chunks. The
corrections within a chunk depend on each other through a unit triangular system, which is solved at once (the WY form
of DeltaNet, Yang et al., 2024). Everything is float32.
"""

from __future__ import annotations

import torch

CHUNK = 64
"""Tokens of a prompt that are computed together."""


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of each of n sequences; return out `[n, H, Dv]` and the states after it.

    query, key `[n, H, Dk]`, value `[n, H, Dv]`, decay (g, at most 0) and beta `[n, H]`, state `[n, H, Dk, Dv]`.
    """
    state = state * decay.exp()[..., None, None]
    recalled = (state * key[..., None]).sum(-2)
    state = state + key[..., None] * ((value - recalled) * beta[..., None])[..., None, :]
    return (state * query[..., None]).sum(-2), state


def gated_delta_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T tokens of one sequence; return out `[T, H, Dv]` and the state after these tokens.

    query, key `[T, H, Dk]`, value `[T, H, Dv]`, decay and beta `[T, H]`, state `[H, Dk, Dv]`.
    """
    parts = []
    by_head = (tensor.transpose(0, 1) for tensor in (query, key, value, decay, beta))
    for q, k, v, g, b in zip(*(tensor.split(CHUNK, dim=1) for tensor in by_head), strict=True):
        reach = g.cumsum(1)  # [H, C]: log of the decay since the chunk's start
        # Later tokens are masked before exp, because exp would overflow for them.
        later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
        between = (reach[:, :, None] - reach[:, None, :]).masked_fill(later, float("-inf")).exp()
        system = b[..., None] * (k @ k.mT) * between
        wanted = b[..., None] * (v - reach.exp()[..., None] * (k @ state))
        # unitriangular: the solver assumes that the diagonal is one and does not read it
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        parts.append(reach.exp()[..., None] * (q @ state) + ((q @ k.mT) * between) @ change)
        left = (reach[:, -1:] - reach).exp()[..., None]
        state = state * reach[:, -1].exp()[:, None, None] + (k * left).mT @ change
    return torch.cat(parts, dim=1).transpose(0, 1), state


def gated_delta_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gated_delta_prompt` token by token."""
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        state = state + torch.einsum("h,hk,hv->hkv", b, k, v - torch.einsum("hkv,hk->hv", state, k))
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out), state
