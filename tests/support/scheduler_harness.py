"""A scheduler over a small pool, and a model that always answers the same token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch

from loramux.engine.execution.runner import PackedStep, pack
from loramux.engine.execution.step_buffers import BlockTables
from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.prefix_digests import prefix_digests
from loramux.engine.memory.residency import Inspected, Residency, ResidencyPolicy, StoreJob
from loramux.engine.messages import AdapterRef, EngineFault, Request, SamplingParams, ServiceClass, TokenEvent
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.sequence import BASE_SLOT, Chunk, Sequence, Step
from loramux_kernels.staged_memory import StagedMemory

INVOCATION = (8, 8, 7)


def decoding(sequences: list[Sequence]) -> list[Chunk]:
    """A chunk for each of `sequences`, of its last token."""
    return [Chunk(sequence, len(sequence.token_ids) - 1, 1) for sequence in sequences]


def answer(step: Step, choose: Callable[[Sequence, list[int]], int]) -> list[TokenEvent]:
    """Return a step's events if `choose` gives the token after a sequence's tokens. Leading drafts that equal these
    tokens are accepted."""
    events = []
    for chunk in step.sampling:
        token_ids = list(chunk.sequence.token_ids)
        for draft in (*chunk.drafts, None):
            token_ids.append(choose(chunk.sequence, token_ids))
            events.append(TokenEvent(request_id=chunk.sequence.id, token_id=token_ids[-1]))
            if token_ids[-1] != draft:
                break
    return events


class ManualStore:
    """Loads end when the test says so."""

    def __init__(self, sizes: dict[str, int], invocations: dict[str, tuple[int, ...]]) -> None:
        """`invocations`: of activated LoRAs."""
        self.sizes = sizes
        self.invocations = invocations
        self.pending: list[tuple[StoreJob[Any], Any]] = []
        self.live: dict[int, list[int]] = {}
        self.forgotten: list[str] = []

    def inspect(self, ref: AdapterRef) -> StoreJob[Inspected]:
        return self._later(Inspected(self.sizes[ref.digest], self.invocations.get(ref.digest)))

    def fill(self, ref: AdapterRef, pages: list[int]) -> StoreJob[int]:
        assert len(pages) == self.sizes[ref.digest]
        slot = next(i for i in range(100) if i not in self.live)
        self.live[slot] = pages
        return self._later(slot)

    def drop(self, slot: int) -> None:
        del self.live[slot]

    def forget(self, digest: str) -> None:
        self.forgotten.append(digest)

    def finish(self, index: int = 0, error: Exception | None = None) -> None:
        future, result = self.pending.pop(index)
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def finish_all(self) -> None:
        while self.pending:
            self.finish()

    def _later(self, result: Any) -> StoreJob[Any]:
        future: StoreJob[Any] = StoreJob()
        self.pending.append((future, result))
        return future


class KvOracle:
    """The meaning of every token of the pool: a row that reads KV or states of another text or identity fails."""

    def __init__(self, block_size: int, store: ManualStore, state_pages: int = 0) -> None:
        self._block_size = block_size
        self._store = store
        self._state_pages = state_pages
        self.held: dict[tuple[int, int], object] = {}

    def run(self, step: Step) -> None:
        """Every row writes its KV, then every row reads all of its context."""
        for pages in self._store.live.values():
            for page in pages:
                self.held.update({(page, offset): "weights" for offset in range(self._block_size)})
        for chunk in step.chunks:
            meant = list(self._meant(chunk))
            self.held.update(meant[chunk.start :])
            self._advance_states(chunk, [meaning for _, meaning in meant])
        for chunk in step.chunks:
            for place, meaning in self._meant(chunk):
                assert self.held[place] == meaning

    def _advance_states(self, chunk: Chunk, meanings: list[object]) -> None:
        """Read the states after the token before the chunk, and write those after its last one that is no draft."""
        for number, page in enumerate(chunk.sequence.pages[: self._state_pages]):
            for offset in range(self._block_size):
                if chunk.start:
                    assert self.held[page, offset] == ("state", number, meanings[chunk.start - 1])
                self.held[page, offset] = ("state", number, meanings[chunk.end - len(chunk.drafts) - 1])

    def _meant(self, chunk: Chunk) -> Iterator[tuple[tuple[int, int], object]]:
        sequence = chunk.sequence
        request = sequence.request
        invocation = self._store.invocations.get(sequence.digest or "")
        activation = last_occurrence(request.prompt_token_ids, invocation) if invocation else None
        of_the_base = (request.tenant, None, request.cache_scope)
        meaning: object = of_the_base if invocation or not sequence.digest else (request.tenant, sequence.digest, "")
        for position, token in enumerate([*sequence.token_ids, *chunk.drafts][: chunk.end]):
            if position == activation:
                meaning = hash((meaning, sequence.digest))
            meaning = hash((meaning, token))
            page = sequence.pages[self._state_pages + position // self._block_size]
            yield (page, position % self._block_size), meaning


class ManualHost:
    """Carries what an oracle's pages mean; by its figures that takes no time."""

    seconds_per_page = 0.0

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.held: dict[tuple[int, int], object] = {}
        self._block_size = block_size
        self._places: dict[tuple[int, int], object] = {}

    def save(self, pages: list[int], places: list[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            for offset in range(self._block_size):
                self._places[place, offset] = self.held.get((page, offset))

    def restore(self, places: list[int], pages: list[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            for offset in range(self._block_size):
                self.held[page, offset] = self._places.pop((place, offset))

    def copy(self, pages: list[int], targets: list[int]) -> None:
        assert not set(pages) & set(targets)
        assert len(set(targets)) == len(targets)
        for page, target in zip(pages, targets, strict=True):
            for offset in range(self._block_size):
                self.held[target, offset] = self.held.get((page, offset))


def last_occurrence(prompt: list[int], words: tuple[int, ...]) -> int | None:
    places = [i for i in range(len(prompt)) if tuple(prompt[i : i + len(words)]) == words]
    return max(places, default=None)


class Harness:
    """A scheduler over a small pool, and a model that always answers token 7."""

    def __init__(
        self,
        num_pages: int = 12,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_tokens: int = 16,
        policy: Policy | None = None,
        pace: tuple[float, float] | None = None,
        max_loading: int = 4,
        host: ManualHost | None = None,
        load_timeout: float = math.inf,
        max_mixed: int = sys.maxsize,
        state_pages: int = 0,
        token_context: float = math.inf,
    ) -> None:
        """`pace`: seconds of a step and of each token in it; a prompt's attention takes what the limits say. Without a
        pace the clock ticks whenever it is read."""
        self.pace = pace
        self.store = ManualStore({"a": 2, "b": 3, "c": 2, "huge": 100, "switched": 2}, {"switched": INVOCATION})
        self.pool = PagePool(num_pages)
        self.time = 0.0
        residency_policy = ResidencyPolicy(max_loading=max_loading, load_timeout=load_timeout)
        self.residency = Residency(self.pool, self.store, self.clock, residency_policy)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs,
                max_tokens,
                max_model_len=1000,
                max_mixed_prefill_tokens=max_mixed,
                token_context=token_context,
            ),
            PageBudget(num_pages, block_size, state_pages),
            self.pool,
            self.residency,
            policy,
            cast(Any, host),
        )
        cpu = torch.device("cpu")
        self.tables = BlockTables(max_num_seqs, num_pages, StagedMemory(1 << 15, cpu), cpu)
        """The tables that a runner on a GPU would keep."""
        remembers = self.scheduler.state.policy.prefix_cache or host
        self.oracle = KvOracle(block_size, self.store, state_pages) if remembers else None
        if host and self.oracle:
            host.held = self.oracle.held
        self._stepped: set[Sequence] = set()
        """Sequences that were in a step."""
        self.finished: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.first_events: dict[str, TokenEvent] = {}
        self.order: list[str] = []
        self.faults: dict[str, EngineFault] = {}
        self.first_token_at: dict[str, float] = {}

    def choose(self, sequence: Sequence, token_ids: list[int]) -> int:
        """Return the token after `token_ids`; a test may replace this function."""
        return 7

    def clock(self) -> float:
        self.time += self.pace is None
        return self.time

    def submit(
        self,
        name: str,
        prompt: int | list[int],
        output: int,
        adapter: str | None = None,
        service_class: ServiceClass = ServiceClass.STANDARD,
        tenant: str = "t",
        weight: float = 1.0,
        deadline_ms: int | None = None,
        scope: str = "",
        group: str = "",
    ) -> None:
        ref = AdapterRef(adapter, f"/{adapter}") if adapter else None
        token_ids = [1] * prompt if isinstance(prompt, int) else prompt
        block_size = self.scheduler.state.budget.block_size
        self.scheduler.add(
            Request(
                id=name,
                tenant=tenant,
                prompt_token_ids=token_ids,
                prefix_digests=prefix_digests(b"", tenant, token_ids, block_size),
                sampling=SamplingParams(max_tokens=output, temperature=0),
                adapter=ref,
                service_class=service_class,
                weight=weight,
                deadline_ms=deadline_ms,
                group_id=group,
                cache_scope=scope,
            )
        )

    def _check_plain(self, step: Step) -> None:
        """Check what the runner and the accounting rely on if a step says that its rows are all plain."""
        if step.is_plain and not step.empty:
            same = Step(step.chunks)
            assert step.sampling == same.sampling == [*step.chunks]
            assert step.pooled == same.pooled == []
            assert all(chunk.length == 1 and not chunk.drafts for chunk in step.chunks)
            assert all(c.start >= max(c.sequence.num_prompt_tokens, c.sequence.num_ever_computed) for c in step.chunks)
            assert self._stepped.issuperset(step.sequences)
            budget = self.scheduler.state.budget
            own, wanted = (pack(one, budget.block_size, budget.state_pages) for one in (step, same))
            for name in {field.name for field in fields(PackedStep)} - {"segments"}:  # made by the same function
                found, expected = getattr(own, name), getattr(wanted, name)
                np.testing.assert_array_equal(found, expected, name)
                assert np.asarray(found).dtype == np.asarray(expected).dtype, name
        self._stepped.update(step.sequences)

    def step(self) -> int:
        step = self.scheduler.plan()
        self._check_plain(step)
        for chunk in step.chunks:
            assert self.scheduler.state.budget.tokens_in(len(chunk.sequence.pages)) >= chunk.end
            assert (chunk.slot == BASE_SLOT) == self._runs_on_the_base(chunk)
        for row, chunk in zip(self.tables.rows_of(step), step.chunks, strict=True):
            pages = list(chunk.sequence.pages)
            assert self.tables.pages[row, : len(pages)].tolist() == pages
        assert sum(chunk.length for chunk in step.chunks) <= self.scheduler.state.limits.max_num_batched_tokens
        assert [slot for slot, _ in step.runs] == sorted({slot for slot, _ in step.runs}, key=lambda s: (s == -1, s))
        if self.pace:
            tokens = sum(chunk.length for chunk in step.chunks)
            pairs = sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in step.chunks if chunk.length > 1)
            self.time += self.pace[0] + self.pace[1] * (tokens + pairs / self.scheduler.state.limits.token_context)
        if self.oracle:
            self.oracle.run(step)
        sampled = answer(step, self.choose)
        for event in self.scheduler.drain_events() + self.scheduler.commit(step, sampled):
            if event.token_id is not None:
                self.first_token_at.setdefault(event.request_id, self.time)
                self.cached.setdefault(event.request_id, event.cached_tokens)
                self.first_events.setdefault(event.request_id, event)
                self.generated[event.request_id] = self.generated.get(event.request_id, 0) + 1
            if event.finish_reason:
                assert event.request_id not in self.finished
                self.finished[event.request_id] = event.finish_reason
                self.order.append(event.request_id)
            if event.fault:
                self.faults[event.request_id] = event.fault
        return len(step.chunks)

    def _runs_on_the_base(self, chunk: Chunk) -> bool:
        if chunk.sequence.digest != "switched":
            return chunk.sequence.digest is None
        activation = last_occurrence(chunk.sequence.request.prompt_token_ids, INVOCATION)
        before = activation is None or chunk.start < activation
        assert not before or activation is None or chunk.end <= activation, "a chunk is of one kind"
        return before

    def run(self, steps: int = 500) -> None:
        for _ in range(steps):
            if self.scheduler.is_idle:
                return
            self.store.finish_all()
            self.step()
        raise AssertionError("the harness did not come to rest")
