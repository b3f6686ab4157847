"""Decode steps as recordings: one for each bucket of rows serves every mix of adapters, contexts and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loramux.engine.forward import Forward
from loramux.engine.graphs import Recorder, Recording
from loramux.engine.packing import PackedStep
from loramux.engine.step_buffers import StepBuffers
from loramux_kernels import Segments
from loramux_kernels.cuda.attention_plan import (
    AttentionShape,
    AttentionTiles,
    attention_shapes,
    lend_attention,
    refill_attention,
    reserve_attention,
)
from loramux_kernels.cuda.tile_map import DECODE_SHAPES, TileMap, TileShape, decode_shape, lend_tile_map

LEAST_PARTIALS = 128
"""Pieces that contexts may be cut into: enough to give every multiprocessor something to read."""

Kind = TileShape | None
"""How a recording multiplies by adapters: None where it launches nothing for them."""


def buckets(most: int) -> tuple[int, ...]:
    """Row counts that are recorded, `most` the last: a step runs in the smallest that holds it.

    Powers of two up to 8, then steps of 8, from 128 on of 16: padding costs at most an eighth.
    """
    counts = [1, 2, 4, *range(8, min(most, 128), 8), *range(128, most, 16)]
    return (*(count for count in counts if count < most), most)


@dataclass(frozen=True, slots=True)
class _Recorded:
    recording: Recording
    tile_map: TileMap | None


class DecodeGraphs:
    """Recordings of the forward over `buffers`, made when this is made: nobody waits for one while serving."""

    def __init__(self, forward: Forward, buffers: StepBuffers, record: Recorder, max_rank: int) -> None:
        self._forward = forward
        self._buffers = buffers
        self._device = forward.bank.pool.device
        self._max_rank = max_rank
        self._buckets = buckets(buffers.max_sequences)
        self._attention = self._reserve_attention()
        self._recorded = {
            (rows, kind): self._record(record, rows, kind)
            for rows in reversed(self._buckets)  # the largest first: the others fit into its memory
            for kind in (None, *DECODE_SHAPES)
        }

    def run(self, packed: PackedStep, ranks: Sequence[int]) -> torch.Tensor:
        """The logits `[S, vocab]` of a decode step that the buffers hold; valid until the next run.

        `ranks` are the largest of each segment's adapter.
        """
        count = len(packed.input_ids)
        rows = next(bucket for bucket in self._buckets if bucket >= count)
        recorded = self._recorded[rows, decode_shape(packed.segments, ranks) if packed.segments else None]
        if recorded.tile_map is not None:
            assert packed.segments is not None
            recorded.tile_map.refill(packed.segments, np.asarray(ranks, dtype=np.int64))
        spans = [(row, row + 1, context) for row, context in enumerate(packed.context_lens.tolist())]
        for shape, tiles in self._attention.items():
            refill_attention(tiles, spans, shape)
        recorded.recording.replay()
        return recorded.recording.output[:count]

    def _reserve_attention(self) -> dict[AttentionShape, AttentionTiles]:
        """Room for every kind of attention that the model's layers ask for, learned from one forward."""
        inputs = self._buffers.padded(1)
        self._forward(inputs, None)
        sequences = self._buffers.max_sequences
        partials = max(LEAST_PARTIALS, 2 * sequences)
        return {
            shape: reserve_attention(shape, sequences, partials, self._device)
            for shape in attention_shapes(inputs.batch)
        }

    def _record(self, record: Recorder, rows: int, kind: Kind) -> _Recorded:
        inputs = self._buffers.padded(rows)
        for shape, tiles in self._attention.items():
            lend_attention(inputs.batch, shape, tiles)
        if kind is None:
            return _Recorded(record(lambda: self._forward(inputs, None)), None)
        # One run of all rows stands for whatever the map will hold.
        segments = Segments((0, rows), (0,))
        tile_map = TileMap.reserve(rows, self._max_rank, kind, self._device)
        lend_tile_map(segments, tile_map)
        return _Recorded(record(lambda: self._forward(inputs, segments)), tile_map)
