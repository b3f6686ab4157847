"""Work lists of the persistent kernels: which program computes what. The host makes them once a step.

A persistent launch has a fixed number of programs, which walk through a list of items. The list and its length are on
the device, and every layer reads them. `refill` replaces the items in place, so one CUDA graph serves steps of any mix.

- `TileMap`: which adapter rows go through which LoRA kernel. Segments of few rows and of many rows have separate tiles.
- `plan_attention`: which query rows meet which stretch of context in one program. Contexts are cut if a few long ones
  would leave multiprocessors idle. The balance is that of FlashInfer's plan (Ye et al., 2025), the merge that of
  Flash-Decoding (Dao et al., 2023).
- `plan_states`: which sequences linear attention computes as single rows, and which in chunks of rows.

This module does not import triton: plans are made and tested on a CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loramux_kernels.cuda.launch import resident_programs
from loramux_kernels.device import to_device
from loramux_kernels.staged_memory import ALIGNMENT, StagedArray, StagedMemory
from loramux_kernels.tables import RANK_TILE, AttentionBatch, LoraTable, Segments

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WorkList:
    """Items of a launch. Its programs read the number of items from the device: a captured launch serves any number."""

    work: torch.Tensor
    """int32[1 + capacity, width]; work[0, 0] is the number of items, which begin at work[1]."""
    staged: StagedArray | None = None
    """The list's place in a step's copy; None if it is not refilled."""

    def refill(self, items: Ints) -> None:
        """Replace the items by `[n, width]` in place, with the step's copy; n is at most the capacity."""
        assert len(items) < len(self.work), f"{len(items)} items in a list that holds {len(self.work) - 1}"
        assert self.staged is not None, "a reserved list"
        rows = self.staged.on_host(len(items) + 1)
        rows[0, 0] = len(items)
        rows[1:] = items


def upload(lists: Sequence[Ints], device: torch.device) -> list[WorkList]:
    """Copy lists of items `[n, width]` to the device, in one transfer; all have the same width."""
    on_device = to_device(np.concatenate([_with_header(items) for items in lists]), device)
    return [WorkList(part) for part in on_device.split([len(items) + 1 for items in lists])]


def reserve(capacity: int, width: int, memory: StagedMemory) -> WorkList:
    """Return an empty list of fixed address with room for `capacity` items."""
    staged = memory.reserve((1 + capacity, width), torch.int32)
    return WorkList(staged.tensor, staged)


def _empty(width: int, device: torch.device) -> WorkList:
    return WorkList(torch.zeros(1, width, dtype=torch.int32, device=device))


