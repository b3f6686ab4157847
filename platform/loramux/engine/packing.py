"""A step laid out in arrays on the host, chunk after chunk, as every kind of runner takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loramux.engine.step import BASE_SLOT, Step
from loramux_kernels import Segments

Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """T rows over S chunks."""

    input_ids: Ints
    """int64[T]; PENDING where the host has yet to learn the token."""
    position_ids: Ints
    """int64[T]"""
    slot_mapping: Ints
    """int64[T]; page * block_size + offset of each token."""
    cu_seqlens: Ints
    """int32[S + 1]"""
    context_lens: Ints
    """int32[S]"""
    block_table: Ints
    """int32[S, most pages of a chunk's sequence]"""
    sampled_rows: Ints
    """int64[number of chunks that sample]"""
    segments: Segments | None
    """None when every row is the base model's."""

    @property
    def decodes(self) -> bool:
        """Whether every row is a sequence of its own that samples."""
        return len(self.input_ids) == len(self.sampled_rows)


def pack(step: Step, block_size: int) -> PackedStep:
    """Lay a step's chunks out one after the other."""
    chunks = step.chunks
    lengths = np.array([c.length for c in chunks], dtype=np.int32)
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32))).astype(np.int32)
    positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
    block_table = np.zeros((len(chunks), max(len(c.sequence.pages) for c in chunks)), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        block_table[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
    pages = block_table[np.repeat(np.arange(len(chunks)), lengths), positions // block_size].astype(np.int64)
    sampled = [end - 1 for end, c in zip(cu_seqlens[1:].tolist(), chunks, strict=True) if c.samples]
    return PackedStep(
        input_ids=np.array([t for c in chunks for t in c.sequence.token_ids[c.start : c.end]], dtype=np.int64),
        position_ids=positions,
        slot_mapping=pages * block_size + positions % block_size,
        cu_seqlens=cu_seqlens,
        context_lens=np.array([c.end for c in chunks], dtype=np.int32),
        block_table=block_table,
        sampled_rows=np.array(sampled, dtype=np.int64),
        segments=_segments(step),
    )


def _segments(step: Step) -> Segments | None:
    runs = [(slot, rows) for slot, rows in step.runs if slot != BASE_SLOT]
    if not runs:
        return None
    ends = np.cumsum([rows for _, rows in runs]).tolist()
    return Segments(cu_seqlens=(0, *ends), slots=tuple(slot for slot, _ in runs))
