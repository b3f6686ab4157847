"""The base's head for multi-token prediction on a GPU: its part of each step, and its drafts while a step runs ahead.

After each step, on the same stream, the head computes the keys and values of the step's pairs (see `multi_token`). This
is recorded for the buckets of rows of any steps. Steps with images and steps of more rows than were recorded launch the
same operators one by one. The places of hidden states are in the step's copy.

When drafts are planned, the step before may still run. All that the head needs of it is on the device: hidden states,
and the last tokens. Positions and pages are known on the host. So drafts are launched at once, and the host waits for
the tokens of all drafts together.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from loramux.engine.execution.cuda_graphs import GraphRecorder, Recording, step_buckets
from loramux.engine.execution.device_sampler import SampledTokens
from loramux.engine.execution.multi_token import NO_PAGE, ROW_BEFORE, HeadDrafter, PairRows
from loramux.engine.execution.runner import PackedStep, StepGraphs
from loramux.engine.execution.step_buffers import MOST_RECORDED_ROWS, StepBuffers
from loramux.engine.execution.vision import StepImages
from loramux.engine.scheduling.sequence import PENDING, Sequence, Step
from loramux_kernels.cuda.work_lists import AttentionShape, attach_attention, empty_attention
from loramux_kernels.device import to_device

WARM_ROWS = 2


class GpuHead:
    """The recordings of a head, and its `StepTables`."""

    def __init__(self, drafter: HeadDrafter, buffers: StepBuffers, hidden_size: int) -> None:
        self.drafter = drafter
        drafter.tables = self
        self.sampled: SampledTokens | None = None
        """Tokens of the latest step."""
        self._buffers = buffers
        self._places = buffers.memory.reserve((2, buffers.max_rows), torch.int64)
        self._places.tensor.fill_(NO_PAGE)
        self._buckets = step_buckets(min(buffers.max_rows, MOST_RECORDED_ROWS))
        rows = max(self._buckets[-1], buffers.max_sequences)
        self.hidden = drafter.head.norm.weight.new_zeros(rows, hidden_size)
        """Hidden states of the rows of a recorded step."""
        self._recordings: dict[int, Recording] = {}

    def record(self, record: GraphRecorder, most_buckets: int | None = None) -> None:
        """Record all buckets, or only the `most_buckets` largest."""
        for count in self._buckets[::-1][:most_buckets]:
            rows, hidden = self._rows(count), self.hidden[:count]
            self._recordings[count] = record(partial(self.drafter.write, rows, hidden), (rows, hidden))

    @property
    def count(self) -> StepGraphs:
        """Counts of the recordings that are graphs and that are calls."""
        graphs = sum(one.is_graph for one in self._recordings.values())
        return StepGraphs(graphs, len(self._recordings) - graphs)

    def stage(self, step: Step, packed: PackedStep) -> None:
        """Put the places of a step's hidden states into its copy."""
        count, places = len(packed.input_ids), self._places.on_host(2)
        places[0, count : 2 * count + 16], places[1, count : 2 * count + 16] = ROW_BEFORE, NO_PAGE  # as `fill` pads
        places[0, :count], places[1, :count] = self.drafter.places_of(step, packed)

    def follow(self, step: Step, packed: PackedStep, hidden: torch.Tensor | None, images: StepImages | None) -> None:
        """Launch the head's part of a launched step; None: a recorded step has left its hidden states in `hidden`."""
        count = len(packed.input_ids)
        bucket = next((rows for rows in self._buckets if rows >= count), None)
        if bucket is None or images is not None:
            hidden = self.hidden[:count] if hidden is None else hidden
            self.drafter.write(self._rows(count), hidden, images)
        else:
            if hidden is not None:
                self.hidden[:count].copy_(hidden)
            hidden = self.hidden[:count]
            self._recordings[bucket].replay()
        self.drafter.note(step, packed, hidden)

    def _rows(self, count: int) -> PairRows:
        inputs, (sources, kept_in) = self._buffers.padded(count), self._places.tensor[:, :count]
        return PairRows(inputs.input_ids, inputs.position_ids, inputs.batch.slot_mapping, sources, kept_in)

    def last_tokens(self, sequences: list[Sequence]) -> torch.Tensor:
        """Return the last token of each sequence, int64[n]; the device has those that are PENDING."""
        known = np.array([sequence.token_ids[-1] for sequence in sequences])
        tokens = to_device(known, self.hidden.device)
        if not (known == PENDING).any():
            return tokens
        assert self.sampled is not None, "the step before has chosen them"
        row_of = self.sampled.row_of
        rows = np.array([row_of[one] if one.token_ids[-1] == PENDING else 0 for one in sequences])
        chosen = self.sampled.tokens[to_device(rows, tokens.device)].clamp(min=0)  # an answer without a token ends
        return torch.where(tokens == PENDING, chosen, tokens)

    def block_tables(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of all sequences, and the rows of these."""
        tables = self._buffers.block_tables
        rows = torch.from_numpy(tables.rows_with_pages(sequences))
        return tables.on_device[:, self._buffers.state_pages :], rows

    def warm_up(self, shapes: Items[AttentionShape]) -> None:
        """Compile what is not recorded. No page is read or written, except by an attention that has no result."""
        rows = min(WARM_ROWS, self._buffers.max_sequences)
        inputs, hidden = self._buffers.padded(rows), self.hidden[:rows].clone()
        ones = torch.ones(rows, 2, dtype=torch.int32)
        batch = replace(inputs.batch, key_ranges=ones, slot_mapping=inputs.batch.slot_mapping.clone())
        for shape in shapes:
            attach_attention(batch, shape, empty_attention(shape, hidden.device))
        self.drafter.predict(inputs.input_ids, hidden, inputs.position_ids, batch)
        self.drafter.write(self._rows(rows), hidden)
        self.drafter.keep(hidden, torch.full((rows,), NO_PAGE, device=hidden.device))
