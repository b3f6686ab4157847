"""Sequences and steps: a request's mutable run, and the tokens of each sequence that run in one iteration.

A `Sequence` holds its tokens so far, the number of tokens with KV, and its place in the scheduler. A `Step` is the list
of `Chunk`s of one forward pass, ordered so that rows of one revision are contiguous and the base model's rows are last.
`StepBuilder` keeps the tokens and rows that are left of a step while it is planned.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter

import msgspec

from loramux.engine.memory.pages import SequenceKv
from loramux.engine.messages import EngineFault, Request
from loramux.engine.scheduling.estimates import Drafter, QueuedWork, attention_pairs, tokens_with_attention
from loramux.engine.scheduling.fairness import ClassCounter, Flow

OUTRUNS = 0.5
"""Minimum number of recently accepted drafted tokens (by `Acceptance`) for which a sequence is expected to be faster
than others.
"""
BASE_SLOT = -1
"""The slot of a sequence that no adapter serves."""
PENDING = -1
"""Placeholder among a sequence's tokens for one that the device has chosen and the host has not read yet."""
MAX_SCORED_ROWS = 128
"""Maximum number of rows in a step for which a prompt's next token is scored. Each such row takes a pass over the
vocabulary, and the step's other rows wait for it.
"""
_SEQUENCE, _SLOT, _LENGTH, _DRAFTS = map(attrgetter, ("sequence", "slot", "length", "drafts"))
_REQUEST_ID = attrgetter("id")


@dataclass(eq=False, slots=True)
class RequestGroup:
    """The choices of one API request. They share one deadline, which is decided before the first choice begins."""

    id: str
    is_shared: bool = False
    """True if the group may have more than one member."""
    start_by: float | None = None
    """Time by which the first choice must have begun, by the scheduler's clock; None without a deadline."""
    is_started: bool = False
    refusal: EngineFault | None = None
    """The fault with which all choices are refused; None if they are not refused."""
    waiting: set[Sequence] = field(default_factory=set)
    """Sequences that were accepted and have not ended."""


