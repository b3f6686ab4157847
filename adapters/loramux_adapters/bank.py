"""The adapters that are resident: their blocks in the pool, and the tables that tell the kernels where."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loramux_adapters.base import VocabularyShape
from loramux_adapters.beyond import Beyond, Held, Ints
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.layout import AdapterLayout, Block, Kind, Matrix, lay_out
from loramux_adapters.matrices import matrices_of
from loramux_adapters.parts import AdapterPlan
from loramux_adapters.token_rows import PagedRows, VocabularyPart
from loramux_adapters.weights import AdapterWeights
from loramux_kernels import NO_VECTORS, RANK_TILE, LoraTable, Segments


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the base that adapters may touch."""

    index: int
    in_features: int
    out_features: int


@dataclass(frozen=True, eq=False, slots=True)
class VectorTable:
    """Where the resident adapters' factors and shifts lie in the pool: `rescale`'s int64[num_slots, num_sites]."""

    columns: torch.Tensor
    inputs: torch.Tensor


def slot_bytes(num_sites: int, max_rank: int) -> int:
    """Bytes that one slot takes in the tables: for each site two offsets of each tile, a rank, a scale, two offsets."""
    return num_sites * (-(-max_rank // RANK_TILE) * 16 + 24)


class AdapterBank:
    """Rows (`slots`) of resident adapters over one pool.

    `pool` is the flat, typed view `[num_pages * page_elements]` of the memory that KV shares. Slots and blocks are
    written by loader threads while steps run: a slot becomes visible to a step only after `install` returned it,
    and its pages belong to nobody else meanwhile.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        page_elements: int,
        sites: Mapping[str, Site],
        max_rank: int,
        max_slots: int,
        vocabulary: VocabularyShape | None = None,
    ) -> None:
        self.pool = pool
        self.page_elements = page_elements
        self.sites = dict(sites)
        shape, device = (max_slots, len(sites)), pool.device
        tiles = (*shape, -(-max_rank // RANK_TILE))
        # Uninitialised on purpose: a row is written whole when its slot is given out; untouched memory is not held.
        self.table = LoraTable(
            a_offsets=torch.empty(tiles, dtype=torch.int64, device=device),
            b_offsets=torch.empty(tiles, dtype=torch.int64, device=device),
            ranks=torch.empty(shape, dtype=torch.int32, device=device),
            scales=torch.empty(shape, dtype=torch.float32, device=device),
        )
        self.vectors = VectorTable(*(torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2)))
        self.max_rank = max_rank
        self._vocabulary = vocabulary
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._segments: Segments | None = None
        self._beyond: Beyond | None = None

    @property
    def page_bytes(self) -> int:
        """What a page holds."""
        return self.page_elements * self.pool.element_size()

    @property
    def segments(self) -> Segments | None:
        """Those of the forward that runs now; None outside one, and in one that holds no adapter's row."""
        return self._segments

    @property
    def beyond(self) -> Beyond | None:
        """What the adapters of the forward that runs now hold beside pairs on linears."""
        return self._beyond

    @contextmanager
    def serving(self, segments: Segments | None, beyond: Beyond | None = None) -> Iterator[None]:
        """Lend a step's adapters to every module of the model for the length of one forward."""
        self._segments, self._beyond = segments, beyond
        try:
            yield
        finally:
            self._segments = self._beyond = None

    def beyond_pairs(self, segments: Segments | None, sampled_rows: Ints) -> Beyond | None:
        """What a step's adapters hold beside pairs on linears; `sampled_rows` are the rows that reach the head."""
        return None if segments is None else Beyond.of_step(self._held, segments, sampled_rows)

    def bytes_of(self, slot: int) -> int:
        """Bytes of weights that a step reads when it holds rows of this slot."""
        return self._held[slot].num_bytes

    def rank_of(self, slot: int) -> int:
        """The largest rank that this slot holds on any site."""
        return self._held[slot].max_rank

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Where the blocks of a validated adapter would go; raises AdapterRejected when its rank is too large."""
        for pair in plan.pairs:
            if pair.rank > self.max_rank:
                raise AdapterRejected(
                    "rank_too_large",
                    "r",
                    f"{pair.module} has rank {pair.rank}; this server holds up to {self.max_rank}.",
                )
        matrices = tuple(matrices_of(plan, self._vocabulary))
        return lay_out(matrices, self.page_elements, self.pool.element_size())

    def install(self, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> int:
        """Copy an adapter, fitted to the base, into `pages` and return the slot that serves it."""
        assert not weights.magnitudes, "fit_to_base makes columns of them"
        slot = self._take_slot()
        with self._beside_steps():
            self._copy(weights, layout, pages)
            self._write_rows(slot, weights, layout, pages)
            self._held[slot] = self._describe(weights, layout, pages)
        return slot

    def _copy(self, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> None:
        for block in layout.blocks:
            start = self._start(block, pages)
            target = self.pool[start : start + block.size].view(block.rows, block.matrix.width)
            target.copy_(weights.matrix(block.matrix)[block.start : block.start + block.rows])

    def _write_rows(self, slot: int, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> None:
        table, vectors = self.table, self.vectors
        tiles = {kind: torch.zeros(table.a_offsets.shape[1:], dtype=torch.int64) for kind in (Kind.A, Kind.B)}
        offsets = {kind: torch.full((len(self.sites),), NO_VECTORS) for kind in (Kind.COLUMNS, Kind.INPUTS)}
        for block in (block for block in layout.blocks if not block.matrix.fills_pages):
            site, kind, start = self.sites[block.matrix.module].index, block.matrix.kind, self._start(block, pages)
            if kind in tiles:
                tiles[kind][site, block.tile] = start
            else:
                offsets[kind][site] = start
        ranks = torch.zeros(len(self.sites), dtype=torch.int32)
        scales = torch.zeros(len(self.sites), dtype=torch.float32)
        for name, pair in weights.modules.items():
            if (found := self.sites.get(name)) is not None:
                ranks[found.index], scales[found.index] = pair.a.shape[0], pair.scale
        rows = (table.a_offsets, table.b_offsets, table.ranks, table.scales, vectors.columns, vectors.inputs)
        for row, value in zip(rows, (*tiles.values(), ranks, scales, *offsets.values()), strict=True):
            row[slot].copy_(value)

    def _describe(self, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> Held:
        embedding, head = (self._vocabulary.embedding, self._vocabulary.head) if self._vocabulary else (None, None)
        ranks = [pair.rank for pair in weights.plan.pairs if pair.module in self.sites]
        read = sum(block.size for block in layout.blocks if block.matrix.module != embedding)
        return Held(
            num_bytes=read * self.pool.element_size(),
            max_rank=max(ranks, default=0),
            columns=any(module in self.sites for module in weights.columns),
            inputs=bool(weights.inputs),
            embedding=self._part(embedding, weights, layout, pages),
            head=self._part(head, weights, layout, pages),
        )

    def _part(
        self, module: str | None, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]
    ) -> VocabularyPart | None:
        """What the adapter changes of the embedding or the head."""
        numbers: defaultdict[Matrix, list[int]] = defaultdict(list)
        for block in layout.blocks:
            if block.matrix.fills_pages and block.matrix.module == module:
                numbers[block.matrix].append(pages[block.page])
        if module is None or not numbers:
            return None
        found = {m.kind: PagedRows(self.pool, self.page_elements, where, m) for m, where in numbers.items()}
        ids = next((part.token_ids for part in weights.plan.rows if part.module == module), None)
        return VocabularyPart(
            pair=(found[Kind.A], found[Kind.B], weights.modules[module].scale) if Kind.A in found else None,
            rows=found.get(Kind.ROWS),
            token_ids=None if ids is None else torch.tensor(sorted(ids), device=self.pool.device),
            columns=found.get(Kind.COLUMNS),
        )

    def _start(self, block: Block, pages: list[int]) -> int:
        return pages[block.page] * self.page_elements + block.offset

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Copy on a stream of its own, behind the steps that may still touch what was freed, and wait for the end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self.pool.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages may be overwritten as soon as this returns."""
        with self._lock:
            del self._held[slot]
            self._free_slots.append(slot)

    def _take_slot(self) -> int:
        with self._lock:
            if not self._free_slots:
                raise RuntimeError("every adapter slot is taken")
            return self._free_slots.pop()
