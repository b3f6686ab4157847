"""Resident adapters: their blocks in the pool, the tables from which the kernels find them, and their extras.

Extras are everything that an adapter has in addition to pairs on linears: vectors, rows of the embedding and the head,
norms, added tokens, a classifier. `ResidentAdapter` describes them for one adapter, `StepExtras` for the rows of one
step. Most steps have no extras and no additional cost.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from loramux_adapters.base import VocabularyShape
from loramux_adapters.components import AdapterPlan
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.families import LATENT_EXPANSION
from loramux_adapters.prepared import PreparedAdapter, prepare, prepare_pages
from loramux_adapters.weights import (
    AdapterLayout,
    AdapterWeights,
    Block,
    Matrix,
    MatrixKind,
    lay_out,
    matrices_of,
    rows_per_page,
)
from loramux_kernels.device import SideStream, kept_for_steps, stage
from loramux_kernels.tables import NO_VECTORS, RANK_TILE, LoraTable, OwnWeights, Segments

TABLE_SHARE = 0.02
"""Maximum memory of the tables, as a share of the GPU's pool. The tables are not part of the pool."""

Ints = NDArray[np.signedinteger[Any]]


class PagedRows:
    """A matrix `[rows, width]` whose i-th row is in `pages[i // rows_per_page]`."""

    def __init__(self, pool: torch.Tensor, page_elements: int, pages: Sequence[int], matrix: Matrix) -> None:
        self.rows, self.width = matrix.rows, matrix.width
        self._height = rows_per_page(matrix.width, page_elements)
        used = pool.view(-1, page_elements)[:, : self._height * self.width]
        self._by_page = used.unflatten(1, (self._height, self.width))
        self._numbers = tuple(pages)
        self._pages = kept_for_steps(torch.tensor(pages, dtype=torch.int64, device=pool.device))

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows `index` int64`[n]`: `[n, width]`."""
        return self._by_page[self._pages[index // self._height], index % self._height]

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of each page: their slice and a view of them."""
        for start, page in zip(range(0, self.rows, self._height), self._numbers, strict=True):
            stop = min(start + self._height, self.rows)
            yield slice(start, stop), self._by_page[page, : stop - start]

    def times_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[n, width]` times this matrix, transposed: `[n, rows]`."""
        products = [x @ block.T for _, block in self.blocks()]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def times_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[n, rows]` times this matrix: `[n, width]`."""
        rows, block = next(blocks := self.blocks())
        total = x[:, rows] @ block
        for rows, block in blocks:
            total += x[:, rows] @ block
        return total


@dataclass(frozen=True, slots=True)
class ResidentClassifier:
    """The head of a resident classifier."""

    linears: tuple[PagedRows, ...]
    """Matrices `[out_features, in_features]` in their order; one with a bias has it as one more column."""

    def logits(self, x: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> torch.Tensor:
        """Map hidden states `[n, hidden_size]` to a number for each label: float32 `[n, labels]`.

        `activation` is applied between two linears.
        """
        for index, linear in enumerate(self.linears):
            x = activation(x) if index else x
            x = linear.times_rows(functional.pad(x, (0, linear.width - x.shape[1]), value=1.0))
        return x.float()


@dataclass(frozen=True, slots=True)
class VocabularyExtras:
    """One resident adapter's changes to the embedding or to the head; any may be absent."""

    pair: tuple[PagedRows, PagedRows, float] | None = None
    """A, B and scale. For the embedding both are transposed (A is `[tokens, rank]`); for the head they are as saved."""
    rows: PagedRows | None = None
    """Rows of every token, or of `token_ids`."""
    token_ids: torch.Tensor | None = None
    """int64`[n]`, ascending."""
    columns: PagedRows | None = None
    """Factor and shift of each logit of the head, `[tokens, 2]`."""

    def change_embeddings(self, y: torch.Tensor, token_ids: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Change the base's embeddings `y` `[n, hidden_size]` of `token_ids` `[n]` in place.

        `factor` is the factor by which the base's embedding multiplies its rows.
        """
        if self.pair is not None:
            a, b, scale = self.pair
            y += b.times_columns(a.gather(token_ids)) * scale * factor
        if self.rows is None:
            return
        if self.token_ids is None:
            # A caller's ids may be outside of a shortened table; an index out of range would end the whole step.
            y.copy_(self.rows.gather(token_ids.clamp(max=self.rows.rows - 1)) * factor)
            return
        place = torch.searchsorted(self.token_ids, token_ids).clamp_(max=len(self.token_ids) - 1)
        found = (self.token_ids[place] == token_ids)[:, None]
        y.copy_(torch.where(found, self.rows.gather(place) * factor, y))

    def change_logits(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Change the base's logits `y` `[n, width]` of the hidden states `x` `[n, hidden_size]` in place.

        `width` is at least the adapter's tokens; another adapter of the step may have more.
        """
        if self.rows is not None:
            own = self.rows.times_rows(x)
            if self.token_ids is None:
                y[:, : own.shape[1]] = own
            else:
                y[:, self.token_ids] = own
        if self.pair is not None:
            a, b, scale = self.pair
            y[:, : b.rows] += b.times_rows(a.times_rows(x)) * scale
        if self.columns is not None:
            for tokens, block in self.columns.blocks():
                y[:, tokens] = torch.addcmul(block[:, 1], y[:, tokens], block[:, 0])


ExtrasSpan = tuple[VocabularyExtras, int, int]
"""Changes, and the rows `[first, last)` that they apply to."""


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """Facts of one resident adapter that a step needs."""

    num_bytes: int = 0
    """Bytes of the adapter's weights that a step with its rows reads."""
    max_rank: int = 0
    """The largest rank of the adapter's pairs on linears."""
    columns: bool = False
    """True if the adapter scales or shifts a linear's outputs."""
    inputs: bool = False
    """True if the adapter scales a linear's inputs."""
    num_tokens: int | None = None
    """Number of tokens of the adapter, if it differs from the base's number."""
    norms: bool = False
    """True if the adapter replaces weights of norms."""
    latents: bool = False
    """True if the adapter changes a linear that expands a compressed KV."""
    embedding: VocabularyExtras | None = None
    head: VocabularyExtras | None = None
    classifier: ResidentClassifier | None = None
    """The head of a classifier. Steps that generate tokens ignore it."""

    @property
    def is_more_than_pairs(self) -> bool:
        """True if the adapter has anything other than pairs on linears."""
        parts = (self.num_tokens, self.embedding, self.head)
        return self.columns or self.inputs or self.norms or any(part is not None for part in parts)


@dataclass(frozen=True, slots=True)
class StepExtras:
    """Extras of one step."""

    columns: Segments | None
    """The step's segments, if the adapter of a segment scales or shifts outputs."""
    inputs: Segments | None
    """The step's segments, if the adapter of a segment scales inputs."""
    norms: Segments | None
    """The step's segments, if the adapter of a segment replaces weights of norms."""
    embedding: tuple[ExtrasSpan, ...]
    """Changes to the embedding, by spans of the step's rows."""
    head: tuple[ExtrasSpan, ...]
    """Changes to the head, by spans of the sampled rows."""
    tokens: tuple[tuple[int, int, int], ...] = ()
    """Vocabulary sizes that differ from the base's, each with the sampled rows `[first, last)` that have this size."""

    @property
    def most_tokens(self) -> int:
        """The largest vocabulary size in `tokens`; 0 if all rows have the base's."""
        return max((number for number, _, _ in self.tokens), default=0)

    def forbid_unknown(self, logits: torch.Tensor, num_tokens: int) -> None:
        """Set the logits `[n, most]` of tokens that a row does not have to -inf; the base has `num_tokens`."""
        if not self.tokens:
            return
        known = torch.full((len(logits), 1), num_tokens, device=logits.device)
        for number, first, last in self.tokens:
            known[first:last] = number
        tokens = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(tokens >= known, float("-inf"))

    @classmethod
    def of_step(cls, held: Mapping[int, ResidentAdapter], segments: Segments, sampled_rows: Ints) -> StepExtras | None:
        """Collect the extras of `segments`; None if the adapters have only pairs. `sampled_rows` is int64`[n]`,
        ascending.
        """
        found = [held[slot] for slot in segments.slots if slot in held]
        if not any(one.is_more_than_pairs for one in found):
            return None
        embedding = ((held[slot].embedding, first, last) for slot, first, last in segments.spans)
        head = ((held[slot].head, *_among(sampled_rows, first, last)) for slot, first, last in segments.spans)
        numbers = ((held[slot].num_tokens, *_among(sampled_rows, first, last)) for slot, first, last in segments.spans)
        return cls(
            tokens=tuple((number, first, last) for number, first, last in numbers if number is not None),
            columns=segments if any(one.columns for one in found) else None,
            inputs=segments if any(one.inputs for one in found) else None,
            norms=segments if any(one.norms for one in found) else None,
            embedding=tuple(_present(embedding)),
            head=tuple(_present(head)),
        )


def _among(sampled_rows: Ints, first: int, last: int) -> tuple[int, int]:
    """Return the range of `sampled_rows` that is within the rows `[first, last)`."""
    start, stop = np.searchsorted(sampled_rows, (first, last)).tolist()
    return start, stop


def _present(spans: Iterator[tuple[VocabularyExtras | None, int, int]]) -> Iterator[ExtrasSpan]:
    for part, first, last in spans:
        if part is not None and last > first:
            yield part, first, last


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the base that adapters may touch."""

    index: int
    in_features: int
    out_features: int


@dataclass(frozen=True, eq=False, slots=True)
class VectorTable:
    """Offsets in the pool of the resident adapters' vectors, or NO_VECTORS."""

    columns: torch.Tensor
    """Offsets of factors and shifts of outputs: `rescale`'s int64[num_slots, num_sites]."""
    inputs: torch.Tensor
    """Offsets of factors and shifts of inputs: int64[num_slots, num_sites]."""
    norms: torch.Tensor
    """Offsets of the weights that replace those of norms: `OwnWeights`' int64[num_slots, norms]."""


def pages_per_slot(page_bytes: int, slot_bytes: int) -> int:
    """Return the number of pages per slot with which the tables take at most `TABLE_SHARE` of the pool.

    Every adapter takes at least this many pages, so slots never run out before pages do. Only pages are budgeted.
    """
    return max(1, math.ceil(slot_bytes / (TABLE_SHARE * page_bytes)))


class AdapterBank:
    """Rows (`slots`) of resident adapters over one pool.

    `pool` is the flat, typed view `[num_pages * page_elements]` of the memory that KV shares. Loader threads write
    slots and blocks while steps run. Invariant: a step uses a slot only after `install` returned it, and until then the
    slot's pages have no other owner.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        page_elements: int,
        sites: Mapping[str, Site],
        max_rank: int,
        max_slots: int,
        vocabulary: VocabularyShape | None = None,
        norms: Iterable[str] = (),
    ) -> None:
        self.page_elements = page_elements
        self.sites = dict(sites)
        self.norms = {name: index for index, name in enumerate(norms)}
        """Columns of the norms that adapters may replace."""
        self.max_rank = max_rank
        self.use_pool(pool, max_slots)
        self._vocabulary = vocabulary
        self._held: dict[int, ResidentAdapter] = {}
        self._lock = threading.Lock()
        self._segments: Segments | None = None
        self._extras: StepExtras | None = None
        self._kv_slots: torch.Tensor | None = None

    def use_pool(self, pool: torch.Tensor, max_slots: int) -> None:
        """Serve from `pool` with `max_slots` slots, before any adapter is installed.

        A GPU's pool takes the memory that the base leaves free. So the pool is made after the base's linears were
        replaced by modules that already hold this bank.
        """
        self.pool = pool
        shape, device = (max_slots, len(self.sites)), pool.device
        tiles = (*shape, -(-self.max_rank // RANK_TILE))
        # Uninitialised on purpose: a row is written whole when its slot is taken, and the system commits no untouched
        # memory.
        self.table = LoraTable(
            a_offsets=torch.empty(tiles, dtype=torch.int64, device=device),
            b_offsets=torch.empty(tiles, dtype=torch.int64, device=device),
            ranks=torch.empty(shape, dtype=torch.int32, device=device),
            scales=torch.empty(shape, dtype=torch.float32, device=device),
        )
        norms = (max_slots, len(self.norms))
        self.vectors = VectorTable(
            *(torch.empty(one, dtype=torch.int64, device=device) for one in (shape, shape, norms))
        )
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._last_readers: dict[int, torch.cuda.Event] = {}
        """End of the last step that read a slot's rows, by dropped slot. An adapter may be dropped while the step of
        its last token runs. A load that then takes its slot may have taken its fence before that step."""
        self.least_pages = max(1, -(-len(pool) // self.page_elements // max(max_slots, 1)))
        """Minimum number of pages of an adapter."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.side_stream = SideStream(device)
        """Stream for the half of the adapters' products that does not wait for the base's."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_elements * self.pool.element_size()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in the tables: for each site two offsets per tile, a rank, a scale and two offsets; for
        each norm one offset.
        """
        return len(self.sites) * (-(-self.max_rank // RANK_TILE) * 16 + 24) + len(self.norms) * 8

    @property
    def num_tokens(self) -> int:
        """Tokens of the base; 0 if adapters may not change its embedding and head."""
        return 0 if self._vocabulary is None else self._vocabulary.num_tokens

    @property
    def segments(self) -> Segments | None:
        """Segments of the running forward; None outside of a forward, or if no row of the forward has an adapter."""
        return self._segments

    @property
    def extras(self) -> StepExtras | None:
        """Extras of the running forward: all parts of its adapters except pairs on linears."""
        return self._extras

    def own_weights(self, norm: str, vectors: int = 1, added: float = 0.0) -> OwnWeights | None:
        """Return the weights with which the running forward's adapters replace a norm's; see OwnWeights."""
        if self._extras is None or self._extras.norms is None or norm not in self.norms:
            return None
        return OwnWeights(self.pool, self.vectors.norms, self.norms[norm], self._extras.norms, added, vectors)

    @property
    def kv_slots(self) -> torch.Tensor | None:
        """int64[T]: places in the KV cache of the running forward's rows; negative for rows of padding."""
        return self._kv_slots

    @contextmanager
    def serving(
        self, segments: Segments | None, extras: StepExtras | None = None, kv_slots: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Make a step's adapters and its padding rows visible to every module for one forward."""
        outer = self._segments, self._extras, self._kv_slots
        self._segments, self._extras, self._kv_slots = segments, extras, kv_slots
        try:
            yield
        finally:
            self._segments, self._extras, self._kv_slots = outer

    def serving_rows(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Make the adapters of some rows of the running forward visible as those of a forward of these rows alone.

        `rows` is int64`[n]`, ascending.
        """
        segments = None if self._segments is None else self._segments.among(rows)
        extras = self._extras
        if extras is not None:
            columns, inputs = (None if part is None else segments for part in (extras.columns, extras.inputs))
            extras = replace(extras, columns=columns, inputs=inputs)
        return self.serving(segments, extras)

    def serving_slot(self, slot: int | None, rows: int) -> AbstractContextManager[None]:
        """Make the adapter of one slot visible as that of all `rows` rows; None: no adapter."""
        segments = None if slot is None else Segments((0, rows), (slot,))
        return self.serving(segments, self.extras_of(segments, np.empty(0, np.int64)))

    def extras_of(self, segments: Segments | None, sampled_rows: Ints) -> StepExtras | None:
        """Return the extras of a step's adapters; `sampled_rows` are the rows that reach the head."""
        return None if segments is None else StepExtras.of_step(self._held, segments, sampled_rows)

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of weights that a step with rows of this slot reads."""
        return self._held[slot].num_bytes

    def classifier_of(self, slot: int) -> ResidentClassifier | None:
        """Return the classification head of this slot's adapter, if it has one."""
        held = self._held.get(slot)
        return None if held is None else held.classifier

    def changes_latents(self, slot: int) -> bool:
        """Return whether this slot's adapter changes a linear that expands a compressed KV."""
        return self._held[slot].latents

    def rank_of(self, slot: int) -> int:
        """Return the largest rank of this slot on any site."""
        return self._held[slot].max_rank

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Lay out the blocks of a validated adapter. Raises AdapterRejected if its rank is too large."""
        for pair in plan.pairs:
            if pair.rank > self.max_rank:
                raise AdapterRejected(
                    "rank_too_large",
                    "r",
                    f"{pair.module} has rank {pair.rank}; this server holds up to {self.max_rank}.",
                )
        matrices = tuple(matrices_of(plan, self._vocabulary))
        layout = _layout_of(matrices, self.page_elements, self.pool.element_size())
        return replace(layout, num_pages=max(layout.num_pages, self.least_pages))

    def fence(self) -> torch.cuda.Event | None:
        """Return an event at the end of all steps launched so far; None if launched steps end at once, as on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(self.pool.device))
        return event

    def blank_slot(self) -> int:
        """Return a slot that changes no row, until an adapter is installed."""
        assert not self._held, "the slot may be an adapter's"
        slot = self._free_slots[0]
        self.table.ranks[slot] = 0
        for offsets in (self.vectors.columns, self.vectors.inputs, self.vectors.norms):
            offsets[slot] = NO_VECTORS
        return slot

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        """Return an adapter, fitted to the base, as `install` takes it. Raises AdapterRejected."""
        layout = self.plan_layout(weights.plan)
        return prepare(weights, layout) if self._stream is None else prepare_pages(weights, layout, self.pool)

    def install(
        self,
        adapter: PreparedAdapter,
        pages: list[int],
        fence: torch.cuda.Event | None = None,
        slot: int | None = None,
    ) -> int:
        """Copy an adapter into `pages` and return the slot that serves it.

        `fence` was taken after the steps that may still read the pages' old contents; None: all steps launched so far
        may read them. `slot` is rank 0's slot if this bank belongs to another rank, because only rank 0 assigns slots.
        """
        slot = self._take_slot(slot)
        try:
            with self._beside_steps(fence, self._last_readers.pop(slot, None)):
                adapter.copy_into(self.pool, self.page_elements, pages)
                self._write_rows(slot, adapter, pages)
                self._held[slot] = self._describe(adapter, pages)
        except BaseException:
            self._return_slot(slot)
            raise
        return slot

    def _write_rows(self, slot: int, adapter: PreparedAdapter, pages: list[int]) -> None:
        table, vectors = self.table, self.vectors
        # numpy, because a torch operator for each block would give Python's lock to the thread of the steps each time.
        places = np.zeros(table.a_offsets.shape[1:], np.int64), np.zeros(table.b_offsets.shape[1:], np.int64)
        tiles = dict(zip((MatrixKind.A, MatrixKind.B), places, strict=True))
        kinds = (MatrixKind.COLUMNS, MatrixKind.INPUTS)
        offsets = {kind: np.full(len(self.sites), NO_VECTORS, np.int64) for kind in kinds}
        norms = np.full(len(self.norms), NO_VECTORS, np.int64)
        for block in adapter.layout.blocks:
            module, kind, start = block.matrix.module, block.matrix.kind, self._start(block, pages)
            if kind is MatrixKind.NORM and module in self.norms:
                norms[self.norms[module]] = start
            if module not in self.sites:
                continue
            site = self.sites[module].index
            if kind in tiles:
                tiles[kind][site, block.tile] = start
            else:
                offsets[kind][site] = start
        ranks, scales = np.zeros(len(self.sites), np.int32), np.zeros(len(self.sites), np.float32)
        for name, pair in adapter.pairs.items():
            if (found := self.sites.get(name)) is not None:
                ranks[found.index], scales[found.index] = pair
        rows = (table.a_offsets, table.b_offsets, table.ranks, table.scales)
        values: tuple[Ints | NDArray[np.float32], ...] = (*places, ranks, scales, *offsets.values(), norms)
        for row, value in zip((*rows, vectors.columns, vectors.inputs, vectors.norms), values, strict=True):
            row[slot].copy_(stage(value, self.pool.device), non_blocking=True)

    def _describe(self, adapter: PreparedAdapter, pages: list[int]) -> ResidentAdapter:
        embedding, head = (self._vocabulary.embedding, self._vocabulary.head) if self._vocabulary else (None, None)
        blocks = adapter.layout.blocks
        kinds = {(block.matrix.kind, block.matrix.module in self.sites) for block in blocks}
        ranks = [pair.rank for module, pair in adapter.pairs.items() if module in self.sites]
        read = sum(block.size for block in blocks if block.matrix.module != embedding)
        return ResidentAdapter(
            num_bytes=read * self.pool.element_size(),
            max_rank=max(ranks, default=0),
            columns=(MatrixKind.COLUMNS, True) in kinds,
            inputs=(MatrixKind.INPUTS, True) in kinds,
            num_tokens=adapter.plan.num_tokens,
            norms=any(kind is MatrixKind.NORM for kind, _ in kinds),
            latents=any(module.endswith(LATENT_EXPANSION) for module in adapter.pairs),
            embedding=self._part(embedding, adapter, pages),
            head=self._part(head, adapter, pages),
            classifier=self._classifier(adapter, pages),
        )

    def _classifier(self, adapter: PreparedAdapter, pages: list[int]) -> ResidentClassifier | None:
        if (head := adapter.plan.classifier) is None:
            return None
        found: dict[str, tuple[Matrix, list[int]]] = {}
        for block in adapter.layout.blocks:
            if block.matrix.kind is MatrixKind.CLASSIFIER:
                found.setdefault(block.matrix.module, (block.matrix, []))[1].append(pages[block.page])
        parts = (found[linear.module] for linear in head.linears)
        return ResidentClassifier(tuple(PagedRows(self.pool, self.page_elements, its, matrix) for matrix, its in parts))

    def _part(self, module: str | None, adapter: PreparedAdapter, pages: list[int]) -> VocabularyExtras | None:
        """Describe the adapter's changes to the embedding or the head."""
        numbers: defaultdict[Matrix, list[int]] = defaultdict(list)
        for block in adapter.layout.blocks:
            if block.matrix.fills_pages and block.matrix.module == module:
                numbers[block.matrix].append(pages[block.page])
        if module is None or not numbers:
            return None
        found = {m.kind: PagedRows(self.pool, self.page_elements, where, m) for m, where in numbers.items()}
        ids = next((part.served_ids for part in adapter.plan.rows if part.module == module), None)
        return VocabularyExtras(
            pair=(found[MatrixKind.A], found[MatrixKind.B], adapter.pairs[module].scale)
            if MatrixKind.A in found
            else None,
            rows=found.get(MatrixKind.ROWS),
            token_ids=None if ids is None else kept_for_steps(torch.tensor(sorted(ids), device=self.pool.device)),
            columns=found.get(MatrixKind.COLUMNS),
        )

    def _start(self, block: Block, pages: list[int]) -> int:
        return pages[block.page] * self.page_elements + block.offset

    @contextmanager
    def _beside_steps(self, fence: torch.cuda.Event | None, reader: torch.cuda.Event | None) -> Iterator[None]:
        """Copy on a separate stream and wait for the end of these copies, but not for those of later loads.

        The copy begins after the steps that may still read the freed pages (`fence`) and the slot's rows (`reader`).
        """
        if self._stream is None:
            yield
            return
        if fence is None:
            self._stream.wait_stream(torch.cuda.default_stream(self.pool.device))
        else:
            self._stream.wait_event(fence)
        if reader is not None:
            self._stream.wait_event(reader)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after a failure too, because the pages must not get another owner while a copy still runs
            end = torch.cuda.Event()
            end.record(self._stream)
            end.synchronize()

    def drop(self, slot: int) -> None:
        """Forget a slot. After this call, its pages may be overwritten after a new fence."""
        reader = self.fence()
        with self._lock:
            del self._held[slot]
            if reader is not None:
                self._last_readers[slot] = reader
        self._return_slot(slot)

    def _return_slot(self, slot: int) -> None:
        with self._lock:
            self._free_slots.append(slot)

    def _take_slot(self, slot: int | None) -> int:
        """Take `slot`, or any if it is None."""
        with self._lock:
            if not self._free_slots:
                raise RuntimeError("every adapter slot is taken")
            if slot is None:
                return self._free_slots.pop()
            self._free_slots.remove(slot)
            return slot


_layout_of = lru_cache(maxsize=128)(lay_out)
"""The result is cached, because most adapters of a tenant have the same shape, and the layout of a large adapter takes
a tenth of a second.
"""