class Sequence(SequenceKv):
    """One running or waiting request. Compared by identity: two sequences are never equal."""

    __slots__ = (
        "arrival",
        "began_at",
        "digest",
        "drafter",
        "expected_service",
        "flow",
        "group",
        "id",
        "likely_len",
        "load",
        "load_units",
        "max_len",
        "num_loads",
        "num_preemptions",
        "num_repeated",
        "num_scored",
        "predicted_ttft_s",
        "queued",
        "slot",
        "units_at_start",
    )

    def __init__(self, request: Request, arrival: float, flow: Flow | None = None) -> None:
        super().__init__(request)
        self.id = request.id
        self.arrival = arrival
        self.flow = Flow() if flow is None else flow
        """The tenant in a class that its service is charged to."""
        self.group: RequestGroup | None = None
        self.digest = request.adapter.digest if request.adapter else None
        """Digest of the sequence's revision; None for the base model."""
        self.max_len = self.likely_len = self.num_prompt_tokens + request.max_output
        """Maximum and expected number of tokens of the sequence. Memory is planned for the expected number."""
        self.slot = BASE_SLOT
        """The bank slot of the sequence's adapter while the sequence runs."""
        self.expected_service = 0.0
        """Expected total of the sequence's units at its end, as estimated at its admission."""
        self.units_at_start = 0
        """Value of `units` when the sequence last began to run."""
        self.queued = QueuedWork()
        """The work that was counted for the sequence when it was last queued."""
        self.num_preemptions = 0
        last = self.num_prompt_tokens - 1
        self.num_scored = 0 if self.needs_whole_prompt and request.pooling is None else last
        """Leading tokens from which the next token's log probability was computed, or is not wanted. The prompt's last
        token leads to the answer and is not counted."""
        self.num_loads = 0
        """Number of loads of its adapter that were started for the sequence."""
        self.load: tuple[float, float] | None = None
        """Begin and end of the adapter's load while the sequence waited, in seconds after its arrival."""
        self.load_units = 0.0
        """Units of the sequence's loads that are not charged yet."""
        self.predicted_ttft_s: float | None = None
        """Predicted seconds from the sequence's arrival to its first token; None if it has no deadline."""
        self.drafter: Drafter | None = None
        """The source of the sequence's drafts, if it decodes and drafts are allowed."""
        self.num_repeated = 0
        """Accepted drafts of the latest step that are computed once more, because the states are those before them; 0
        if no layer keeps states."""
        self.began_at: float | None = None
        """Time at which the sequence's first step was planned, by the scheduler's clock."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def likely_left(self) -> int:
        """Number of tokens that the sequence is still expected to generate. A sequence that has exceeded its estimate
        is expected to generate half as many tokens again.
        """
        held = len(self.token_ids)
        left, beyond = self.likely_len - held, (held - self.num_prompt_tokens) // 2
        return left if left >= beyond else max(left, min(self.max_len - held, beyond))

    @property
    def outruns_others(self) -> bool:
        """True if the sequence grows by more than one token per step, because its drafts are accepted."""
        return self.drafter is not None and self.drafter.acceptance.accepted >= OUTRUNS

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that must go through the model before the next token can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def decodes(self) -> bool:
        """True if the rows before the next token are the last token and, before it, drafts that are computed again."""
        return self.num_uncomputed == 1 + self.num_repeated

    @property
    def uncomputed_pairs(self) -> float:
        """Query-key pairs of the uncomputed tokens."""
        return attention_pairs(self.num_computed, self.num_uncomputed)

    @property
    def num_next(self) -> int:
        """Number of leading uncomputed tokens that one model serves, up to a border where states are cached, which is
        the maximum of a chunk.
        """
        start, end = self.num_computed, len(self.token_ids)
        cuts = self.borders if self.activation is None else (*self.borders, self.activation)
        return min((cut for cut in cuts if start < cut < end), default=end) - start

    def without_cut(self, length: int, most: int) -> int:
        """Return the length of the next chunk, of at most `length` tokens, if a chunk must not end inside an image.

        A chunk that would end in its first image is longer than `length`, if the image's end is within `most` tokens,
        and else 0.
        """
        start = self.num_computed
        for image in self.request.images if length else ():
            first, end = image.start, image.start + image.num_tokens
            if first < start + length < end:
                return first - start if first > start else end - start if end - start <= most else 0
        return length

    def to_score(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of the tokens [start, end) for which the next token's log probability must be computed."""
        first = max(start, self.num_scored)
        return first, max(first, min(end, self.num_prompt_tokens - 1))

    @property
    def units(self) -> int:
        """Service that the sequence has received. A prompt token, computed or found in the cache, is one unit; a
        generated token is two units.
        """
        reached = max(self.num_ever_computed, self.num_computed)
        return min(reached, self.num_prompt_tokens) + 2 * self.num_output_tokens

    @property
    def made_progress(self) -> bool:
        """True if the sequence has computed more tokens, since it last began to run, than ever before."""
        return self.units > self.units_at_start

    def note_load(self, began: float, ended: float) -> None:
        """Note a load of its adapter, by the scheduler's clock, if it ended while the sequence waited."""
        assert self.began_at is not None, "its wait is over"
        if ended > self.arrival:
            self.load = max(0.0, began - self.arrival), min(ended, self.began_at) - self.arrival

    def activate(self, invocation: tuple[int, ...]) -> None:
        """Apply the adapter from the last occurrence of `invocation` in the prompt. Without an occurrence the adapter
        never applies (as in PEFT).
        """
        prompt, length = self.request.prompt_token_ids, len(invocation)
        starts = range(self.num_prompt_tokens - length, -1, -1)
        found = (start for start in starts if tuple(prompt[start : start + length]) == invocation)
        self.activation = next(found, self.max_len)

    def slot_at(self, position: int) -> int:
        """Return the slot that serves the token at `position` while the sequence runs."""
        return self.slot if self.activation is None or position >= self.activation else BASE_SLOT

    def fresh_prompt(self, start: int, end: int) -> int:
        """Return how many of the tokens [start, end) are of the prompt and are computed for the first time."""
        return max(0, min(end, self.num_prompt_tokens) - max(start, self.num_ever_computed))

    def recomputed(self, start: int, end: int) -> int:
        """Return the number of the tokens [start, end) that had been computed or found before, and were lost since."""
        return max(0, min(end, self.num_ever_computed) - start)

    def cost(self, start: int, end: int) -> int:
        """Return the units that are charged for computing the tokens [start, end).

        A prompt token computed for the first time costs one; reaching the last token, which generates a token, costs
        two.
        """
        fresh = self.fresh_prompt(start, end) if start < self.num_prompt_tokens else 0
        return fresh + 2 * (end == len(self.token_ids))

    def take_cost(self, start: int, end: int) -> float:
        """Return `cost`, plus the units of the adapter's loads if `cost` is not 0.

        A load is charged together with progress, never alone, because the charge may suspend the tenant. A tenant
        suspended for a load, before the load brought progress, could lose the adapter and load it again, without ever
        making progress.
        """
        cost: float = self.cost(start, end)
        if cost and self.load_units:
            cost += self.load_units
            self.load_units = 0.0
        return cost


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """`length` rows of a sequence from position `start`: one row while decoding, and up to the token budget in prefill.

    The rows are the sequence's own tokens and then its drafts: tokens that are expected to follow and are verified in
    this step. A token is sampled from the last row before the drafts, and from each draft's row.

    A chunk is a Struct because a step creates hundreds of chunks, and a Struct is created ten times faster than a
    frozen dataclass.
    """

    sequence: Sequence
    start: int
    length: int
    slot: int = BASE_SLOT
    """The resident adapter's slot in the bank."""
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last row, which is the context length after the step."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the sequence's last token, from which a new one is sampled."""
        return self.start + self.length - len(self.drafts) == len(self.sequence.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of rows that tokens are sampled from: the last rows of the chunk."""
        return 1 + len(self.drafts) if self.samples and self.sequence.request.pooling is None else 0

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the rows."""
        own = self.sequence.token_ids[self.start : self.start + self.length]
        return [*own, *self.drafts] if self.drafts else own


@dataclass(frozen=True)
class Step:
    """The chunks of one forward pass, ordered by slot with the base model's last.

    In most steps every row is plain (see `is_plain`). What the host does for each row of such a step decides how many
    rows a GPU is kept busy with, so it is done by few instructions: `map` and `attrgetter` read an attribute of all
    rows in a loop of C.
    """

    chunks: tuple[Chunk, ...]
    is_plain: bool = False
    """True if every chunk is a plain row: one row of a sequence that decodes, after its prompt, without drafts, which
    was in an earlier step and is computed for the first time. Each row then samples. False: some chunk may differ."""

    @classmethod
    def ordered(cls, chunks: Iterable[Chunk], *, is_plain: bool = False) -> Step:
        """Order the chunks by slot. Chunks with the same slot keep the scheduler's order."""
        by_slot = sorted(chunks, key=_SLOT)
        num_base = bisect_right(by_slot, BASE_SLOT, key=_SLOT)  # the base's slot is lower than any adapter's
        return cls((*by_slot[num_base:], *by_slot[:num_base]), is_plain)

    @property
    def empty(self) -> bool:
        """True if there is nothing to run."""
        return not self.chunks

    @cached_property
    def sequences(self) -> list[Sequence]:
        """The sequence of each chunk."""
        return [*map(_SEQUENCE, self.chunks)]

    @cached_property
    def request_ids(self) -> list[str]:
        """The id of each chunk's request."""
        return [*map(_REQUEST_ID, self.sequences)]

    @property
    def has_drafts(self) -> bool:
        """True if any chunk has drafts."""
        return not self.is_plain and any(map(_DRAFTS, self.chunks))

    @cached_property
    def sampling(self) -> list[Chunk]:
        """Chunks that yield tokens, in row order. Computed at the first use, which must be before the commit."""
        if self.is_plain:
            return [*self.chunks]
        ends = [c for c in self.chunks if c.start + c.length - len(c.drafts) == len(c.sequence.token_ids)]
        return [c for c in ends if c.sequence.request.pooling is None]

    @cached_property
    def pooled(self) -> list[tuple[int, Chunk]]:
        """Chunks of requests with `pooling`, each with its first row."""
        if self.is_plain or all(c.sequence.request.pooling is None for c in self.chunks):
            return []
        firsts = accumulate((c.length for c in self.chunks), initial=0)
        return [(row, c) for row, c in zip(firsts, self.chunks, strict=False) if c.sequence.request.pooling]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(slot, rows) of every run of rows that share a revision, base included, in row order."""
        return [(slot, sum(map(_LENGTH, run))) for slot, run in groupby(self.chunks, key=_SLOT)]

    @property
    def adapter_slots(self) -> list[int]:
        """Slots of the step's distinct adapters."""
        return [slot for slot, _ in self.runs if slot != BASE_SLOT]

    @property
    def holds_base(self) -> bool:
        """True if any row is the base model's."""
        return bool(self.runs) and self.runs[-1][0] == BASE_SLOT


@dataclass(slots=True)
class StepBuilder:
    """A step that is being planned, and the remaining tokens and rows of its budget."""

    tokens_left: int
    """Tokens for which the step has room, in tokens without context."""
    rows_left: int
    whole_prompts: bool = False
    """True if a step has room for the whole of a prompt or for none of it."""
    whole_images: bool = False
    """True if no chunk ends inside an image."""
    token_context: float = math.inf
    """Tokens of context whose attention costs a token as much as its products; inf: attention is not counted."""
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    page_tokens: int = 1
    """Tokens of a page if states are cached at the ends of pages: chunks then end there if they can."""
    background: ClassCounter | None = None
    """The class whose prompts come last in this step."""
    background_left: int = 0
    """Part of `tokens_left` that the prompts of the background may take."""
    background_is_last: bool = False
    """True if the background's prompts come after all others, including prompts of requests that join in this step."""
    _kept: tuple[int, int] = (0, 0)
    scored_left: int = MAX_SCORED_ROWS
    joined: list[Sequence] = field(default_factory=list)
    """Sequences of the step that were admitted in this plan."""
    is_plain: bool = True
    """False if any other chunk than a plain row was added (see `Step.is_plain`)."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, taken or not."""
        return len(self.chunks) + self.rows_left

    def has_tokens_for(self, sequence: Sequence) -> bool:
        """Return whether the step has enough tokens left for a chunk of `sequence`."""
        least = sequence.num_next if self.whole_prompts else 1
        return self.tokens_left >= (sequence.without_cut(least, sys.maxsize) if self.whole_images else least)

    def room_for(self, sequence: Sequence) -> int:
        """Return the number of the sequence's next tokens for which the step has room."""
        room, left = min(sequence.num_next, self.tokens_left), self.tokens_left
        if self.whole_prompts:
            # A prompt of the background is begun if any of the background's tokens are left: it cannot be cut.
            return room if self.has_tokens_for(sequence) and not self.is_background_full(sequence) else 0
        if sequence.flow.group is self.background:
            left = min(left, self.background_left)
        if sequence.num_scored < sequence.num_prompt_tokens - 1:
            room = min(room, self.scored_left)
        room = min(room, self._room_after(sequence.num_computed, left))
        if self.whole_images:
            return sequence.without_cut(room, self.tokens_left)
        if room < sequence.num_next:
            beyond = (sequence.num_computed + room) % self.page_tokens
            room -= beyond if beyond < room else 0
        return room

    def _room_after(self, context: int, left: int) -> int:
        """Return the largest n with `_cost(context, n) <= left`; at least one if anything is left."""
        if math.isinf(self.token_context) or not left:
            return left
        begin = self.token_context + context
        return max(1, int(math.sqrt(begin * begin + 2.0 * self.token_context * left) - begin))

    def _cost(self, context: int, length: int) -> int:
        """Return the cost of `length` tokens after `context` tokens, in tokens without context, rounded up."""
        return math.ceil(tokens_with_attention(length, attention_pairs(context, length), self.token_context))

    def add_decoding(self, sequence: Sequence, position: int, length: int) -> None:
        """Add the `length` rows of a decoding `sequence` from `position` on that are not one plain row. The sequence
        already has the pages.
        """
        slot = sequence.slot if sequence.activation is None else sequence.slot_at(position)
        self.chunks[sequence] = Chunk(sequence, position, length, slot)
        self.is_plain = False
        self.tokens_left -= length
        self.rows_left -= 1

    def keep_for(self, deferred: list[Sequence]) -> None:
        """Keep rows and tokens of the background for `deferred`: sequences that join before them cannot take these."""
        tokens = min(self.background_left, sum(self._cost(s.num_computed, s.num_next) for s in deferred))
        self._kept = len(deferred), tokens
        self.rows_left -= len(deferred)
        self.background_left -= tokens

    def release_kept(self) -> None:
        """Give back the kept rows and tokens."""
        rows, tokens = self._kept
        self.rows_left += rows
        self.background_left += tokens

    def is_background_full(self, sequence: Sequence) -> bool:
        """Return whether `sequence` must wait because its class comes last and has used its tokens of this step."""
        return sequence.flow.group is self.background and not self.background_left

    def add(self, sequence: Sequence, length: int) -> None:
        """Give `sequence` the next `length` of its tokens, within `room_for`. The sequence already has the pages."""
        start = sequence.num_computed
        slot = sequence.slot if sequence.activation is None else sequence.slot_at(start)
        self.chunks[sequence] = Chunk(sequence, start, length, slot)
        self.is_plain = False
        cost = self._cost(start, length)
        self.tokens_left = max(0, self.tokens_left - cost)
        self.rows_left -= 1
        if sequence.flow.group is self.background:
            self.background_left = max(0, self.background_left - cost)
        if sequence.num_scored < sequence.num_prompt_tokens - 1:
            first, last = sequence.to_score(start, start + length)
            self.scored_left = max(0, self.scored_left - (last - first))

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Give a decoding `sequence` of the step a row for each of `drafts`. The sequence already has the pages."""
        chunk = self.chunks[sequence]
        length = chunk.length + len(drafts)
        self.is_plain = False
        self.chunks[sequence] = Chunk(sequence, chunk.start, length, chunk.slot, drafts)
        self.tokens_left -= len(drafts)

    def build(self) -> Step:
        """Return the step."""
        return Step.ordered(self.chunks.values(), is_plain=self.is_plain)
