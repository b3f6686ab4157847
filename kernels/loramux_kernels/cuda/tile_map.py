"""The work lists of the LoRA kernels: which rows go through which kernel.

Cut once a step on the host and read by every layer's launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loramux_kernels.cuda.work_list import Ints, WorkList, cut, reserve, upload
from loramux_kernels.tables import RANK_TILE, LoraTable, Segments

SHORT_ROWS = 32
"""Segments up to here are short: their adapter's bytes, not their rows, are what they cost."""

ITEM_WIDTH = 4
"""Columns of an item: slot, first row, one past the last row, first rank row (0 for expand)."""


@dataclass(frozen=True)
class TileShape:
    """Rows and rank rows that one item covers."""

    rows: int
    """1: a row by itself, multiplied without tensor cores."""
    rank: int
    """Rank rows that one item of shrink takes."""
    expand_rows: int
    """Rows of an item of expand. Fewer than 64, so that Hopper's wgmma is not used: the intermediate reaches it in
    registers, which assemblers before CUDA 13.3 may reuse too early (triton-lang/triton#9433)."""


ROW = TileShape(1, RANK_TILE, 1)
SHORT = TileShape(16, RANK_TILE, 16)
LONG_ROWS, LONG_EXPAND_ROWS = 64, 32
LONG_RANKS = (16, 32, 64)
"""Rank rows of a long segment's items: the least that hold the widest rank, or the most."""

LONG = TileShape(LONG_ROWS, LONG_RANKS[-1], LONG_EXPAND_ROWS)

DECODE_SHAPES = (ROW, SHORT)
"""Shapes for steps of single rows; `decode_shape` chooses."""


@dataclass(frozen=True, eq=False)
class RowTiles:
    """The items of one tile shape."""

    shape: TileShape
    shrink: WorkList
    """(row tile, rank tile) pairs that exist at the adapters' true ranks."""
    expand: WorkList
    """Row tiles."""


