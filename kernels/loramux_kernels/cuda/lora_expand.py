"""Semantics: y[s[k]:s[k+1], slice i] += scale(slot[k], sites[i]) * sum over p of v[p, i, s[k]:s[k+1], :r] @ Bt(...)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.group_table import BLOCK_WIDTH, VECTOR, group_table
from loramux_kernels.cuda.launch import Launch, resident_programs, run_all
from loramux_kernels.cuda.lora_shrink import shrink_programs, split_count
from loramux_kernels.cuda.tile_map import ITEM_WIDTH, LONG_ROWS, RowTiles, tile_map_of
from loramux_kernels.tables import RANK_TILE, LoraGroup, LoraTable, Segments

MAX_SPLITS = 16
"""Partial sums that a row's program loads at once: `TileMap.max_splits` is never more."""

_ITEM = tl.constexpr(ITEM_WIDTH)
_BLOCK = tl.constexpr(BLOCK_WIDTH)
_VECTOR = tl.constexpr(VECTOR)
_TILE = tl.constexpr(RANK_TILE)


def lora_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> None:
    """Add every adapter's contribution to the base's outputs, in place, for all sites of a group at once.

    Arguments as for the public operator, on a GPU; `v` is the GPU's `lora_shrink`'s, `b_offsets` are multiples of 8
    elements. The intermediate keeps float32's precision to within 2^-16: tensor cores take it as a sum of two numbers.
    """
    run_all(prepare_expand(v, pool, table, group, segments, y))


def prepare_expand(
    v: torch.Tensor, pool: torch.Tensor, table: LoraTable, group: LoraGroup, segments: Segments, y: torch.Tensor
) -> list[Launch]:
    """The launches that add to `y`: one for each tile shape of the step, none when it has no adapter."""
    assert y.stride(1) == 1, "rows of y are contiguous"
    shared = {
        "v": v,
        "pool": pool,
        "y": y,
        "b_offsets": table.b_offsets,
        "ranks": table.ranks,
        "scales": table.scales,
        "y_stride": y.stride(0),
        "v_rows": v.shape[2],
        "v_rank": v.shape[3],
        "table_sites": table.ranks.shape[1],
        "table_tiles": table.b_offsets.shape[2],
        "max_splits": v.shape[0],
        "NUM_SITES": len(group.sites),
    }
    return [_launch(tiles, shared, group, y) for tiles in tile_map_of(segments, table).tiles]


def _launch(tiles: RowTiles, shared: dict[str, Any], group: LoraGroup, y: torch.Tensor) -> Launch:
    columns = _block_columns(tiles, y.dtype)
    blocks = group_table(group, columns, y.device)
    arguments = {
        **shared,
        "shrink_work": tiles.shrink.work,
        "split_programs": shrink_programs(tiles, y.device),
        "work": tiles.expand.work,
        "blocks": blocks.blocks,
        "num_blocks": len(blocks.blocks),
        "ALIGNED": blocks.aligned,
        "BLOCK_COLUMNS": columns,
    }
    grid = (resident_programs(y.device, 3 if tiles.shape.rows == LONG_ROWS else 4),)
    if tiles.shape.rows == 1:
        arguments["MAX_SPLITS"] = MAX_SPLITS
        return Launch(_expand_rows, grid, arguments, num_warps=4, num_stages=1)
    arguments["BLOCK_ROWS"] = tiles.shape.expand_rows
    return Launch(_expand_tiles, grid, arguments, num_warps=4, num_stages=2)


def _block_columns(tiles: RowTiles, dtype: torch.dtype) -> int:
    if tiles.shape.rows == 1:
        return 512
    return 128 if dtype == torch.float32 else 256


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_rows(
    v: tl.tensor, pool: tl.tensor, y: tl.tensor, shrink_work: tl.tensor, work: tl.tensor, blocks: tl.tensor,
    b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor, y_stride: tl.tensor, v_rows: tl.tensor,
    v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor, num_blocks: tl.tensor,
    NUM_SITES: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One row by one block of columns an item, without tensor cores: B streams through registers once."""
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    tile_rank = tl.arange(0, _TILE)
    partial = tl.arange(0, MAX_SPLITS)
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
            out = y + row * y_stride + y_start + column
            base = tl.load(out, mask=has_column, other=0.0).to(tl.float32)
            v_row = v + ((partial * NUM_SITES + index).to(tl.int64) * v_rows + row) * v_rank
            total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
            for first in range(0, rank, _TILE):
                r = first + tile_rank
                start = tl.multiple_of(tl.load(b_offsets + cell * table_tiles + first // _TILE), _VECTOR)
                b = pool + start + tile_rank[:, None].to(tl.int64) * width + column[None, :]
                weights = tl.load(b, mask=(r < rank)[:, None] & has_column[None, :], other=0.0)
                has_partial = (partial < splits)[:, None] & (r < rank)[None, :]
                inner = tl.sum(tl.load(v_row[:, None] + r[None, :], mask=has_partial, other=0.0), axis=0)
                total += tl.sum(weights.to(tl.float32) * inner[:, None], axis=0)
            tl.store(out, (base + tl.load(scales + cell) * total).to(y.dtype.element_ty), mask=has_column)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_tiles(
    v: tl.tensor, pool: tl.tensor, y: tl.tensor, shrink_work: tl.tensor, work: tl.tensor, blocks: tl.tensor,
    b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor, y_stride: tl.tensor, v_rows: tl.tensor,
    v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor, num_blocks: tl.tensor,
    NUM_SITES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of rows by one block of columns an item, on tensor cores."""
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
            for first in range(0, rank, _TILE):
                r = first + tile_rank
                start = tl.multiple_of(tl.load(b_offsets + cell * table_tiles + first // _TILE), _VECTOR)
                b = pool + start + tile_rank[:, None].to(tl.int64) * width + column[None, :]
                weights = tl.load(b, mask=(r < rank)[:, None] & has_column, other=0.0)
                inner = tl.zeros((BLOCK_ROWS, _TILE), tl.float32)
                for split in range(splits):
                    v_row = v + ((split * NUM_SITES + index).to(tl.int64) * v_rows + rows) * v_rank
                    inner += tl.load(v_row[:, None] + r[None, :], mask=has_row & (r < rank)[None, :], other=0.0)
                total = _multiply(inner, weights, total)
            out = y + rows[:, None] * y_stride + y_start + column[None, :]
            base = tl.load(out, mask=has_row & has_column, other=0.0).to(tl.float32)
            result = base + tl.load(scales + cell) * total
            tl.store(out, result.to(y.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _multiply(inner: tl.tensor, weights: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + inner @ weights with `inner` float32, whatever the dtype of `weights`."""
    if weights.dtype == tl.float32:
        return tl.dot(inner, weights, total, input_precision="ieee")
    high = inner.to(weights.dtype)
    low = (inner - high.to(tl.float32)).to(weights.dtype)
    return tl.dot(low, weights, tl.dot(high, weights, total))
