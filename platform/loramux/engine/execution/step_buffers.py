"""Inputs of steps at fixed addresses on the device, and the block tables of running sequences.

A step sends what differs from the step before in one copy: token ids, positions, slots, work lists, and the pages that
sequences got since. A block table is kept on the device from step to step. So the host's work for a step grows with its
rows, not with their contexts.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.engine.execution.runner import PackedStep, PageChanges, StepInputs
from loramux.engine.execution.vision import NO_EFFECTS, ImageEffects
from loramux.engine.scheduling.sequence import Sequence, Step
from loramux_kernels.cuda.work_lists import LONG, ROW, SHORT, RowTiles, TileMap, TileShape, attach_tile_map, whole_tiles
from loramux_kernels.device import to_device
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.step_inputs import write_pages
from loramux_kernels.tables import AttentionBatch, Segments

NO_SLOT = -1
"""Value of a padding row in `slot_mapping`: its KV is not stored."""

MOST_RECORDED_ROWS = 2048
"""Rows of the largest step that is recorded: the arithmetic of a larger one hides its launches."""

NUM_PATCHES = 1024
"""Pages that a step's copy has room for. More new pages, such as those of a long cached prefix, have two copies."""

_PAGES, _NUM_UNCHANGED = attrgetter("pages"), attrgetter("num_unchanged_pages")

NO_CHANGES = PageChanges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))

LISTS_BYTES = 8 << 20
SEQUENCE_LISTS_BYTES = 1 << 10
"""Room for a step's work lists of up to four kinds of attention: as a whole, and in addition for each sequence."""


