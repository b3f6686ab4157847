"""Semantics: v[i, s[k]:s[k+1], :r] = x[s[k]:s[k+1]] @ A(slot[k], sites[i]).T, with s = cu_seqlens."""

from __future__ import annotations

import ctypes

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES
from loramux_kernels.tables import LoraGroup, LoraTable, Segments, read_rank_rows


def lora_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """Project every adapter's rows down to its rank, for all sites of a group at once.

    `x` `[T, in_features]` with T >= segments.rows, last dimension contiguous; `pool` 1-D, of x's dtype. Returns float32
    `[len(sites), segments.rows, max rank in the step]`; what lies past a segment's own rank is undefined. On a GPU
    it is `[splits, len(sites), ...]`, which the GPU's `lora_expand` adds up.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import lora_shrink as triton_shrink

        return triton_shrink.lora_shrink(x, pool, table, group, segments)
    if (native := native_for(x)) is not None:
        return _shrink_natively(native, x, pool, table, group, segments)
    return lora_shrink_reference(x, pool, table, group, segments)


def _shrink_natively(
    native: ctypes.CDLL, x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    rank = segments.max_rank(table)
    v = torch.empty(len(group.sites), segments.rows, rank, dtype=torch.float32)
    native.loramux_lora_shrink(
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.shape[1],
        pool.data_ptr(),
        table.abi,
        group.packed.buffer_info()[0],
        segments.packed.buffer_info()[0],
        v.data_ptr(),
        rank,
        torch.get_num_threads(),
    )
    return v


def lora_shrink_reference(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """`lora_shrink` in torch, on any device and in any floating dtype."""
    v = x.new_zeros(len(group.sites), segments.rows, segments.max_rank(table), dtype=torch.float32)
    for slot, start, stop in segments.spans:
        rows = x[start:stop].float()
        for i, site in enumerate(group.sites):
            if rank := int(table.ranks[slot, site]):
                a = read_rank_rows(pool, table.a_offsets[slot, site], rank, x.shape[1])
                v[i, start:stop, :rank] = rows @ a.T
    return v
