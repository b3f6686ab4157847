"""One engine of a simulation: the engine's own scheduler over modelled devices, with a simulated clock.

The devices are a disk and a host link, each with a queue, and the clock measures their times. Tenants are admitted in
the engine's own order (`FairAdmission`) or, as a baseline, in order of arrival (`FifoAdmission`).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from loramux.engine.memory.memory import OPERATOR
from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.residency import Inspected, Residency, StoreJob
from loramux.engine.messages import AdapterRef, EngineCount, Request, ServiceClass, TokenEvent
from loramux.engine.scheduling.fairness import VirtualTokenCounter
from loramux.engine.scheduling.policy import PageBudget, SchedulerLimits
from loramux.engine.scheduling.queue import RequestQueue
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.sequence import BASE_SLOT, Step
from loramux.engine.statistics import ServiceMeter, snapshot
from loramux.fleet.view import EngineState, EngineView, view_of
from loramux.simulator.hardware import Device, StepTime, StepWork
from loramux.simulator.report import Meter, Resource, ServiceGap, Share
from loramux.simulator.scenario import Scenario, ScenarioError
from loramux.simulator.traffic import Arrivals

MOMENT = 1e-6
"""Seconds within which two times count as equal."""
NEVER = math.inf
BASE = "base"


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start of the simulation. Calling it reads it, as with time.monotonic."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Let time pass; the clock never goes back."""
        assert when >= self.now, "time does not go back"
        self.now = when


T = TypeVar("T")


