"""Speculative decoding: which sequences of a step get drafts, and how long the drafts are.

A draft is planned as additional rows of a decoding sequence's chunk. The sampler accepts leading drafted tokens for as
long as they equal the tokens that it chooses itself. `Scheduler.commit` appends the accepted tokens, and the next step
overwrites the KV of rejected tokens.

**When a draft pays.** A step of n rows takes T(n) seconds (measured) and yields e tokens (expected). The i-th token of
a draft is accepted with probability a**i; a is the recently accepted share. The token saves time if its row raises the
tokens per second: a**i / (T(n + 1) - T(n)) > e / T(n). On a device that waits for its memory, a row is almost free and
drafts are long. If the batch keeps the device busy, a row takes as long as a token, and there are no drafts. T(n) of a
step without drafts must be known for this: if it was not measured lately, the step gets no drafts.

**What a draft may take.** A draft comes after all running and admitted sequences. A draft takes tokens of the step's
budget that no prompt needs, and pages that are free or hold only cached prefixes. Pages after the accepted tokens are
given back at the commit, so admission never counts them. A draft preempts no sequence, evicts no adapter that a request
waits for, and delays no admission.

**While a step runs ahead** (on a GPU), a sequence's last token is PENDING: the device knows it, and the host does not.
The draft begins with a guess of this token, which is left out, because the row of the token itself is planned anyway. A
wrong guess costs the draft, never a wrong token. A step with drafts is read before the next step is planned, because
only then the host knows how many tokens the sequences have. The measured time of such a step contains this wait, so
drafts must save more than it.

**Layers with states** (linear attention, Mamba 2) cannot go back over a refused draft. Their states are stored before
the drafts of a step. So accepted drafts are computed once more, as further rows of the next step
(`Sequence.num_repeated`), and an accepted token costs two rows.

**Sources.** Prompt lookup (`Drafter.lookup`) costs nothing and finds copies alone. The base's own head for multi-token
prediction (`DraftHead`) drafts for all sequences together, after it is known how many drafts each of them gets. On a
GPU it reads a PENDING token there, and needs no guess. It takes h seconds (measured) for a token of all drafts
together. So each of m sequences that may get drafts pays h / m for a token of its draft, in addition to the row; then
all drafts are cut to the length that gives the most tokens per second.

A request starts from the acceptance of its revision, and a revision from `FIRST_GUESS`. Both return to the first guess
while drafts save no time, so that a request that begins to repeat text gets drafts again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from loramux.engine.scheduling.estimates import Acceptance, DecodeTimes, Drafter
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence, StepBuilder
from loramux.engine.scheduling.state import SchedulerState, history_key

FIRST_GUESS = 0.5
"""Acceptance of a revision without history."""
KEPT_BY_REQUEST, KEPT_BY_REVISION = 0.8, 0.98
"""Share of the past acceptance that is kept after each verified draft."""
FADED_REQUEST, FADED_REVISION = 0.98, 0.9998
"""Share of the past acceptance that is kept after each row for which a draft would not have saved time."""
MAX_REVISIONS = 4096
"""Maximum number of remembered revisions. The revision whose last draft is oldest is forgotten first."""


class DraftHead(Protocol):
    """A part of the base that drafts."""

    def knows(self, sequence: Sequence) -> bool:
        """Return whether `sequence` can get drafts now."""

    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return as many drafts of each sequence as are asked for. It can get drafts, and has the pages for them."""


