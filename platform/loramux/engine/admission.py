"""Who joins the batch, who must leave it, and whose adapters are loaded meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from loramux.engine.batch import Batch, Draft
from loramux.engine.fairness import Flow
from loramux.engine.history import OutputHistory
from loramux.engine.memory import Memory
from loramux.engine.policy import Policy
from loramux.engine.queue import RequestQueue
from loramux.engine.resident import AdapterState
from loramux.engine.room import Room
from loramux.engine.sequence import Sequence


class Admission:
    """Moves sequences between the queue and the batch, under one budget."""

    def __init__(self, policy: Policy, room: Room, queue: RequestQueue, batch: Batch, memory: Memory) -> None:
        self.num_preemptions = 0
        self._history = OutputHistory()
        self._policy = policy
        self._room = room
        self._told_no: tuple[Sequence, int, int] | None = None
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self._residency = memory.residency

    def estimate(self, sequence: Sequence) -> None:
        """How long it should get (for memory) and what it should take (for shares), by its revision's history."""
        sampling = sequence.request.sampling
        expected = self._history.expect(_history_key(sequence), sampling.max_tokens)
        sequence.likely_len = sequence.num_prompt_tokens + math.ceil(expected)
        outputs = max(expected, sequence.num_output_tokens + 1)
        sequence.due = sequence.num_prompt_tokens + 2 * outputs

    def interrupt(self, max_num_seqs: int) -> Flow | None:
        """Between two steps: let the next in order take the places of those that owe it theirs; who is to go first now.

        Only for who can join at once, and where it is enough: otherwise somebody would be interrupted for nothing.
        """
        flow = self._queue.first
        sequence = self._next_of(flow) if flow and not flow.too_far else None
        if sequence is None or self._cold(sequence) or self._room.over_quota(sequence):
            return None
        self._prepare(sequence)
        debtors = self._room.debtors(sequence)
        if not (debtors and self._room.has_pages(sequence, leaving=set(debtors))):
            return None
        while debtors and not (len(self._batch.running) < max_num_seqs and self._room.has_pages(sequence)):
            debtor = debtors.pop()
            if self._room.owes(debtor, sequence):
                self.preempt(debtor)
        return flow

    def admit(self, draft: Draft, refuse: Callable[[Sequence, str], None], favoured: Flow | None = None) -> None:
        """Fill `draft` from the queue, from `favoured` first. A head that does not fit holds its place: nobody behind
        it goes in.

        Those behind it have their adapters loaded where that takes nothing from anybody. `refuse` is called with those
        that could not run in an empty house either, and why.
        """
        is_open, looked_at = True, 0
        while looked_at < self._policy.lookahead and (flow := favoured or self._choose()):
            favoured = None
            if (sequence := self._next_of(flow)) is None:
                continue
            if reason := self._room.never(sequence):
                refuse(sequence, reason)
            elif self._room.over_quota(sequence):
                self._queue.stand_out(flow, [_quota_of(flow.tenant)])
            elif not (is_open and self._advance(sequence, draft)):
                is_open = is_open and not self._waits_for_room(sequence)
                self._prefetch(sequence)
                self._queue.set_aside(flow)
                looked_at += 1
        self._queue.restore()

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of its queue; when it runs again its KV is computed again, or comes back from the host."""
        self._memory.swap.save(sequence)
        self.leave(sequence)
        self._queue.push_front(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def leave(self, sequence: Sequence) -> None:
        """Out of the batch; what it was expected to take and did not is no longer booked."""
        self._batch.leave(sequence)
        self._queue.book(sequence.flow, sequence.units - sequence.due)
        self._queue.call_back(_quota_of(sequence.flow.tenant))

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

    def _choose(self) -> Flow | None:
        """The first in order; where adapters crowd the batch, the first within a quantum of it that brings none."""
        first = self._queue.first
        if first is None or self._room.omega() <= self._policy.overhead_target:
            return first
        return self._queue.first_near(first, self._brings_none) or first

    def _brings_none(self, flow: Flow) -> bool:
        digest = self._queue.waiting(flow)[0].digest
        return digest is None or self._residency.in_use(digest)

    def _waits_for_room(self, sequence: Sequence) -> bool:
        """Whether it is the pool that `sequence` waits for, and its turn: then nobody overtakes it.

        Who sits out, was to go before its turn, or waits for others' loads to end, keeps nobody out.
        """
        if self._cold(sequence) and self._residency.saturated:
            return False
        return not sequence.flow.too_far and sequence.flow is self._queue.first

    def _cold(self, sequence: Sequence) -> bool:
        return sequence.digest is not None and self._residency.state(sequence.digest) is AdapterState.KNOWN

    def _advance(self, sequence: Sequence, draft: Draft) -> bool:
        """Bring the next in order one step further, into the pool or into the batch; False if it has to wait."""
        flow = sequence.flow
        if flow.too_far:
            return False
        self._prepare(sequence)
        cold = self._cold(sequence)
        if not (cold or (draft.tokens_left and self._room.has_row(flow, draft))):
            return False
        if not (self._has_pages(sequence) or self._clear_the_way(sequence, draft)):
            return False
        if cold:
            return self._load(sequence, spare_wanted=False)
        self._join(sequence, draft)
        return True

    def _prepare(self, sequence: Sequence) -> None:
        """Find out where its adapter sets in, what is in the cache for it, and how long it may get."""
        invocation = self._residency.invocation(sequence.digest) if sequence.digest else None
        if invocation and sequence.activation is None:
            sequence.activate(invocation)
        self._memory.cache.look_up(sequence)
        self.estimate(sequence)

    def _has_pages(self, sequence: Sequence) -> bool:
        """As the room says; who was told no is told so, unasked, until somebody leaves or other adapters are in use."""
        asked = (sequence, self._batch.num_departures, self._residency.pinned_pages())
        if asked == self._told_no:
            return False
        has_pages = self._room.has_pages(sequence)
        self._told_no = None if has_pages else asked
        return has_pages

    def _prefetch(self, sequence: Sequence) -> None:
        if self._cold(sequence):
            self._load(sequence, spare_wanted=True)

    def _load(self, sequence: Sequence, *, spare_wanted: bool) -> bool:
        digest = sequence.digest
        assert digest is not None, "only adapters are cold"
        leave_free = self._room.watermark if spare_wanted else 0
        if not self._memory.load(digest, spare_wanted=spare_wanted, leave_free=leave_free):
            return False
        sequence.num_loads += 1
        units = self._residency.size(digest) * self._policy.load_units_per_page
        self._queue.book(sequence.flow, units)
        self._queue.charge(sequence.flow, units)
        return True

    def _join(self, sequence: Sequence, draft: Draft) -> None:
        flow = sequence.flow
        self._queue.remove(sequence)
        self._batch.join(sequence)
        self._queue.book(flow, sequence.due - sequence.units)
        length = min(sequence.num_next, draft.tokens_left)
        end = sequence.num_computed + length
        extended = self._batch.extend(sequence, end)
        assert extended, "the budget counts what is held, so that what it admits has its first pages"
        self._queue.charge(flow, sequence.cost(sequence.num_computed, end))
        draft.lay(sequence, length)

    def _clear_the_way(self, sequence: Sequence, draft: Draft) -> bool:
        """Preempt those that sit out until `sequence` fits: of the most served, the newest first."""
        out = [s for s in self._batch.running if s.flow.too_far and s not in draft.chunks]
        out.sort(key=lambda s: (s.flow.group.served, s.flow.served))  # stable, so that pop() takes the newest
        while out:
            self.preempt(out.pop())
            if self._room.has_pages(sequence):
                return True
        return False


def _history_key(sequence: Sequence) -> tuple[str, str | None]:
    return sequence.request.tenant, sequence.digest


def _quota_of(tenant: str) -> tuple[str, str]:
    """The event that some of the tenant's quota has come free."""
    return "quota", tenant
