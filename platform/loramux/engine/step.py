"""One iteration: which tokens of which sequences run, laid out so that rows of one revision are contiguous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import msgspec

from loramux.engine.sequence import BASE_SLOT, Sequence

__all__ = ["BASE_SLOT", "PENDING", "Chunk", "Step"]

PENDING = -1
"""Stands among a sequence's tokens for one that the device has chosen and the host has not read yet."""


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """`length` tokens of a sequence from `start`: one while decoding, up to the token budget in prefill.

    A Struct because a step makes hundreds, and makes them ten times faster than a frozen dataclass's.
    """

    sequence: Sequence
    start: int
    length: int
    slot: int = BASE_SLOT
    """The resident adapter's slot in the bank."""

    @property
    def end(self) -> int:
        """One past the last token; the context length after the step."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that a new one is sampled from it."""
        return self.start + self.length == len(self.sequence.token_ids)


@dataclass(frozen=True)
class Step:
    """The chunks of one forward, ordered by slot with the base model's last."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def lay_out(cls, chunks: Iterable[Chunk]) -> Step:
        """Order the chunks; stable, so that equals keep the scheduler's order."""
        return cls(tuple(sorted(chunks, key=_row_order)))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.chunks

    @cached_property
    def sampling(self) -> list[Chunk]:
        """The chunks that yield a token, in row order, as they were when first asked for: before the commit."""
        return [chunk for chunk in self.chunks if chunk.samples]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(slot, rows) of every run of rows that share a revision, base included, in row order."""
        return [(slot, sum(c.length for c in run)) for slot, run in groupby(self.chunks, key=lambda c: c.slot)]

    @property
    def adapter_slots(self) -> list[int]:
        """The distinct adapters of the step."""
        return [slot for slot, _ in self.runs if slot != BASE_SLOT]

    @property
    def holds_base(self) -> bool:
        """Whether any row is the base model's."""
        return bool(self.runs) and self.runs[-1][0] == BASE_SLOT


def _row_order(chunk: Chunk) -> int:
    return chunk.slot & 0xFFFF_FFFF  # BASE_SLOT becomes the highest
