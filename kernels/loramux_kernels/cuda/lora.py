"""Segmented LoRA as Triton kernels: shrink, expand and rescale, and the table of a group's linears that they read.

Semantics, with s = cu_seqlens:

    lora_shrink   sum over p of v[p, i, s[k]:s[k+1], :r] = x[s[k]:s[k+1]] @ A(slot[k], sites[i]).T
    lora_expand   y[s[k]:s[k+1], slice i] += scale(slot[k], sites[i]) * sum over p of v[p, i, s[k]:s[k+1], :r] @ Bt(...)
    rescale       y[s[k]:s[k+1], slice i] = y[...] * factor(slot[k], sites[i]) + shift(slot[k], sites[i]), columnwise

A step with few rows does not fill a GPU. Shrink then cuts the product over in_features into p = 1, 2, ... splits, and
expand adds the partial sums while it loads them, always in the same order. Both compute the number of splits from the
step's work list (`split_count`), so a captured launch serves steps of any mix.

For a group of one linear's heads (`HeadColumns`), site i is head i: it has its own rows of x or y, and its columns of A
or Bt. For other groups the arguments of heads are None, and their code is not compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.dependent_launch import begin_dependent, wait_for_earlier
from loramux_kernels.cuda.launch import Launch, resident_programs, run_all
from loramux_kernels.cuda.work_lists import LONG_ROWS, LORA_ITEM_WIDTH, RowTiles, TileMap, tile_map_of
from loramux_kernels.tables import RANK_TILE, LoraGroup, LoraTable, Segments

BLOCK_WIDTH = 8
"""Columns of a column block: index of the site in the group, site, number of the block within its slice, width of the
slice, first column of the slice in y; the rest is padding."""

VECTOR = 8
"""Elements that the kernels load at once; offsets of rank tiles are multiples of it."""

MIN_SPLIT = 512
"""Least number of in_features in a split."""

MAX_SPLITS = 16
"""Most partial sums that a row's program loads at once: `TileMap.max_splits` is never more."""

RESCALE_COLUMNS = 1024
"""Columns of y that a program of rescale takes."""

_ITEM = tl.constexpr(LORA_ITEM_WIDTH)
_VECTOR = tl.constexpr(VECTOR)
_TILE = tl.constexpr(RANK_TILE)
_BLOCK = tl.constexpr(BLOCK_WIDTH)


def lora_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments
) -> torch.Tensor:
    """Project every adapter's rows down to its rank: float32 partial sums `[splits, len(sites), rows, rank]`.

    Arguments as for the public operator, on a GPU; `a_offsets` are multiples of 8 elements. Values past a segment's
    rank, and past the number of splits that the step uses, are undefined.
    """
    v = new_intermediate(x, group, segments, table)
    run_all(prepare_shrink(x, pool, table, group, segments, v))
    return v


def new_intermediate(x: torch.Tensor, group: LoraGroup, segments: Segments, table: LoraTable) -> torch.Tensor:
    """Return an empty tensor for the partial sums that shrink passes to expand."""
    tile_map = tile_map_of(segments, table)
    splits = min(tile_map.max_splits, triton.cdiv(x.shape[-1], MIN_SPLIT))
    return x.new_empty(splits, len(group.sites), tile_map.rows, tile_map.rank, dtype=torch.float32)


def prepare_shrink(
    x: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, v: torch.Tensor
) -> list[Launch]:
    """Return the launches that fill `v`: one for each tile shape of the step, none if the step has no adapter."""
    assert x.stride(-1) == 1, "rows of x are contiguous"
    shared = {
        "x": x,
        "pool": pool,
        "v": v,
        # Shrink reads only the sites, so the block size does not matter.
        "sites": group_table(group, 1 << 30, x.device).sites,
        "a_offsets": table.a_offsets,
        "ranks": table.ranks,
        "in_features": x.shape[-1],
        "x_stride": x.stride(0),
        **_head_arguments(group),
        "x_head": None if group.heads is None else x.stride(1),
        "v_rows": v.shape[2],
        "v_rank": v.shape[3],
        "table_sites": table.ranks.shape[1],
        "table_tiles": table.a_offsets.shape[2],
        "max_splits": v.shape[0],
        "NUM_SITES": len(group.sites),
    }
    tile_map = tile_map_of(segments, table)
    return [_shrink_launch(tiles, tile_map, shared, x) for tiles in tile_map.tiles]


