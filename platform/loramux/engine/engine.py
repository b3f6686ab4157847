"""The engine: one continuously batched loop, a step at a time, and the two ways to run its steps.

    commands -> scheduler.plan() -> pipeline.advance(step) -> scheduler.commit(...) -> events
                      |                     |
               scheduling/, memory/    execution/: the runner launches the model's kernels

`SyncPipeline` ends a step before the next one is planned. A GPU works independently of the host and should never wait
for it. So `AsyncPipeline` commits a step when it is launched, with PENDING for the tokens that only the device knows.
The next step is planned and launched on that state, and the device fills in its own tokens. Then the host reads the
tokens of the first step and replaces PENDING by them:

    advance(k):   launch k  ->  complete k-1 (wait, fill its PENDING tokens)  ->  sample k  ->  commit k with PENDING

The tokens of step k are chosen when it is launched, unless a constraint needs the tokens of step k-1 first. Step k-1 is
completed before step k is committed, because KV that a commit publishes for reuse must never belong to an unknown
token. A sequence that ended with a token of step k-1 has run one row too many in step k. The result of this row is
dropped and not billed. A step with drafts is completed before it is committed: only its tokens tell how long the
sequences are. vLLM (async scheduling) and SGLang (overlap schedule) hide the host's time in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Protocol

import msgspec
import torch
from llguidance import LLMatcher

from loramux.common.settings.file import Settings
from loramux.engine.execution.constraints import INVALID, Constraints
from loramux.engine.execution.loader import LoadedModel
from loramux.engine.execution.rank_team import RankedBank, RankedHostKv, RankTeam
from loramux.engine.execution.runner import LaunchedStep, Runner
from loramux.engine.execution.vision import Tower
from loramux.engine.memory.host_memory import AdapterSource, AdapterTarget, DiskStore, HostCache, HostPages
from loramux.engine.memory.image_rows import ImageRows, TowerOf
from loramux.engine.memory.memory import AdapterPins, HostKv, PinLimits
from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.ranking import RankedItems
from loramux.engine.memory.residency import AdapterStore, Residency, ResidencyPolicy, StoreJob
from loramux.engine.messages import (
    AdapterRef,
    EngineFault,
    EngineStats,
    ModelFacts,
    Pinned,
    Request,
    StepReport,
    TenantService,
    TokenEvent,
)
from loramux.engine.metrics import Counters
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.sequence import Chunk, Sequence, Step
from loramux.engine.scheduling.speculation import DraftHead
from loramux.engine.statistics import RequestAccounting, ServiceMeter, StepTimeline, count_step, snapshot
from loramux_adapters.plan import PlanLimits
from loramux_adapters.tower import changed_linears

NO_TEXT = "unsupported_task"
STATS_INTERVAL_S = 1.0
"""Seconds between two reports with statistics while the engine is busy."""
SERVICE_INTERVAL_S = 0.25
"""Seconds between two reports with the service of tenants."""
_TOKEN_ID, _CACHED_TOKENS = attrgetter("token_id"), attrgetter("cached_tokens")


@dataclass(eq=False, slots=True)
class _Compiling:
    """A request whose grammar is being compiled."""

    request: Request
    compiled: Future[LLMatcher]
    start_by: float
    """Deadline of the request, by the clock; inf: it has none."""

    def request_at(self, now: float) -> Request:
        """Return the request with the time that is left to its deadline."""
        if math.isinf(self.start_by):
            return self.request
        return msgspec.structs.replace(self.request, deadline_ms=max(0, int(1000 * (self.start_by - now))))


class EngineStore(AdapterStore, Protocol):
    """An adapter store with threads to stop and a cache to report on."""

    @property
    def num_cached(self) -> int:
        """Adapters in the host's memory."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of the adapters in the host's memory."""

    def close(self) -> None:
        """Stop the threads."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine that access a device, files or the clock. A simulation replaces these parts."""

    facts: ModelFacts
    runner: Runner
    store: EngineStore
    host_kv: HostKv | None
    """Store for the KV of preempted sequences, and copies of states; None: both are computed again."""
    weight_bytes: int
    """Bytes of the base model's weights."""
    constraints: Constraints | None = None
    """Compiler of grammars; None: requests with a constraint are refused."""
    tower: Tower | None = None
    """The vision tower; None: no request has images."""
    tower_of: TowerOf | None = None
    """Function that reads an adapter for the tower; None if there is no tower."""
    team: RankTeam | None = None
    """The other ranks of this engine."""
    head: DraftHead | None = None
    """The part of the base that drafts; None: drafts are copies of earlier tokens."""
    clock: Callable[[], float] = time.monotonic
    """Clock in seconds that never goes back."""