class BlockTables:
    """Block tables on the device: a row for each sequence of the latest steps. A step sends the pages that changed."""

    def __init__(self, max_sequences: int, max_blocks: int, memory: StagedMemory, device: torch.device) -> None:
        self._device = device
        self.on_device = torch.zeros(max_sequences, max_blocks, dtype=torch.int32, device=device)
        self.pages = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        """The host's copy of `on_device`."""
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_sequences))
        self._places = memory.reserve((NUM_PATCHES,), torch.int64)
        self._values = memory.reserve((NUM_PATCHES,), torch.int32)
        self._number = memory.reserve((1,), torch.int32)
        self._changed: list[tuple[int, int, int]] = []

    def rows_of(self, step: Step) -> NDArray[np.int64]:
        """Return the row of each chunk's sequence, int64[S], and note the pages that `on_device` lacks."""
        return self._rows_of(step.sequences, step.request_ids)

    def rows_with_pages(self, sequences: Items[Sequence]) -> NDArray[np.int64]:
        """Return the row of each sequence, int64[S], after writing the pages that `on_device` lacks, between two
        steps."""
        rows = self._rows_of(sequences, [sequence.id for sequence in sequences])
        if (changes := self.take_changes()) is not None:
            self._write(changes)
        return rows

    def _rows_of(self, sequences: Items[Sequence], names: Items[str]) -> NDArray[np.int64]:
        rows = [*map(self._row_of.get, names)]
        if None in rows:
            self._give_rows([one for one, row in zip(sequences, rows, strict=True) if row is None], names)
            rows = [*map(self._row_of.get, names)]
        found = np.array(rows, dtype=np.int64)
        # Few sequences of a step have new pages.
        firsts = np.array([*map(_NUM_UNCHANGED, sequences)], dtype=np.int64)
        ends = np.array([*map(len, map(_PAGES, sequences))], dtype=np.int64)
        for number in np.flatnonzero(firsts < ends).tolist():
            row, first, end = int(found[number]), int(firsts[number]), int(ends[number])
            self.pages[row, first:end] = sequences[number].pages[first:]
            self._changed.append((row, first, end))
            sequences[number].num_unchanged_pages = end
        return found

    def _give_rows(self, missing: list[Sequence], names: Items[str]) -> None:
        """Give a row to each sequence of `missing`, one of a step of the requests `names`."""
        if len(missing) > len(self._free):
            self._forget_all_but({*names})
        for sequence in missing:
            self._row_of[sequence.id], sequence.num_unchanged_pages = self._free.pop(), 0

    def take_changes(self) -> PageChanges | None:
        """Return the pages that `on_device` lacks, once."""
        if not self._changed:
            return None
        width = self.pages.shape[1]
        places = np.concatenate([np.arange(row * width + a, row * width + b) for row, a, b in self._changed])
        self._changed.clear()
        return PageChanges(places, self.pages.reshape(-1)[places])

    def stage(self, changes: PageChanges | None) -> None:
        """Put changes into the step's copy. Changes that it has no room for are written now, by separate copies."""
        places, values = changes or NO_CHANGES
        if len(places) > NUM_PATCHES:
            self._write(PageChanges(places, values))
            places, values = NO_CHANGES
        count = len(places)
        self._places.on_host(count)[:], self._values.on_host(count)[:] = places, values
        self._number.on_host(1)[0] = count

    def _write(self, changes: PageChanges) -> None:
        where, pages = (to_device(part, self._device) for part in changes)
        self.on_device.view(-1).index_copy_(0, where, pages)

    def apply(self) -> None:
        """Launch the write of what was staged and sent; it is recorded too."""
        write_pages(self.on_device, self._places.tensor, self._values.tensor, self._number.tensor)

    def _forget_all_but(self, names: set[str]) -> None:
        for name in [name for name in self._row_of if name not in names]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Free the row of a sequence that has ended."""
        if (row := self._row_of.pop(name, None)) is not None:
            self._free.append(row)


class StepBuffers:
    """Inputs of steps up to `max_rows` rows and `max_sequences` sequences of `max_blocks` pages each, on the device.

    The tensors are allocated once, so views of them keep their addresses.
    """

    def __init__(
        self,
        max_rows: int,
        max_sequences: int,
        max_blocks: int,
        max_rank: int,
        device: torch.device,
        state_pages: int = 0,
        *,
        is_invariant: bool = False,
        effects: ImageEffects = NO_EFFECTS,
    ) -> None:
        """`max_rank`: the largest rank of an adapter. The first `state_pages` pages of a sequence, in addition to
        `max_blocks`, hold its states of fixed size. `is_invariant`: no row's result depends on the other rows.
        `effects` are those of images."""
        self.max_rows, self.max_sequences, self.state_pages = max_rows, max_sequences, state_pages
        self.is_invariant, self.sees_ahead = is_invariant, effects.sees_ahead
        self._max_rank = max_rank
        tiles = sum(RowTiles.reserved_bytes(shape, self._rows_of(shape), max_rank) for shape in (ROW, SHORT, LONG))
        lists = LISTS_BYTES + SEQUENCE_LISTS_BYTES * max_sequences + tiles
        self.memory = StagedMemory(lists + 8 * 18 * max_rows, device)
        """Memory that a step sends in one copy."""
        # Rows: input ids, positions (three of them if tokens have places), KV slots and adapters' slots.
        self._rows = self.memory.reserve((6 if effects.has_places else 4, max_rows), torch.int64)
        self._rows.tensor[-2:] = NO_SLOT
        self._positions = self._rows.tensor[1:-2] if effects.has_places else self._rows.tensor[1]
        self._row_ends = self.memory.reserve((max_rows,), torch.int32) if effects.sees_ahead else None
        self._sampled_rows = self.memory.reserve((max_rows,), torch.int64)
        self.block_tables = BlockTables(max_sequences, state_pages + max_blocks, self.memory, device)
        pages = self.block_tables.on_device
        self._state_tables, self._block_table = pages[:, :state_pages], pages[:, state_pages:]
        # A decode step samples every row. Graphs read this tensor, so all of them share one.
        self._every_row = torch.arange(max_sequences, device=device)
        self._tiles: dict[TileShape, RowTiles] = {}
        self._arrivals = torch.zeros(max_sequences, dtype=torch.int32, device=device)

    def fill(self, packed: PackedStep) -> StepInputs:
        """Put a step into the host's buffer, which `send` copies, and return its inputs on the device."""
        length, num_sampled = len(packed.input_ids), len(packed.sampled_rows)
        rows = self._rows.on_host(len(self._rows.tensor))
        # The rows that pad a recorded step: no bucket has more than twice the rows of a step, or 16 more.
        rows[:-2, length : 2 * length + 16] = 0
        rows[-2:, length : 2 * length + 16] = NO_SLOT
        rows[0, :length], rows[-2, :length] = packed.input_ids, packed.slot_mapping
        rows[1:-2, :length] = packed.position_ids if packed.rotary_positions is None else packed.rotary_positions
        adapted = 0
        if (segments := packed.segments) is not None:
            adapted = segments.rows
            rows[-1, :adapted] = np.repeat(segments.slots, np.diff(segments.cu_seqlens))
        rows[-1, adapted:length] = NO_SLOT
        if packed.row_ends is not None:
            assert self._row_ends is not None, "a step of a model whose images see ahead"
            self._row_ends.on_host(length)[:] = packed.row_ends
        self._sampled_rows.on_host(num_sampled)[:] = packed.sampled_rows
        self.block_tables.stage(packed.page_changes)
        return StepInputs(
            input_ids=self._rows.tensor[0, :length],
            position_ids=self._positions[..., :length],
            # The kernels' work lists are cut from the lengths on the host, so the lengths stay there.
            batch=AttentionBatch(
                cu_seqlens=torch.from_numpy(packed.cu_seqlens),
                context_lens=torch.from_numpy(packed.context_lens),
                block_table=self._block_table,
                slot_mapping=self._rows.tensor[-2, :length],
                state_tables=self._state_tables,
                prompt_lens=torch.from_numpy(packed.prompt_lens),
                table_rows=None if packed.table_rows is None else torch.from_numpy(packed.table_rows),
                is_invariant=self.is_invariant,
                row_ends=None if packed.row_ends is None else self._ends(length),
                activations=None if packed.activations is None else torch.from_numpy(packed.activations),
                draft_lens=None if packed.draft_lens is None else torch.from_numpy(packed.draft_lens),
            ),
            sampled_rows=self._sampled_rows.tensor[:num_sampled],
        )

    def tiles_of(self, shape: TileShape) -> RowTiles:
        """Return the tiles of `shape` for steps of any recorded size; all recordings share them."""
        if shape not in self._tiles:
            self._tiles[shape] = RowTiles.reserve(shape, self._rows_of(shape), self._max_rank, self.memory)
        return self._tiles[shape]

    def _rows_of(self, shape: TileShape) -> int:
        return self.max_sequences if shape == ROW else min(self.max_rows, MOST_RECORDED_ROWS)

    def _ends(self, rows: int) -> torch.Tensor | None:
        return None if self._row_ends is None else self._row_ends.tensor[:rows]

    def padded(self, rows: int, *, with_ends: bool = False) -> StepInputs:
        """Return the first `rows` rows as a step's inputs: views, which show everything that is filled in later.

        Before they are filled, the rows are sequences of one token each that are sampled. `with_ends`: each row has an
        end of what it sees, if tokens of an image see later ones.
        """
        return StepInputs(
            input_ids=self._rows.tensor[0, :rows],
            position_ids=self._positions[..., :rows],
            batch=AttentionBatch(
                cu_seqlens=torch.arange(rows + 1, dtype=torch.int32),
                context_lens=torch.ones(rows, dtype=torch.int32),
                block_table=self._block_table,
                slot_mapping=self._rows.tensor[-2, :rows],
                state_tables=self._state_tables,
                is_invariant=self.is_invariant,
                row_ends=self._ends(rows) if with_ends else None,
            ),
            sampled_rows=self._every_row[:rows],
        )

    def padded_segments(self, rows: int, shapes: Items[TileShape]) -> Segments:
        """Return the first `rows` rows as a step's segments of adapters of any rank: views of the buffers."""
        # One run of all rows represents any runs that they will hold.
        segments = Segments((0, rows), (0,))
        tiles = tuple(self.tiles_of(shape) for shape in shapes)
        # A row's program reads no more of B in a joined expand than in a separate launch.
        arrivals = self._arrivals[:rows] if tuple(shapes) == (ROW,) else None
        tile_map = TileMap(rows, whole_tiles(self._max_rank), tiles, is_invariant=self.is_invariant, arrivals=arrivals)
        attach_tile_map(segments, tile_map)
        segments.use_row_slots(self._rows.tensor[-1, :rows])
        return segments