class Speculation:
    """Adds drafts to planned steps if they pay, and learns from the result."""

    def __init__(self, state: SchedulerState) -> None:
        self.times = DecodeTimes(state.step_time)
        self.head: DraftHead | None = None
        """The source of drafts; None: prompt lookup."""
        self._state = state
        self._most = state.policy.max_draft_tokens
        self.revisions: OrderedDict[tuple[str, str | None], Acceptance] = OrderedDict()
        """Acceptance by tenant and revision, of the remembered ones."""

    def add_drafts(self, builder: StepBuilder) -> None:
        """Add drafts that save time to the decoding sequences of a step, while tokens and pages are left."""
        if not (self._most and builder.tokens_left and self.times.is_known):
            return
        chunks = [c for c in builder.chunks.values() if c.num_sampled and c.length <= 1 + c.sequence.num_repeated]
        rows, expected = sum(chunk.length for chunk in chunks), float(len(chunks))
        if not self.times.is_measured(rows):  # this step without drafts is measured
            return
        left, chosen = builder.tokens_left, dict[Sequence, tuple[int, ...]]()
        sequences = [chunk.sequence for chunk in chunks if self.head is None or self.head.knows(chunk.sequence)]
        ahead_seconds = 0.0 if self.head is None else self.times.ahead_seconds
        rates: dict[Sequence, float] = {}
        base = rows, expected
        for sequence in sequences:
            most = min(self._most, left, sequence.max_len - len(sequence.token_ids) - 1)
            if most <= 0:
                continue
            own, revision = self._drafter(sequence).acceptance, self._revision(sequence)
            rate = own.rate(revision.rate(FIRST_GUESS))
            count = self.count_paying(rate, rows, expected, most, ahead_seconds / len(sequences))
            if not count:
                own.fade(FADED_REQUEST)
                revision.fade(FADED_REVISION)
            elif drafts := self._with_pages(sequence, self.guess(sequence, count)):
                chosen[sequence], rates[sequence] = drafts, rate
                left -= len(drafts)
                rows += len(drafts)
                expected += sum(rate**place for place in range(1, len(drafts) + 1))
        if self.head is not None and chosen:
            most = self.longest_paying([(rates[one], len(drafts)) for one, drafts in chosen.items()], *base)
            asked = [(sequence, min(most, len(drafts))) for sequence, drafts in chosen.items() if most]
            chosen = dict(zip(rates, map(tuple, self.head.draft(asked)), strict=True)) if most else {}
        for sequence, drafts in chosen.items():
            builder.add_drafts(sequence, drafts)

    def count_paying(self, rate: float, rows: int, expected: float, most: int, ahead_seconds: float = 0.0) -> int:
        """Return how many more rows, up to `most`, a draft is worth in a step of `rows` and `expected` tokens.
        `ahead_seconds`: time of the head for each token of the draft.
        """
        gain, seconds, ahead = 1.0, self.times.seconds(rows), 0.0
        has_states = self._state.budget.state_pages > 0
        for count in range(most):
            gain *= rate
            longer = self.times.seconds(rows + count + 1)
            again = gain if has_states else 0.0  # expected rows that repeat the draft in the next step
            if gain * (seconds + ahead) <= ((1.0 + again) * (longer - seconds) + ahead_seconds) * expected:
                return count
            expected += gain
            seconds = longer
            ahead += ahead_seconds
        return most

    def longest_paying(self, asked: list[tuple[float, int]], rows: int, expected: float) -> int:
        """Return the length to which drafts of the head are cut: other sequences may not share its time as each was
        told. `asked`: the acceptance and the length of each draft."""
        alone = self.times.seconds(rows)
        best, length, extra, gain = expected / alone, 0, 0, 0.0
        has_states = self._state.budget.state_pages > 0
        for place in range(1, max(count for _, count in asked) + 1):
            reached = [rate for rate, count in asked if count >= place]
            extra, gain = extra + len(reached), gain + sum(rate**place for rate in reached)
            again = self.times.seconds(rows + gain) - alone if has_states else 0.0
            seconds = self.times.seconds(rows + extra) + again + place * self.times.ahead_seconds
            if (expected + gain) / seconds > best:
                best, length = (expected + gain) / seconds, place
        return length

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        """Return up to `count` tokens that `sequence` may continue with, after its last token, PENDING or not. If the
        head drafts, they are PENDING until the head has drafted them.
        """
        if self.head is not None:
            return [PENDING] * count
        token_ids = sequence.token_ids
        unknown = int(token_ids[-1] == PENDING)
        lookup = self._drafter(sequence).lookup
        return lookup.draft(token_ids, unknown + count, len(token_ids) - unknown)[unknown:]

    def note_verified(self, chunk: Chunk) -> int:
        """Learn from a chunk whose tokens are appended; return the number of accepted drafts."""
        sequence, drafted = chunk.sequence, len(chunk.drafts)
        accepted = max(0, len(sequence.token_ids) - 1 - (chunk.end - drafted))
        revision = self._revision(sequence)
        for acceptance in (self._drafter(sequence).acceptance, revision):
            acceptance.add(drafted, accepted)
        self.revisions.move_to_end(history_key(sequence))
        counters = self._state.counters
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        return accepted

    def _with_pages(self, sequence: Sequence, drafts: list[int]) -> tuple[int, ...]:
        """Take the pages for `drafts`; return the drafts that have pages."""
        budget, held = self._state.budget, len(sequence.token_ids)
        missing = budget.pages_for(held + len(drafts)) - len(sequence.pages)
        if missing > 0 and self._state.memory.num_spare >= missing:
            self._state.extend(sequence, held + len(drafts))
        return tuple(drafts[: budget.tokens_in(len(sequence.pages)) - held])

    def _drafter(self, sequence: Sequence) -> Drafter:
        if sequence.drafter is None:
            sequence.drafter = Drafter(Acceptance(KEPT_BY_REQUEST))
        return sequence.drafter

    def _revision(self, sequence: Sequence) -> Acceptance:
        key = history_key(sequence)
        acceptance = self.revisions.get(key)
        if acceptance is None:
            acceptance = self.revisions[key] = Acceptance(KEPT_BY_REVISION)
            if len(self.revisions) > MAX_REVISIONS:
                self.revisions.popitem(last=False)
        return acceptance
