"""What runs next: admission under one budget, decode first, prefill in chunks, preemption when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from loramux.engine.budget import Budget
from loramux.engine.messages import EngineFault, TokenEvent
from loramux.engine.pages import PagePool, PageUse
from loramux.engine.queue import RequestQueue
from loramux.engine.request import Request
from loramux.engine.residency import AdapterState, Residency
from loramux.engine.sequence import Sequence
from loramux.engine.step import BASE_SLOT, Chunk, Step


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The familiar knobs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler:
    """Plans steps and commits their results. Pure Python: a simulator can run it with a clock and store of its own."""

    def __init__(
        self, limits: SchedulerLimits, budget: Budget, pool: PagePool, residency: Residency, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.budget = budget
        self.pool = pool
        self.residency = residency
        self.queue = RequestQueue()
        self.running: list[Sequence] = []
        """In order of admission."""
        self.num_preemptions = 0
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._news: list[TokenEvent] = []

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is still to be told."""
        return not (self._sequences or self._news)

    @property
    def stalled(self) -> bool:
        """Whether nothing can run before an adapter has arrived."""
        return not self._news and not any(self._ready(sequence) for sequence in self.running)

    # requests come and go

    def add(self, request: Request) -> None:
        """Queue a request, or answer it at once when it could never run."""
        if fault := self._impossible(request):
            self._news.append(_ending(request.id, "error", fault))
            return
        sequence = Sequence(request, self._clock())
        self._sequences[request.id] = sequence
        if request.adapter is not None:
            self.residency.want(request.adapter)
        self.queue.push(sequence)

    def cancel(self, request_id: str) -> None:
        """Free a request's pages; unknown ids have ended already."""
        if sequence := self._sequences.get(request_id):
            self._end(sequence)
            self._news.append(_ending(request_id, "cancelled"))

    def take_news(self) -> list[TokenEvent]:
        """Endings that no step brought about: refusals, cancellations, failed adapters."""
        news, self._news = self._news, []
        return news

    # one step

    def plan(self) -> Step:
        """Admit what fits, then give every ready decoding sequence a row and the rest of the budget to prefill."""
        self.residency.poll()
        self._fail_those_without_adapter()
        self._admit()
        chunks: dict[Sequence, Chunk] = {}
        left = self.limits.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            length = min(sequence.num_uncomputed, left)
            if length and self._runs_still(sequence) and self._reserve(sequence, length, chunks):
                chunks[sequence] = self._chunk(sequence, length)
                left -= length
        return Step.lay_out(chunks.values())

    def commit(self, step: Step, sampled: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Write a step's result into its sequences; returns what their clients should hear.

        `sampled` holds one event for each of `step.sampling`, with the token and, where it ends the answer, `stop`.
        """
        sampling = step.sampling
        for chunk in step.chunks:
            chunk.sequence.num_computed = chunk.end
            self.queue.charge(chunk.sequence, chunk.length)
        return [self._append(chunk.sequence, event) for chunk, event in zip(sampling, sampled, strict=True)]

    # admission

    def _impossible(self, request: Request) -> EngineFault | None:
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        limit = min(self.limits.max_model_len, self.budget.num_pages * self.budget.block_size)
        if total <= limit:
            return None
        return EngineFault(
            "context_length_exceeded",
            f"The prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.sampling.max_tokens}: "
            f"together {total}, more than the {limit} that this server can hold. Shorten the prompt or max_tokens.",
        )

    def _admit(self) -> None:
        """Admit in queue order. A head that does not fit holds its place; one that waits for a file is passed."""
        for sequence in self.queue:
            if len(self.running) >= self.limits.max_num_seqs:
                return
            digest = sequence.digest
            if digest is not None and self.residency.state(digest) is AdapterState.INSPECTING:
                continue
            if not self.budget.admits(sequence, self.running, self.residency.pinned_pages(digest)):
                if not self._fits_alone(sequence):
                    self._refuse_for_ever(sequence)
                    continue
                return
            if digest is not None and not self._pin(digest):
                return
            self.queue.remove(sequence)
            self.running.append(sequence)

    def _pin(self, digest: str) -> bool:
        """Pin the candidate's adapter; False when its pages are not free at this moment."""
        missing = self.residency.size(digest) if self.residency.state(digest) is AdapterState.KNOWN else 0
        if not self.residency.make_room(missing):
            return False
        self.residency.pin(digest)
        return True

    def _fits_alone(self, sequence: Sequence) -> bool:
        total = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
        return self.budget.fits_alone(total, self.residency.size(sequence.digest) if sequence.digest else 0)

    def _refuse_for_ever(self, sequence: Sequence) -> None:
        assert sequence.digest is not None, "requests for the base were measured when they came"
        message = (
            f"The request needs {self.budget.pages_for(sequence.num_prompt_tokens + sequence.max_tokens_left)} pages "
            f"of KV and its adapter {self.residency.size(sequence.digest)}: more than the pool's "
            f"{self.budget.num_pages}. Lower max_tokens, or ask the operator for a larger engine.pool_bytes."
        )
        self._end(sequence)
        self._news.append(_ending(sequence.id, "error", EngineFault("context_length_exceeded", message)))

    def _fail_those_without_adapter(self) -> None:
        for sequence in [*self.queue, *self.running]:
            if sequence.digest and self.residency.state(sequence.digest) is AdapterState.FAILED:
                fault = EngineFault(
                    "adapter_failed", f"The adapter could not be loaded: {self.residency.failure(sequence.digest)}"
                )
                self._end(sequence)
                self._news.append(_ending(sequence.id, "error", fault))

    # memory

    def _ready(self, sequence: Sequence) -> bool:
        return sequence.digest is None or self.residency.state(sequence.digest) is AdapterState.READY

    def _runs_still(self, sequence: Sequence) -> bool:
        """Ready, and not preempted by a sequence planned before it."""
        return self._ready(sequence) and sequence in self.running

    def _reserve(self, sequence: Sequence, length: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Take pages for `length` more tokens, preempting the newest if need be; False if that was `sequence`."""
        missing = self.budget.pages_for(sequence.num_computed + length) - len(sequence.pages)
        while missing > 0 and not self.residency.make_room(missing):
            newest = self.running[-1]
            self._preempt(newest)
            chunks.pop(newest, None)
            if newest is sequence:
                return False
        if missing > 0:
            sequence.pages += self.pool.take(missing, PageUse.KV)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its KV is recomputed when it runs again."""
        self._leave_the_pool(sequence)
        self.queue.push_front(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _leave_the_pool(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.forget_kv(), PageUse.KV)
        if sequence.digest is not None:
            self.residency.unpin(sequence.digest)

    # results

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        slot = BASE_SLOT if sequence.digest is None else self.residency.slot(sequence.digest)
        assert slot is not None, "a ready adapter has a slot"
        return Chunk(sequence, sequence.num_computed, length, slot)

    def _append(self, sequence: Sequence, event: TokenEvent) -> TokenEvent:
        assert event.token_id is not None, "a sampled event carries its token"
        sequence.token_ids.append(event.token_id)
        if event.finish_reason is None and sequence.max_tokens_left == 0:
            event = msgspec.structs.replace(event, finish_reason="length")
        if event.finish_reason is not None:
            self._end(sequence)
        return event

    def _end(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self._leave_the_pool(sequence)
        else:
            self.queue.remove(sequence)
        if sequence.digest is not None:
            self.residency.unwant(sequence.digest)
        del self._sequences[sequence.id]


def _ending(request_id: str, finish_reason: str, fault: EngineFault | None = None) -> TokenEvent:
    return TokenEvent(request_id=request_id, finish_reason=finish_reason, fault=fault)
