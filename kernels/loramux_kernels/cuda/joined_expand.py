"""Expand of single rows, joined to the operator that reads its result: one launch for both.

Semantics, with y the result of a group's base product, and expand(y) what `lora_expand` makes of it:

    gated           out = activation(gate) * up, of the slices gate and up of expand(y)
    rope_write_kv   q = turn(norm(q)) in place; key[page, :, offset] = turn(norm(k)); value[page, :, offset] = v,
                    of the slices q, k and v of expand(y)
    rms_norm        out = norm(expand(y)), or x += factor * expand(y), out = norm(x)

Each program reads the slot of its row, and the columns of B that it needs itself. Programs of rows without an adapter
read none. They round expand(y) to its dtype, as `lora_expand` does, so the results are those of two launches.

No program may read more of B than a program of `lora_expand`, or a launch of few rows would take longer than both
launches. So rotation has a program for each head, and a norm one for each part of a row. The program that writes the
last part of a row then normalises the row. It takes the same sum as in `rms_norm`, whichever program it is.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.dependent_launch import begin_dependent, wait_for_earlier
from loramux_kernels.cuda.e4m3 import passes
from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.layer_operators import activated, over_root_mean_square, rope_arguments, turn
from loramux_kernels.cuda.lora import MAX_SPLITS, group_table, products_of_row, split_count, split_programs
from loramux_kernels.cuda.paged_attention import store_heads
from loramux_kernels.cuda.work_lists import attached_tile_map
from loramux_kernels.tables import RANK_TILE, KvLayer, Norm, PendingExpand, Rotation

GATED_COLUMNS = 256
"""Columns that a program of the gate takes, of gate and up each: as many elements of B as a program of expand reads."""

NORM_COLUMNS = 512
"""Columns of a part of a row."""

_TILE = tl.constexpr(RANK_TILE)


def _pair_arguments(expand: PendingExpand) -> dict[str, Any]:
    """Return what a launch reads to expand the rows of a step."""
    tile_map, table, v = attached_tile_map(expand.segments), expand.table, expand.v
    (tiles,) = tile_map.tiles
    slots = expand.segments.row_slots(v.device)
    assert len(slots) >= len(expand.y), "each row has a slot, or a number for none"
    return {
        "v": v,
        "pool": expand.pool,
        "shrink_work": tiles.shrink.work,
        "row_slots": slots,
        # Only the sites are read, so the block size does not matter.
        "sites": group_table(expand.group, 1 << 30, v.device).sites,
        "b_offsets": table.b_offsets,
        "ranks": table.ranks,
        "scales": table.scales,
        "v_rows": v.shape[2],
        "v_rank": v.shape[3],
        "table_sites": table.ranks.shape[1],
        "table_tiles": table.b_offsets.shape[2],
        "split_programs": split_programs(tiles, tile_map, v.device),
        "max_splits": v.shape[0],
        "NUM_SITES": len(expand.group.sites),
        "MAX_SPLITS": MAX_SPLITS,
    }


def _place(expand: PendingExpand, part: torch.Tensor) -> tuple[int, int, int]:
    """Return the site's index in the group, `part`'s first column in the site's slice, and the width of the slice."""
    column, starts = int(part.storage_offset() - expand.y.storage_offset()), expand.group.out_starts
    index = bisect_right(starts, column) - 1
    return index, column - starts[index], expand.group.out_features[index]


