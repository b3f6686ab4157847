"""The scheduler: decode first, prefill in chunks, admission under one budget, preemption when memory runs out.

`plan` chooses the tokens of the next step, and `commit` writes the step's result into its sequences. The package's
docstring lists the parts of a plan in their order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter

import msgspec

from loramux.engine.memory.memory import HostKv, KvSwap, Memory
from loramux.engine.memory.pages import PageCosts, PagePool
from loramux.engine.memory.prefix_cache import PrefixCache
from loramux.engine.memory.residency import AdapterState, Residency
from loramux.engine.messages import EngineFault, Request, TokenEvent
from loramux.engine.scheduling.admission import Admission, CapacityPolicy
from loramux.engine.scheduling.deadlines import Deadlines
from loramux.engine.scheduling.estimates import StepTimeModel, attention_pairs, tokens_with_attention
from loramux.engine.scheduling.fairness import Flow
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.queue import LOAD_SLOT
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence, Step, StepBuilder
from loramux.engine.scheduling.speculation import Speculation
from loramux.engine.scheduling.state import SchedulerState

MIN_BACKGROUND_TOKENS = 16
"""Minimum number of prompt tokens of class batch in a step, even if the step is slow. With this minimum, a prompt of
1,000 tokens takes 63 steps.
"""
_FLOW, _LENGTH = attrgetter("flow"), attrgetter("length")


class Scheduler:
    """Plans steps and commits their results. Pure Python: a simulator uses it with another clock and another store."""

    def __init__(
        self,
        limits: SchedulerLimits,
        budget: PageBudget,
        pool: PagePool,
        residency: Residency,
        policy: Policy | None = None,
        host: HostKv | None = None,
    ) -> None:
        """Use the clock and the counters of `residency`. `host` takes the KV of preempted sequences; without it their
        KV is recomputed, and no page of a model with states is cached."""
        policy, step_time, counters = policy or Policy(), StepTimeModel(), residency.counters
        costs = PageCosts(
            step_time.compute_seconds,
            budget.block_size,
            copy_seconds=host.seconds_per_page if host else None,
            assumed=budget.block_size / policy.load_units_per_page,
            state_pages=budget.state_pages,
        )
        enabled = policy.prefix_cache and (host is not None or not budget.state_pages)
        keeps_answers = policy.cache_answers
        cache = PrefixCache(pool, residency, costs, counters, enabled=enabled, keeps_answers=keeps_answers)
        memory = Memory(pool, residency, cache, KvSwap(host, costs, counters))
        self.state = SchedulerState(limits, policy, budget, memory, step_time, residency.clock, counters)
        self.memory, self.queue = memory, self.state.queue
        self.running = self.state.running
        """Sequences that hold memory, in order of admission."""
        self.capacity = CapacityPolicy(self.state)
        self._admission = Admission(self.state, self.capacity)
        self._deadlines = Deadlines(self.state, self.capacity)
        self.speculation = Speculation(self.state)
        self._planned_at, self._running_tokens = 0.0, 0.0
        """Time of the latest plan, and tokens of the running step, with the attention of prompts."""
        self._running_rows = self._running_ahead = 0
        """Tokens of the running step if none is of a prompt, else 0."""
        self._is_in_flight = self._was_in_flight = False
        """True if the latest step had not ended when it was committed, or the one before it when the latest was
        planned."""
        self._earlier_tokens = 0.0
        """Tokens of the step before the latest one."""
        self._settled_at: int | None = 0
        """The queue's `num_changes` after a plan that held nothing and changed nothing; None after any other plan."""

    # questions

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits and no event remains to be reported."""
        return not (self.state.sequences or self.state.events)

    @property
    def next_plan_at(self) -> float:
        """The time of the next plan, by the scheduler's clock.

        -inf: at once. inf: after the next request, cancellation or load.

        The engine waits only after a plan that held nothing and changed nothing: without an event the next plan would
        be the same. The wait ends with the next deadline of a waiting group, or the next time-out of a load.
        """
        if self.state.events or self._settled_at != self.queue.num_changes:
            return -math.inf
        deadline, timeout = self._deadlines.next, self.memory.residency.next_timeout
        return timeout if deadline is None else min(deadline, timeout)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute, of sequences that wait or run."""
        return round(self._deadlines.prompt_work(self.queue.work)[0])

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second next to the sequences that run now; 0 before steps were measured.

        After long contexts they are fewer: the tokens have the mean attention of `num_queued_tokens`.
        """
        rows = len(self.running)
        prompt = max(1, self.state.limits.prefill_tokens(rows))
        seconds = self.state.step_time.seconds(1, rows + prompt)
        tokens, cost = self._deadlines.prompt_work(self.queue.work)
        share = tokens / cost if tokens >= 1.0 else 1.0  # the sums of no work may have rounding errors
        return prompt / seconds * share if seconds else 0.0

    @property
    def page_seconds(self) -> float:
        """Seconds that one more page to read adds to a step; 0 before steps were measured."""
        pages = self.memory.counts
        return self.state.step_time.seconds(1, 0) / (self.state.policy.weight_pages + pages.kv + pages.adapters)

    @property
    def weights_seconds(self) -> float:
        """Seconds of a step in which the weights of the base are read; 0 before steps were measured."""
        weight_pages = self.state.policy.weight_pages
        return weight_pages * self.page_seconds if math.isfinite(weight_pages) else 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until every sequence that waits now has begun; 0 before steps were measured."""
        return self._deadlines.queue_seconds()

    def is_open(self, sequence: Sequence) -> bool:
        """Return whether `sequence` has not ended."""
        return self.state.sequences.get(sequence.id) is sequence

    def open_part_of(self, step: Step) -> Step:
        """Return `step` without the chunks of sequences that have ended."""
        if [*map(self.state.sequences.get, step.request_ids)] == step.sequences:
            return step
        return Step(tuple(chunk for chunk in step.chunks if self.is_open(chunk.sequence)), step.is_plain)

    # requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; refuse it immediately if it could never run or would miss its deadline."""
        state = self.state
        if reason := self.capacity.too_long(request):
            self.refuse(request, EngineFault("context_length_exceeded", reason))
            return
        sequence = Sequence(request, state.clock(), state.queue.flow_of(request))
        state.estimate(sequence)
        if fault := self._deadlines.check(sequence):
            state.counters.refused_over_capacity += 1
            self.refuse(request, fault)
            return
        state.add(sequence)
        if sequence.digest and state.residency.state(sequence.digest) is AdapterState.FAILED:
            self._reject_failed(sequence)

    def refuse(self, request: Request, fault: EngineFault | None = None) -> None:
        """Report the end of a request that was not added: refused for `fault`, or cancelled."""
        self.state.report_end(request.id, "error" if fault else "cancelled", fault)

    def miss_deadline(self, request: Request) -> EngineFault | None:
        """Return the fault of a request that was not added before its deadline passed; None if a choice of its group
        has begun, so that the deadline does not matter any more.
        """
        fault = self._deadlines.miss(request)
        self.state.counters.missed_deadlines += fault is not None
        return fault

    def cancel(self, request_id: str) -> None:
        """End a request and free its pages; an unknown id belongs to a request that has already ended."""
        if sequence := self.state.sequences.get(request_id):
            self.state.finish(sequence)
            self.state.report_end(request_id, "cancelled")

    def drain_events(self) -> list[TokenEvent]:
        """Return the events of requests that ended outside a step: refusals, cancellations, failed adapters."""
        events, self.state.events = self.state.events, []
        return events

    def take_starts(self) -> list[TokenEvent]:
        """Return the events of loads that began with the latest plan. Only requests with `report_start` get them."""
        starts, self.state.starts = self.state.starts, []
        return starts

    # a step

    def plan(self) -> Step:
        """Give a row to every decoding sequence, and the remaining tokens to prompts, both old and newly admitted.

        Chunked prefill as in Sarathi-Serve (OSDI 2024): a prompt never stalls the decoding rows of the same step.
        """
        state, changes = self.state, self.queue.num_changes
        now = state.clock()
        self._observe_step(now)
        self.process_loads()
        self._process_deadlines(now)
        self.queue.update_ceilings()
        priority_flow = self._admission.preempt_for_next()
        limits = state.limits
        builder = StepBuilder(
            limits.max_num_batched_tokens, limits.max_num_seqs, limits.whole_prompts, limits.whole_tokens > 0
        )
        if self.memory.caches_states:
            builder.page_tokens = state.budget.block_size
        deferred = self._schedule_running(builder, now)
        self._admission.admit(builder, priority_flow)
        self._schedule_deferred(builder, deferred)
        self.speculation.add_drafts(builder)
        self._note_starts(builder, now)
        self._settled_at = changes if not builder.chunks and changes == self.queue.num_changes else None
        return builder.build()

    def commit(self, step: Step, sampled: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Write a step's result into its sequences; return the events for their clients.

        `sampled` holds one event for each of `step.sampling`, with the token and, if the token ends the answer, `stop`.
        For each accepted draft, another event follows. A request whose prompt is pooled may have an event, too.
        """
        events = [self._append(event) for event in sampled]
        self._commit_chunks(step, events, in_flight=False)
        return events

    def commit_ahead(self, step: Step) -> dict[Sequence, TokenEvent]:
        """Commit a step that has not ended, with PENDING in the place of its tokens.

        Return facts that the step's events have to tell in addition to their tokens: those of a first token, and the
        end by length. `fill_pending` puts the tokens in their places.
        """
        facts: dict[Sequence, TokenEvent] = {}
        for chunk in step.sampling:
            sequence = chunk.sequence
            token_ids = sequence.token_ids
            token_ids.append(PENDING)
            held = len(token_ids)
            if held == sequence.max_len or held == sequence.num_prompt_tokens + 1:
                facts[sequence] = self._with_facts(TokenEvent(request_id=sequence.id, token_id=PENDING), sequence)
        self._commit_chunks(step, facts.values(), in_flight=True)
        return facts

    def _commit_chunks(self, step: Step, events: Iterable[TokenEvent], *, in_flight: bool) -> None:
        """Take note of the KV that a step has written, after its tokens were appended; end the sequences whose `events`
        say so. `in_flight`: the step has not ended.
        """
        if step.is_plain:
            self._note_plain_rows(step)
            tokens, drafted, ahead = len(step.chunks), 0, 0
        else:
            tokens, drafted, ahead = self._note_chunks(step)
        self.memory.copy_states()
        self.state.num_commits += 1
        for event in [event for event in events if event.finish_reason is not None]:
            self._end(event)
        # While sequences run, the next plan follows at once: the time between two plans is the time of the step.
        if self.running:
            holds_prompt = tokens > len(step.chunks) + drafted
            self._running_tokens, self._running_rows = tokens, 0 if holds_prompt else tokens
            self._running_ahead = 0 if self.speculation.head is None else ahead
            if holds_prompt:
                pairs = sum(attention_pairs(c.start, c.length) for c in step.chunks if c.length > len(c.drafts) + 1)
                self._running_tokens = tokens_with_attention(tokens, pairs, self.state.limits.token_context)
        self._is_in_flight = in_flight

    def _note_plain_rows(self, step: Step) -> None:
        """Note the computed token of each row of a step whose rows are all plain. `_note_chunks` serves other steps."""
        size, caches = self.state.budget.block_size, self.memory.cache.is_enabled
        for chunk in step.chunks:
            sequence, computed = chunk.sequence, chunk.start + 1
            sequence.num_computed = computed
            if caches and computed // size > len(sequence.prefix_pages):
                self._publish(sequence)

    def _note_chunks(self, step: Step) -> tuple[int, int, int]:
        """Note the computed tokens of each chunk. Return the step's tokens, those of them that are drafts or repeat
        accepted ones, and the most drafts of a chunk.
        """
        size, caches = self.state.budget.block_size, self.memory.cache.is_enabled
        has_states = self.state.budget.state_pages > 0
        tokens = drafted = ahead = 0
        for chunk in step.chunks:
            sequence, computed = chunk.sequence, chunk.start + chunk.length
            tokens += chunk.length
            drafted += len(chunk.drafts) + sequence.num_repeated
            sequence.num_repeated = 0
            if chunk.drafts:
                accepted = self.speculation.note_verified(chunk)
                ahead = max(ahead, len(chunk.drafts))
                # The plan charged one token. Only now it is known how many drafts were accepted.
                self.queue.charge(sequence.flow, 2.0 * accepted)
                self.state.trim(sequence)
                # The KV of rejected drafts is overwritten. States are those before all drafts.
                sequence.num_repeated = accepted if has_states else 0
                computed -= len(chunk.drafts) - accepted + sequence.num_repeated
            sequence.num_computed = computed
            if sequence.num_scored < sequence.num_prompt_tokens - 1:
                sequence.num_scored = sequence.to_score(chunk.start, computed)[1]
            if caches and computed // size > len(sequence.prefix_pages):
                self._publish(sequence)
        return tokens, drafted, ahead

    def _publish(self, sequence: Sequence) -> None:
        self.memory.cache.publish(sequence)
        if self.memory.caches_states:
            self.memory.cache_state(sequence)

    def fill_pending(
        self, chunks: Iterable[Chunk], events: Iterable[TokenEvent], facts: Mapping[Sequence, TokenEvent]
    ) -> list[TokenEvent]:
        """Put the tokens that `chunks` sampled in the place of PENDING; return the events for their clients.

        `chunks`: those of a step that `commit_ahead` has committed, which returned `facts`. Some may have ended before
        this, or their clients may have disconnected while the step was in flight: these get no event.
        """
        sequences, told = self.state.sequences, []
        for chunk, event in zip(chunks, events, strict=True):
            sequence = chunk.sequence
            is_open = sequences.get(sequence.id) is sequence
            committed = facts.get(sequence)
            if not (is_open or (committed is not None and committed.finish_reason)):
                continue
            if event.token_id is not None:
                sequence.token_ids[chunk.start + chunk.length] = event.token_id
            if event.finish_reason is not None and is_open:
                self.state.record_length(sequence)
                self.state.finish(sequence)
            told.append(event if committed is None else _joined(committed, event))
        return told

    def end_pooled(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """End requests whose prompts were pooled to their ends in a step that was committed before.

        Return the events for their clients, without those of requests that have ended since."""
        alive = [self._append(event) for event in events if event.request_id in self.state.sequences]
        for event in alive:
            if event.finish_reason is not None:
                self._end(event)
        return alive

    # the parts of a plan

    def _observe_step(self, now: float) -> None:
        """Count the time of the step that ran between the latest plan and this one.

        This is one step's time, also if every step is planned while the one before it is in flight. A step that was
        planned ahead and has ended now had the time of the step before it, too. A step that was launched alone and is
        in flight has not ended.
        """
        tokens, rows, seconds = self._running_tokens, self._running_rows, now - self._planned_at
        if self._was_in_flight and not self._is_in_flight:
            seconds -= self.state.step_time.seconds(1, self._earlier_tokens)
        if tokens and seconds >= 0.0 and (self._was_in_flight or not self._is_in_flight):
            self.state.step_time.observe(tokens, seconds)
            if rows:
                self.speculation.times.observe(rows, seconds, self._running_ahead)
        self._was_in_flight, self._is_in_flight = self._is_in_flight, False
        self._earlier_tokens, self._planned_at = tokens, now
        self._running_tokens = self._running_rows = 0

    def process_loads(self) -> None:
        """Take over the inspections and loads that have ended. Reject the requests of revisions that failed, and let
        flows that waited for a load take part again.
        """
        state = self.state
        for digest in state.residency.poll():
            if state.residency.has_failed(digest):
                state.drop_failed_claim(digest)
                for sequence in state.queue.waiting_for(digest):
                    self._reject_failed(sequence)
            state.queue.unpark(digest)
            state.queue.unpark(LOAD_SLOT)

    def _process_deadlines(self, now: float) -> None:
        for sequence, fault in self._deadlines.expired(now):
            self.state.counters.missed_deadlines += 1
            self.state.reject(sequence, fault)

    def _limit_prompts(self, builder: StepBuilder, now: float) -> None:
        """Limit the prompt tokens of a step that holds its decoding rows, and within this limit the prompt tokens of
        the background class.
        """
        limits = self.state.limits
        builder.tokens_left = limits.prefill_tokens(sum(map(_LENGTH, builder.chunks.values())))
        if builder.chunks:
            builder.token_context = limits.token_context
        if found := self.queue.background(now, is_blocked=self._admission.is_blocked):
            builder.background, share = found
            policy = self.state.policy
            brief = self.state.step_time.tokens_in(policy.background_step_share)
            least = min(policy.background_prefill_tokens, max(MIN_BACKGROUND_TOKENS, brief))
            builder.background_left = max(round(least), math.ceil(share * builder.tokens_left))
            builder.background_is_last = not share

    def _schedule_running(self, builder: StepBuilder, now: float) -> list[Sequence]:
        """Give rows to the sequences that were admitted earlier, and charge their flows.

        Return the sequences whose prompts come after the admission. The rows of these sequences and the background's
        tokens stay reserved. Attributes are read instead of properties, and nothing is called for a plain row, because
        this is the part of a plan that grows with the rows.
        """
        size, state_pages = self.state.budget.block_size, self.state.budget.state_pages
        chunks, left = builder.chunks, builder.tokens_left
        plain: list[Sequence] = []
        others: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._rows():
            computed, held = sequence.num_computed, len(sequence.token_ids)
            rows = held - computed
            if rows != 1 and not (sequence.decodes and rows <= left and rows == sequence.num_next):
                prefilling.append(sequence)
            elif not (left and (pages := len(sequence.pages))):
                continue  # no token is left, or the sequence was preempted for an earlier sequence
            elif held <= (pages - state_pages) * size or self._extend(sequence, held, builder):
                left -= rows
                # A plain row costs two units. Another row may cost a prompt token, or the load of its adapter.
                if (
                    rows == 1
                    and sequence.num_prompt_tokens <= computed >= sequence.num_ever_computed
                    and (not sequence.load_units)
                ):
                    slot = sequence.slot if sequence.activation is None else sequence.slot_at(computed)
                    chunks[sequence] = Chunk(sequence, computed, 1, slot)
                    plain.append(sequence)
                else:
                    builder.add_decoding(sequence, computed, rows)
                    others.append(sequence)
        builder.rows_left -= len(plain)
        self._limit_prompts(builder, now)
        deferred = []
        if builder.background_is_last:
            deferred = [s for s in prefilling if s.flow.group is builder.background]
            prefilling = [s for s in prefilling if s.flow.group is not builder.background]
        for sequence in prefilling:
            length = builder.room_for(sequence)
            if length and sequence.pages and self._extend(sequence, sequence.num_computed + length, builder):
                builder.add(sequence, length)
                others.append(sequence)
        # `chunks` are without sequences that were preempted for other sequences.
        units: defaultdict[Flow, float] = defaultdict(float)
        for flow, rows in Counter(map(_FLOW, filter(chunks.__contains__, plain))).items():
            units[flow] = 2.0 * rows
        for sequence in others:
            if chunk := chunks.get(sequence):
                units[sequence.flow] += sequence.take_cost(chunk.start, chunk.end)
        self.queue.charge_all(units)
        builder.keep_for(deferred)
        return deferred

    def _schedule_deferred(self, builder: StepBuilder, deferred: list[Sequence]) -> None:
        """Give the tokens that are left to running prompts of the background.

        The step's other rows are not preempted for these prompts, because they are already charged. Only if the step
        would otherwise be empty, pages are taken by preemption as for any other sequence.
        """
        builder.release_kept()
        for sequence in deferred:
            length = builder.room_for(sequence)
            if not (length and builder.rows_left and sequence.pages) or sequence in builder.chunks:
                continue  # no token is left, or it was preempted for an earlier sequence
            end = sequence.num_computed + length
            if self.state.extend(sequence, end) or (not builder.chunks and self._extend(sequence, end, builder)):
                self.queue.charge(sequence.flow, sequence.take_cost(sequence.num_computed, end))
                builder.add(sequence, length)

    def _rows(self) -> list[Sequence]:
        """Return the running sequences, without those that are suspended or exceed the number of rows."""
        # No counter exceeds the peak: in most steps no flow can be suspended, and rows need no check.
        if any(group.tenants.peak > group.ceiling for group in self.queue.groups):
            rows = [s for s in self.running if s.flow.served <= s.flow.group.ceiling]
        else:
            rows = [*self.running]
        if len(rows) > self.state.limits.max_num_seqs:
            # The sequences of the most-served classes and tenants sit out.
            rows.sort(key=lambda s: (s.flow.group.served, s.flow.served))
            del rows[self.state.limits.max_num_seqs :]
        return rows

    def _extend(self, sequence: Sequence, num_tokens: int, builder: StepBuilder) -> bool:
        """Take pages for `num_tokens` tokens, preempting if needed; return False if `sequence` itself was preempted."""
        while not self.state.extend(sequence, num_tokens):
            victim = self.capacity.victim()
            builder.chunks.pop(victim, None)
            self.state.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _note_starts(self, builder: StepBuilder, now: float) -> None:
        for sequence in builder.joined:
            if sequence.began_at is None:
                sequence.began_at = now
                if sequence.digest is not None:
                    sequence.note_load(*self.state.residency.load_times(sequence.digest))
                self.state.counters.queue_seconds.observe(now - sequence.arrival)
                self._deadlines.note_start(sequence, now)

    # ends

    def _append(self, event: TokenEvent) -> TokenEvent:
        sequence, token_id = self.state.sequences[event.request_id], event.token_id
        if token_id is None:
            if event.pooled is not None:
                return self._with_start(event, sequence)
            # A fault: the logits had no token to choose.
            assert event.finish_reason is not None, "a sampled event carries its token or ends the answer"
            return event
        token_ids = sequence.token_ids
        token_ids.append(token_id)
        held = len(token_ids)
        if held == sequence.max_len or held == sequence.num_prompt_tokens + 1:
            return self._with_facts(event, sequence)
        return event

    def _with_facts(self, event: TokenEvent, sequence: Sequence) -> TokenEvent:
        """Return the event of a token, which is appended, with the facts of a first token and the end by length."""
        held = len(sequence.token_ids)
        if held == sequence.num_prompt_tokens + 1:
            event = self._with_start(event, sequence)
        if held == sequence.max_len and event.finish_reason is None:
            event = msgspec.structs.replace(event, finish_reason="length")
        return event

    def _with_start(self, event: TokenEvent, sequence: Sequence) -> TokenEvent:
        """Return a request's first event, with the facts before it: cached tokens, wait and load."""
        waited = (sequence.began_at or sequence.arrival) - sequence.arrival
        return msgspec.structs.replace(event, cached_tokens=sequence.num_cached, waited_s=waited, load=sequence.load)

    def _end(self, event: TokenEvent) -> None:
        sequence = self.state.sequences[event.request_id]
        if event.token_id is not None:
            self.state.record_length(sequence)
        self.state.finish(sequence)

    def _reject_failed(self, sequence: Sequence) -> None:
        assert sequence.digest is not None, "only an adapter can fail"
        message = f"The adapter could not be loaded: {self.state.residency.failure(sequence.digest)}"
        self.state.reject(sequence, EngineFault("adapter_failed", message))


def _joined(committed: TokenEvent, event: TokenEvent) -> TokenEvent:
    """Return the `event` of a token with the facts of its commit: those of a first token, and the end by length."""
    return msgspec.structs.replace(
        event,
        cached_tokens=committed.cached_tokens,
        waited_s=committed.waited_s,
        load=committed.load,
        finish_reason=event.finish_reason or committed.finish_reason,
    )
