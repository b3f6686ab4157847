"""Semantics: v[i, s[k]:s[k+1], :r] = x[s[k]:s[k+1]] @ A(slot[k], sites[i]).T, with s = cu_seqlens."""

from __future__ import annotations

import torch

from loramux_kernels.table import LoraGroup, LoraTable, Segments, max_rank, read_rank_rows


def lora_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """Project every adapter's rows down to its rank, for all sites of a group at once.

    `x` `[T, in_features]` with T >= segments.rows, last dimension contiguous; `pool` 1-D, of x's dtype. Returns float32
    `[len(sites), segments.rows, max rank]`; what lies past a segment's own rank is undefined.
    """
    return lora_shrink_reference(x, pool, table, group, segments)


def lora_shrink_reference(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """`lora_shrink` in torch, on any device and in any floating dtype."""
    v = x.new_zeros(len(group.sites), segments.rows, max_rank(table, group, segments), dtype=torch.float32)
    for slot, start, stop in segments.spans:
        rows = x[start:stop].float()
        for i, site in enumerate(group.sites):
            if rank := int(table.ranks[slot, site]):
                a = read_rank_rows(pool, table.a_offsets[slot, site], rank, x.shape[1])
                v[i, start:stop, :rank] = rows @ a.T
    return v
