"""What runs next: decode first, prefill in chunks, admission under one budget, preemption when memory runs out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from loramux.engine.admission import Admission
from loramux.engine.batch import Batch, Draft
from loramux.engine.budget import Budget
from loramux.engine.counters import SchedulerCounters
from loramux.engine.deadlines import Deadlines
from loramux.engine.fairness import Flow
from loramux.engine.forecast import Forecast
from loramux.engine.memory import Memory
from loramux.engine.messages import EngineFault, TokenEvent
from loramux.engine.pace import Pace
from loramux.engine.page_costs import PageCosts
from loramux.engine.pages import PagePool
from loramux.engine.policy import Policy, SchedulerLimits
from loramux.engine.prefix_cache import PrefixCache
from loramux.engine.queue import RequestQueue
from loramux.engine.request import Request
from loramux.engine.residency import Residency
from loramux.engine.resident import AdapterState
from loramux.engine.room import Room
from loramux.engine.sequence import Sequence
from loramux.engine.step import Chunk, Step
from loramux.engine.swap import HostKv, Swap

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Plans steps and commits their results. Pure Python: a simulator runs it with a clock and store of its own."""

    def __init__(
        self,
        limits: SchedulerLimits,
        budget: Budget,
        pool: PagePool,
        residency: Residency,
        policy: Policy | None = None,
        host: HostKv | None = None,
    ) -> None:
        """Time is `residency`'s. `host`: where KV of preempted sequences may go; without one it is computed again."""
        self.limits = limits
        self.budget = budget
        self.residency = residency
        self.policy = policy or Policy()
        self.queue = RequestQueue(self.policy)
        self.pace, size = Pace(), budget.block_size
        assumed = size / self.policy.load_units_per_page
        costs = PageCosts(self.pace, size, host.seconds_per_page if host else None, assumed)
        cache = PrefixCache(self.policy, pool, residency, size, costs)
        self.memory = Memory(pool, residency, cache, Swap(host, costs))
        self._batch = Batch(self.memory, budget.block_size)
        self._room = Room(self.policy, budget, self.queue, self._batch, self.memory)
        self._admission = Admission(self.policy, self._room, self.queue, self._batch, self.memory)
        self._forecast = Forecast(limits, budget, self.queue, self._batch, self.pace, self._room)
        self._deadlines = Deadlines(self.policy, self._forecast)
        self._clock = residency.clock
        self._planned_at, self._running_tokens = 0.0, 0
        self.counters = SchedulerCounters()
        self._sequences: dict[str, Sequence] = {}
        self._news: list[TokenEvent] = []

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold memory, in order of admission."""
        return self._batch.running

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._admission.num_preemptions

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is still to be told."""
        return not (self._sequences or self._news)

    @property
    def stalled(self) -> bool:
        """Whether nothing can run before an adapter has arrived."""
        return not self._news and not self.running

    @property
    def seconds_to_deadline(self) -> float | None:
        """Until the next of those that wait would have to be answered; None where nobody has a deadline."""
        deadline = self._deadlines.next
        return None if deadline is None else max(0.0, deadline - self._clock())

    def add(self, request: Request) -> None:
        """Queue a request, or answer it at once when it could never run, or not by its deadline."""
        if reason := self._room.too_long(request, self.limits.max_model_len):
            self._news.append(_ending(request.id, "error", EngineFault("context_length_exceeded", reason)))
            return
        sequence = Sequence(request, self._clock(), self.queue.flow_of(request))
        self._admission.estimate(sequence)
        if fault := self._deadlines.refusal(sequence):
            self.counters.refused += 1
            self._news.append(_ending(request.id, "error", fault))
            return
        self._sequences[request.id] = sequence
        self._deadlines.watch(sequence)
        if request.adapter is not None:
            self.residency.want(request.adapter)
        self.queue.push(sequence)
        if sequence.digest and self.residency.state(sequence.digest) is AdapterState.FAILED:
            self._fail(sequence)

    def cancel(self, request_id: str) -> None:
        """Free a request's pages; unknown ids have ended already."""
        if sequence := self._sequences.get(request_id):
            self._end(sequence)
            self._news.append(_ending(request_id, "cancelled"))

    def take_news(self) -> list[TokenEvent]:
        """Endings that no step brought about: refusals, cancellations, failed adapters."""
        news, self._news = self._news, []
        return news

    def plan(self) -> Step:
        """Give every ready decoding sequence a row and the rest of the budget to prefill, old and newly admitted."""
        now = self._clock()
        if self._running_tokens:
            self.pace.observe(self._running_tokens, now - self._planned_at)
        self._planned_at, self._running_tokens = now, 0
        self._heed_adapters()
        self._heed_deadlines()
        self.queue.draw_ceilings()
        favoured = self._admission.interrupt(self.limits.max_num_seqs)
        draft = Draft(self.limits.max_num_batched_tokens, self.limits.max_num_seqs)
        self._go_on(draft)
        self._admission.admit(draft, self._refuse_for_ever, favoured)
        self._note_starts(draft)
        return draft.finish()

    def commit(self, step: Step, sampled: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Write a step's result into its sequences; returns what their clients should hear.

        `sampled` holds one event for each of `step.sampling`, with the token and, where it ends the answer, `stop`.
        """
        sampling = step.sampling
        self._batch.commit(step)
        events = [self._append(chunk.sequence, event) for chunk, event in zip(sampling, sampled, strict=True)]
        # Where something runs, the next plan follows at once: the time between them is the step's.
        self._running_tokens = sum(chunk.length for chunk in step.chunks) if self.running else 0
        return events

    def _note_starts(self, draft: Draft) -> None:
        for sequence in draft.chunks:
            if sequence.began_at is None:
                sequence.began_at = self._planned_at
                self.counters.queue_seconds.observe(self._planned_at - sequence.arrival)
                self._deadlines.learn(sequence, self._planned_at)
                self._deadlines.let_go(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether `sequence` has not ended."""
        return self._sequences.get(sequence.id) is sequence

    def reveal(self, chunk: Chunk, event: TokenEvent) -> None:
        """The token that `chunk` sampled, of a step that was committed with PENDING in its place."""
        sequence = chunk.sequence
        assert event.token_id is not None, "a sampled event carries its token"
        sequence.token_ids[chunk.end] = event.token_id
        if event.finish_reason is not None and self.holds(sequence):
            self._admission.remember(sequence)
            self._end(sequence)

    def _heed_adapters(self) -> None:
        for digest in self.residency.poll():
            if self.residency.failed(digest):
                for sequence in [s for s in self.queue if s.digest == digest]:
                    self._fail(sequence)
            self.queue.call_back(digest)

    def _heed_deadlines(self) -> None:
        for sequence in self._deadlines.missed(self._planned_at):
            self.counters.missed += 1
            self._deadlines.learn(sequence, self._planned_at)
            self._refuse(sequence, self._deadlines.fault(sequence))

    def _go_on(self, draft: Draft) -> None:
        """The rows of those admitted earlier."""
        for sequence in self._rows():
            length = min(sequence.num_next, draft.tokens_left)
            if length and sequence.pages and self._extend(sequence, length, draft):
                draft.lay(sequence, length)
        units: defaultdict[Flow, int] = defaultdict(int)
        for sequence, chunk in draft.chunks.items():
            units[sequence.flow] += sequence.cost(chunk.start, chunk.end)
        for flow, charged in units.items():
            self.queue.charge(flow, charged)

    def _rows(self) -> list[Sequence]:
        """Decoding ones first. Left out are those too far ahead of others who wait, and what is over the rows."""
        rows = [s for s in self.running if not s.flow.too_far]
        if len(rows) > self.limits.max_num_seqs:
            rows.sort(key=lambda s: (s.flow.group.served, s.flow.served))
            del rows[self.limits.max_num_seqs :]
        decoding = [s for s in rows if s.num_uncomputed == 1]
        return decoding if len(decoding) == len(rows) else decoding + [s for s in rows if s.num_uncomputed > 1]

    def _extend(self, sequence: Sequence, length: int, draft: Draft) -> bool:
        """Take pages for `length` more tokens, preempting if need be; False if `sequence` itself had to go."""
        while not self._batch.extend(sequence, sequence.num_computed + length):
            victim = self._victim()
            draft.chunks.pop(victim, None)
            self._admission.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        """With borrowed pages, then of the class with the smallest share, then the newest of who got most."""
        return min(reversed(self.running), key=self._room.standing)

    def _append(self, sequence: Sequence, event: TokenEvent) -> TokenEvent:
        assert event.token_id is not None, "a sampled event carries its token"
        sequence.token_ids.append(event.token_id)
        if sequence.num_output_tokens == 1:
            event = msgspec.structs.replace(event, cached_tokens=sequence.num_cached)
        if event.finish_reason is None and len(sequence.token_ids) == sequence.max_len:
            event = msgspec.structs.replace(event, finish_reason="length")
        if event.finish_reason is not None:
            self._admission.remember(sequence)
            self._end(sequence)
        return event

    def _end(self, sequence: Sequence) -> None:
        if sequence.pages:
            self._admission.leave(sequence)
        else:
            self.queue.remove(sequence)
            self.memory.swap.forget(sequence)
        self._deadlines.let_go(sequence)
        if sequence.digest is not None:
            self.memory.unwant(sequence.digest)
        del self._sequences[sequence.id]

    def _fail(self, sequence: Sequence) -> None:
        assert sequence.digest is not None, "only an adapter can fail"
        message = f"The adapter could not be loaded: {self.residency.failure(sequence.digest)}"
        self._refuse(sequence, EngineFault("adapter_failed", message))

    def _refuse(self, sequence: Sequence, fault: EngineFault) -> None:
        self._end(sequence)
        self._news.append(_ending(sequence.id, "error", fault))

    def _refuse_for_ever(self, sequence: Sequence, reason: str) -> None:
        self._refuse(sequence, EngineFault("context_length_exceeded", reason))


def _ending(request_id: str, finish_reason: str, fault: EngineFault | None = None) -> TokenEvent:
    return TokenEvent(request_id=request_id, finish_reason=finish_reason, fault=fault)
