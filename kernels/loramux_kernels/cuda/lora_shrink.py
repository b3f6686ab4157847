"""Semantics: sum over p of v[p, i, s[k]:s[k+1], :r] = x[s[k]:s[k+1]] @ A(slot[k], sites[i]).T, with s = cu_seqlens.

The products over in_features are cut into p = 1, 2, ... splits when a step has too few rows to fill the GPU; the
partial sums are added by `lora_expand` while it loads them, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.group_table import VECTOR, group_table
from loramux_kernels.cuda.launch import Launch, resident_programs, run_all
from loramux_kernels.cuda.tile_map import ITEM_WIDTH, LONG_ROWS, RowTiles, tile_map_of
from loramux_kernels.tables import RANK_TILE, LoraGroup, LoraTable, Segments

MIN_SPLIT = 512
"""in_features that a split has at least."""

_ITEM = tl.constexpr(ITEM_WIDTH)
_VECTOR = tl.constexpr(VECTOR)
_TILE = tl.constexpr(RANK_TILE)


def lora_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """Project every adapter's rows down to its rank: float32 partial sums `[splits, len(sites), rows, rank]`.

    Arguments as for the public operator, on a GPU; `a_offsets` are multiples of 8 elements. What lies past a segment's
    own rank, and past the number of splits that the step came to, is undefined.
    """
    v = new_intermediate(x, group, segments, table)
    run_all(prepare_shrink(x, pool, table, group, segments, v))
    return v


def new_intermediate(x: torch.Tensor, group: LoraGroup, segments: Segments, table: LoraTable) -> torch.Tensor:
    """Room for what shrink hands to expand."""
    tile_map = tile_map_of(segments, table)
    splits = min(tile_map.max_splits, triton.cdiv(x.shape[1], MIN_SPLIT))
    return x.new_empty(splits, len(group.sites), tile_map.rows, tile_map.rank, dtype=torch.float32)


def prepare_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, v: torch.Tensor
) -> list[Launch]:
    """The launches that fill `v`: one for each tile shape of the step, none when it has no adapter."""
    assert x.stride(1) == 1, "rows of x are contiguous"
    shared = {
        "x": x,
        "pool": pool,
        "v": v,
        "sites": group_table(group, 1 << 30, x.device).sites,
        "a_offsets": table.a_offsets,
        "ranks": table.ranks,
        "in_features": x.shape[1],
        "x_stride": x.stride(0),
        "v_rows": v.shape[2],
        "v_rank": v.shape[3],
        "table_sites": table.ranks.shape[1],
        "table_tiles": table.a_offsets.shape[2],
        "max_splits": v.shape[0],
        "NUM_SITES": len(group.sites),
    }
    return [_launch(tiles, shared, x) for tiles in tile_map_of(segments, table).tiles]


def _launch(tiles: RowTiles, shared: dict[str, Any], x: torch.Tensor) -> Launch:
    programs = shrink_programs(tiles, x.device)
    arguments = {**shared, "work": tiles.shrink.work, "split_programs": programs}
    if tiles.shape.rows == 1:
        return Launch(_shrink_rows, (programs,), {**arguments, "BLOCK_K": 512}, num_warps=4, num_stages=1)
    arguments["BLOCK_ROWS"] = tiles.shape.rows
    arguments["BLOCK_RANK"] = tiles.shape.rank
    arguments["BLOCK_K"] = 16 if x.dtype == torch.float32 else 128
    num_warps = 4 if tiles.shape.rows == LONG_ROWS else 2
    return Launch(_shrink_tiles, (programs,), arguments, num_warps=num_warps, num_stages=3)


def shrink_programs(tiles: RowTiles, device: torch.device) -> int:
    """Programs that shrink is launched with: what registers and shared memory let a multiprocessor hold at once."""
    per_processor = {1: 3, LONG_ROWS: 2}
    return resident_programs(device, per_processor.get(tiles.shape.rows, 4))


@triton.jit
def split_count(items: tl.tensor, num_sites: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor) -> tl.tensor:
    """Splits of in_features that this step's items leave room for: shrink and expand agree on it."""
    return tl.minimum(tl.maximum(split_programs // tl.maximum(items * num_sites, 1), 1), max_splits)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _shrink_rows(
    x: tl.tensor, pool: tl.tensor, v: tl.tensor, work: tl.tensor, sites: tl.tensor, a_offsets: tl.tensor,
    ranks: tl.tensor, in_features: tl.tensor, x_stride: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor,
    table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One row by one rank tile an item, without tensor cores: A streams through registers once."""
    items = tl.load(work)
    splits = split_count(items, NUM_SITES, split_programs, max_splits)
    span = tl.cdiv(tl.cdiv(in_features, BLOCK_K), splits) * BLOCK_K
    r = tl.arange(0, _TILE)
    for task in range(tl.program_id(0), items * NUM_SITES * splits, tl.num_programs(0)):
        split = task % splits
        index = task // splits % NUM_SITES
        item = work + (task // splits // NUM_SITES + 1) * _ITEM
        row = tl.load(item + 1).to(tl.int64)
        first_rank = tl.load(item + 3)
        cell = tl.load(item).to(tl.int64) * table_sites + tl.load(sites + index)
        rank = tl.load(ranks + cell)
        if first_rank < rank:
            a = pool + tl.multiple_of(tl.load(a_offsets + cell * table_tiles + first_rank // _TILE), _VECTOR)
            a_rows = a + r[:, None].to(tl.int64) * in_features
            has_rank = (first_rank + r < rank)[:, None]
            total = tl.zeros((_TILE, BLOCK_K), tl.float32)
            for start in range(split * span, tl.minimum((split + 1) * span, in_features), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                weights = tl.load(a_rows + k[None, :], mask=has_rank & (k < in_features)[None, :], other=0.0)
                inputs = tl.load(x + row * x_stride + k, mask=k < in_features, other=0.0)
                total += weights.to(tl.float32) * inputs.to(tl.float32)[None, :]
            out = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + row) * v_rank + first_rank
            tl.store(out + r, tl.sum(total, axis=1), mask=first_rank + r < rank)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _shrink_tiles(
    x: tl.tensor, pool: tl.tensor, v: tl.tensor, work: tl.tensor, sites: tl.tensor, a_offsets: tl.tensor,
    ranks: tl.tensor, in_features: tl.tensor, x_stride: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor,
    table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of rows by some rank tiles an item, on tensor cores."""
    items = tl.load(work)
    splits = split_count(items, NUM_SITES, split_programs, max_splits)
    span = tl.cdiv(tl.cdiv(in_features, BLOCK_K), splits) * BLOCK_K
    for task in range(tl.program_id(0), items * NUM_SITES * splits, tl.num_programs(0)):
        split = task % splits
        index = task // splits % NUM_SITES
        item = work + (task // splits // NUM_SITES + 1) * _ITEM
        rows = tl.load(item + 1) + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        has_row = rows < tl.load(item + 2)
        first_rank = tl.load(item + 3)
        r = first_rank + tl.arange(0, BLOCK_RANK)
        cell = tl.load(item).to(tl.int64) * table_sites + tl.load(sites + index)
        rank = tl.load(ranks + cell)
        if first_rank < rank:
            has_rank = r < rank
            tiles = tl.load(a_offsets + cell * table_tiles + r // _TILE, mask=has_rank, other=0)
            a_rows = pool + tl.multiple_of(tiles, _VECTOR)[:, None] + (r % _TILE)[:, None].to(tl.int64) * in_features
            x_rows = x + rows[:, None] * x_stride
            total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
            for start in range(split * span, tl.minimum((split + 1) * span, in_features), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                has_k = (k < in_features)[None, :]
                inputs = tl.load(x_rows + k[None, :], mask=has_row[:, None] & has_k, other=0.0)
                weights = tl.load(a_rows + k[None, :], mask=has_rank[:, None] & has_k, other=0.0)
                total = tl.dot(inputs, tl.trans(weights), total, input_precision="ieee")
            out = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + rows[:, None]) * v_rank + r[None, :]
            tl.store(out, total, mask=has_row[:, None] & has_rank[None, :])