def cut(lengths: Ints, size: int | Ints) -> tuple[Ints, Ints]:
    """Cut runs of `lengths` into pieces of at most `size`: (run of each piece, start of the piece within its run)."""
    pieces = -(-lengths // size)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return owner, index * (size if isinstance(size, int) else size[owner])


def _with_header(items: Ints) -> NDArray[np.int32]:
    rows = np.zeros((len(items) + 1, items.shape[1]), dtype=np.int32)
    rows[0, 0] = len(items)
    rows[1:] = items
    return rows


SHORT_SEGMENT_ROWS = 32
"""Most rows of a short segment. A short segment's time goes into reading the adapter, not into its rows."""

LORA_ITEM_WIDTH = 4
"""Columns of an item: slot, first row, one past the last row, first rank row (0 for expand)."""


@dataclass(frozen=True)
class TileShape:
    """Rows and rank rows that one item covers."""

    rows: int
    """Rows of the tile. 1: each row is multiplied alone, without tensor cores."""
    rank: int
    """Rank rows that one item of shrink takes."""
    expand_rows: int
    """Rows of an item of expand. Fewer than 64, because then Hopper's wgmma is not used: it would read the intermediate
    from registers, which assemblers before CUDA 13.3 may reuse too early (triton-lang/triton#9433)."""


ROW = TileShape(1, RANK_TILE, 1)
SHORT = TileShape(16, RANK_TILE, 16)
LONG_ROWS, LONG_EXPAND_ROWS = 64, 32
LONG_RANKS = (16, 32, 64)
"""Rank rows of a long segment's items: the least that hold the widest rank, or the largest of these."""

LONG = TileShape(LONG_ROWS, LONG_RANKS[-1], LONG_EXPAND_ROWS)

INVARIANT_SPLITS = 4
"""Partial sums that shrink cuts a product into if the cut must not depend on the step."""

DECODE_SHAPES = (ROW, SHORT)
"""Shapes for steps of single rows; `decode_shape` chooses."""


@dataclass(frozen=True, eq=False)
class RowTiles:
    """The items of one tile shape."""

    shape: TileShape
    shrink: WorkList
    """Pairs (row tile, rank tile) that exist at the adapters' true ranks."""
    expand: WorkList
    """Row tiles."""

    @classmethod
    def reserve(cls, shape: TileShape, rows: int, rank: int, memory: StagedMemory) -> RowTiles:
        """Return empty lists of fixed addresses for launches in CUDA graphs: up to `rows` rows and ranks up to
        `rank`."""
        # The shorter list first, because a step's copy ends where a list's items end.
        expand = reserve(rows, LORA_ITEM_WIDTH, memory)
        return cls(shape, reserve(rows * -(-rank // shape.rank), LORA_ITEM_WIDTH, memory), expand)

    @staticmethod
    def reserved_bytes(shape: TileShape, rows: int, rank: int) -> int:
        """Return the memory that `reserve` takes at most."""
        items = 2 + rows + rows * -(-rank // shape.rank)
        return items * LORA_ITEM_WIDTH * torch.int32.itemsize + 2 * ALIGNMENT


@dataclass(frozen=True, eq=False)
class TileMap:
    """A step's adapter rows as work for the LoRA kernels."""

    rows: int
    """Rows that belong to an adapter."""
    rank: int
    """Width of the intermediate: the largest rank of the step, in whole rank tiles."""
    tiles: tuple[RowTiles, ...]
    """One entry for each tile shape that occurs: at most one for short segments and one for long ones."""
    made_by_kernel: bool = False
    """True if a kernel of the step fills the lists, as those of a mixture's experts."""
    is_invariant: bool = False
    """True if a row's result must not depend on the other rows: all tiles are SHORT, and the splits are fixed."""
    arrivals: torch.Tensor | None = None
    """int32[rows], zeros between launches. If set, the only tiles are of shape ROW, and expand is joined to the
    operator that reads its result. A launch counts here the parts of each row that are written."""

    @property
    def max_splits(self) -> int:
        """Most partial sums that shrink may cut one product into: a step of few rows would leave a GPU idle without."""
        if self.is_invariant:
            return INVARIANT_SPLITS
        if self.rows <= 256:
            return 16
        return 4 if self.rows <= 2048 else 1

    @classmethod
    def for_step(cls, segments: Segments, ranks: Ints, device: torch.device, *, is_invariant: bool = False) -> TileMap:
        """Return the map of one step; `ranks` `[S]` is the largest rank of each segment's adapter on any site."""
        shapes = (SHORT,) if is_invariant else _shapes(segments, ranks)
        plans = [(shape, *_items(segments, ranks, shape, every=is_invariant)) for shape in shapes]
        plans = [plan for plan in plans if len(plan[1])]
        if not plans:
            return cls(segments.rows, 0, ())
        uploaded = iter(upload([items for _, *lists in plans for items in lists], device))
        tiles = tuple(RowTiles(shape, next(uploaded), next(uploaded)) for shape, *_ in plans)
        return cls(segments.rows, whole_tiles(int(ranks.max(initial=0))), tiles, is_invariant=is_invariant)

    @classmethod
    def of_every_shape(cls, rows: int, rank: int, device: torch.device, *, is_invariant: bool = False) -> TileMap:
        """Return an empty map of all shapes that steps may need (a step needs two at most), to compile their
        kernels."""
        longs = (TileShape(LONG_ROWS, long, LONG_EXPAND_ROWS) for long in LONG_RANKS)
        shapes = (SHORT,) if is_invariant else (*DECODE_SHAPES, *longs)
        empty = [RowTiles(shape, *(_empty(LORA_ITEM_WIDTH, device) for _ in range(2))) for shape in shapes]
        return cls(rows, whole_tiles(rank), tuple(empty), is_invariant=is_invariant)

    def refill(self, segments: Segments, ranks: Ints) -> None:
        """Put another step's segments into a reserved map. If the map has one tile shape, all segments go through
        it."""
        for tiles in self.tiles:
            shrink, expand = _items(segments, ranks, tiles.shape, every=len(self.tiles) == 1)
            tiles.shrink.refill(shrink)
            tiles.expand.refill(expand)


def tile_map_of(segments: Segments, table: LoraTable) -> TileMap:
    """Return the map of `segments`, made on first use and kept with them, as a cached property would be.

    Reads the ranks from `table`: the host waits for the device once a step, unless `attach_tile_map` was called before.
    """
    if "tile_map" not in vars(segments):
        slots = torch.tensor(segments.slots, dtype=torch.int64, device=table.ranks.device)
        ranks = table.ranks[slots].amax(dim=1).cpu().numpy().astype(np.int64)
        attach_tile_map(segments, TileMap.for_step(segments, ranks, table.ranks.device))
    return attached_tile_map(segments)


def attach_tile_map(segments: Segments, tile_map: TileMap) -> None:
    """Have every launch for `segments` use `tile_map`: one made without asking the device, or a reserved one."""
    vars(segments)["tile_map"] = tile_map


def attached_tile_map(segments: Segments) -> TileMap:
    """Return the map that was attached."""
    found: TileMap = vars(segments)["tile_map"]
    return found


def joins_expand(segments: Segments) -> bool:
    """Return True if expand is joined to the operator that reads its result."""
    tile_map: TileMap | None = vars(segments).get("tile_map")
    return tile_map is not None and tile_map.arrivals is not None


def decode_shape(segments: Segments, ranks: Sequence[int]) -> TileShape:
    """Return the shape for all segments of a decode step, whose adapters have `ranks`."""
    lengths = np.diff(segments.cu_seqlens)
    return _short_shape(lengths[np.asarray(ranks) > 0])


def _short_shape(lengths: Ints) -> TileShape:
    # While few rows share an adapter, reading it once for each row is faster than padding to a tensor-core tile.
    return ROW if lengths.sum() < 2 * (-(-lengths // SHORT.rows)).sum() else SHORT


def _shapes(segments: Segments, ranks: Ints) -> tuple[TileShape, TileShape]:
    """Return the shapes for this step's short and long segments."""
    lengths = np.diff(segments.cu_seqlens)
    short = lengths <= SHORT_SEGMENT_ROWS
    widest = int(ranks[~short].max(initial=0))
    long_rank = next((rank for rank in LONG_RANKS if widest <= rank), LONG_RANKS[-1])
    return _short_shape(lengths[short & (ranks > 0)]), TileShape(LONG_ROWS, long_rank, LONG_EXPAND_ROWS)


def _items(segments: Segments, ranks: Ints, shape: TileShape, *, every: bool = False) -> tuple[Ints, Ints]:
    """Return (shrink items, expand items) of the segments that `shape` serves; an adapter of rank 0 has none."""
    lengths = np.diff(segments.cu_seqlens).astype(np.int64)
    served = ranks > 0
    if not every:
        served &= (lengths > SHORT_SEGMENT_ROWS) == (shape.rows == LONG_ROWS)
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
    """Return `[n, 3]`: segment, first row, one past the last; `lengths` is the number of rows of each segment to
    cut."""
    starts = np.asarray(segments.cu_seqlens[:-1], dtype=np.int64)
    owner, offset = cut(lengths, height)
    first = starts[owner] + offset
    return np.column_stack((owner, first, np.minimum(first + height, (starts + lengths)[owner])))


def whole_tiles(rank: int) -> int:
    """Round a rank up to whole rank tiles."""
    return -(-rank // RANK_TILE) * RANK_TILE


ATTENTION_ITEM_WIDTH = 10
"""Columns of an attention item: sequence, first query row, query rows, position of the first, first token, one past the
last token, row of its partial result (-1: straight to the output), 1 if it holds the sequence's first token, first
partial result of its query rows, number of them."""

DECODE_TILE_ROWS = 16
"""Query rows times heads of a group in a decode tile: the fewest that tensor cores take."""

LARGEST_BLOCK = 64
"""Most tokens of context that attention reads at once."""

LEAST_TOKENS = 256
"""Fewest tokens of context in a piece: a shorter piece would spend its time on merging."""

ATTENTION_PROGRAMS = 2
"""Attention programs that a multiprocessor's registers hold at once."""

FAIR_LOAD = 1.15
"""Largest load of the busiest program, in units of the mean, that is still cheaper than cutting contexts and
merging."""


@dataclass(frozen=True)
class AttentionShape:
    """Facts, in addition to the batch, on which a plan depends. They are the same for all layers of one kind."""

    groups: int
    """Query heads of a tile: they share a kv head and are next to each other in the tile's rows."""
    kv_heads: int
    """Tiles with the same query rows: kv heads, each as often as its query heads are divided."""
    sliding_window: int | None
    long_rows: int
    """Rows of a prefill tile: query rows times `groups`."""
    is_invariant: bool = False
    """True if a row's result must not depend on the other rows: tiles have one height, and contexts are not cut."""
    sees_ahead: bool = False
    """True if rows may see later tokens (`AttentionBatch.row_ends`). A tile's item then reaches to the end of the
    context, and the kernel stops at the last token that a row of the tile sees."""

    @property
    def short_rows(self) -> int:
        """Rows of a decode tile."""
        return max(DECODE_TILE_ROWS, 1 << (self.groups - 1).bit_length())

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of a decode tile and of a prefill tile."""
        return self.short_rows, self.short_rows if self.is_invariant else max(self.long_rows, self.short_rows)


@dataclass(frozen=True, eq=False)
class AttentionTiles:
    """The items of one tile height."""

    rows: int
    """Rows of a tile: query rows times query heads per kv head. A power of two."""
    items: WorkList
    partials: int
    """Partial results that the items may write."""
    arrivals: torch.Tensor
    """int32[at least partials * kv_heads], zeros between launches: for query rows whose context is cut, at their first
    partial result, the number of their partial results that are written. The program that writes the last one merges
    all of them, in order, and sets the number to zero again."""

    @classmethod
    def of(cls, rows: int, items: WorkList, partials: int, shape: AttentionShape) -> AttentionTiles:
        """Return tiles of a height whose launches write up to `partials` partial results."""
        counts = torch.zeros(max(partials, 1) * shape.kv_heads, dtype=torch.int32, device=items.work.device)
        return cls(rows, items, partials, counts)


def plan_attention(batch: AttentionBatch, shape: AttentionShape) -> tuple[AttentionTiles, ...]:
    """Return the work of a step: decode tiles, prefill tiles, or both.

    Made on first use and kept with the batch, as a cached property would be; reads `batch.spans`.
    """
    plans: dict[AttentionShape, tuple[AttentionTiles, ...]] = vars(batch).setdefault("attention_plans", {})
    if shape not in plans:
        plans[shape] = _plan(batch, shape)
    return plans[shape]


def attention_shapes(batch: AttentionBatch) -> tuple[AttentionShape, ...]:
    """Return the shapes for which attention was planned for `batch` so far."""
    return tuple(vars(batch).get("attention_plans", ()))


def reserve_attention(
    shape: AttentionShape, max_sequences: int, max_rows: int, max_partials: int, memory: StagedMemory
) -> tuple[AttentionTiles, ...]:
    """Return empty tiles of each height at fixed addresses; steps have up to `max_rows` query rows."""
    found = []
    for rows, most in zip(shape.heights, (0, max_rows), strict=True):
        tiles = max_sequences + most // (rows // shape.groups)
        items = reserve(tiles + max_partials, ATTENTION_ITEM_WIDTH, memory)
        found.append(AttentionTiles.of(rows, items, max_partials, shape))
    return tuple(found)


def empty_attention(shape: AttentionShape, device: torch.device) -> tuple[AttentionTiles, ...]:
    """Return tiles of each height without work, to compile their kernels."""
    items = _empty(ATTENTION_ITEM_WIDTH, device)
    return tuple(AttentionTiles.of(rows, items, 1, shape) for rows in shape.heights)


def attach_attention(batch: AttentionBatch, shape: AttentionShape, tiles: tuple[AttentionTiles, ...]) -> None:
    """Have every launch for `batch` of this shape use `tiles`."""
    vars(batch).setdefault("attention_plans", {})[shape] = tiles


def refill_attention(
    tiles: Sequence[AttentionTiles], spans: Ints, table_rows: Ints | None, shape: AttentionShape
) -> None:
    """Put another step's sequences into reserved tiles; a decode step needs only the first height.

    `spans` int64[S, 3]: first query row, one past the last, and context length of each sequence.
    """
    for reserved, (_, whole) in zip(tiles, _by_height(spans, table_rows, shape), strict=False):
        reserved.items.refill(_cut_contexts(whole, shape, reserved.items.work.device, reserved.partials))


def _plan(batch: AttentionBatch, shape: AttentionShape) -> tuple[AttentionTiles, ...]:
    device, spans = batch.block_table.device, np.array(batch.spans, dtype=np.int64).reshape(-1, 3)
    ranges = None if batch.key_ranges is None else batch.key_ranges.numpy().astype(np.int64)
    whole = [(rows, tiles) for rows, tiles in _by_height(spans, _table_rows(batch), shape, ranges) if len(tiles)]
    if not whole:
        return ()
    plans = [_cut_contexts(tiles, shape, device) for _, tiles in whole]
    return tuple(
        AttentionTiles.of(rows, uploaded, int((items[:, 6] >= 0).sum()), shape)
        for (rows, _), items, uploaded in zip(whole, plans, upload(plans, device), strict=True)
    )


def _table_rows(batch: AttentionBatch) -> Ints | None:
    return None if batch.table_rows is None else batch.table_rows.numpy()


def _by_height(
    spans: Ints, table_rows: Ints | None, shape: AttentionShape, key_ranges: Ints | None = None
) -> Iterator[tuple[int, Ints]]:
    """Yield each tile height and the whole-context items of the sequences that take it."""
    is_short = spans[:, 1] - spans[:, 0] <= shape.short_rows // shape.groups
    for rows, taken in zip(shape.heights, (is_short, ~is_short), strict=True):
        numbers = np.flatnonzero(taken)
        tiles = _tiles(spans[numbers], rows, shape)
        if key_ranges is not None:
            first, end = key_ranges[numbers[tiles[:, 0]]].T
            tiles[:, 4] = np.maximum(tiles[:, 4], first)
            tiles[:, 5] = np.minimum(tiles[:, 5], end)
            tiles = tiles[tiles[:, 4] < tiles[:, 5]]
        tiles[:, 0] = (numbers if table_rows is None else table_rows[numbers])[tiles[:, 0]]
        yield rows, tiles


def _tiles(spans: Ints, rows: int, shape: AttentionShape) -> Ints:
    """Return items of whole contexts, one for each tile of query rows."""
    start, end, context = spans.T
    height = rows // shape.groups
    owner, offset = cut(end - start, height)
    count = np.minimum(height, (end - start)[owner] - offset)
    position = (context - (end - start))[owner] + offset
    first = np.zeros_like(position)
    if shape.sliding_window is not None:
        first = np.maximum(position - shape.sliding_window + 1, 0)
        if shape.is_invariant:
            # Blocks of tokens then begin at the same tokens, whichever rows are in the tile.
            first -= first % LARGEST_BLOCK
    stop = context[owner] if shape.sees_ahead else position + count
    columns = (owner, start[owner] + offset, count, position, first, stop)
    nothing = np.zeros_like(first)
    return np.column_stack((*columns, np.full_like(first, -1), np.ones_like(first), nothing, nothing))


def _cut_contexts(tiles: Ints, shape: AttentionShape, device: torch.device, max_partials: int | None = None) -> Ints:
    """Return the items: long contexts are cut to give every program as much to read; longest items first."""
    kv_heads, tokens = shape.kv_heads, tiles[:, 5] - tiles[:, 4]
    tiles, tokens = tiles[order := np.argsort(-tokens, kind="stable")], tokens[order]
    if shape.is_invariant:
        return tiles
    programs = resident_programs(device, ATTENTION_PROGRAMS)
    # A persistent launch deals its tasks, one for each item and kv head, to its programs in turn.
    loads = np.bincount(np.arange(len(tokens) * kv_heads) % programs, np.repeat(tokens, kv_heads))
    mean = tokens.sum() * kv_heads / programs
    if len(loads) == programs and loads.max() <= FAIR_LOAD * mean:
        return tiles
    piece = max(LEAST_TOKENS, -(-int(mean / 3) // LEAST_TOKENS) * LEAST_TOKENS)
    # A captured launch has room for a fixed number of partial results.
    while max_partials is not None and -(-tokens[tokens > piece] // piece).sum() > max_partials:
        piece *= 2
    return _cut_into(tiles, tokens, piece)


def _cut_into(tiles: Ints, tokens: Ints, piece: int) -> Ints:
    owner, offset = cut(tokens, piece)
    items = tiles[owner]
    items[:, 4] += offset
    items[:, 5] = np.minimum(items[:, 4] + piece, items[:, 5])
    items[:, 7] = offset == 0
    pieces = np.bincount(owner, minlength=len(tiles))
    counts = np.where(pieces > 1, pieces, 0)
    partial = counts[owner] > 0
    items[partial, 6] = np.arange(partial.sum())
    items[partial, 8] = (np.cumsum(counts) - counts)[owner[partial]]
    items[partial, 9] = counts[owner[partial]]
    return items


STATE_CHUNK = 32
"""Rows of a prompt that linear attention computes together."""

STATE_ITEM_WIDTH = 8
"""Columns of an item of linear attention: row of the state tables, first row, one past the last row, first row of the
sequence, 1 if the item reads nothing from the state (the sequence begins with it, or a chunk of it comes before), 1 if
the item has the last row whose inputs are stored, one past the last row of the sequence's prompt, one past the last row
after which the sequence's state is stored: its drafts follow."""


@dataclass(frozen=True, eq=False)
class StateTiles:
    """A step's sequences as work for linear attention."""

    singles: WorkList
    """Sequences of one row."""
    chunks: WorkList | None
    """Chunks of the other sequences; None if a launch has single rows only."""
    prompts: WorkList | None
    """The other sequences, whole."""

    @property
    def of_single_rows(self) -> StateTiles:
        """The part that decode steps need."""
        return StateTiles(self.singles, None, None)

    def refill(self, spans: Ints, prompt_ends: Ints, table_rows: Ints | None, draft_lens: Ints | None = None) -> None:
        """Put another step's sequences into reserved tiles; the arguments as in `AttentionBatch`, as arrays."""
        lists = _state_items(spans, prompt_ends, table_rows, draft_lens)
        for work, items in zip((self.singles, self.chunks, self.prompts), lists, strict=True):
            if work is not None:
                work.refill(items)


def plan_states(batch: AttentionBatch) -> StateTiles:
    """Return the work of a step, made on first use and kept with the batch, as a cached property would be."""
    if "state_tiles" not in vars(batch):
        assert batch.state_tables is not None, "a step of a model with linear attention has the pages of its states"
        spans = np.array(batch.spans, dtype=np.int64).reshape(-1, 3)
        draft_lens = None if batch.draft_lens is None else batch.draft_lens.numpy()
        lists = _state_items(spans, np.array(batch.prompt_ends, dtype=np.int64), _table_rows(batch), draft_lens)
        attach_states(batch, StateTiles(*upload(lists, batch.state_tables.device)))
    found: StateTiles = vars(batch)["state_tiles"]
    return found


def reserve_states(max_sequences: int, max_rows: int, memory: StagedMemory) -> StateTiles:
    """Return empty tiles at fixed addresses for steps of up to `max_sequences` sequences and `max_rows` rows."""
    chunks = max_rows // STATE_CHUNK + 2 * max_sequences  # a sequence's rows and its drafts are cut separately
    capacities = (max_sequences, chunks, max_sequences)
    return StateTiles(*(reserve(capacity, STATE_ITEM_WIDTH, memory) for capacity in capacities))


def empty_states(device: torch.device) -> StateTiles:
    """Return tiles without work, to compile their kernels."""
    return StateTiles(*(_empty(STATE_ITEM_WIDTH, device) for _ in range(3)))


def attach_states(batch: AttentionBatch, tiles: StateTiles) -> None:
    """Have every launch of linear attention for `batch` use `tiles`."""
    vars(batch)["state_tiles"] = tiles


def _state_items(
    spans: Ints, prompt_ends: Ints, table_rows: Ints | None, draft_lens: Ints | None
) -> tuple[Ints, Ints, Ints]:
    """Return the items of sequences of one row, of the other sequences' chunks, and of these sequences."""
    start, stop, context = spans.T
    stored = stop if draft_lens is None else stop - draft_lens
    sequences = np.arange(len(start)) if table_rows is None else table_rows
    columns = (sequences, start, stop, start, stop - start == context, np.ones_like(start), prompt_ends, stored)
    whole = np.column_stack(columns)
    is_single = stop - start == 1
    prompts = whole[~is_single]
    # Two runs of each sequence: the rows whose state is stored, and the drafts.
    first, end, kept = prompts[:, 1], prompts[:, 2], prompts[:, 7]
    begins, ends = np.column_stack((first, kept)).ravel(), np.column_stack((kept, end)).ravel()
    run, offset = cut(ends - begins, STATE_CHUNK)
    chunks = prompts[run // 2]
    chunks[:, 1] = begins[run] + offset
    chunks[:, 2] = np.minimum(chunks[:, 1] + STATE_CHUNK, ends[run])
    chunks[:, 4] |= chunks[:, 1] - chunks[:, 3] >= STATE_CHUNK
    chunks[:, 5] = chunks[:, 2] == chunks[:, 7]
    return whole[is_single], chunks, prompts
