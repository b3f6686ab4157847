"""First-token deadlines: they are predicted when a request arrives, and watched while it waits. A request that would
miss its deadline is refused early.

A deadline belongs to a *request group*: the choices of one API request. The deadline is decided for the group before
any choice has begun. The group is refused on arrival if the prediction misses the deadline, and ended if the deadline
passes while all choices wait. After a choice has begun, the deadline ends no choice: a client that reads one choice
never sees its request fail.

The prediction (`predict_ttft`) is the longest of three waits: until rows and pages come free, until the earlier prompts
are computed, and until the adapter is loaded. The prediction does not include later requests or answers that end early.
`WaitBias` corrects it with the waits of the flow's earlier requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Items
from itertools import accumulate

from loramux.engine.messages import EngineFault, Request
from loramux.engine.scheduling.admission import CapacityPolicy
from loramux.engine.scheduling.estimates import QueuedWork, tokens_with_attention
from loramux.engine.scheduling.sequence import Sequence
from loramux.engine.scheduling.state import SchedulerState


class Deadlines:
    """Decides deadlines; the decisions are kept in the groups."""

    def __init__(self, state: SchedulerState, capacity: CapacityPolicy) -> None:
        self._state = state
        self._capacity = capacity

    @property
    def next(self) -> float | None:
        """The next deadline of a waiting group, by the scheduler's clock."""
        group = self._state.deadlines.first()
        return None if group is None else group.start_by

    def check(self, sequence: Sequence) -> EngineFault | None:
        """Decide the deadline of a `sequence` that has just arrived; return the fault if its whole group is refused."""
        state, group = self._state, self._state.group_of(sequence.request)
        sequence.group = group
        if sequence.request.group_started:
            self._state.start_group(group)
        if group.is_started or group.refusal is not None or group.start_by is not None:
            return group.refusal  # decided with the first of the group
        if (deadline := state.policy.deadline_ms(sequence.request)) is None:
            return None
        sequence.predicted_ttft_s = self.predict_ttft(sequence)
        wait = 1000.0 * sequence.predicted_ttft_s * sequence.flow.wait_bias.factor
        if wait <= deadline:
            group.start_by = sequence.arrival + deadline / 1000.0
            state.deadlines.put(group)
            return None
        group.refusal = EngineFault(
            "engine_overloaded",
            f"The server is over capacity: the first token is expected in {wait:.0f} ms, that is {wait - deadline:.0f} "
            f"ms after the request's deadline. Retry later, or allow more time.",
            retry_after=max(1, math.ceil((wait - deadline) / 1000.0)),
        )
        state.close_group(group)
        return group.refusal

    def miss(self, request: Request) -> EngineFault | None:
        """Refuse the whole group of `request`, whose deadline passed before the request was added. Return None if a
        choice of the group has begun.
        """
        group = self._state.group_of(request)
        if request.group_started or group.is_started:
            return None
        if group.refusal is None:
            group.refusal = _deadline_exceeded()
            if group.waiting:  # these are ended by the next plan
                group.start_by = -math.inf
                self._state.deadlines.put(group)
            else:
                self._state.close_group(group)
        return group.refusal

    def note_start(self, sequence: Sequence, now: float) -> None:
        """Note that the first step of `sequence` is planned."""
        if sequence.group is not None and not sequence.group.is_started:
            self._state.start_group(sequence.group)
        self._learn(sequence, now)

    def expired(self, now: float) -> list[tuple[Sequence, EngineFault]]:
        """Return the sequences of groups whose deadline has passed before any choice began, each with its fault."""
        expired: list[tuple[Sequence, EngineFault]] = []
        while (group := self._state.deadlines.first()) is not None and group.start_by is not None:
            if group.start_by > now:
                break
            self._state.deadlines.drop(group)
            group.refusal = fault = _deadline_exceeded()
            for sequence in sorted(group.waiting, key=lambda sequence: sequence.id):
                self._learn(sequence, now)
                expired.append((sequence, fault))
        return expired

    def predict_ttft(self, candidate: Sequence) -> float:
        """Return the seconds until `candidate`, not queued yet, has its first token; 0 before steps were measured.

        The candidate waits for three things: free pages and rows after the requests that are admitted before it, the
        computation of all earlier prompts, and its adapter. The longest of these waits counts.
        """
        state = self._state
        if not state.step_time.is_known:
            return 0.0
        before = state.queue.work_before(candidate.flow)
        seconds = self._seconds(self._steps_to_admission(before, candidate), before, [candidate])
        return max(seconds, state.residency.expected_wait(candidate.digest) if candidate.digest else 0.0)

    def queue_seconds(self) -> float:
        """Return the seconds until all waiting requests have begun and computed their prompts; 0 before steps were
        measured."""
        before = self._state.queue.work
        return self._seconds(self._steps_to_admission(before), before)

    def prompt_work(self, before: QueuedWork, others: Items[Sequence] = ()) -> tuple[float, float]:
        """Return the prompt tokens that the running sequences, `before` and `others` have to compute, as they are and
        with their attention, in tokens without context."""
        prefilling = [*(s for s in self._state.running if s.num_uncomputed > 1), *others]
        tokens = sum(s.num_uncomputed for s in prefilling) + before.prompt
        pairs = sum(s.uncomputed_pairs for s in prefilling) + before.pairs
        return tokens, tokens_with_attention(tokens, pairs, self._state.limits.token_context)

    def _seconds(self, steps_to_admission: float, before: QueuedWork, others: Items[Sequence] = ()) -> float:
        """Return the time of the steps until the work `before` is admitted and every prompt is computed."""
        state = self._state
        decoding = min(len(state.running) + before.requests, state.limits.max_num_seqs)
        tokens, cost = self.prompt_work(before, others)
        chunk = max(1, state.limits.prefill_tokens(math.ceil(decoding)))
        # A step in which no sequence decodes takes as many tokens after any context, but takes longer.
        steps = max(steps_to_admission, (cost if decoding else tokens) / chunk)
        return state.step_time.seconds(math.ceil(steps), steps * decoding + cost)

    def _steps_to_admission(self, before: QueuedWork, candidate: Sequence | None = None) -> float:
        """Return the number of steps until enough pages and rows are free, at one token per step. Sequences that must
        yield free theirs immediately.
        """
        state, budget = self._state, self._state.budget
        yields = self._capacity.must_yield
        left_of = {s: 0 if candidate and yields(s, candidate) else s.likely_left for s in state.running}
        running = sorted(left_of, key=left_of.__getitem__)
        pinned = state.residency.pinned_pages(candidate.digest if candidate else None)
        requests, kv_tokens = before.requests, before.kv_tokens
        if candidate:
            requests, kv_tokens = requests + 1.0, kv_tokens + candidate.likely_len
        rows = len(running) + requests - state.limits.max_num_seqs
        wanted = kv_tokens / budget.block_size + requests * budget.state_pages
        pages = budget.kv_peak(running) + wanted - (budget.num_pages - budget.watermark - pinned)
        left = [left_of[sequence] for sequence in running]
        freed = [budget.pages_for(len(sequence.token_ids) + sequence.likely_left) for sequence in running]
        generation = before.output / max(before.requests, 1.0)
        return max(_steps_until(rows, [1] * len(left), left, generation), _steps_until(pages, freed, left, generation))

    def _learn(self, sequence: Sequence, now: float) -> None:
        if sequence.predicted_ttft_s is not None:
            sequence.flow.wait_bias.add(now - sequence.arrival, sequence.predicted_ttft_s)


def _deadline_exceeded() -> EngineFault:
    return EngineFault(
        "deadline_exceeded",
        "The request's deadline passed while it waited, and nothing of it was run. Retry later, or allow more time.",
        retry_after=1,
    )


def _steps_until(needed: float, freed: list[int], left: list[int], generation: float) -> float:
    """Return the number of steps until ending sequences have freed `needed`.

    The i-th sequence to end frees `freed[i]` after `left[i]` steps. The sequence that takes its place is assumed to
    have the same size and to take `generation` steps. So the same amount becomes free again in every round.
    """
    if needed <= 0.0 or not freed:
        return 0.0
    rounds = math.ceil(needed / sum(freed)) - 1
    last = bisect_left(list(accumulate(freed)), needed - rounds * sum(freed))
    return rounds * generation + left[min(last, len(left) - 1)]