def _head_arguments(group: LoraGroup) -> dict[str, int | None]:
    """Return the places of a head's columns in rows of A or Bt; None for linears, whose rows are whole."""
    heads = group.heads
    if heads is None:
        return {"head_first": None, "head_step": None, "matrix_row": None}
    return {"head_first": heads.first, "head_step": heads.step, "matrix_row": heads.row}


def _shrink_launch(tiles: RowTiles, tile_map: TileMap, shared: dict[str, Any], x: torch.Tensor) -> Launch:
    programs = shrink_programs(tiles, x.device)
    arguments = {**shared, "work": tiles.shrink.work, "split_programs": split_programs(tiles, tile_map, x.device)}
    if tiles.shape.rows == 1:
        return Launch(_shrink_rows, (programs,), {**arguments, "BLOCK_K": 512}, num_warps=4, num_stages=1)
    arguments["BLOCK_ROWS"] = tiles.shape.rows
    arguments["BLOCK_RANK"] = tiles.shape.rank
    arguments["BLOCK_K"] = 16 if x.dtype == torch.float32 else 128
    num_warps = 4 if tiles.shape.rows == LONG_ROWS else 2
    return Launch(_shrink_tiles, (programs,), arguments, num_warps=num_warps, num_stages=3)


def shrink_programs(tiles: RowTiles, device: torch.device) -> int:
    """Return shrink's number of programs: as many as fit the multiprocessors' registers and shared memory at once."""
    per_processor = {1: 3, LONG_ROWS: 2}
    return resident_programs(device, per_processor.get(tiles.shape.rows, 4))


def split_programs(tiles: RowTiles, tile_map: TileMap, device: torch.device) -> int:
    """Return the programs that `split_count` finds splits for; very many if it must always find the most."""
    return 1 << 30 if tile_map.is_invariant else shrink_programs(tiles, device)