def build_engine(loaded: LoadedModel, settings: Settings, wake: Callable[[], None]) -> Engine:
    """Make the engine of a loaded model, with adapters from disk; `Engine` explains `wake`."""
    bank, adapters = loaded.runner.bank, settings.adapters
    limits = PlanLimits(adapters.max_rank, adapters.max_bytes, adapters.max_vocabulary_bytes)
    source = AdapterSource(loaded.base, loaded.weights, limits, bank.pool.dtype)
    host_kv: HostKv | None = None
    if loaded.facts.generates:
        own = HostPages(bank.pool, bank.page_elements, settings.engine.swap_bytes)
        host_kv = own if loaded.team is None else RankedHostKv(own, loaded.team)
    target: AdapterTarget = bank
    if loaded.team is not None and loaded.sharding is not None:
        loaded.team.on_death = wake
        target = RankedBank(bank, loaded.sharding, loaded.team)
    store = DiskStore(target, source, HostCache(adapters.host_bytes, time.monotonic), adapters.max_loading)

    def tower_of(ref: AdapterRef) -> StoreJob[AbstractContextManager[None]]:
        return store.read(ref, partial(changed_linears, loaded.tower_linears))

    parts = EngineParts(
        facts=loaded.facts,
        runner=loaded.runner,
        store=store,
        host_kv=host_kv,
        weight_bytes=loaded.weight_bytes,
        constraints=loaded.constraints,
        tower=loaded.tower,
        tower_of=tower_of,
        team=loaded.team,
        head=loaded.head,
    )
    return Engine(parts, settings, wake)