@triton.jit
def _cell(
    slot: tl.tensor, index: tl.constexpr, sites: tl.tensor, ranks: tl.tensor, scales: tl.tensor, table_sites: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the place in the tables of a row's adapter at a site, its rank and its scale; zeros without an adapter."""
    cell = slot * table_sites + tl.load(sites + index)
    return cell, tl.load(ranks + cell, mask=slot >= 0, other=0), tl.load(scales + cell, mask=slot >= 0, other=0.0)


@triton.jit
def _expanded(
    at: tl.tensor, column: tl.tensor, has_column: tl.tensor, width: tl.tensor, row: tl.tensor, slot: tl.tensor,
    splits: tl.tensor, v: tl.tensor, pool: tl.tensor, sites: tl.tensor, b_offsets: tl.tensor, ranks: tl.tensor,
    scales: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor,
    INDEX: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SITES: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the base's values at the addresses `at`, with the pairs of the row's adapter added, in their dtype."""
    cell, rank, scale = _cell(slot, INDEX, sites, ranks, scales, table_sites)
    base = tl.load(at, mask=has_column, other=0.0)
    total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for first in range(0, rank, _TILE):
        total += tl.sum(
            products_of_row(
                first, rank, column, has_column, width, row, INDEX, cell, splits, v, pool, b_offsets,
                None, None, None, v_rows, v_rank, table_tiles, NUM_SITES, MAX_SPLITS,
            ),
            axis=0,
        )  # fmt: skip
    return (base.to(tl.float32) + scale * total).to(base.dtype)


def prepare_gated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, expand: PendingExpand, y: torch.Tensor
) -> Launch:
    """Return the launch that fills `y` from slices of `expand.y`: a program for each row and block of columns."""
    assert gate.stride(1) == up.stride(1) == y.stride(1) == 1, "rows are contiguous"
    rows, width = gate.shape
    (gate_index, gate_first, gate_width), (up_index, up_first, up_width) = (_place(expand, x) for x in (gate, up))
    assert (gate_index, gate_first, gate_width) == (0, 0, up_width), "gate and up, in this order, of one width"
    arguments = {
        **_pair_arguments(expand),
        "gate": gate,
        "up": up,
        "y": y,
        "gate_row": gate.stride(0),
        "up_row": up.stride(0),
        "width": width,
        "up_first": up_first,
        "site_width": up_width,
        "UP_INDEX": up_index,
        "IS_SILU": activation == "silu",
        "BLOCK_COLUMNS": GATED_COLUMNS,
    }
    return Launch(_expand_gated, (rows, triton.cdiv(width, GATED_COLUMNS)), arguments, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_gated(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, v: tl.tensor, pool: tl.tensor, shrink_work: tl.tensor,
    row_slots: tl.tensor, sites: tl.tensor, b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor,
    gate_row: tl.tensor, up_row: tl.tensor, width: tl.tensor, up_first: tl.tensor, site_width: tl.tensor,
    v_rows: tl.tensor, v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor,
    UP_INDEX: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SITES: tl.constexpr,
    MAX_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    wait_for_earlier(DEPENDENT)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < width
    gate_cell, gate_rank, gate_scale = _cell(slot, 0, sites, ranks, scales, table_sites)
    up_cell, up_rank, up_scale = _cell(slot, UP_INDEX, sites, ranks, scales, table_sites)
    base = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
    passed = tl.load(up + row * up_row + column, mask=inside, other=0.0)
    gate_total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    up_total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    # One loop for both, so that B of the one is loaded while B of the other is.
    for first in range(0, tl.maximum(gate_rank, up_rank), _TILE):
        of_gate = products_of_row(
            first, gate_rank, column, inside, site_width, row, 0, gate_cell, splits, v, pool, b_offsets,
            None, None, None, v_rows, v_rank, table_tiles, NUM_SITES, MAX_SPLITS,
        )  # fmt: skip
        of_up = products_of_row(
            first, up_rank, up_first + column, inside, site_width, row, UP_INDEX, up_cell, splits, v, pool, b_offsets,
            None, None, None, v_rows, v_rank, table_tiles, NUM_SITES, MAX_SPLITS,
        )  # fmt: skip
        gate_total += tl.sum(of_gate, axis=0)
        up_total += tl.sum(of_up, axis=0)
    x = (base.to(tl.float32) + gate_scale * gate_total).to(base.dtype).to(tl.float32)
    passed = (passed.to(tl.float32) + up_scale * up_total).to(base.dtype).to(tl.float32)
    product = activated(x, IS_SILU).to(base.dtype).to(tl.float32) * passed
    tl.store(y + row * width + column, product.to(y.dtype.element_ty), mask=inside)


def prepare_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
    expand: PendingExpand,
) -> list[Launch]:
    """Return the launches on slices of `expand.y`: a program for each token and each head of queries, keys, values."""
    arguments = rope_arguments(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)
    for name, part in (("query", query), ("key", key), ("value", value)):
        index, first, width = _place(expand, part)
        arguments |= {f"{name.upper()}_INDEX": index, f"{name}_first": first, f"{name}_width": width}
    arguments |= {
        **_pair_arguments(expand),
        "HEADS": query.shape[1],
        "KV_HEADS": key.shape[1],
        "BLOCK_KEY": triton.next_power_of_2(query.shape[2]),
    }
    grid = (len(query), query.shape[1] + 2 * key.shape[1])
    warps = 2 if max(query.shape[2], value.shape[2]) <= 256 else 4
    return [
        Launch(_expand_rope_write_kv, grid, arguments | {"BEGINS": begins}, num_warps=warps, num_stages=1)
        for begins in passes(layer)
    ]


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_rope_write_kv(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor,
    key_scale: tl.tensor, value_scale: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_weight: tl.tensor,
    key_weight: tl.tensor, slot_mapping: tl.tensor, eps: tl.tensor, block_size: tl.tensor, rotation_token: tl.tensor,
    query_token: tl.tensor, query_head: tl.tensor, key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor,
    value_head: tl.tensor, key_cache_page: tl.tensor, key_cache_head: tl.tensor, key_cache_token: tl.tensor,
    value_cache_page: tl.tensor, value_cache_head: tl.tensor, value_cache_token: tl.tensor, key_scale_page: tl.tensor,
    value_scale_page: tl.tensor, v: tl.tensor, pool: tl.tensor, shrink_work: tl.tensor, row_slots: tl.tensor,
    sites: tl.tensor, b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor, query_first: tl.tensor,
    key_first: tl.tensor, value_first: tl.tensor, query_width: tl.tensor, key_width: tl.tensor, value_width: tl.tensor,
    v_rows: tl.tensor, v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor, split_programs: tl.tensor,
    max_splits: tl.tensor,
    QUERY_INDEX: tl.constexpr, KEY_INDEX: tl.constexpr, VALUE_INDEX: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, ROUNDS_FIRST: tl.constexpr, KEY_DIM: tl.constexpr, HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, NUM_SITES: tl.constexpr, MAX_SPLITS: tl.constexpr, BEGINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    adapter = tl.load(row_slots + token)
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    wait_for_earlier(DEPENDENT)
    if BEGINS is not None:  # noqa: SIM102 - evaluated when compiling; the nested condition is not
        if (slot % block_size == 0) != BEGINS:
            return
    if cos is not None:
        cos += token * rotation_token
        sin += token * rotation_token
    page = slot // block_size
    offset = slot % block_size
    if head < HEADS:
        at = query + token * query_token + head * query_head
        _expand_in_place(
            at, query_first + head * KEY_DIM, query_width, token, adapter, splits, v, pool, sites, b_offsets, ranks,
            scales, v_rows, v_rank, table_sites, table_tiles, QUERY_INDEX, KEY_DIM, BLOCK_KEY, NUM_SITES, MAX_SPLITS,
        )  # fmt: skip
        turn(
            at, 0, at, 0, None, cos, sin, query_weight, eps,
            ROUNDS_FIRST, 1, KEY_DIM, HALF, 1, BLOCK_HALF, BLOCK_REST, None,
        )  # fmt: skip
    elif slot >= 0 and head < HEADS + KV_HEADS:
        head -= HEADS
        at = key + token * key_token + head * key_head
        _expand_in_place(
            at, key_first + head * KEY_DIM, key_width, token, adapter, splits, v, pool, sites, b_offsets, ranks,
            scales, v_rows, v_rank, table_sites, table_tiles, KEY_INDEX, KEY_DIM, BLOCK_KEY, NUM_SITES, MAX_SPLITS,
        )  # fmt: skip
        if BEGINS is not None:
            key_scale += page * key_scale_page + head
        to_key = key_cache + page * key_cache_page + head * key_cache_head + offset * key_cache_token
        turn(
            at, 0, to_key, 0, key_scale, cos, sin, key_weight, eps,
            ROUNDS_FIRST, 1, KEY_DIM, HALF, 1, BLOCK_HALF, BLOCK_REST, BEGINS,
        )  # fmt: skip
    elif slot >= 0:
        head -= HEADS + KV_HEADS
        at = value + token * value_token + head * value_head
        _expand_in_place(
            at, value_first + head * VALUE_DIM, value_width, token, adapter, splits, v, pool, sites, b_offsets, ranks,
            scales, v_rows, v_rank, table_sites, table_tiles, VALUE_INDEX, VALUE_DIM, BLOCK_VALUE, NUM_SITES,
            MAX_SPLITS,
        )  # fmt: skip
        if BEGINS is not None:
            value_scale += page * value_scale_page + head
        to_value = value_cache + page * value_cache_page + head * value_cache_head + offset * value_cache_token
        store_heads(at, 0, to_value, 0, value_scale, 1, VALUE_DIM, 1, BLOCK_VALUE, BEGINS)


@triton.jit
def _expand_in_place(
    at: tl.tensor, first_column: tl.tensor, width: tl.tensor, row: tl.tensor, slot: tl.tensor, splits: tl.tensor,
    v: tl.tensor, pool: tl.tensor, sites: tl.tensor, b_offsets: tl.tensor, ranks: tl.tensor, scales: tl.tensor,
    v_rows: tl.tensor, v_rank: tl.tensor, table_sites: tl.tensor, table_tiles: tl.tensor,
    INDEX: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SITES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Expand the columns of one head, for all threads of this program to read."""
    column = tl.arange(0, BLOCK_COLUMNS)
    has_column = column < COLUMNS
    values = _expanded(
        at + column, first_column + column, has_column, width, row, slot, splits, v, pool, sites, b_offsets, ranks,
        scales, v_rows, v_rank, table_sites, table_tiles, INDEX, BLOCK_COLUMNS, NUM_SITES, MAX_SPLITS,
    )  # fmt: skip
    tl.store(at + column, values, mask=has_column)
    tl.debug_barrier()


def prepare_rms_norm(
    x: torch.Tensor | None, norm: Norm, factor: float, expand: PendingExpand, y: torch.Tensor
) -> Launch:
    """Return the launch that fills `y` with the normalised rows of `x`, after adding `expand.y` to them.

    Without `x` the rows of `expand.y` are normalised. A program for each row and part of it.
    """
    delta, arrivals = expand.y, attached_tile_map(expand.segments).arrivals
    assert delta.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert x is None or x.stride(1) == 1, "rows are contiguous"
    assert len(expand.group.sites) == 1, "a norm reads the result of one linear"
    rows, width = delta.shape
    arguments = {
        **_pair_arguments(expand),
        "x": x,
        "delta": delta,
        "weight": norm.weight,
        "y": y,
        "arrivals": arrivals,
        "x_row": 0 if x is None else x.stride(0),
        "delta_row": delta.stride(0),
        "y_row": y.stride(0),
        "width": width,
        "eps": norm.eps,
        "factor": factor,
        "ROUNDS_FIRST": norm.rounds_first,
        "BLOCK": triton.next_power_of_2(width),
        "BLOCK_COLUMNS": NORM_COLUMNS,
    }
    grid = (rows, triton.cdiv(width, NORM_COLUMNS))
    return Launch(_expand_rms_norm, grid, arguments, num_warps=4 if width <= 8192 else 8, num_stages=1)


@triton.jit(do_not_specialize=["v_rows", "max_splits"])
def _expand_rms_norm(
    x: tl.tensor, delta: tl.tensor, weight: tl.tensor, y: tl.tensor, arrivals: tl.tensor, v: tl.tensor,
    pool: tl.tensor, shrink_work: tl.tensor, row_slots: tl.tensor, sites: tl.tensor, b_offsets: tl.tensor,
    ranks: tl.tensor, scales: tl.tensor, x_row: tl.tensor, delta_row: tl.tensor, y_row: tl.tensor, width: tl.tensor,
    eps: tl.tensor, factor: tl.tensor, v_rows: tl.tensor, v_rank: tl.tensor, table_sites: tl.tensor,
    table_tiles: tl.tensor, split_programs: tl.tensor, max_splits: tl.tensor,
    ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SITES: tl.constexpr,
    MAX_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    splits = split_count(tl.load(shrink_work), NUM_SITES, split_programs, max_splits)
    wait_for_earlier(DEPENDENT)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < width
    stream = delta + row * delta_row
    values = _expanded(
        stream + column, column, inside, width, row, slot, splits, v, pool, sites, b_offsets, ranks, scales,
        v_rows, v_rank, table_sites, table_tiles, 0, BLOCK_COLUMNS, NUM_SITES, MAX_SPLITS,
    )  # fmt: skip
    if x is not None:
        stream = x + row * x_row
        # Rounded twice, as the reference's two operators round.
        change = (values.to(tl.float32) * factor).to(values.dtype).to(tl.float32)
        values = tl.load(stream + column, mask=inside, other=0.0).to(tl.float32) + change
    tl.store(stream + column, values.to(y.dtype.element_ty), mask=inside)
    # All threads have stored their values before one thread counts the part.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        tl.store(arrivals + row, 0)
        whole = tl.arange(0, BLOCK)
        in_row = whole < width
        # Other programs have written them: read from the cache that all multiprocessors share.
        row_values = tl.load(stream + whole, mask=in_row, other=0.0, cache_modifier=".cg").to(tl.float32)
        row_values = over_root_mean_square(row_values, width, eps, y.dtype.element_ty, ROUNDS_FIRST)
        row_values *= tl.load(weight + whole, mask=in_row, other=0.0)
        tl.store(y + row * y_row + whole, row_values.to(y.dtype.element_ty), mask=in_row)
