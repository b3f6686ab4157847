"""Who joins the batch, who must leave it, and whose adapters are loaded meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from loramux.engine.batch import Batch, Draft
from loramux.engine.budget import Budget
from loramux.engine.fairness import Flow
from loramux.engine.history import OutputHistory
from loramux.engine.memory import Memory
from loramux.engine.policy import Policy
from loramux.engine.queue import RequestQueue
from loramux.engine.resident import AdapterState
from loramux.engine.sequence import Sequence


class Admission:
    """Moves sequences between the queue and the batch, under one budget."""

    def __init__(self, policy: Policy, budget: Budget, queue: RequestQueue, batch: Batch, memory: Memory) -> None:
        self.num_preemptions = 0
        self._history = OutputHistory()
        self._policy = policy
        self._budget = budget
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self._residency = memory.residency

    def estimate(self, sequence: Sequence) -> None:
        """How long it should get (for memory) and what it should take (for shares), by its revision's history."""
        sampling = sequence.request.sampling
        expected = self._history.expect(_history_key(sequence), sampling.max_tokens)
        sequence.likely_len = sequence.num_prompt_tokens + expected.p90
        outputs = max(expected.mean, sequence.num_output_tokens + 1)
        sequence.due = sequence.num_prompt_tokens + 2 * outputs

    def admit(self, draft: Draft, refuse: Callable[[Sequence], None]) -> None:
        """Fill `draft` from the queue. A head that does not fit holds its place: nobody behind it goes in.

        Those behind it have their adapters loaded where that takes nothing from anybody. `refuse` is called with those
        that could not run in an empty house either.
        """
        is_open, looked_at = True, 0
        while looked_at < self._policy.lookahead and (flow := self._queue.first):
            if (sequence := self._next_of(flow)) is None:
                continue
            if not self._fits_alone(sequence):
                refuse(sequence)
            elif not (is_open and self._advance(sequence, draft)):
                # One that sits out is not waiting for room, and keeps nobody out.
                is_open = is_open and flow.too_far
                self._prefetch(sequence)
                self._queue.set_aside(flow)
                looked_at += 1
        self._queue.restore()

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of its queue; its KV is recomputed when it runs again."""
        self.leave(sequence)
        self._queue.push_front(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def leave(self, sequence: Sequence) -> None:
        """Out of the batch; what it was expected to take and did not is no longer booked."""
        self._batch.leave(sequence)
        self._queue.book(sequence.flow, sequence.units - sequence.due)

    def remember(self, sequence: Sequence) -> None:
        """An answer came to its own end: the next ones of its revision are expected to be like it."""
        self._history.record(_history_key(sequence), sequence.num_output_tokens)

    def _next_of(self, flow: Flow) -> Sequence | None:
        """The first of `flow` that does not wait for its files; where all do, the flow stands out."""
        coming = []
        for sequence in islice(self._queue.waiting(flow), self._policy.window):
            digest = sequence.digest
            if digest is None or self._residency.state(digest) in (AdapterState.READY, AdapterState.KNOWN):
                return sequence
            coming.append(digest)
        self._queue.stand_out(flow, coming)
        return None

    def _fits_alone(self, sequence: Sequence) -> bool:
        adapter_pages = self._residency.size(sequence.digest) if sequence.digest else 0
        return self._budget.fits_alone(sequence.max_len, adapter_pages)

    def _cold(self, sequence: Sequence) -> bool:
        return sequence.digest is not None and self._residency.state(sequence.digest) is AdapterState.KNOWN

    def _advance(self, sequence: Sequence, draft: Draft) -> bool:
        """Bring the next in order one step further, into the pool or into the batch; False if it has to wait."""
        flow = sequence.flow
        if flow.too_far:
            return False
        self._memory.cache.look_up(sequence)
        self.estimate(sequence)
        if not (self._has_room(sequence) or self._clear_the_way(sequence, draft)):
            return False
        if self._cold(sequence):
            return self._load(sequence, spare_wanted=False)
        if not (draft.tokens_left and self._has_row(flow, draft)):
            return False
        self._join(sequence, draft)
        return True

    def _prefetch(self, sequence: Sequence) -> None:
        if self._cold(sequence):
            self._load(sequence, spare_wanted=True)

    def _load(self, sequence: Sequence, *, spare_wanted: bool) -> bool:
        digest = sequence.digest
        assert digest is not None, "only adapters are cold"
        leave_free = self._budget.watermark if spare_wanted else 0
        if not self._memory.load(digest, spare_wanted=spare_wanted, leave_free=leave_free):
            return False
        units = self._residency.size(digest) * self._policy.load_units_per_page
        self._queue.book(sequence.flow, units)
        self._queue.charge(sequence.flow, units)
        return True

    def _join(self, sequence: Sequence, draft: Draft) -> None:
        flow = sequence.flow
        self._queue.remove(sequence)
        self._batch.join(sequence)
        self._queue.book(flow, sequence.due - sequence.units)
        length = min(sequence.num_uncomputed, draft.tokens_left)
        end = sequence.num_computed + length
        extended = self._batch.extend(sequence, end)
        assert extended, "the budget counts what is held, so that what it admits has its first pages"
        self._queue.charge(flow, sequence.cost(sequence.num_computed, end))
        draft.lay(sequence, length)

    # room

    def _has_row(self, flow: Flow, draft: Draft) -> bool:
        reserved = int((len(draft.chunks) + draft.rows_left) * self._budget.reserve_share)
        return draft.rows_left > reserved or (draft.rows_left > 0 and self._batch.held_by(flow)[0] < reserved)

    def _has_room(self, sequence: Sequence) -> bool:
        running, adapters = self._batch.running, self._residency.pinned_pages(sequence.digest)
        reserve = self._budget.reserve
        if self._budget.admits(sequence, running, adapters, reserve):
            return True
        _, held = self._batch.held_by(sequence.flow)
        small = held + self._budget.pages_for(sequence.likely_len) <= reserve
        return small and self._budget.admits(sequence, running, adapters)

    def _clear_the_way(self, sequence: Sequence, draft: Draft) -> bool:
        """Preempt those that sit out until `sequence` fits: of the most served, the newest first."""
        out = [s for s in self._batch.running if s.flow.too_far and s not in draft.chunks]
        out.sort(key=lambda s: (s.flow.group.served, s.flow.served))  # stable, so that pop() takes the newest
        while out:
            self.preempt(out.pop())
            if self._has_room(sequence):
                return True
        return False


def _history_key(sequence: Sequence) -> tuple[str, str | None]:
    return sequence.request.tenant, sequence.digest
