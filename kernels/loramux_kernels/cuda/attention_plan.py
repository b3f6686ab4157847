"""The work lists of paged attention: which query rows meet which stretch of context in one program.

Cut once a step on the host and read by every layer. Contexts are cut where a few long ones would leave
multiprocessors idle; the balance is that of FlashInfer's plan (Ye et al., 2025), the merge that of Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loramux_kernels.cuda.launch import resident_programs
from loramux_kernels.cuda.work_list import Ints, WorkList, cut, reserve, upload
from loramux_kernels.tables import AttentionBatch

ITEM_WIDTH = 8
"""Columns of an attention item: sequence, first query row, query rows, position of the first, first token, one past the
last token, row of its partial result (-1: straight to the output), 1 if it holds the sequence's first token.
Columns of a merge item: first query row, query rows, first partial result, number of them."""

SHORT_ROWS = 16
"""Query rows times heads of a group in a decode tile: the least that tensor cores take."""

LEAST_TOKENS = 256
"""Least tokens of context in a piece: shorter pieces would spend their time on merging."""

PROGRAMS = 2
"""Attention programs that a multiprocessor's registers hold at once."""

FAIR_LOAD = 1.15
"""The busiest program's share of the mean that is still cheaper than cutting contexts and merging."""


@dataclass(frozen=True)
class AttentionShape:
    """The facts besides the batch that a plan depends on: the same for all layers of one kind."""

    groups: int
    """Query heads that share a kv head: they lie side by side in a tile's rows."""
    kv_heads: int
    sliding_window: int | None
    long_rows: int
    """Query rows times groups in a prefill tile."""

    @property
    def short_rows(self) -> int:
        """Rows of a decode tile."""
        return max(SHORT_ROWS, 1 << (self.groups - 1).bit_length())

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of a decode tile and of a prefill tile."""
        return self.short_rows, max(self.long_rows, self.short_rows)


@dataclass(frozen=True, eq=False)
class AttentionTiles:
    """The items of one tile height."""

    rows: int
    """Query rows times groups; a power of two."""
    items: WorkList
    merges: WorkList | None
    """None when no context was cut."""
    partials: int
    """Partial results that the items write."""


def plan_attention(batch: AttentionBatch, shape: AttentionShape) -> tuple[AttentionTiles, ...]:
    """The work of a step: decode tiles and prefill tiles, whichever occur.

    Made on first use and kept with the batch, as a cached property would be; reads `batch.spans`.
    """
    plans: dict[AttentionShape, tuple[AttentionTiles, ...]] = vars(batch).setdefault("attention_plans", {})
    if shape not in plans:
        plans[shape] = _plan(batch.spans, shape, batch.block_table.device)
    return plans[shape]


def attention_shapes(batch: AttentionBatch) -> tuple[AttentionShape, ...]:
    """The kinds of attention that launches for `batch` have asked for."""
    return tuple(vars(batch).get("attention_plans", ()))


def reserve_attention(
    shape: AttentionShape, max_sequences: int, max_rows: int, max_partials: int, device: torch.device
) -> tuple[AttentionTiles, ...]:
    """Return empty tiles of fixed addresses of each height, for steps of up to `max_rows` query rows."""
    found = []
    for rows, most in zip(shape.heights, (0, max_rows), strict=True):
        tiles = max_sequences + most // (rows // shape.groups)
        items = reserve(tiles + max_partials, ITEM_WIDTH, device)
        found.append(AttentionTiles(rows, items, reserve(tiles, ITEM_WIDTH, device), max_partials))
    return tuple(found)


def attach_attention(batch: AttentionBatch, shape: AttentionShape, tiles: tuple[AttentionTiles, ...]) -> None:
    """Have every launch for `batch` of this shape use `tiles`."""
    vars(batch).setdefault("attention_plans", {})[shape] = tiles


def refill_attention(
    tiles: Sequence[AttentionTiles], spans: Sequence[tuple[int, int, int]], shape: AttentionShape
) -> None:
    """Put another step's sequences into reserved tiles; the first height alone holds every step that decodes."""
    for reserved, (_, whole) in zip(tiles, _by_height(spans, shape), strict=False):
        assert reserved.merges is not None, "reserved tiles may be merged"
        pieces, merges = _cut_contexts(whole, shape.kv_heads, reserved.items.work.device, reserved.partials)
        reserved.items.refill(pieces)
        reserved.merges.refill(merges)


