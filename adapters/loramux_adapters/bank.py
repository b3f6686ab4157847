"""The adapters that are resident: their rank tiles in the pool, and the table that tells the kernels where."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loramux_adapters.errors import AdapterRejected
from loramux_adapters.layout import AdapterLayout, SiteShape, lay_out
from loramux_adapters.plan import AdapterPlan
from loramux_adapters.weights import AdapterWeights
from loramux_kernels import RANK_TILE, LoraTable, Segments


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the base that adapters may touch."""

    index: int
    in_features: int
    out_features: int


def slot_bytes(num_sites: int, max_rank: int) -> int:
    """Bytes that one slot takes in the table: two offsets for each tile of each site, a rank and a scale."""
    return num_sites * (-(-max_rank // RANK_TILE) * 16 + 8)


class AdapterBank:
    """Rows (`slots`) of resident adapters over one pool.

    `pool` is the flat, typed view `[num_pages * page_elements]` of the memory that KV shares. Slots and tiles are
    written by loader threads while steps run: a slot becomes visible to a step only after `install` returned it,
    and its pages belong to nobody else meanwhile.
    """

    def __init__(
        self, pool: torch.Tensor, page_elements: int, sites: Mapping[str, Site], max_rank: int, max_slots: int
    ) -> None:
        self.pool = pool
        self.page_elements = page_elements
        self.sites = dict(sites)
        tiles = -(-max_rank // RANK_TILE)
        shape = (max_slots, len(sites), tiles)
        device = pool.device
        # Uninitialised on purpose: a row is written whole when its slot is given out; untouched memory is not held.
        self.table = LoraTable(
            a_offsets=torch.empty(shape, dtype=torch.int64, device=device),
            b_offsets=torch.empty(shape, dtype=torch.int64, device=device),
            ranks=torch.empty(shape[:2], dtype=torch.int32, device=device),
            scales=torch.empty(shape[:2], dtype=torch.float32, device=device),
        )
        self.max_rank = max_rank
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._bytes = [0] * max_slots
        self._ranks = [0] * max_slots
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._segments: Segments | None = None

    @property
    def page_bytes(self) -> int:
        """What a page holds."""
        return self.page_elements * self.pool.element_size()

    @property
    def segments(self) -> Segments | None:
        """Those of the forward that runs now; None outside one, and in one that holds no adapter's row."""
        return self._segments

    @contextmanager
    def serving(self, segments: Segments | None) -> Iterator[None]:
        """Lend a step's segments to every LoRA linear for the length of one forward."""
        self._segments = segments
        try:
            yield
        finally:
            self._segments = None

    def bytes_of(self, slot: int) -> int:
        """Bytes of weights that a step reads when it holds rows of this slot."""
        return self._bytes[slot]

    def rank_of(self, slot: int) -> int:
        """The largest rank that this slot holds on any site."""
        return self._ranks[slot]

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Where the tiles of a validated adapter would go; raises AdapterRejected when its rank is too large."""
        shapes = []
        for pair in plan.pairs:
            if pair.rank > self.max_rank:
                raise AdapterRejected(
                    "rank_too_large",
                    "r",
                    f"{pair.module} has rank {pair.rank}; this server holds up to {self.max_rank}.",
                )
            site = self.sites[pair.module]
            shapes.append(SiteShape(site.index, pair.rank, site.in_features, site.out_features))
        return lay_out(shapes, self.page_elements, self.pool.element_size())

    def install(self, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> int:
        """Copy an adapter into `pages` and return the slot that serves it."""
        slot = self._take_slot()
        with self._beside_steps():
            self._write(slot, weights, layout, pages)
        return slot

    def _write(self, slot: int, weights: AdapterWeights, layout: AdapterLayout, pages: list[int]) -> None:
        by_site = {self.sites[name].index: module for name, module in weights.modules.items()}
        offsets = torch.zeros(2, *self.table.a_offsets.shape[1:], dtype=torch.int64)
        for tile in layout.tiles:
            module = by_site[tile.site]
            rows = slice(tile.start, tile.start + tile.rows)
            start = pages[tile.page] * self.page_elements + tile.offset
            target = self.pool[start : start + tile.rows * tile.width].view(tile.rows, tile.width)
            target.copy_(module.b[:, rows].T if tile.transposed_b else module.a[rows])
            offsets[int(tile.transposed_b), tile.site, tile.index] = start
        ranks = torch.zeros(len(self.sites), dtype=torch.int32)
        scales = torch.zeros(len(self.sites), dtype=torch.float32)
        for index, module in by_site.items():
            ranks[index], scales[index] = module.a.shape[0], module.scale
        for row, value in zip(self._rows(slot), (*offsets, ranks, scales), strict=True):
            row.copy_(value)
        self._bytes[slot], self._ranks[slot] = layout.num_bytes, int(ranks.max())

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
            self._free_slots.append(slot)

    def _rows(self, slot: int) -> tuple[torch.Tensor, ...]:
        table = self.table
        return table.a_offsets[slot], table.b_offsets[slot], table.ranks[slot], table.scales[slot]

    def _take_slot(self) -> int:
        with self._lock:
            if not self._free_slots:
                raise RuntimeError("every adapter slot is taken")
            return self._free_slots.pop()
