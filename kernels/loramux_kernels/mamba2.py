"""The recurrence of Mamba 2 (state space duality, Dao and Gu, 2024).

Semantics: S_t = e^g_t S_{t-1} + beta_t k_t v_t^T; out_t = S_t^T q_t, with g_t = decay * beta_t.

The memory is one matrix S `[Dk, Dv]` per head, as in linear attention: queries are what the paper calls C, keys B,
values x, and step sizes (beta) dt. R heads of values share a head of queries and keys, which the paper calls a group.
Tokens of a prompt are computed in chunks: products within a chunk, and one update of the state per chunk. Everything is
float32.

Some models limit step sizes. transformers 5.24 applies the limits where it computes several tokens, which is a prompt,
and not where it computes one generated token. `generate`, with PEFT or without, therefore limits the rows of the prompt
alone. A sequence that is computed again after a preemption must do the same, so `linear_attention` limits rows by their
position, not by the number of rows that are computed together.
"""

from __future__ import annotations

import torch

CHUNK = 64
"""Tokens of a prompt that are computed together."""


def mamba2_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of each of n sequences; return out `[n, H, Dv]` and the states after it.

    query, key `[n, G, Dk]`, value `[n, H, Dv]`, decay (g, at most 0) and beta `[n, H]`, state `[n, H, Dk, Dv]`. H / G
    heads share a query and a key.
    """
    by_group = state.unflatten(1, (query.shape[1], -1))
    value, decay = (part.unflatten(1, by_group.shape[1:3]) for part in (value * beta[..., None], decay))
    added = key[:, :, None, :, None] * value[..., None, :]
    by_group = torch.addcmul(added, by_group, decay.exp()[..., None, None])
    out = query[:, :, None, None] @ by_group
    return out.flatten(1, 3), by_group.flatten(1, 2)


def mamba2_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T tokens of one sequence; return out `[T, H, Dv]` and the state after these tokens.

    query, key `[T, G, Dk]`, value `[T, H, Dv]`, decay and beta `[T, H]`, state `[H, Dk, Dv]`.
    """
    groups = query.shape[1]
    state = state.unflatten(0, (groups, -1))
    by_head = (
        *(part.transpose(0, 1)[:, None] for part in (query, key)),  # [G, 1, T, Dk]
        (value * beta[..., None]).unflatten(1, (groups, -1)).permute(1, 2, 0, 3),
        decay.unflatten(1, (groups, -1)).permute(1, 2, 0)[..., None],
    )
    parts = []
    for q, k, v, g in zip(*(part.split(CHUNK, dim=2) for part in by_head), strict=True):
        reach = g.cumsum(2)  # [G, R, C, 1]: log of the decay since the chunk's start
        # Later tokens are masked before exp, because exp would overflow for them.
        later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
        between = (reach - reach.mT).masked_fill(later, float("-inf")).exp()
        parts.append(reach.exp() * (q @ state) + ((q @ k.mT) * between) @ v)
        last = reach[:, :, -1:]
        state = state * last.exp() + k.mT @ (v * (last - reach).exp())
    return torch.cat(parts, dim=2).flatten(0, 1).transpose(0, 1), state.flatten(0, 1)


def mamba2_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `mamba2_prompt` token by token."""
    out = []
    repeats = state.shape[0] // query.shape[1]
    query, key = (part.repeat_interleave(repeats, dim=1) for part in (query, key))
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state + torch.einsum("h,hk,hv->hkv", b, k, v)
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out), state
