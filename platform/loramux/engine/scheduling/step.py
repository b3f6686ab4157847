"""One iteration: the tokens of each sequence that run, laid out so that rows of one revision are contiguous."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter

import msgspec

from loramux.engine.scheduling.fairness import ClassCounter
from loramux.engine.scheduling.sequence import BASE_SLOT, Sequence

__all__ = ["BASE_SLOT", "PENDING", "Chunk", "Step", "StepBuilder"]

MAX_SCORED_ROWS = 128
"""Rows of a step from which a prompt's next token is scored: each takes a pass over the vocabulary, and the rows beside
it wait for that."""
_SLOT = attrgetter("slot")
PENDING = -1
"""Stands among a sequence's tokens for one that the device has chosen and the host has not read yet."""


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """`length` rows of a sequence from position `start`: one while decoding, up to the token budget in prefill.

    The rows are the sequence's own tokens and then its drafts: tokens that are expected to follow and are verified in
    this step. A token is sampled from the last row of its own and from each draft's.

    A Struct because a step makes hundreds, and makes them ten times faster than a frozen dataclass's.
    """

    sequence: Sequence
    start: int
    length: int
    slot: int = BASE_SLOT
    """The resident adapter's slot in the bank."""
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """One past the last row; the context length after the step."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Does the chunk reach the sequence's last token, so that a new one is sampled from it?"""
        return self.start + self.length - len(self.drafts) == len(self.sequence.token_ids)

    @property
    def num_sampled(self) -> int:
        """Rows that tokens are sampled from, the last ones."""
        return 1 + len(self.drafts) if self.samples and self.sequence.request.pooling is None else 0

    @property
    def token_ids(self) -> list[int]:
        """The rows' tokens."""
        return [*self.sequence.token_ids[self.start : self.end], *self.drafts]


@dataclass(frozen=True)
class Step:
    """The chunks of one forward, ordered by slot with the base model's last."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def ordered(cls, chunks: Iterable[Chunk]) -> Step:
        """Order the chunks by slot; stable, so that equals keep the scheduler's order."""
        by_slot = sorted(chunks, key=_SLOT)
        num_base = bisect_right(by_slot, BASE_SLOT, key=_SLOT)  # it is lower than any adapter's
        return cls((*by_slot[num_base:], *by_slot[:num_base]))

    @property
    def empty(self) -> bool:
        """Is there nothing to run?"""
        return not self.chunks

    @cached_property
    def sampling(self) -> list[Chunk]:
        """The chunks that yield tokens, in row order, as they were when first asked for: before the commit."""
        ends = [c for c in self.chunks if c.start + c.length - len(c.drafts) == len(c.sequence.token_ids)]
        return [c for c in ends if c.sequence.request.pooling is None]

    @cached_property
    def pooled(self) -> list[tuple[int, Chunk]]:
        """The chunks of requests with `pooling`, each with its first row."""
        if all(c.sequence.request.pooling is None for c in self.chunks):
            return []
        firsts = accumulate((c.length for c in self.chunks), initial=0)
        return [(row, c) for row, c in zip(firsts, self.chunks, strict=False) if c.sequence.request.pooling]

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
        """Is any row the base model's?"""
        return bool(self.runs) and self.runs[-1][0] == BASE_SLOT


@dataclass(slots=True)
class StepBuilder:
    """A step that is being planned, and the tokens and rows that are left of its budget."""

    tokens_left: int
    rows_left: int
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    background: ClassCounter | None = None
    """The class whose prompts give way in this step."""
    background_left: int = 0
    """Tokens that are left to its prompts."""
    background_is_last: bool = False
    """Its prompts come after those of all others, also of those that join in this step."""
    _kept: tuple[int, int] = (0, 0)
    scored_left: int = MAX_SCORED_ROWS
    joined: list[Sequence] = field(default_factory=list)
    """Those of them that were admitted in this plan."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, taken or not."""
        return len(self.chunks) + self.rows_left

    def room_for(self, sequence: Sequence) -> int:
        """Return how many of its next tokens the step has room for."""
        room = min(sequence.num_next, self.tokens_left)
        if sequence.flow.group is self.background:
            room = min(room, self.background_left)
        if sequence.num_scored < sequence.num_prompt_tokens - 1:
            return min(room, self.scored_left)
        return room

    def add_row(self, sequence: Sequence, position: int) -> None:
        """Give a `sequence` whose last token alone is to be computed, at `position`, its row; it has the page."""
        slot = sequence.slot if sequence.activation is None else sequence.slot_at(position)
        self.chunks[sequence] = Chunk(sequence, position, 1, slot)
        self.tokens_left -= 1
        self.rows_left -= 1

    def keep_for(self, deferred: list[Sequence]) -> None:
        """Keep rows, and tokens of the background, from those that join before `deferred` have theirs."""
        tokens = min(self.background_left, sum(sequence.num_next for sequence in deferred))
        self._kept = len(deferred), tokens
        self.rows_left -= len(deferred)
        self.background_left -= tokens

    def release_kept(self) -> None:
        """Give back what was kept."""
        rows, tokens = self._kept
        self.rows_left += rows
        self.background_left += tokens

    def is_background_full(self, sequence: Sequence) -> bool:
        """Must `sequence` wait for the next step, because its class gives way and has had its tokens of this one?"""
        return sequence.flow.group is self.background and not self.background_left

    def add(self, sequence: Sequence, length: int) -> None:
        """Give `sequence` the next `length` of its tokens, within `room_for`; it has the pages."""
        start = sequence.num_computed
        slot = sequence.slot if sequence.activation is None else sequence.slot_at(start)
        self.chunks[sequence] = Chunk(sequence, start, length, slot)
        self.tokens_left -= length
        self.rows_left -= 1
        if sequence.flow.group is self.background:
            self.background_left -= length
        if sequence.num_scored < sequence.num_prompt_tokens - 1:
            first, last = sequence.to_score(start, start + length)
            self.scored_left -= last - first

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Give a decoding `sequence` of the step a row for each of `drafts`; it has the pages."""
        chunk = self.chunks[sequence]
        length = chunk.length + len(drafts)
        self.chunks[sequence] = Chunk(sequence, chunk.start, length, chunk.slot, drafts)
        self.tokens_left -= len(drafts)

    def build(self) -> Step:
        """The step."""
        return Step.ordered(self.chunks.values())