class Engine:
    """A loaded model, its scheduler and its pool. Not thread-safe: one worker owns it."""

    def __init__(self, parts: EngineParts, settings: Settings, wake: Callable[[], None]) -> None:
        """`wake` is called from other threads when a result that the next step can use is ready."""
        self.facts = parts.facts
        self._clock = parts.clock
        self._runner = parts.runner
        self._constraints = parts.constraints
        self._compiling: dict[str, _Compiling] = {}
        """Requests whose grammar is being compiled, by id."""
        self._compile_deadlines: RankedItems[_Compiling, float] = RankedItems(attrgetter("start_by"))
        """Requests of `_compiling` whose deadline has not passed, the next deadline first."""
        self._wake = wake
        self.announce: Callable[[StepReport], None] = lambda _: None
        """Called during a step with a report that must be sent before the step runs."""
        self._reported: set[str] = set()
        """Requests without a token yet whose `report_start` is set."""
        self._unknown: list[str] = []
        """Requests of `_reported` in a step that runs ahead and has not ended yet."""
        self._store = parts.store
        self._team = parts.team
        self._weight_bytes = parts.weight_bytes
        self._counters = Counters()
        pool, adapters = PagePool(parts.facts.pages_total), settings.adapters
        residency_policy = ResidencyPolicy(max_loading=adapters.max_loading, load_timeout=adapters.load_timeout_s)
        residency = Residency(pool, parts.store, parts.clock, residency_policy, self._counters, wake)
        state_pages = parts.facts.state_pages
        budget = PageBudget(parts.facts.pages_total, parts.facts.block_size, state_pages)
        weight_pages = parts.weight_bytes / parts.runner.bank.page_bytes
        policy = Policy.from_settings(settings, weight_pages, parts.facts.limits.max_draft_tokens)
        policy = replace(
            policy,
            prefix_cache=policy.prefix_cache and parts.facts.generates,
            cache_answers=parts.facts.cache_answers,
        )
        self.scheduler = Scheduler(
            SchedulerLimits.of(
                parts.facts.limits,
                parts.facts.max_model_len,
                on_cpu=not self._runner.runs_ahead,
                whole_prompts=not parts.facts.generates,
                whole_tokens=parts.tower.whole_tokens if parts.tower is not None else 0,
                token_context=parts.facts.token_context or math.inf,
            ),
            budget,
            pool,
            residency,
            policy,
            parts.host_kv,
        )
        self.scheduler.speculation.head = parts.head
        self._images = self._serve_images(parts, settings.engine.image_bytes)
        """Requests that wait for their images, and the rows of images; None: no request has images."""
        max_pinned = int(budget.num_pages * adapters.pinned_pool_share)
        pin_limits = PinLimits(max_pinned, budget.watermark, adapters.pins_per_tenant)
        self._pins = AdapterPins(pin_limits, self.scheduler.memory)
        pipeline = AsyncPipeline if self._runner.runs_ahead else SyncPipeline
        self._pipeline = pipeline(self.scheduler, self._runner)
        self._accounting = RequestAccounting()
        self._meter = ServiceMeter(self.scheduler.queue)
        self._timeline = StepTimeline(self._counters, time.time() - parts.clock())
        self._was_commanded = False
        """True if a command that may change the next step has come since the last step."""
        self._stats_sent_at = float("-inf")
        self._service_sent_at = float("-inf")
        self._stats_version: tuple[int, ...] | None = None
        """Numbers that change with the statistics, at the time when statistics were last sent."""

    def _serve_images(self, parts: EngineParts, max_bytes: int) -> ImageRows[torch.Tensor] | None:
        if (tower := parts.tower) is None:
            return None
        assert parts.tower_of is not None, "adapters may change the tower"
        sequences = self.scheduler.state.sequences

        def has_started(request_id: str) -> bool:
            return request_id not in sequences or sequences[request_id].began_at is not None

        memory = self.scheduler.memory
        rows = ImageRows(
            tower,
            parts.tower_of,
            memory,
            max_bytes,
            self._wake,
            has_started,
            self._note_image,
            self.scheduler.miss_deadline,
        )
        self._runner.image_rows = rows
        return rows

    # the loop

    def step(self) -> StepReport | None:
        """Plan, run and commit one step; return None if nothing ran and there is nothing to report.

        Raises RankDied if another rank of this engine has ended.
        """
        if self._team is not None:
            self._team.ensure_alive()
        self._was_commanded = False
        self.scheduler.process_loads()  # requests with images wait for inspections, too
        self._add_with_images()
        self._add_compiled()
        step = self.scheduler.plan()
        events = self.scheduler.drain_events()
        # Only requests that may have caused the death of an earlier engine are reported: see fleet.group.
        worked_on = self._announce_work(step) if self._reported else []
        self._count_step(step)
        events += self._pipeline.advance(step)
        if worked_on or self._unknown:
            events += self._survivors(worked_on, events)
        return self._report(events, self._pins.advance())

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits and no event remains to be reported."""
        waits = self._compiling or (self._images is not None and not self._images.is_idle)
        return self.scheduler.is_idle and self._pipeline.is_idle and not waits

    @property
    def wait_seconds(self) -> float:
        """Seconds to wait for a command or for `wake` before the next step. 0: do not wait; inf: without a limit."""
        if not self._pipeline.is_idle or self._was_commanded:
            return 0.0
        first = self._compile_deadlines.first()
        deadlines = (
            math.inf if self._images is None else self._images.next_deadline,
            math.inf if first is None else first.start_by,
        )
        return max(0.0, min(self.scheduler.next_plan_at, *deadlines) - self._clock())

    # commands

    def submit(self, request: Request) -> None:
        """Queue a request once its images are computed and its grammar is compiled."""
        self._was_commanded = True
        if request.report_start:
            self._reported.add(request.id)
        if request.pooling is None and not self.facts.generates:
            self.scheduler.refuse(request, EngineFault(NO_TEXT, "The base is an encoder, which generates no text."))
            return
        if not request.images:
            self._compile(request)
            return
        assert self._images is not None, "the serving layer refuses images that the model does not read"
        deadline = self.scheduler.state.policy.deadline_ms(request)
        if fault := self._images.submit(msgspec.structs.replace(request, deadline_ms=deadline)):
            self.scheduler.refuse(request, fault)

    def _compile(self, request: Request) -> None:
        """Queue a request; one with a constraint is queued once its grammar is compiled."""
        if request.constraint is None:
            self.scheduler.add(request)
        elif self._constraints is None:
            message = f"'{request.constraint.field}' is not supported with this model's tokenizer."
            self.scheduler.refuse(request, EngineFault(INVALID, message, field=request.constraint.field))
        else:
            now, deadline = self._clock(), self.scheduler.state.policy.deadline_ms(request)
            start_by = math.inf if deadline is None else now + deadline / 1000.0
            request = msgspec.structs.replace(request, deadline_ms=deadline)
            waiting = self._compiling[request.id] = _Compiling(request, self._constraints.compile(request), start_by)
            if deadline is not None:
                self._compile_deadlines.put(waiting)
            waiting.compiled.add_done_callback(lambda _: self._wake())

    def cancel(self, request_id: str) -> None:
        """End a request immediately; its pages are free for the next step."""
        self._was_commanded = True
        if (waiting := self._compiling.pop(request_id, None)) is not None:
            self._compile_deadlines.drop(waiting)
            self.scheduler.refuse(waiting.request)
        elif self._images is not None and (request := self._images.cancel(request_id)) is not None:
            self.scheduler.refuse(request)
        else:
            self.scheduler.cancel(request_id)

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages once nothing uses it."""
        self._was_commanded = True
        self._pins.retire(digest)
        self.scheduler.memory.retire(digest)
        if self._images is not None:
            self._images.retire(digest)

    def pin(self, ref: AdapterRef, owner: str) -> None:
        """Keep a revision in the pool; the report of a later step has the outcome."""
        self._was_commanded = True
        self._pins.pin(ref, owner)

    def unpin(self, digest: str, owner: str) -> None:
        """Release `owner`'s pin."""
        self._was_commanded = True
        self._pins.unpin(digest, owner)

    def lift(self, services: list[TenantService]) -> None:
        """Count what other engines served."""
        self._was_commanded = True
        self.scheduler.queue.lift(services)

    def close(self) -> None:
        """Stop the threads and the other ranks."""
        self._store.close()
        if self._team is not None:
            self._team.close()
        if self._constraints is not None:
            self._constraints.close()
        if self._images is not None:
            self._images.close()

    def _add_with_images(self) -> None:
        """Go on with the requests whose images have been computed."""
        if self._images is None:
            return
        ready, failed = self._images.advance()
        ended = [TokenEvent(request_id=one.id, is_worked_on=False) for one in ready if one.id in self._reported]
        if ended:
            self.announce(StepReport(ended))
        for request in ready:
            self._compile(request)
        for request, fault in failed:
            self.scheduler.refuse(request, fault)

    def _note_image(self, request_id: str) -> None:
        """Report that an image of the request is being computed."""
        if request_id in self._reported:
            self.announce(StepReport([TokenEvent(request_id=request_id, is_worked_on=True)]))

    def _add_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled, and end those whose deadline has passed before."""
        for waiting in [waiting for waiting in self._compiling.values() if waiting.compiled.done()]:
            del self._compiling[waiting.request.id]
            self._compile_deadlines.drop(waiting)
            assert self._constraints is not None, "it compiles"
            request = waiting.request_at(self._clock())
            if fault := self._constraints.begin(request, waiting.compiled.result()):
                self.scheduler.refuse(request, fault)
            else:
                self.scheduler.add(request)
        while (first := self._compile_deadlines.first()) is not None and first.start_by <= self._clock():
            self._compile_deadlines.drop(first)
            if fault := self.scheduler.miss_deadline(first.request):
                del self._compiling[first.request.id]
                self.scheduler.refuse(first.request, fault)
            else:  # the group may be forgotten before this choice is added
                first.request = msgspec.structs.replace(first.request, group_started=True)

    def _announce_work(self, step: Step) -> list[str]:
        """Report the requests that the engine begins to work on; return those in the step."""
        worked_on = [chunk.sequence.id for chunk in step.chunks if chunk.sequence.id in self._reported]
        begun = [TokenEvent(request_id=id, is_worked_on=True) for id in worked_on] + self.scheduler.take_starts()
        if begun:
            self.announce(StepReport(begun))
        return worked_on

    def _survivors(self, worked_on: list[str], events: list[TokenEvent]) -> list[TokenEvent]:
        """Report requests whose step has ended without a token for them: these requests are not the cause if the engine
        dies later.
        """
        answered = (event for event in events if event.token_id is not None or event.is_pooled)
        self._reported.difference_update(event.request_id for event in answered)
        ended, self._unknown = (self._unknown, worked_on) if self._runner.runs_ahead else (worked_on, [])
        return [
            TokenEvent(request_id=id, is_worked_on=False)
            for id in ended
            if id in self._reported and id not in self._unknown
        ]

    # statistics

    def stats(self) -> EngineStats:
        """Return the counters and gauges of this moment."""
        return snapshot(
            self.scheduler,
            self._meter,
            self._accounting.ended,
            timeline=self._timeline.samples,
            weight_bytes=self._weight_bytes,
            adapters_pinned=len(self._pins),
            adapters_host=self._store.num_cached,
            adapters_host_bytes=self._store.cached_bytes,
            image_bytes=self._images.num_bytes if self._images is not None else 0,
            step_graphs=self._runner.graphs.recorded,
            step_graphs_missing=self._runner.graphs.missing,
        )

    def _stats_if_due(self) -> EngineStats | None:
        """Return statistics if they have changed, and if a second has passed or the engine has no work; otherwise
        return None.
        """
        counters, now = self._counters, self._clock()
        loads = counters.adapter_loads + counters.adapter_load_failures
        resident = len(self.scheduler.memory.residency.resident)
        version = (self.scheduler.queue.num_changes, counters.steps, loads, resident)
        rests = self.is_idle or self.wait_seconds > 0.0
        if version == self._stats_version or not (rests or now - self._stats_sent_at >= STATS_INTERVAL_S):
            return None
        self._stats_sent_at, self._stats_version = now, version
        return self.stats()

    def _service_if_due(self) -> list[TenantService]:
        now = self._clock()
        if now - self._service_sent_at < SERVICE_INTERVAL_S:
            return []
        self._service_sent_at = now
        return self.scheduler.queue.take_service()

    def _count_step(self, step: Step) -> None:
        if not step.empty:
            count_step(self._counters, step, self._runner.bank.bytes_of)
            self._accounting.count_step(step)
            self._timeline.sample(step, self._clock())

    def _report(self, events: list[TokenEvent], pins: list[Pinned]) -> StepReport | None:
        """Count the step's results. Return a report of the results and the statistics that are due, or None if there is
        nothing to report.
        """
        self._counters.output_tokens += len(events) - [*map(_TOKEN_ID, events)].count(None)
        self._counters.cached_tokens += sum(map(_CACHED_TOKENS, events))
        for event in events:
            if event.finish_reason is not None:
                self._reported.discard(event.request_id)
                self._runner.forget(event.request_id)
                if self._images is not None:
                    self._images.release(event.request_id)
        events = self._accounting.count_events(events)
        stats, service = self._stats_if_due(), self._service_if_due()
        return StepReport(events, stats, pins, service) if events or pins or stats or service else None


class SyncPipeline:
    """Ends each step before it plans the next one."""

    is_idle = True
    """True: no step is ever in flight between two calls."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def advance(self, step: Step) -> list[TokenEvent]:
        """Run `step`, which may be empty; return its events."""
        if step.empty:
            return []
        launched = self._runner.launch(step)
        events = launched.events() + launched.pooled.events()
        return launched.scores.events() + self._scheduler.commit(step, events)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and committed with PENDING instead of its tokens."""

    launched: LaunchedStep
    sampling: list[Chunk]
    facts: dict[Sequence, TokenEvent]
    """Result of the commit: see `Scheduler.commit_ahead`."""


class AsyncPipeline:
    """Launches each step before the tokens of the previous step are known."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: InFlightStep | None = None

    @property
    def is_idle(self) -> bool:
        """True if no step is in flight, and so no event is still to come."""
        return self._in_flight is None

    def advance(self, step: Step) -> list[TokenEvent]:
        """Launch `step`, which may be empty; return the events of the step before."""
        sampling = step.sampling
        # The device runs this step while the host completes the one before.
        launched = None if step.empty else self._runner.launch(step)
        events = [] if self._in_flight is None else self._complete(self._in_flight)
        self._in_flight = None
        if launched is None:
            return events
        # After the previous step is completed, because a constraint may need its tokens to choose the next tokens.
        launched.sample()
        # Sequences may have ended since the step was planned.
        alive = self._scheduler.open_part_of(step)
        if step.has_drafts:
            return events + self._run_to_end(launched, alive)
        facts = {} if alive.empty else self._scheduler.commit_ahead(alive)
        self._in_flight = InFlightStep(launched, sampling, facts)
        return events

    def _run_to_end(self, launched: LaunchedStep, alive: Step) -> list[TokenEvent]:
        """Wait for the step's tokens, and commit the step with them."""
        told = launched.events() + launched.pooled.events()
        names = {chunk.sequence.id for chunk in alive.chunks}
        sampled = [event for event in told if event.request_id in names]
        return launched.scores.events() + ([] if alive.empty else self._scheduler.commit(alive, sampled))

    def _complete(self, step: InFlightStep) -> list[TokenEvent]:
        """Wait for the step's tokens and put them in the place of PENDING."""
        sampled = step.launched.events()
        events = step.launched.scores.events() + self._scheduler.end_pooled(step.launched.pooled.events())
        return events + self._scheduler.fill_pending(step.sampling, sampled, step.facts)
