"""Semantics: a mixture's rows (token, choice) by expert, and back: out[t] = sum over j of w[t, j] * y[row(t, j)].

The work of the LoRA kernels for a mixture's rows depends on the choices, which only the device knows. So it is cut
there too: `expert_segments` is the counterpart of `TileMap.for_step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.tile_map import ITEM_WIDTH, LONG_RANKS, SHORT, RowTiles, TileMap, TileShape, attach_tile_map
from loramux_kernels.cuda.work_list import WorkList
from loramux_kernels.tables import RANK_TILE, Routes, Segments

BLOCK_ROWS = 1024
BLOCK_COLUMNS = 512

_ITEM = tl.constexpr(ITEM_WIDTH)


def route(experts: torch.Tensor, num_experts: int, kv_slots: torch.Tensor | None) -> Routes:
    """Order rows by expert, in one launch. Arguments as for the public operator, on a GPU."""
    rows = experts.numel()
    # Each begins at 16 bytes, which rows of one tensor need not: Triton would compile anew for those.
    tokens, of_rows, places = (experts.new_empty(rows) for _ in range(3))
    routes = Routes(tokens, of_rows, places.view(experts.shape), experts.new_empty(num_experts + 1))
    prepare_route(experts, kv_slots, routes).run()
    return routes


def prepare_route(experts: torch.Tensor, kv_slots: torch.Tensor | None, routes: Routes) -> Launch:
    """The launch that fills `routes`: a program for each expert, and one for padding."""
    arguments = {
        "experts": experts.contiguous(),
        "kv_slots": kv_slots,
        "tokens": routes.tokens,
        "of_rows": routes.experts,
        "places": routes.places,
        "starts": routes.starts,
        "rows": experts.numel(),
        "CHOICES": experts.shape[1],
        "BLOCK": BLOCK_ROWS,
    }
    return Launch(_route, (len(routes.starts),), arguments, num_warps=4, num_stages=1)


def combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor) -> torch.Tensor:
    """Add up every token's rows, in one launch. Arguments as for the public operator, on a GPU."""
    out = y.new_empty(weights.shape[0], y.shape[1])
    if len(out):
        prepare_combine(y, routes, weights, out).run()
    return out


def prepare_combine(y: torch.Tensor, routes: Routes, weights: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch that fills `out`: a program for each token and block of columns."""
    assert y.is_contiguous(), "rows are found by arithmetic"
    arguments = {
        "y": y,
        "places": routes.places,
        "weights": weights.contiguous(),
        "out": out,
        "width": y.shape[1],
        "CHOICES": weights.shape[1],
        "BLOCK_CHOICES": triton.next_power_of_2(weights.shape[1]),
        "BLOCK": BLOCK_COLUMNS,
    }
    return Launch(_combine, (len(out), triton.cdiv(y.shape[1], BLOCK_COLUMNS)), arguments, num_warps=4, num_stages=1)


def expert_segments(routes: Routes, segments: Segments, num_sites: int, max_rank: int) -> Segments:
    """Return the routes' rows as segments of a table with a row for each slot and expert, `num_sites` rows a slot.

    `segments` are the step's, of tokens. A run of one expert and one adapter is cut where a row's number is a multiple
    of an item's height.
    """
    rows, device = len(routes.tokens), routes.tokens.device
    rank = next((least for least in LONG_RANKS if max_rank <= least), LONG_RANKS[-1])
    parts = -(-max_rank // rank)
    shape = TileShape(SHORT.rows, rank, SHORT.rows)
    shrink, expand = (torch.empty(1 + rows * most, ITEM_WIDTH, dtype=torch.int32, device=device) for most in (parts, 1))
    prepare_expert_items(routes, segments, num_sites, shape, shrink, expand).run()
    whole = Segments((0, rows), (0,))
    tiles = RowTiles(shape, WorkList(shrink), WorkList(expand))
    attach_tile_map(whole, TileMap(rows, -(-max_rank // RANK_TILE) * RANK_TILE, (tiles,)))
    return whole


def prepare_expert_items(
    routes: Routes, segments: Segments, num_sites: int, shape: TileShape, shrink: torch.Tensor, expand: torch.Tensor
) -> Launch:
    """The launch that fills two work lists: one program, which counts as it goes through the rows."""
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
        "BLOCK": BLOCK_ROWS,
    }
    return Launch(_expert_items, (1,), arguments, num_warps=4, num_stages=1)


@triton.jit
def _chosen(
    experts: tl.tensor, kv_slots: tl.tensor, pair: tl.tensor, rows: tl.tensor, none: tl.tensor, CHOICES: tl.constexpr
) -> tl.tensor:
    """Experts of pairs (token, choice); `none` for padding, and more beyond the last."""
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
    """Count the rows of the experts before one's own, then give its rows the numbers that follow."""
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


@triton.jit
def _combine(
    y: tl.tensor, places: tl.tensor, weights: tl.tensor, out: tl.tensor, width: tl.tensor,
    CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One token by one block of columns a program."""
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


@triton.jit
def _table_row(
    row: tl.tensor, live: tl.tensor, tokens: tl.tensor, experts: tl.tensor, row_slots: tl.tensor,
    num_adapted: tl.tensor, num_sites: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The table's row of a route's row; -1 where it has no adapter, or is none."""
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
    """An item begins where the table's row changes, or a row's number is a multiple of HEIGHT."""
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
