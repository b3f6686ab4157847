"""Semantics: y[s[k]:s[k+1], slice i] += scale(slot[k], sites[i]) * v[i, s[k]:s[k+1], :r] @ Bt(slot[k], sites[i])."""

from __future__ import annotations

import ctypes

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES
from loramux_kernels.tables import LoraGroup, LoraTable, Segments, read_rank_rows


def lora_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """Add every adapter's contribution to the base's outputs, in place, for all sites of a group at once.

    `v` is `lora_shrink`'s; `y` `[T, sum(out_features)]` with T >= segments.rows, of the pool's dtype, last dimension
    contiguous, any row stride. Sums are taken in float32 and rounded once.
    """
    if runs_triton(y):
        from loramux_kernels.cuda import lora_expand as triton_expand

        triton_expand.lora_expand(v, pool, table, group, segments, y)
    elif (native := native_for(y)) is not None:
        _expand_natively(native, v, pool, table, group, segments, y)
    else:
        lora_expand_reference(v, pool, table, group, segments, y)


def _expand_natively(
    native: ctypes.CDLL,
    v: torch.Tensor,
    pool: torch.Tensor,
    table: LoraTable,
    group: LoraGroup,
    segments: Segments,
    y: torch.Tensor,
) -> None:
    native.loramux_lora_expand(
        DTYPES[y.dtype],
        v.data_ptr(),
        v.shape[2],
        pool.data_ptr(),
        table.abi,
        group.packed.buffer_info()[0],
        segments.packed.buffer_info()[0],
        y.data_ptr(),
        y.stride(0),
        torch.get_num_threads(),
    )


def lora_expand_reference(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """`lora_expand` in torch, on any device and in any floating dtype."""
    for slot, start, stop in segments.spans:
        for i, site in enumerate(group.sites):
            if rank := int(table.ranks[slot, site]):
                bt = read_rank_rows(pool, table.b_offsets[slot, site], rank, group.out_features[i])
                out = y[start:stop, group.out_starts[i] : group.out_starts[i + 1]]
                out.copy_(out.float() + table.scales[slot, site] * (v[i, start:stop, :rank] @ bt))