@triton.jit
def split_count(items: tl.tensor, num_sites: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor) -> tl.tensor:
    """Return the splits of in_features that this step's items leave room for; shrink and expand compute the same."""
    return tl.minimum(tl.maximum(split_programs // tl.maximum(items * num_sites, 1), 1), max_splits)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _shrink_rows(
    x: tl.tensor, pool: tl.tensor, v: tl.tensor, work: tl.tensor, sites: tl.tensor, a_offsets: tl.tensor,
    ranks: tl.tensor, in_features: tl.tensor, x_stride: tl.tensor, x_head: tl.tensor, head_first: tl.tensor,
    head_step: tl.tensor, matrix_row: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor,
    table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one row by one rank tile for each item, without tensor cores: A streams through registers once."""
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
            x_row = x + row * x_stride
            if matrix_row is None:
                a_rows = a + r[:, None].to(tl.int64) * in_features
            else:
                a_rows = a + head_first + index * head_step + r[:, None].to(tl.int64) * matrix_row
                x_row += index.to(tl.int64) * x_head
            has_rank = (first_rank + r < rank)[:, None]
            total = tl.zeros((_TILE, BLOCK_K), tl.float32)
            for start in range(split * span, tl.minimum((split + 1) * span, in_features), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                weights = tl.load(a_rows + k[None, :], mask=has_rank & (k < in_features)[None, :], other=0.0)
                inputs = tl.load(x_row + k, mask=k < in_features, other=0.0)
                total += weights.to(tl.float32) * inputs.to(tl.float32)[None, :]
            out = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + row) * v_rank + first_rank
            tl.store(out + r, tl.sum(total, axis=1), mask=first_rank + r < rank)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _shrink_tiles(
    x: tl.tensor, pool: tl.tensor, v: tl.tensor, work: tl.tensor, sites: tl.tensor, a_offsets: tl.tensor,
    ranks: tl.tensor, in_features: tl.tensor, x_stride: tl.tensor, x_head: tl.tensor, head_first: tl.tensor,
    head_step: tl.tensor, matrix_row: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor,
    table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of rows by some rank tiles for each item, on tensor cores."""
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
            a = pool + tl.multiple_of(tiles, _VECTOR)[:, None]
            x_rows = x + rows[:, None] * x_stride
            if matrix_row is None:
                a_rows = a + (r % _TILE)[:, None].to(tl.int64) * in_features
            else:
                a_rows = a + head_first + index * head_step + (r % _TILE)[:, None].to(tl.int64) * matrix_row
                x_rows += index.to(tl.int64) * x_head
            total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
            for start in range(split * span, tl.minimum((split + 1) * span, in_features), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                has_k = (k < in_features)[None, :]
                inputs = tl.load(x_rows + k[None, :], mask=has_row[:, None] & has_k, other=0.0)
                weights = tl.load(a_rows + k[None, :], mask=has_rank[:, None] & has_k, other=0.0)
                total = tl.dot(inputs, tl.trans(weights), total, input_precision="ieee")
            out = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + rows[:, None]) * v_rank + r[None, :]
            tl.store(out, total, mask=has_row[:, None] & has_rank[None, :])


def lora_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """Add every adapter's contribution to the base's outputs, in place, for all sites of a group at once.

    Arguments as for the public operator, on a GPU; `v` is from the GPU's `lora_shrink`, `b_offsets` are multiples of
    8 elements. The partial sums are added in float32 and then rounded to the pool's dtype.
    """
    run_all(prepare_expand(v, pool, table, group, segments, y))


def prepare_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> list[Launch]:
    """Return the launches that add to `y`: one for each tile shape of the step, none if the step has no adapter."""
    assert y.stride(-1) == 1, "rows of y are contiguous"
    shared = {
        "v": v,
        "pool": pool,
        "y": y,
        "b_offsets": table.b_offsets,
        "ranks": table.ranks,
        "scales": table.scales,
        "y_stride": y.stride(0),
        **_head_arguments(group),
        "y_head": None if group.heads is None else y.stride(1),
        "v_rows": v.shape[2],
        "v_rank": v.shape[3],
        "table_sites": table.ranks.shape[1],
        "table_tiles": table.b_offsets.shape[2],
        "max_splits": v.shape[0],
        "NUM_SITES": len(group.sites),
    }
    tile_map = tile_map_of(segments, table)
    return [_expand_launch(tiles, tile_map, shared, group, y) for tiles in tile_map.tiles]


def _expand_launch(
    tiles: RowTiles, tile_map: TileMap, shared: dict[str, Any], group: LoraGroup, y: torch.Tensor
) -> Launch:
    columns = _block_columns(tiles, y.dtype, group)
    blocks = group_table(group, columns, y.device)
    arguments = {
        **shared,
        "shrink_work": tiles.shrink.work,
        "split_programs": split_programs(tiles, tile_map, y.device),
        "work": tiles.expand.work,
        "blocks": blocks.blocks,
        "num_blocks": len(blocks.blocks),
        "ALIGNED": is_aligned(group),
        "BLOCK_COLUMNS": columns,
    }
    grid = (resident_programs(y.device, 3 if tiles.shape.rows == LONG_ROWS else 4),)
    may_depend = not tile_map.made_by_kernel
    if tiles.shape.rows == 1:
        arguments["MAX_SPLITS"] = MAX_SPLITS
        return Launch(_expand_rows, grid, arguments, 4, 1, may_depend)
    arguments["BLOCK_ROWS"] = tiles.shape.expand_rows
    return Launch(_expand_tiles, grid, arguments, 4, 2, may_depend)


def _block_columns(tiles: RowTiles, dtype: torch.dtype, group: LoraGroup) -> int:
    """Return the columns of an item: loads of single elements need more registers than vectors."""
    if tiles.shape.rows == 1:
        return 512
    return 128 if dtype == torch.float32 or not is_aligned(group) else 256


@cache
def is_aligned(group: LoraGroup) -> bool:
    """Return True if every row of B starts at an address that a vector load may use."""
    return all(width % VECTOR == 0 for width in group.out_features)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_rows(
    v: tl.tensor, pool: tl.tensor, y: tl.tensor, shrink_work: tl.tensor, work: tl.tensor, blocks: tl.tensor,
    b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor, y_stride: tl.tensor, y_head: tl.tensor,
    head_first: tl.tensor, head_step: tl.tensor, matrix_row: tl.tensor, v_rows: tl.tensor,
    v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor, num_blocks: tl.tensor,
    NUM_SITES: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one row by one block of columns for each item, without tensor cores: B streams through registers once."""
    begin_dependent(DEPENDENT)
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    for task in range(tl.program_id(0), tl.load(work) * num_blocks, tl.num_programs(0)):
        item = work + (task // num_blocks + 1) * _ITEM
        block = blocks + task % num_blocks * _BLOCK
        index = tl.load(block)
        width = tl.load(block + 3)
        y_start = tl.load(block + 4)
        if ALIGNED:
            width = tl.multiple_of(width, _VECTOR)
            y_start = tl.multiple_of(y_start, _VECTOR)
        row = tl.load(item + 1).to(tl.int64)
        cell = tl.load(item).to(tl.int64) * table_sites + tl.load(block + 1)
        rank = tl.load(ranks + cell)
        if rank > 0:
            column = tl.load(block + 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            has_column = column < width
            if matrix_row is None:
                out = y + row * y_stride + y_start + column
            else:
                out = y + row * y_stride + index.to(tl.int64) * y_head + column
            scale = tl.load(scales + cell)
            wait_for_earlier(DEPENDENT)
            base = tl.load(out, mask=has_column, other=0.0).to(tl.float32)
            total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
            for first in range(0, rank, _TILE):
                total += tl.sum(
                    products_of_row(
                        first, rank, column, has_column, width, row, index, cell, splits, v, pool, b_offsets,
                        head_first, head_step, matrix_row, v_rows, v_rank, table_tiles, NUM_SITES, MAX_SPLITS,
                    ),
                    axis=0,
                )  # fmt: skip
            tl.store(out, (base + scale * total).to(y.dtype.element_ty), mask=has_column)
    wait_for_earlier(DEPENDENT)


@triton.jit
def products_of_row(
    first: tl.tensor, rank: tl.tensor, column: tl.tensor, has_column: tl.tensor, width: tl.tensor, row: tl.tensor,
    index: tl.tensor, cell: tl.tensor, splits: tl.tensor, v: tl.tensor, pool: tl.tensor, b_offsets: tl.tensor,
    head_first: tl.tensor, head_step: tl.tensor, matrix_row: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor,
    table_tiles: tl.tensor, NUM_SITES: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `[rank rows of a tile, columns]`: products of one row's v with B, to be summed over the rank rows.

    `first` is the tile's first rank row; the slice of the site, the `index`th of its group, has `width` columns.
    """
    tile_rank = tl.arange(0, _TILE)
    partial = tl.arange(0, MAX_SPLITS)
    r = first + tile_rank
    start = tl.multiple_of(tl.load(b_offsets + cell * table_tiles + first // _TILE), _VECTOR)
    if matrix_row is None:
        b = pool + start + tile_rank[:, None].to(tl.int64) * width + column[None, :]
    else:
        b = pool + start + head_first + index * head_step + column[None, :]
        b += tile_rank[:, None].to(tl.int64) * matrix_row
    weights = tl.load(b, mask=(r < rank)[:, None] & has_column[None, :], other=0.0)
    v_row = v + ((partial * NUM_SITES + index).to(tl.int64) * v_rows + row) * v_rank
    has_partial = (partial < splits)[:, None] & (r < rank)[None, :]
    inner = tl.sum(tl.load(v_row[:, None] + r[None, :], mask=has_partial, other=0.0), axis=0)
    # Rounded as the input of every linear is.
    inner = inner.to(weights.dtype).to(tl.float32)
    return weights.to(tl.float32) * inner[:, None]


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_tiles(
    v: tl.tensor, pool: tl.tensor, y: tl.tensor, shrink_work: tl.tensor, work: tl.tensor, blocks: tl.tensor,
    b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor, y_stride: tl.tensor, y_head: tl.tensor,
    head_first: tl.tensor, head_step: tl.tensor, matrix_row: tl.tensor, v_rows: tl.tensor,
    v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor, num_blocks: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of rows by one block of columns for each item, on tensor cores."""
    begin_dependent(DEPENDENT)
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    tile_rank = tl.arange(0, _TILE)
    for task in range(tl.program_id(0), tl.load(work) * num_blocks, tl.num_programs(0)):
        item = work + (task // num_blocks + 1) * _ITEM
        block = blocks + task % num_blocks * _BLOCK
        index = tl.load(block)
        width = tl.load(block + 3)
        y_start = tl.load(block + 4)
        if ALIGNED:
            width = tl.multiple_of(width, _VECTOR)
            y_start = tl.multiple_of(y_start, _VECTOR)
        rows = tl.load(item + 1) + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        has_row = (rows < tl.load(item + 2))[:, None]
        cell = tl.load(item).to(tl.int64) * table_sites + tl.load(block + 1)
        rank = tl.load(ranks + cell)
        if rank > 0:
            column = tl.load(block + 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            has_column = (column < width)[None, :]
            total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            scale = tl.load(scales + cell)
            wait_for_earlier(DEPENDENT)
            for first in range(0, rank, _TILE):
                r = first + tile_rank
                start = tl.multiple_of(tl.load(b_offsets + cell * table_tiles + first // _TILE), _VECTOR)
                if matrix_row is None:
                    b = pool + start + tile_rank[:, None].to(tl.int64) * width + column[None, :]
                else:
                    b = pool + start + head_first + index * head_step + column[None, :]
                    b += tile_rank[:, None].to(tl.int64) * matrix_row
                weights = tl.load(b, mask=(r < rank)[:, None] & has_column, other=0.0)
                inner = tl.zeros((BLOCK_ROWS, _TILE), tl.float32)
                for split in range(splits):
                    v_row = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + rows) * v_rank
                    inner += tl.load(v_row[:, None] + r[None, :], mask=has_row & (r < rank)[None, :], other=0.0)
                total = tl.dot(inner.to(weights.dtype), weights, total, input_precision="ieee")
            if matrix_row is None:
                out = y + rows[:, None] * y_stride + y_start + column[None, :]
            else:
                out = y + rows[:, None] * y_stride + index.to(tl.int64) * y_head + column[None, :]
            base = tl.load(out, mask=has_row & has_column, other=0.0).to(tl.float32)
            tl.store(out, (base + scale * total).to(y.dtype.element_ty), mask=has_row & has_column)
    wait_for_earlier(DEPENDENT)


def rescale(y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments) -> None:
    """Scale and shift every adapter's rows, in place. Arguments as for the public operator, on a GPU."""
    if segments.rows:
        prepare_rescale(y, pool, offsets, group, segments).run()


def prepare_rescale(
    y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments
) -> Launch:
    """Return the launch that changes `y`: a program for each row and block of columns. Most find no work and return."""
    assert y.stride(1) == 1, "rows of y are contiguous"
    blocks = group_table(group, RESCALE_COLUMNS, y.device).blocks
    arguments = {
        "y": y,
        "pool": pool,
        "offsets": offsets,
        "row_slots": segments.row_slots(y.device),
        "blocks": blocks,
        "y_stride": y.stride(0),
        "table_sites": offsets.shape[1],
        "BLOCK_COLUMNS": RESCALE_COLUMNS,
    }
    return Launch(_rescale, (segments.rows, len(blocks)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _rescale(
    y: tl.tensor, pool: tl.tensor, offsets: tl.tensor, row_slots: tl.tensor, blocks: tl.tensor, y_stride: tl.tensor,
    table_sites: tl.tensor, BLOCK_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Change one row by one block of columns in each program."""
    row = tl.program_id(0).to(tl.int64)
    block = blocks + tl.program_id(1) * _BLOCK
    slot = tl.load(row_slots + row)
    start = tl.load(offsets + slot * table_sites + tl.load(block + 1), mask=slot >= 0, other=-1)
    if start >= 0:
        width = tl.load(block + 3)
        column = tl.load(block + 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        has_column = column < width
        out = y + row * y_stride + tl.load(block + 4) + column
        factor = tl.load(pool + start + column, mask=has_column, other=0.0).to(tl.float32)
        shift = tl.load(pool + start + width + column, mask=has_column, other=0.0).to(tl.float32)
        value = tl.load(out, mask=has_column, other=0.0).to(tl.float32)
        tl.store(out, (value * factor + shift).to(y.dtype.element_ty), mask=has_column)


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Tables that the launches of one group read."""

    sites: torch.Tensor
    """int32[len(group.sites)]"""
    blocks: torch.Tensor
    """int32[number of column blocks, BLOCK_WIDTH]"""


@cache
def group_table(group: LoraGroup, block_columns: int, device: torch.device) -> GroupTable:
    """Return the tables of `group`, whose slices are cut into blocks of `block_columns`.

    The first launch of a group makes them: run one before capturing a CUDA graph.
    """
    blocks = [
        (index, site, block, width, start, 0, 0, 0)
        for index, (site, width, start) in enumerate(
            zip(group.sites, group.out_features, group.out_starts, strict=False)
        )
        for block in range(-(-width // block_columns))
    ]
    return GroupTable(
        sites=torch.tensor(group.sites, dtype=torch.int32, device=device),
        blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
    )
