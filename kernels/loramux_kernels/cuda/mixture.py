"""Mixtures of experts as Triton kernels: routing, one product for each expert, and the sum over a token's experts.

Semantics:

    route            a row for each (token, choice), ordered by expert and within one by token
    grouped_linear   y[s[e]:s[e + 1]] = x[s[e]:s[e + 1]] @ weight[e].T + bias[e], with s = starts
    combine          out[t] = sum over j of w[t, j] * y[row(t, j)]

A program of `grouped_linear` computes a tile of one expert's rows by a block of columns. The tiles of all experts are
numbered one after the other, and a program finds its expert in `starts`. So the host needs only the largest possible
number of tiles, not the number of rows of any expert. Programs after the last tile return at once.

The choices decide which rows the LoRA kernels compute for a mixture, and only the device knows them. So the work list
is made on the device too: `expert_segments` is the counterpart of `TileMap.for_step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.work_lists import (
    LONG_RANKS,
    LORA_ITEM_WIDTH,
    SHORT,
    RowTiles,
    TileMap,
    TileShape,
    WorkList,
    attach_tile_map,
)
from loramux_kernels.tables import RANK_TILE, Routes, Segments

ROUTED_ROWS = 1024
"""Rows, or (token, choice) pairs, that `route` and `expert_segments` read at a time."""

COMBINED_COLUMNS = 512
"""Columns that a program of `combine` takes."""

FEW_ROWS = 16
"""Mean number of rows of an expert up to which reading its weight costs more time than the products."""

_ITEM = tl.constexpr(LORA_ITEM_WIDTH)


def route(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None) -> Routes:
    """Order rows by expert, in one launch. Arguments as for the public operator, on a GPU."""
    rows = experts.numel()
    # Each must begin at a multiple of 16 bytes. The rows of one tensor may not, and Triton would compile another
    # variant for their addresses.
    tokens, of_rows, places = (experts.new_empty(rows) for _ in range(3))
    routes = Routes(tokens, of_rows, places.view(experts.shape), experts.new_empty(num_experts + 1))
    prepare_route(experts, kv_slots, routes).run()
    return routes


def prepare_route(experts: torch.Tensor, kv_slots: torch.Tensor | None, routes: Routes) -> Launch:
    """Return the launch that fills `routes`: a program for each expert, and one for padding."""
    arguments = {
        "experts": experts.contiguous(),
        "kv_slots": kv_slots,
        "tokens": routes.tokens,
        "of_rows": routes.experts,
        "places": routes.places,
        "starts": routes.starts,
        "rows": experts.numel(),
        "CHOICES": experts.shape[1],
        "BLOCK": ROUTED_ROWS,
    }
    return Launch(_route, (len(routes.starts),), arguments, num_warps=4, num_stages=1)


@triton.jit
def _chosen(
    experts: tl.tensor, kv_slots: tl.tensor, pair: tl.tensor, rows: tl.tensor, none: tl.tensor, CHOICES: tl.constexpr
) -> tl.tensor:
    """Return the experts of (token, choice) pairs; `none` for padding, and `none + 1` after the last pair."""
    inside = pair < rows
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32)
    if kv_slots is not None:
        expert = tl.where(tl.load(kv_slots + pair // CHOICES, mask=inside, other=0) < 0, none, expert)
    return tl.where(inside, expert, none + 1)


@triton.jit(do_not_specialize=["rows"])
def _route(
    experts: tl.tensor, kv_slots: tl.tensor, tokens: tl.tensor, of_rows: tl.tensor, places: tl.tensor,
    starts: tl.tensor, rows: tl.tensor,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Count the rows of the experts before this program's expert, then number this expert's rows from there."""
    own = tl.program_id(0)
    none = tl.num_programs(0) - 1
    row = 0
    for start in range(0, rows, BLOCK):
        chosen = _chosen(experts, kv_slots, start + tl.arange(0, BLOCK), rows, none, CHOICES)
        row += tl.sum((chosen < own).to(tl.int32))
    tl.store(starts + own, row)
    for start in range(0, rows, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_own = _chosen(experts, kv_slots, pair, rows, none, CHOICES) == own
        place = row + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(tokens + place, (pair // CHOICES).to(tl.int64), mask=is_own)
        tl.store(of_rows + place, tl.zeros((BLOCK,), tl.int64) + own, mask=is_own)
        tl.store(places + pair, place.to(tl.int64), mask=is_own)
        row += tl.sum(is_own.to(tl.int32))


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with its weight, in one launch. Arguments as for the public operator, on a
    GPU."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    if len(x):
        prepare_grouped_linear(x, weight, bias, starts, y).run()
    return y


def prepare_grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor, y: torch.Tensor
) -> Launch:
    """Return the launch that fills `y`: a program for each possible tile of rows and each block of columns."""
    assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert bias is None or bias.is_contiguous(), "rows are contiguous"
    experts, columns, width = weight.shape
    is_float32 = x.dtype == torch.float32
    is_small = is_float32 or len(x) <= FEW_ROWS * experts
    block_rows = FEW_ROWS if is_small else 64
    block_columns, block_inputs = (32, 32) if is_float32 else (64, 128) if is_small else (128, 64)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "y": y,
        "starts": starts,
        "x_row": x.stride(0),
        "width": width,
        "columns": columns,
        "weight_expert": weight.stride(0),
        "weight_column": weight.stride(1),
        "weight_input": weight.stride(2),
        "EXPERTS": experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(experts),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "BLOCK_INPUTS": block_inputs,
    }
    # Every expert's last tile may be partly filled.
    most_tiles = min(len(x), len(x) // block_rows + experts)
    grid = (triton.cdiv(columns, block_columns), most_tiles)
    return Launch(_grouped_linear, grid, arguments, num_warps=4, num_stages=2 if is_float32 else 4 if is_small else 3)


@triton.jit
def expert_tile(
    starts: tl.tensor, tile: tl.tensor, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile's expert, its rows, and True for the rows that the expert has; EXPERTS after the last tile."""
    e = tl.arange(0, BLOCK_EXPERTS)
    firsts = tl.load(starts + e, mask=e < EXPERTS, other=0).to(tl.int32)
    lasts = tl.load(starts + e + 1, mask=e < EXPERTS, other=0).to(tl.int32)
    tiles = tl.cdiv(lasts - firsts, BLOCK_ROWS)
    ends = tl.cumsum(tiles, axis=0)
    # The number of experts whose tiles all come before this one.
    expert = tl.minimum(tl.sum((ends <= tile).to(tl.int32)), EXPERTS)
    is_own = e == expert
    before = tl.sum(tl.where(is_own, ends - tiles, 0))
    row = tl.sum(tl.where(is_own, firsts, 0)) + (tile - before) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return expert, row, row < tl.sum(tl.where(is_own, lasts, 0))


@triton.jit
def _grouped_linear(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, starts: tl.tensor, x_row: tl.tensor,
    width: tl.tensor, columns: tl.tensor, weight_expert: tl.tensor, weight_column: tl.tensor, weight_input: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    expert, row, is_row = expert_tile(starts, tl.program_id(1), EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS)
    if expert < EXPERTS:
        column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column = column < columns
        x_rows = x + row.to(tl.int64)[:, None] * x_row
        own_weight = weight + expert.to(tl.int64) * weight_expert + column.to(tl.int64)[None, :] * weight_column
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for start in range(0, width, BLOCK_INPUTS):
            k = start + tl.arange(0, BLOCK_INPUTS)
            is_input = k < width
            inputs = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            factors = own_weight + k.to(tl.int64)[:, None] * weight_input
            factors = tl.load(factors, mask=is_input[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(inputs, factors, total, input_precision="ieee")
        if bias is not None:
            own_bias = bias + expert.to(tl.int64) * columns + column
            total += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
        out = y + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """Add up every token's rows, in one launch. Arguments as for the public operator, on a GPU."""
    out = y.new_empty(weights.shape[0], y.shape[1])
    if len(out):
        prepare_combine(y, routes, weights, out).run()
    return out


def prepare_combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch that fills `out`: a program for each token and block of columns."""
    assert y.is_contiguous(), "rows are found by arithmetic"
    arguments = {
        "y": y,
        "places": routes.places,
        "weights": weights.contiguous(),
        "out": out,
        "width": y.shape[1],
        "CHOICES": weights.shape[1],
        "BLOCK_CHOICES": triton.next_power_of_2(weights.shape[1]),
        "BLOCK": COMBINED_COLUMNS,
    }
    return Launch(_combine, (len(out), triton.cdiv(y.shape[1], COMBINED_COLUMNS)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _combine(
    y: tl.tensor, places: tl.tensor, weights: tl.tensor, out: tl.tensor, width: tl.tensor,
    CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add up one token by one block of columns in each program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_CHOICES)
    is_choice = choice < CHOICES
    place = tl.load(places + token * CHOICES + choice, mask=is_choice, other=0)
    factor = tl.load(weights + token * CHOICES + choice, mask=is_choice, other=0.0).to(tl.float32)
    inside = is_choice[:, None] & (column < width)[None, :]
    rows = tl.load(y + place[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(rows * factor[:, None], axis=0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def expert_segments(routes: Routes, segments: Segments, num_sites: int, max_rank: int) -> Segments:
    """Return the routes' rows as segments of a table with a row for each slot and expert, `num_sites` rows a slot.

    `segments` are the step's, of tokens. A run of one expert and one adapter is cut at row numbers that are multiples
    of an item's height.
    """
    rows, device = len(routes.tokens), routes.tokens.device
    rank = next((least for least in LONG_RANKS if max_rank <= least), LONG_RANKS[-1])
    parts = -(-max_rank // rank)
    shape = TileShape(SHORT.rows, rank, SHORT.rows)
    shrink, expand = (
        torch.empty(1 + rows * most, LORA_ITEM_WIDTH, dtype=torch.int32, device=device) for most in (parts, 1)
    )
    prepare_expert_items(routes, segments, num_sites, shape, shrink, expand).run()
    whole = Segments((0, rows), (0,))
    tiles = RowTiles(shape, WorkList(shrink), WorkList(expand))
    attach_tile_map(whole, TileMap(rows, -(-max_rank // RANK_TILE) * RANK_TILE, (tiles,), made_by_kernel=True))
    return whole


def prepare_expert_items(
    routes: Routes, segments: Segments, num_sites: int, shape: TileShape, shrink: torch.Tensor, expand: torch.Tensor
) -> Launch:
    """Return the launch that fills two work lists: one program, which counts items as it goes through the rows."""
    rows = len(routes.tokens)
    arguments = {
        "tokens": routes.tokens,
        "experts": routes.experts,
        "starts": routes.starts,
        "row_slots": segments.row_slots(routes.tokens.device),
        "shrink": shrink,
        "expand": expand,
        "rows": rows,
        "num_adapted": segments.rows,
        "num_experts": len(routes.starts) - 1,
        "num_sites": num_sites,
        "PARTS": (len(shrink) - 1) // max(rows, 1),
        "RANK": shape.rank,
        "HEIGHT": shape.rows,
        "BLOCK": ROUTED_ROWS,
    }
    return Launch(_expert_items, (1,), arguments, num_warps=4, num_stages=1)


@triton.jit
def _table_row(
    row: tl.tensor, live: tl.tensor, tokens: tl.tensor, experts: tl.tensor, row_slots: tl.tensor,
    num_adapted: tl.tensor, num_sites: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the table's row for a row of the routes, or -1 if the routes' row has no adapter or does not exist."""
    inside = (row >= 0) & (row < live)
    token = tl.load(tokens + row, mask=inside, other=0)
    slot = tl.load(row_slots + token, mask=inside & (token < num_adapted), other=-1)
    expert = tl.load(experts + row, mask=inside, other=0)
    return tl.where(slot >= 0, slot * num_sites + expert, -1).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "num_adapted"])
def _expert_items(
    tokens: tl.tensor, experts: tl.tensor, starts: tl.tensor, row_slots: tl.tensor, shrink: tl.tensor,
    expand: tl.tensor, rows: tl.tensor, num_adapted: tl.tensor, num_experts: tl.tensor, num_sites: tl.tensor,
    PARTS: tl.constexpr, RANK: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Begin an item at each change of the table's row, and at row numbers that are multiples of HEIGHT."""
    live = tl.load(starts + num_experts)
    items = 0
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        own = _table_row(row, live, tokens, experts, row_slots, num_adapted, num_sites)
        before = _table_row(row - 1, live, tokens, experts, row_slots, num_adapted, num_sites)
        after = _table_row(row + 1, live, tokens, experts, row_slots, num_adapted, num_sites)
        begins = (own >= 0) & ((own != before) | (row % HEIGHT == 0))
        ends = (own >= 0) & ((own != after) | ((row + 1) % HEIGHT == 0))
        item = items + tl.cumsum(begins.to(tl.int32), axis=0) - 1
        to = expand + (item + 1) * _ITEM
        tl.store(to, own, mask=begins)
        tl.store(to + 1, row, mask=begins)
        tl.store(to + 2, row + 1, mask=ends)
        tl.store(to + 3, row * 0, mask=begins)
        for part in tl.static_range(PARTS):
            to = shrink + (item * PARTS + part + 1) * _ITEM
            tl.store(to, own, mask=begins)
            tl.store(to + 1, row, mask=begins)
            tl.store(to + 2, row + 1, mask=ends)
            tl.store(to + 3, row * 0 + part * RANK, mask=begins)
        items += tl.sum(begins.to(tl.int32))
    tl.store(expand, items)
    tl.store(shrink, items * PARTS)
