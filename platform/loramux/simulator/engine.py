"""One engine of a simulation: the engine's own scheduler over a modelled device, with a clock of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.residency import Residency
from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.request import AdapterRef, Request
from loramux.engine.scheduling.budget import PageBudget
from loramux.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loramux.engine.scheduling.step import BASE_SLOT, Step
from loramux.engine.statistics import ServiceMeter, snapshot
from loramux.fleet.view import EngineState, EngineView, view_of
from loramux.simulator.hardware import StepTime, Work
from loramux.simulator.report import Meter, Share
from loramux.simulator.scenario import Scenario, ScenarioError
from loramux.simulator.service_gap import make_admission_order
from loramux.simulator.store import SimulatedHost, SimulatedStore, VirtualClock

NEVER = math.inf
BASE = "base"


class SimulatedEngine:
    """An engine of a scenario. `wake_at` says when `run` is to be called; time passes between the calls."""

    def __init__(self, name: str, scenario: Scenario, ranks: Mapping[str, int], meter: Meter, now: float) -> None:
        """`ranks`: of the adapters, by digest. `meter` samples the tokens of all engines."""
        self.name = name
        self.scenario = scenario
        self.clock = VirtualClock(now)
        self.wake_at = NEVER
        self.opened: dict[str, Request] = {}
        """Requests that were sent here and have not ended."""
        self.most_adapters = 0
        """Resident at once."""
        self.use, self.use_when_waited_for = Share(), Share()
        self._ranks = ranks
        self._bytes = {digest: scenario.model.adapter_bytes(rank) for digest, rank in ranks.items()}
        self.sizes = {digest: (-(-size // scenario.page_bytes), size) for digest, size in self._bytes.items()}
        device = scenario.device.slowed(scenario.slowness.get(name, 1.0))
        self.store = SimulatedStore(self.clock, device, self.sizes)
        self.pool = PagePool(scenario.num_pages)
        self.host = SimulatedHost(scenario.swap_bytes, scenario.page_bytes, device)
        self.residency = Residency(self.pool, self.store, self.clock)
        self.scheduler = Scheduler(
            SchedulerLimits(scenario.max_num_seqs, scenario.max_num_batched_tokens, scenario.model.max_model_len),
            PageBudget(scenario.num_pages, scenario.block_size),
            self.pool,
            self.residency,
            # How much the model weighs beside its adapters.
            dataclasses.replace(scenario.policy, weight_pages=scenario.model.weight_bytes / scenario.page_bytes),
            self.host,
        )
        self.order = make_admission_order(scenario.order, self.scheduler.queue)
        self._service_meter = ServiceMeter(self.scheduler.queue)
        self._step_time = StepTime(device, scenario.model)
        self._meter = meter
        self._inbox: list[Request] = []
        self._step: Step | None = None
        self.view = self._look()
        """The latest statistics, as fronts have them."""

    # before time begins

    def preload(self, wanted: Iterable[AdapterRef]) -> None:
        """Bring adapters into the pool at once."""
        refs = list(wanted)
        for ref in refs:
            self.residency.acquire(ref)
        self._settle_all()
        for ref in refs:
            if not self.scheduler.memory.load(ref.digest, claimed=False, spare_wanted=False):
                raise ScenarioError(
                    f"the pool of {self.pool.num_pages} pages cannot hold all {len(refs)} preloaded adapters"
                )
            self._settle_all()
        for ref in refs:
            self.scheduler.memory.release(ref.digest)

    def _settle_all(self) -> None:
        self.store.settle_all()
        self.residency.poll()

    # while time passes

    def submit(self, request: Request, now: float) -> None:
        """Send a request, which the loop takes at the end of the step under way."""
        self.opened[request.id] = request
        self._inbox.append(request)
        if self._step is None:
            self.wake_at = min(self.wake_at, max(now, self.clock.now))

    def run(self) -> list[TokenEvent]:
        """Do at `wake_at` what is due: end the step under way, begin the next; return what clients get to see."""
        self.clock.advance_to(max(self.clock.now, self.wake_at))
        events: list[TokenEvent] = []
        if self._step is not None:
            step, self._step = self._step, None
            events += self.scheduler.commit(step, self._meter.sample(step, self.clock.now))
            self._note_ends(events)
        for request in self._inbox:
            self.scheduler.add(self.order.file(request))
        self._inbox.clear()
        self.store.settle()
        step = self.scheduler.plan()
        if news := self.scheduler.drain_events():
            self._note_ends(news)
            events += news
        if not step.empty:
            self._begin(step)
        else:
            self.wake_at = self.clock.now if news else self._next_change()
        if self.scenario.engines > 1 and (step.empty or self.clock.now - self.view.at >= self.scenario.statistics_s):
            self.view = self._look()
        return events

    @property
    def is_idle(self) -> bool:
        """Does nothing run, wait or arrive?"""
        return self.scheduler.is_idle and not self._inbox

    def _begin(self, step: Step) -> None:
        self.order.observe(step)
        self._step = step
        seconds = self._step_time.seconds(self._work(step), self.store.link_bandwidth) + self.host.spend()
        self._observe_pool(seconds)
        self.wake_at = self.clock.now + seconds

    def _next_change(self) -> float:
        if (planned := self.scheduler.next_plan_at) == -math.inf:
            return self.clock.now
        due = self.store.next_due
        return max(self.clock.now, min(planned, NEVER if due is None else due))

    def _note_ends(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self.order.end(event.request_id)
                del self.opened[event.request_id]

    def _work(self, step: Step) -> Work:
        """The bytes that a step reads and the operations that it computes."""
        tokens = contexts = pairs = 0
        for chunk in step.chunks:
            length, end = chunk.length, chunk.start + chunk.length
            tokens += length
            contexts += end
            pairs += length * end - length * (length - 1) // 2
        adapter_bytes = ranks = 0
        for slot, rows in step.runs:
            if slot != BASE_SLOT:
                digest = self.store.digest_of(slot)
                adapter_bytes += self._bytes[digest]
                ranks += rows * self._ranks[digest]
        return Work(tokens, contexts, pairs, adapter_bytes, ranks)

    def _observe_pool(self, seconds: float) -> None:
        share = self.pool_use
        self.most_adapters = max(self.most_adapters, self.residency.num_resident)
        if self.clock.now <= self.scenario.duration_s or not self.use.seconds:  # what drains is no load
            self.use.add(share, seconds)
            if len(self.scheduler.queue):
                self.use_when_waited_for.add(share, seconds)

    @property
    def pool_use(self) -> float:
        """Share of the pages that running requests and their adapters hold."""
        counts = self.scheduler.memory.counts
        return (counts.kv + counts.adapters) / counts.total

    @property
    def most_units_of_a_step(self) -> float:
        """The most that one step charges one tenant."""
        scenario, policy = self.scenario, self.scheduler.state.policy
        largest = max((pages for pages, _ in self.sizes.values()), default=0)
        loads = min(scenario.num_pages, largest * policy.lookahead) * policy.load_units_per_page
        return scenario.max_num_batched_tokens + 2 * scenario.max_num_seqs + loads

    @property
    def most_units_per_s(self) -> float:
        """The most that an engine charges one tenant in a second: prefill, decode and loads, each at its fastest."""
        tokens, rows = self.scenario.max_num_batched_tokens, self.scenario.max_num_seqs
        prefill = tokens / self._step_time.seconds(Work(tokens, tokens, tokens, 0, 0))
        decode = 2 * rows / self._step_time.seconds(Work(rows, rows, rows, 0, 0))
        loads = self.scenario.device.link_bandwidth / self.scenario.page_bytes
        return prefill + decode + loads * self.scenario.policy.load_units_per_page

    def _look(self) -> EngineView:
        statistics = snapshot(
            self.scheduler,
            self._service_meter,
            EngineCount(),
            weight_bytes=0,
            adapters_pinned=0,
            adapters_host=0,
            adapters_host_bytes=0,
        )
        return view_of(self.name, BASE, EngineState.READY, statistics, self.clock.now)
