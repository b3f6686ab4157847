"""Multi-head latent attention (MLA, DeepSeek-V2, 2024) over its compressed KV, by absorbing the linear that expands it.

A token's compressed KV is a vector c, from which `kv_b_proj` makes the keys and values of every head:

    k = W_k c, v = W_v c        W_k `[key_dim, rank]`, W_v `[value_dim, rank]` of each head

    q . k = (W_k^T q) . c       so a query is multiplied instead of each key,
    sum(p v) = W_v sum(p c)     and the sum over values is taken before the product

The cache then holds c alone, one vector for all heads, and attention sees one key-value head. With an adapter,
`W + s B A` takes the place of W. All tokens of a sequence have one adapter, so a query row's adapter is that of every
key it sees: `W_k^T q + s A^T (B_k^T q)` and `W_v x + s B_v (A x)`, where each head has its own columns of B.
(`plan._check_latents` refuses the exception, an activated LoRA on this linear.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loramux_adapters.bank import AdapterBank, Site
from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.packed_linear import heads_linear, rows_weight
from loramux_kernels.tables import NO_VECTORS, HeadColumns, LoraGroup, Segments


def expands_latents(attention: nn.Module) -> bool:
    """Return whether one of transformers' attention modules has a compressed KV, which its `expand_kv` expands."""
    return hasattr(attention, "expand_kv")


def pass_latents(model: nn.Module) -> None:
    """Have every attention module of `model` with a compressed KV pass it to attention as it is."""
    attentions: list[Any] = [module for module in model.modules() if expands_latents(module)]
    for attention in attentions:
        attention.expand_kv = _join_latents


def _join_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one key head `[1, 1, T, rank + rotary dim]`, and its first elements, `latents`, as values."""
    key = torch.cat((latents, rotated), dim=-1)
    return key, key[..., : latents.shape[-1]]


class LatentLinear(nn.Module):
    """Replaces the linear that expands a compressed KV, `kv_b_proj`: queries and outputs are multiplied instead."""

    def __init__(self, weight: torch.Tensor, attention: Any, site: Site, bank: AdapterBank) -> None:
        """`weight` is `[heads * (key_dim + value_dim), rank]`; `attention` is transformers' module."""
        super().__init__()
        self._key_dim: int = attention.qk_nope_head_dim
        self._dims = (self._key_dim, attention.v_head_dim)
        self._site = site
        self._bank = bank
        rank, step = weight.shape[1], sum(self._dims)
        keys, values = weight.to(bank.pool.dtype).unflatten(0, (-1, step)).split(self._dims, dim=1)
        self.keys = _held(keys.transpose(1, 2))
        """W_k, transposed: `[heads, rank, key_dim]`."""
        self.values = _held(values)
        """W_v: `[heads, value_dim, rank]`."""
        self._rank, heads = rank, len(keys)

        def group(width: int, first: int, step: int, row: int) -> LoraGroup:
            return LoraGroup.of_heads(site.index, heads, HeadColumns(width, first, step, row))

        self._of_latents = group(rank, 0, 0, rank)
        self._of_keys = group(self._key_dim, 0, step, heads * step)
        self._of_values = group(self._dims[1], self._key_dim, step, heads * step)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[n, rank]` to `[n, heads * (key_dim + value_dim)]`, without adapters."""
        parts = (self.keys.transpose(1, 2), self.values)
        return functional.linear(x, torch.cat([part.to(x.dtype) for part in parts], dim=1).flatten(0, 1))

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Map queries `[T, heads, key_dim + rotary dim]`, already rotated, to `[T, heads, rank + rotary dim]`."""
        bank, segments = self._bank, self._bank.segments
        keys, rotated = query.split((self._key_dim, query.shape[-1] - self._key_dim), dim=-1)
        if (columns := self._columns()) is not None:
            # A shift of all keys changes each of a query's scores by the same number, and no weight.
            keys = _rescaled(keys, columns[0][..., : self._key_dim])
        out = query.new_empty(*query.shape[:2], self._rank + rotated.shape[-1])
        absorbed = out[..., : self._rank]
        absorbed.copy_(heads_linear(keys, self.keys))
        if segments is not None:
            table = bank.table.transposed
            v = lora_shrink(keys, bank.pool, table, self._of_keys, segments)
            lora_expand(v, bank.pool, table, self._of_latents, segments, absorbed)
        if (inputs := self._inputs()) is not None:
            absorbed.copy_(_rescaled(absorbed, inputs[0][:, None]))
        out[..., self._rank :] = rotated
        return out

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Map the sums `[T, heads, rank]` over the compressed KV to those over values, `[T, heads, value_dim]`."""
        bank, segments = self._bank, self._bank.segments
        if (inputs := self._inputs()) is not None:
            mixed = _rescaled(mixed, inputs[0][:, None])
        out = heads_linear(mixed, self.values)
        if segments is not None:
            v = lora_shrink(mixed, bank.pool, bank.table, self._of_latents, segments)
            lora_expand(v, bank.pool, bank.table, self._of_values, segments, out)
        if (columns := self._columns()) is not None:
            factor, shift = (part[..., self._key_dim :] for part in columns)
            out = _rescaled(out, factor, shift)
        return out

    def _columns(self) -> Sequence[torch.Tensor] | None:
        """Return factors and shifts of the linear's outputs, `[rows, heads, key_dim + value_dim]` each; None if no
        adapter of the step has any."""
        extras = self._bank.extras
        if extras is None or extras.columns is None:
            return None
        found = self._vectors(self._bank.vectors.columns, extras.columns, self._site.out_features)
        return [part.unflatten(1, (-1, sum(self._dims))) for part in found]

    def _inputs(self) -> Sequence[torch.Tensor] | None:
        """Return factors of the linear's inputs, `[rows, rank]`; None if no adapter of the step has any."""
        extras = self._bank.extras
        if extras is None or extras.inputs is None:
            return None
        return self._vectors(self._bank.vectors.inputs, extras.inputs, self._rank)

    def _vectors(self, offsets: torch.Tensor, segments: Segments, width: int) -> Sequence[torch.Tensor]:
        """Return the factors and shifts, `[rows, width]` each, of the rows of `segments`; see `lora.rescale`."""
        pool, slots = self._bank.pool, segments.row_slots(offsets.device)
        starts = torch.where(slots < 0, NO_VECTORS, offsets[slots.clamp(min=0), self._site.index])[:, None]
        columns = torch.arange(width, device=offsets.device)
        factor, shift = (pool[starts.clamp(min=0) + first + columns] for first in (0, width))
        return factor.where(starts >= 0, 1.0), shift.where(starts >= 0, 0.0)


def _held(weight: torch.Tensor) -> nn.Parameter:
    """Return a copy, because the checkpoint's whole file stays in memory while one tensor refers to it."""
    copied = weight.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(rows_weight(copied), requires_grad=False)


def _rescaled(rows: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """Return `rows` `[T, heads, width]`, of which the first are multiplied by `factor`, and shifted, in float32."""
    changed = rows[: len(factor)].float() * factor.float()
    if shift is not None:
        changed += shift.float()
    return torch.cat((changed.to(rows.dtype), rows[len(factor) :]))
