"""Segmented LoRA: the adapters of a mixed step, each applied to its own rows.

Semantics, with s = cu_seqlens, slot[k] the adapter of rows s[k]:s[k+1], and sites[i] the i-th linear of a group:

    lora_shrink   v[i, s[k]:s[k+1], :r] = x[s[k]:s[k+1]] @ A(slot[k], sites[i]).T
    lora_expand   y[s[k]:s[k+1], slice i] += scale(slot[k], sites[i]) * v[i, s[k]:s[k+1], :r] @ Bt(slot[k], sites[i])
    rescale       y[s[k]:s[k+1], slice i] = y[...] * factor(slot[k], sites[i]) + shift(slot[k], sites[i]), columnwise

`lora_shrink` projects each row to the rank of its adapter, and `lora_expand` adds the result to the output of the base.
`rescale` applies the factors and shifts of DoRA, IA3 and trained biases afterwards. Rows of the base model come last
and are not read. One call serves all linears of a group, because they read the same input.

For a group of one linear's heads (`HeadColumns`), head i takes the place of site i: x and y are `[T, heads, width]`,
and head i multiplies `x[:, i]`, or changes `y[:, i]`, by its own columns of A or Bt.

Sources: Punica's SGMV (Chen et al., 2023) for segments; S-LoRA (Sheng et al., 2023) for unpadded ranks in one pool.
"""

from __future__ import annotations

import ctypes

import torch

from loramux_kernels.cuda.work_lists import joins_expand
from loramux_kernels.device import runs_triton
from loramux_kernels.native.abi import DTYPES
from loramux_kernels.native.loader import native_for
from loramux_kernels.tables import NO_VECTORS, RANK_TILE, HeadColumns, LoraGroup, LoraTable, PendingExpand, Segments


def lora_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """Project every adapter's rows down to its rank, for all sites of a group at once.

    `x` `[T, in_features]`, of heads `[T, heads, width]`, with T >= segments.rows, last dimension contiguous; `pool`
    1-D, of x's dtype. Returns float32 `[len(sites), segments.rows, max rank in the step]`; values past a segment's own
    rank are undefined. On a GPU it is `[splits, len(sites), ...]`, which the GPU's `lora_expand` adds up.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import lora as triton

        return triton.lora_shrink(x, pool, table, group, segments)
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
        0 if group.heads is None else x.stride(1),
        x.shape[-1],
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
    """Compute `lora_shrink` in torch, on any device and in any floating dtype."""
    v = x.new_zeros(len(group.sites), segments.rows, segments.max_rank(table), dtype=torch.float32)
    for slot, start, stop in segments.spans:
        rows = x[start:stop].float()
        for i, site in enumerate(group.sites):
            if rank := int(table.ranks[slot, site]):
                a = _read_rank_rows(pool, table.a_offsets[slot, site], rank, x.shape[-1], group.heads, i)
                v[i, start:stop, :rank] = (rows if group.heads is None else rows[:, i]) @ a.T
    return v


def lora_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """Add every adapter's contribution to the base's outputs, in place, for all sites of a group at once.

    `v` is from `lora_shrink`; `y` `[T, sum(out_features)]`, of heads `[T, heads, width]`, with T >= segments.rows, of
    the pool's dtype, last dimension contiguous, other strides any. v is rounded to the pool's dtype, as every linear's
    input is; sums are taken in float32 and rounded once.
    """
    if runs_triton(y):
        from loramux_kernels.cuda import lora as triton

        triton.lora_expand(v, pool, table, group, segments, y)
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
        0 if group.heads is None else y.stride(1),
        torch.get_num_threads(),
    )


def lora_expand_reference(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """Compute `lora_expand` in torch, on any device and in any floating dtype."""
    for slot, start, stop in segments.spans:
        for i, site in enumerate(group.sites):
            if rank := int(table.ranks[slot, site]):
                bt = _read_rank_rows(pool, table.b_offsets[slot, site], rank, group.out_features[i], group.heads, i)
                columns = slice(group.out_starts[i], group.out_starts[i + 1])
                out = y[start:stop, columns if group.heads is None else i]
                inner = v[i, start:stop, :rank].to(pool.dtype).float()
                out.copy_(out.float() + table.scales[slot, site] * (inner @ bt))


def can_be_joined(expand: PendingExpand) -> bool:
    """Return True if the operators that take a `PendingExpand` compute this one in their own launch."""
    return runs_triton(expand.y) and joins_expand(expand.segments)


def run_expand(expand: PendingExpand) -> None:
    """Compute it now, in a separate launch."""
    lora_expand(expand.v, expand.pool, expand.table, expand.group, expand.segments, expand.y)


def rescale(y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments) -> None:
    """Scale and shift every adapter's rows, in place, for all sites of a group at once.

    `y` `[T, sum(group.out_features)]` with T >= segments.rows, of the pool's dtype, last dimension contiguous, any row
    stride. `offsets` int64[num_slots, num_sites] is the place of a site's factors in the pool, in elements, or
    NO_VECTORS; the shifts follow right after the factors. Computed in float32 and rounded once.
    """
    if runs_triton(y):
        from loramux_kernels.cuda import lora as triton

        triton.rescale(y, pool, offsets, group, segments)
    else:
        rescale_reference(y, pool, offsets, group, segments)


def rescale_reference(
    y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments
) -> None:
    """Compute `rescale` in torch, on any device and in any floating dtype."""
    found = offsets[list(segments.slots)][:, list(group.sites)].tolist()
    for (_, first, last), starts in zip(segments.spans, found, strict=True):
        for i, (start, width) in enumerate(zip(starts, group.out_features, strict=True)):
            if start != NO_VECTORS:
                factor, shift = pool[start : start + 2 * width].view(2, width)
                part = y[first:last, group.out_starts[i] : group.out_starts[i + 1]]
                part.copy_(torch.addcmul(shift.float(), part.float(), factor.float()))


def _read_rank_rows(
    pool: torch.Tensor, offsets: torch.Tensor, rank: int, width: int, heads: HeadColumns | None, head: int
) -> torch.Tensor:
    """Return the rank rows `[rank, width]` of one (slot, site), or of one head of it, in float32, copied from their
    tiles.

    `offsets` is the row `[max_tiles]` of `a_offsets` or `b_offsets`.
    """
    tiles, row = [], width if heads is None else heads.row
    first = 0 if heads is None else heads.first + head * heads.step
    for tile, offset in enumerate(offsets[: -(-rank // RANK_TILE)].tolist()):
        rows = min(RANK_TILE, rank - tile * RANK_TILE)
        tiles.append(pool[offset : offset + rows * row].view(rows, row)[:, first : first + width])
    return torch.cat(tiles).float()