class SimulatedStore:
    """An AdapterStore whose work ends when the clock says so: one transfer at a time over disk and link.

    The storage adds a latency to each load, and some loads fail; both are drawn from a fixed seed.
    """

    def __init__(
        self,
        clock: VirtualClock,
        device: Device,
        sizes: dict[str, tuple[int, int]],
        invocations: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """`sizes` has pages and bytes of every revision, by digest; `invocations` those of the activated LoRAs."""
        self._clock = clock
        self._device = device
        self._sizes = sizes
        self._invocations = invocations
        self._random = random.Random(0)  # noqa: S311  a simulation, repeatable
        self.num_loads: Counter[str] = Counter()
        """Number of loads that were started, by digest."""
        self._due: list[tuple[float, int, StoreJob[Any], Any]] = []
        self._tickets = count()
        self._free_slots: list[int] = []
        self._digests: list[str | None] = []
        self._disk_free_at = 0.0
        self._link_free_at = 0.0

    # calls of the engine

    def inspect(self, ref: AdapterRef) -> StoreJob[Inspected]:
        """Read the files into the host's memory."""
        pages, size = self._sizes[ref.digest]
        self._disk_free_at = max(self._clock.now, self._disk_free_at) + size / self._device.disk_bandwidth
        return self._later(self._disk_free_at, Inspected(pages, self._invocations.get(ref.digest)))

    def fill(self, ref: AdapterRef, pages: list[int]) -> StoreJob[int]:
        """Copy the weights over the link; the result is a slot."""
        size = self._sizes[ref.digest][1]
        assert len(pages) == self._sizes[ref.digest][0], "the engine takes the pages it was told"
        seconds = self._device.load_overhead_s + size / self._device.link_bandwidth
        self._link_free_at = max(self._clock.now, self._link_free_at) + seconds
        self.num_loads[ref.digest] += 1
        ends_at = self._link_free_at + self._random.uniform(*self._device.load_latency_s)
        if self._random.random() < self._device.load_failures:
            return self._later(ends_at, OSError("the storage does not answer"))
        return self._later(ends_at, self._slot_for(ref.digest))

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        assert self._digests[slot] is not None, "a slot is dropped once"
        self._digests[slot] = None
        heapq.heappush(self._free_slots, slot)

    def forget(self, digest: str) -> None:
        """Do nothing: a deleted revision would be read again if it were wanted again."""

    # calls of the simulation

    @property
    def next_due(self) -> float | None:
        """The end of the next transfer; None if no transfer is running."""
        return self._due[0][0] if self._due else None

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second that come over the link at this moment."""
        return self._device.link_bandwidth if self._link_free_at > self._clock.now else 0.0

    def settle(self) -> None:
        """Set the results of the transfers that have ended by now."""
        while self._due and self._due[0][0] <= self._clock.now + MOMENT:
            _, _, future, result = heapq.heappop(self._due)
            _conclude(future, result)

    def settle_all(self) -> None:
        """End all running transfers immediately, for example before the first request arrives."""
        for _, _, future, result in self._due:
            _conclude(future, result)
        self._due.clear()
        self._disk_free_at = self._link_free_at = self._clock.now

    def digest_of(self, slot: int) -> str:
        """Return the revision that a slot serves."""
        digest = self._digests[slot]
        assert digest is not None, "a step runs only adapters that are in the pool"
        return digest

    def _slot_for(self, digest: str) -> int:
        if not self._free_slots:
            self._free_slots.append(len(self._digests))
            self._digests.append(None)
        slot = heapq.heappop(self._free_slots)
        self._digests[slot] = digest
        return slot

    def _later(self, when: float, result: T | OSError) -> StoreJob[T]:
        future: StoreJob[T] = StoreJob()
        heapq.heappush(self._due, (when, next(self._tickets), future, result))
        return future


def _conclude(future: StoreJob[Any], result: object) -> None:
    if isinstance(result, OSError):
        future.set_exception(result)
    else:
        future.set_result(result)


class SimulatedHost:
    """A HostKv whose copies take their time over the link before the next step."""

    def __init__(self, num_bytes: int, page_bytes: int, device: Device) -> None:
        self.num_slots = num_bytes // page_bytes
        self.seconds_per_page = page_bytes / device.link_bandwidth
        self._due = 0.0

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages to the host."""
        self._carry(pages, places)

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages back from the host."""
        self._carry(places, pages)

    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages within the device's memory, which takes no time over the link."""

    def spend(self) -> float:
        """Return the seconds that the copies take which were ordered since the last call."""
        due, self._due = self._due, 0.0
        return due

    def _carry(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(sources) == len(targets), "every page has its place"
        self._due += len(sources) * self.seconds_per_page


class FairAdmission:
    """The engine's own order; the gap is that of the engine's own counters."""

    def __init__(self, queue: RequestQueue) -> None:
        self._gaps = [(group, ServiceGap()) for group in queue.groups]

    def file(self, request: Request) -> Request:
        """Return the request unchanged."""
        return request

    def observe(self, step: Step) -> None:  # noqa: ARG002  the counters have been charged
        """Compare the waiting tenants."""
        for group, gap in self._gaps:
            gap.observe(group.tenants)

    def end(self, request_id: str) -> None:
        """Do nothing."""

    @property
    def largest_gap(self) -> float:
        """Largest gap of all classes."""
        return max(gap.largest for _, gap in self._gaps)


SHARED_TENANT = "all-tenants"


class FifoAdmission:
    """The baseline: the engine sees all tenants as one, served in order of arrival; their counters are kept here."""

    def __init__(self) -> None:
        self._counters: dict[tuple[ServiceClass, str], VirtualTokenCounter] = {}
        self._counter_of: dict[str, VirtualTokenCounter] = {}
        self._computed: dict[str, int] = {}
        self._waiting: Counter[VirtualTokenCounter] = Counter()
        self._gap = ServiceGap()

    def file(self, request: Request) -> Request:
        """Return the request under the shared tenant."""
        key = (request.service_class, request.tenant)
        counter = self._counters.setdefault(key, VirtualTokenCounter(weight=request.weight))
        self._counter_of[request.id] = counter
        self._waiting[counter] += 1
        return msgspec.structs.replace(request, tenant=SHARED_TENANT, service_class=ServiceClass.STANDARD, weight=1.0)

    def observe(self, step: Step) -> None:
        """Charge the tokens that the step computes for the first time, and compare the waiting tenants."""
        for chunk in step.chunks:
            sequence, counter = chunk.sequence, self._counter_of[chunk.sequence.id]
            if (computed := self._computed.get(sequence.id)) is None:
                self._waiting[counter] -= 1
                computed = 0
            counter.charge(max(0, min(chunk.end, sequence.num_prompt_tokens) - computed) + 2 * chunk.samples)
            self._computed[sequence.id] = max(computed, chunk.end)
        self._gap.observe(counter for counter, waiting in self._waiting.items() if waiting)

    def end(self, request_id: str) -> None:
        """Drop the request from the waiting ones, if it never ran."""
        counter = self._counter_of.pop(request_id)
        if self._computed.pop(request_id, None) is None:
            self._waiting[counter] -= 1

    @property
    def largest_gap(self) -> float:
        """Largest gap over all tenants, because there is one queue."""
        return self._gap.largest


class SimulatedEngine:
    """An engine of a scenario. `wake_at` is the time of the next call of `run`; time passes between the calls."""

    def __init__(self, name: str, scenario: Scenario, arrivals: Arrivals, meter: Meter, now: float) -> None:
        """`arrivals` has the adapters. `meter` samples the tokens of all engines."""
        ranks = {ref.digest: rank for ref, rank in arrivals.adapters.items()}
        self.name = name
        self.scenario = scenario
        self.clock = VirtualClock(now)
        self.wake_at = NEVER
        self.opened: dict[str, Request] = {}
        """Requests that were sent to this engine and have not ended."""
        self.num_prompt_tokens = 0
        """Prompt tokens that were computed since the warm-up, again if they were lost."""
        self.most_adapters = 0
        """Maximum number of adapters that were resident at the same time."""
        self.use, self.use_when_waited_for = Share(), Share()
        self.busy: defaultdict[Resource, float] = defaultdict(float)
        """Seconds of steps by the resource that decided them, and seconds of steps in which adapters arrived."""
        self._ranks = ranks
        self._bytes = {digest: scenario.model.adapter_bytes(rank) for digest, rank in ranks.items()}
        self.sizes = {digest: (-(-size // scenario.page_bytes), size) for digest, size in self._bytes.items()}
        device = scenario.device.slowed(scenario.slowness.get(name, 1.0))
        self.store = SimulatedStore(self.clock, device, self.sizes, arrivals.invocations)
        self.pool = PagePool(scenario.num_pages)
        self.host = SimulatedHost(scenario.swap_bytes, scenario.page_bytes, device)
        self.residency = Residency(self.pool, self.store, self.clock)
        self.scheduler = Scheduler(
            SchedulerLimits(
                scenario.max_num_seqs,
                scenario.max_num_batched_tokens,
                scenario.model.max_model_len,
                scenario.max_mixed_prefill_tokens or sys.maxsize,
                token_context=scenario.token_context,
            ),
            PageBudget(scenario.num_pages, scenario.block_size),
            self.pool,
            self.residency,
            # weight of the model, in pages, without its adapters
            dataclasses.replace(scenario.policy, weight_pages=scenario.model.weight_bytes / scenario.page_bytes),
            self.host,
        )
        self.order = FifoAdmission() if scenario.order == "fifo" else FairAdmission(self.scheduler.queue)
        self._service_meter = ServiceMeter(self.scheduler.queue)
        self._step_time = StepTime(device, scenario.model)
        self._meter = meter
        self._inbox: list[Request] = []
        self._step: Step | None = None
        self.view = self._look()
        """Latest statistics in the form that servers have."""

    # before time begins

    def preload(self, wanted: Iterable[AdapterRef]) -> None:
        """Bring adapters into the pool at once."""
        refs = list(wanted)
        for ref in refs:
            self.residency.acquire(ref)
        self._settle_all()
        for ref in refs:
            if not self.scheduler.memory.load(ref.digest, OPERATOR, claimed=False, spare_wanted=False):
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
        """Send a request. The loop reads it at the end of the running step."""
        self.opened[request.id] = request
        self._inbox.append(request)
        if self._step is None:
            self.wake_at = min(self.wake_at, max(now, self.clock.now))

    def run(self) -> list[TokenEvent]:
        """Do the work that is due at `wake_at`: end the running step, begin the next step. Return the events for
        clients.
        """
        self.clock.advance_to(max(self.clock.now, self.wake_at))
        events: list[TokenEvent] = []
        if self._step is not None:
            step, self._step = self._step, None
            events += self.scheduler.commit(step, self._meter.sample(step, self.clock.now))
            self._note_ends(events)
        self._read_inbox()
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

    def _read_inbox(self) -> None:
        """Give the scheduler the requests that have come; with static batching a batch, if the last one has ended."""
        count = len(self._inbox)
        if self.scenario.batching == "static":
            count = min(count, self.scenario.max_num_seqs) if self.scheduler.is_idle else 0
        for request in self._inbox[:count]:
            self.scheduler.add(self.order.file(request))
        del self._inbox[:count]

    @property
    def is_idle(self) -> bool:
        """True if no request runs, waits or arrives."""
        return self.scheduler.is_idle and not self._inbox

    def _begin(self, step: Step) -> None:
        self.order.observe(step)
        self._step = step
        if self.clock.now >= self.scenario.warmup_s:
            prompts = (min(chunk.end, chunk.sequence.num_prompt_tokens) - chunk.start for chunk in step.chunks)
            self.num_prompt_tokens += sum(tokens for tokens in prompts if tokens > 0)
        work, arriving = self._work(step), self.store.link_bandwidth
        seconds = self._step_time.seconds(work, arriving) + self.host.spend()
        reads = self._step_time.read_seconds(work, arriving) >= self._step_time.compute_seconds(work)
        self.busy["bandwidth" if reads else "arithmetic"] += seconds
        if arriving:
            self.busy["link"] += seconds
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

    def _work(self, step: Step) -> StepWork:
        """Return the bytes that a step reads and the operations that it computes."""
        tokens = contexts = pairs = sampled = 0
        for chunk in step.chunks:
            length, end = chunk.length, chunk.start + chunk.length
            tokens += length
            contexts += end
            sampled += chunk.samples
            pairs += length * end - length * (length - 1) // 2
        adapter_bytes = ranks = adapters = 0
        for slot, rows in step.runs:
            if slot != BASE_SLOT:
                digest = self.store.digest_of(slot)
                adapters += 1
                adapter_bytes += self._bytes[digest]
                ranks += rows * self._ranks[digest]
        return StepWork(tokens, contexts, pairs, adapter_bytes, ranks, sampled, adapters)

    def _observe_pool(self, seconds: float) -> None:
        share = self.pool_use
        self.most_adapters = max(self.most_adapters, len(self.residency.resident))
        if self.clock.now <= self.scenario.duration_s or not self.use.seconds:  # draining is no load
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
        """Maximum units that one step charges one tenant."""
        scenario, policy = self.scenario, self.scheduler.state.policy
        largest = max((pages for pages, _ in self.sizes.values()), default=0)
        loads = min(scenario.num_pages, largest * policy.lookahead) * policy.load_units_per_page
        return scenario.max_num_batched_tokens + 2 * scenario.max_num_seqs + loads

    @property
    def most_units_per_s(self) -> float:
        """Maximum units that an engine charges one tenant in a second: prefill, decode and loads at their fastest."""
        tokens, rows = self.scenario.max_num_batched_tokens, self.scenario.max_num_seqs
        prefill = tokens / self._step_time.seconds(StepWork(tokens, tokens, tokens, 0, 0))
        decode = 2 * rows / self._step_time.seconds(StepWork(rows, rows, rows, 0, 0, rows))
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