@dataclass(frozen=True, eq=False)
class TileMap:
    """A step's adapter rows as work for the LoRA kernels."""

    rows: int
    """Rows that belong to an adapter."""
    rank: int
    """Width of the intermediate: the largest rank of the step, in whole rank tiles."""
    tiles: tuple[RowTiles, ...]
    """One entry for each tile shape that occurs: at most one for short segments and one for long ones."""

    @property
    def max_splits(self) -> int:
        """Most partial sums that shrink may cut one product into; few rows leave a GPU idle otherwise."""
        if self.rows <= 256:
            return 16
        return 4 if self.rows <= 2048 else 1

    @classmethod
    def for_step(cls, segments: Segments, ranks: Ints, device: torch.device) -> TileMap:
        """The map of one step; `ranks` `[S]` are the largest that each segment's adapter holds on any site."""
        plans = [(shape, *_items(segments, ranks, shape)) for shape in _shapes(segments, ranks)]
        plans = [plan for plan in plans if len(plan[1])]
        if not plans:
            return cls(segments.rows, 0, ())
        uploaded = iter(upload([items for _, *lists in plans for items in lists], device))
        tiles = tuple(RowTiles(shape, next(uploaded), next(uploaded)) for shape, *_ in plans)
        return cls(segments.rows, _whole_tiles(ranks), tiles)

    @classmethod
    def reserve(cls, rows: int, rank: int, shape: TileShape, device: torch.device) -> TileMap:
        """An empty map of fixed addresses for launches held in a CUDA graph: up to `rows` rows, ranks up to `rank`."""
        shrink = reserve(rows * -(-rank // shape.rank), ITEM_WIDTH, device)
        tiles = RowTiles(shape, shrink, reserve(rows, ITEM_WIDTH, device))
        return cls(rows, -(-rank // RANK_TILE) * RANK_TILE, (tiles,))

    @classmethod
    def reserve_any(cls, rows: int, rank: int, device: torch.device) -> TileMap:
        """An empty map of fixed addresses for any step of up to `rows` rows: for short and for long segments."""
        short, long = (cls.reserve(rows, rank, shape, device) for shape in (SHORT, LONG))
        return cls(rows, short.rank, (*short.tiles, *long.tiles))

    @classmethod
    def of_every_shape(cls, rows: int, rank: int, device: torch.device) -> TileMap:
        """An empty map of all shapes that a step may need, at most two of them at a time: to compile their kernels."""
        shapes = (*DECODE_SHAPES, *(TileShape(LONG_ROWS, long, LONG_EXPAND_ROWS) for long in LONG_RANKS))
        maps = [cls.reserve(rows, rank, shape, device) for shape in shapes]
        return cls(rows, maps[0].rank, tuple(tiles for one in maps for tiles in one.tiles))

    def refill(self, segments: Segments, ranks: Ints) -> None:
        """Put another step's segments into a reserved map; where it has one tile shape, all of them go through that."""
        for tiles in self.tiles:
            shrink, expand = _items(segments, ranks, tiles.shape, every=len(self.tiles) == 1)
            tiles.shrink.refill(shrink)
            tiles.expand.refill(expand)


def tile_map_of(segments: Segments, table: LoraTable) -> TileMap:
    """The map of `segments`, made on first use and kept with them, as a cached property would be.

    Reads the ranks from `table`, for which the host waits once a step; `attach_tile_map` spares it that.
    """
    if "tile_map" not in vars(segments):
        slots = torch.tensor(segments.slots, dtype=torch.int64, device=table.ranks.device)
        ranks = table.ranks[slots].amax(dim=1).cpu().numpy().astype(np.int64)
        attach_tile_map(segments, TileMap.for_step(segments, ranks, table.ranks.device))
    return vars(segments)["tile_map"]


def attach_tile_map(segments: Segments, tile_map: TileMap) -> None:
    """Have every launch for `segments` use `tile_map`: one made without asking the device, or a reserved one."""
    vars(segments)["tile_map"] = tile_map


def decode_shape(segments: Segments, ranks: Sequence[int]) -> TileShape:
    """The shape for all of a decode step's segments, `ranks` being their adapters'."""
    lengths = np.diff(segments.cu_seqlens)
    return _short_shape(lengths[np.asarray(ranks) > 0])


def _short_shape(lengths: Ints) -> TileShape:
    # Reading an adapter once for each row beats padding to a tensor-core tile while rows hardly share adapters.
    return ROW if lengths.sum() < 2 * (-(-lengths // SHORT.rows)).sum() else SHORT


def _shapes(segments: Segments, ranks: Ints) -> tuple[TileShape, TileShape]:
    """The shapes for this step's short and long segments."""
    lengths = np.diff(segments.cu_seqlens)
    short = lengths <= SHORT_ROWS
    widest = int(ranks[~short].max(initial=0))
    long_rank = next((rank for rank in LONG_RANKS if widest <= rank), LONG_RANKS[-1])
    return _short_shape(lengths[short & (ranks > 0)]), TileShape(LONG_ROWS, long_rank, LONG_EXPAND_ROWS)


def _items(segments: Segments, ranks: Ints, shape: TileShape, *, every: bool = False) -> tuple[Ints, Ints]:
    """(shrink items, expand items) of the segments that `shape` serves; an adapter of rank 0 has none."""
    lengths = np.diff(segments.cu_seqlens).astype(np.int64)
    served = ranks > 0
    if not every:
        served &= (lengths > SHORT_ROWS) == (shape.rows == LONG_ROWS)
    lengths = np.where(served, lengths, 0)
    rows = _row_tiles(segments, lengths, shape.rows)
    owner, rank_start = cut(ranks[rows[:, 0]], shape.rank)
    shrink = np.column_stack((rows[owner], rank_start))
    expand = _row_tiles(segments, lengths, shape.expand_rows)
    expand = np.column_stack((expand, np.zeros(len(expand), dtype=np.int64)))
    slots = np.asarray(segments.slots, dtype=np.int64)
    for items in (shrink, expand):
        items[:, 0] = slots[items[:, 0]]
    return shrink, expand


def _row_tiles(segments: Segments, lengths: Ints, height: int) -> Ints:
    """[n, 3]: segment, first row, one past the last; `lengths` rows of each segment are cut."""
    starts = np.asarray(segments.cu_seqlens[:-1], dtype=np.int64)
    owner, offset = cut(lengths, height)
    first = starts[owner] + offset
    return np.column_stack((owner, first, np.minimum(first + height, (starts + lengths)[owner])))


def _whole_tiles(ranks: Ints) -> int:
    return -(-int(ranks.max(initial=0)) // RANK_TILE) * RANK_TILE