def _plan(
    spans: Sequence[tuple[int, int, int]], shape: AttentionShape, device: torch.device
) -> tuple[AttentionTiles, ...]:
    whole = [(rows, tiles) for rows, tiles in _by_height(spans, shape) if len(tiles)]
    plans = [(rows, *_cut_contexts(tiles, shape.kv_heads, device)) for rows, tiles in whole]
    if not plans:
        return ()
    uploaded = iter(upload([items for _, *lists in plans for items in lists], device))
    tiles_of = []
    for rows, _, merges in plans:
        items, merge_list = next(uploaded), next(uploaded)
        partials = int(merges[:, 3].sum())
        tiles_of.append(AttentionTiles(rows, items, merge_list if partials else None, partials))
    return tuple(tiles_of)


def _by_height(spans: Sequence[tuple[int, int, int]], shape: AttentionShape) -> Iterator[tuple[int, Ints]]:
    """Yield each tile height and the whole-context items of the sequences that take it."""
    short = shape.short_rows // shape.groups
    for rows, is_short in zip(shape.heights, (True, False), strict=True):
        some = [(i, span) for i, span in enumerate(spans) if (span[1] - span[0] <= short) is is_short]
        tiles = _tiles([span for _, span in some], rows, shape)
        tiles[:, 0] = np.array([i for i, _ in some], dtype=np.int64)[tiles[:, 0]]
        yield rows, tiles


def _tiles(spans: Sequence[tuple[int, int, int]], rows: int, shape: AttentionShape) -> Ints:
    """Whole-context items, one for each tile of query rows."""
    start, stop, context = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    height = rows // shape.groups
    owner, offset = cut(stop - start, height)
    count = np.minimum(height, (stop - start)[owner] - offset)
    position = (context - (stop - start))[owner] + offset
    first = np.zeros_like(position)
    if shape.sliding_window is not None:
        first = np.maximum(position - shape.sliding_window + 1, 0)
    columns = (owner, start[owner] + offset, count, position, first, position + count)
    return np.column_stack((*columns, np.full_like(first, -1), np.ones_like(first)))


def _cut_contexts(
    tiles: Ints, kv_heads: int, device: torch.device, max_partials: int | None = None
) -> tuple[Ints, Ints]:
    """(items, merges): long contexts cut so that every program has as much to read, longest first."""
    tokens = tiles[:, 5] - tiles[:, 4]
    tiles, tokens = tiles[order := np.argsort(-tokens, kind="stable")], tokens[order]
    programs = resident_programs(device, PROGRAMS)
    loads = np.bincount(np.arange(len(tokens) * kv_heads) % programs, np.repeat(tokens, kv_heads))
    mean = tokens.sum() * kv_heads / programs
    if len(loads) == programs and loads.max() <= FAIR_LOAD * mean:
        return tiles, tiles[:0]
    piece = max(LEAST_TOKENS, -(-int(mean / 3) // LEAST_TOKENS) * LEAST_TOKENS)
    while max_partials is not None and -(-tokens[tokens > piece] // piece).sum() > max_partials:
        piece *= 2
    return _cut_into(tiles, tokens, piece)


def _cut_into(tiles: Ints, tokens: Ints, piece: int) -> tuple[Ints, Ints]:
    owner, offset = cut(tokens, piece)
    items = tiles[owner]
    items[:, 4] += offset
    items[:, 5] = np.minimum(items[:, 4] + piece, items[:, 5])
    items[:, 7] = offset == 0
    pieces = np.bincount(owner, minlength=len(tiles))
    partial = pieces[owner] > 1
    items[partial, 6] = np.arange(partial.sum())
    merged = pieces > 1
    counts = pieces[merged]
    firsts = np.cumsum(counts) - counts
    merges = np.zeros((len(counts), ITEM_WIDTH), dtype=np.int64)
    merges[:, :4] = np.column_stack((tiles[merged, 1], tiles[merged, 2], firsts, counts))
    return items, merges
