"""The loop: the engine's own scheduler, with a device model in place of the runner and time that the model passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from loramux.engine.budget import Budget
from loramux.engine.messages import TokenEvent
from loramux.engine.pages import PagePool
from loramux.engine.policy import Policy
from loramux.engine.residency import Residency
from loramux.engine.scheduler import Scheduler, SchedulerLimits
from loramux.engine.step import BASE_SLOT, Step
from loramux.simulator.clock import MOMENT, VirtualClock
from loramux.simulator.course import Course
from loramux.simulator.hardware import StepTime, Work
from loramux.simulator.meter import Meter, Share
from loramux.simulator.order import make_order
from loramux.simulator.report import Report, overall, tenant_report
from loramux.simulator.scenario import Scenario, ScenarioError
from loramux.simulator.store import SimulatedHost, SimulatedStore
from loramux.simulator.traffic import Arrivals, drawn


class Stalled(RuntimeError):
    """Requests wait and nothing will ever happen: a fault of the engine's, found."""


class Simulation:
    """One scenario, served from its first request to its last token."""

    def __init__(self, scenario: Scenario, arrivals: Arrivals | None = None) -> None:
        """`arrivals` in place of those that the scenario draws."""
        self.arrivals = _arrivals(scenario) if arrivals is None else arrivals
        self.scenario = scenario
        self.meter = Meter()
        self.clock = VirtualClock()
        self._ranks = {ref.digest: rank for ref, rank in self.arrivals.adapters.items()}
        self._bytes = {digest: scenario.model.adapter_bytes(rank) for digest, rank in self._ranks.items()}
        self.store = SimulatedStore(self.clock, scenario.device, self._sizes())
        self.pool = PagePool(scenario.num_pages)
        self.host = SimulatedHost(scenario.swap_bytes, scenario.page_bytes, scenario.device)
        self.residency = Residency(self.pool, self.store, self.clock)
        self.scheduler = Scheduler(
            SchedulerLimits(scenario.max_num_seqs, scenario.max_num_batched_tokens, scenario.model.max_model_len),
            Budget(scenario.num_pages, scenario.block_size),
            self.pool,
            self.residency,
            self._policy(),
            self.host,
        )
        self.order = make_order(scenario.order, self.scheduler.queue)
        self._step_time = StepTime(scenario.device, scenario.model)
        self._coming = self.arrivals.requests()
        self._next = next(self._coming, None)
        self._prompts: dict[str, int] = {}
        self._use, self._use_when_waited_for = Share(), Share()
        self.course = Course(interval=scenario.duration_s / 500)
        self.most_adapters = 0
        """Resident at once."""

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Report:
        """To the end; `progress` is told how many more were answered. Raises Stalled where the engine never goes on."""
        self.preload()
        told = 0
        while self.advance():
            if self.meter.num_answered > told:
                progress(self.meter.num_answered - told)
                told = self.meter.num_answered
        return self.report()

    def preload(self) -> None:
        """Bring the adapters of clients with `preload` into the pool, before time begins."""
        wanted = self.arrivals.preloaded
        for ref in wanted:
            self.residency.want(ref)
        self._settle_all()
        for ref in wanted:
            if not self.scheduler.memory.load(ref.digest, spare_wanted=False, leave_free=0):
                raise ScenarioError(
                    f"the pool of {self.pool.num_pages} pages cannot hold all {len(wanted)} preloaded adapters"
                )
            self._settle_all()
        for ref in wanted:
            self.scheduler.memory.unwant(ref.digest)

    def _settle_all(self) -> None:
        self.store.settle_all()
        self.residency.poll()

    def advance(self) -> bool:
        """One step, or a jump to when there is something to do; False at the end."""
        self._let_in()
        self.store.settle()
        step = self.scheduler.plan()
        news = self.scheduler.take_news()
        self._hear(news)
        if not step.empty:
            self._run(step)
            return True
        return bool(news) or self._skip_idle_time()

    def _let_in(self) -> None:
        while self._next and self._next[0] <= self.clock.now:
            at, source, output_tokens, request = self._next
            self.meter.arrive(request.id, at, source, output_tokens)
            self._prompts[request.id] = len(request.prompt_token_ids)
            self.scheduler.add(self.order.file(request))
            self._next = next(self._coming, None)

    def _run(self, step: Step) -> None:
        self.order.observe(step)
        seconds = self._step_time.seconds(self._work(step), self.store.link_bandwidth) + self.host.spend()
        self._observe_pool(seconds)
        self.clock.advance_to(self.clock.now + seconds)
        self._hear(self.scheduler.commit(step, self.meter.sample(step, self.clock.now)))

    def _hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self.order.end(event.request_id)
                self.meter.end(event, self._prompts.pop(event.request_id))

    def _skip_idle_time(self) -> bool:
        coming = [
            at for at in (self._next and self._next[0], self.store.next_due, self._next_deadline) if at is not None
        ]
        if coming:
            self.clock.advance_to(max(self.clock.now, min(coming)))
            return True
        if not self.scheduler.idle:
            raise Stalled(
                f"{len(self.scheduler.queue)} requests wait at {self.clock.now:.3f} s, and nothing is to come"
            )
        return False

    @property
    def _next_deadline(self) -> float | None:
        """When it has just passed."""
        seconds = self.scheduler.seconds_to_deadline
        return None if seconds is None else self.clock.now + seconds + MOMENT

    def _work(self, step: Step) -> Work:
        """What a step reads and computes."""
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
        counts, waiting = self.scheduler.memory.counts, len(self.scheduler.queue)
        share = (counts.kv + counts.adapters) / counts.total
        self.most_adapters = max(self.most_adapters, self.residency.num_resident)
        if self.course.due(self.clock.now):
            self.course.look(self.clock.now, share, (waiting, len(self.scheduler.running)), self.meter.tallies)
        if self.clock.now <= self.scenario.duration_s or not self._use.seconds:  # what drains is no load
            self._use.add(share, seconds)
            if waiting:
                self._use_when_waited_for.add(share, seconds)

    def _policy(self) -> Policy:
        """The scenario's, and how much the model weighs beside its adapters."""
        scenario = self.scenario
        return dataclasses.replace(scenario.policy, weight_pages=scenario.model.weight_bytes / scenario.page_bytes)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        page = self.scenario.page_bytes
        return {digest: (-(-size // page), size) for digest, size in self._bytes.items()}

    # the report

    def report(self) -> Report:
        """The figures so far."""
        tallies = self.meter.tallies
        everybody = overall(tallies.values())
        seconds = self.meter.last_token_at - float(self.arrivals.at[0])
        use = self._use_when_waited_for if self._use_when_waited_for.seconds else self._use
        return Report(
            throughput_tokens_per_s=(everybody.prompt_tokens + everybody.output_tokens) / seconds if seconds else 0.0,
            ttft_ms=everybody.ttft_ms,
            itl_ms=everybody.itl_ms,
            preemption_rate=self.scheduler.num_preemptions / max(1, everybody.accepted),
            pages_swapped=self.scheduler.memory.swap.num_out,
            pool_use=use.mean,
            service_gap_max=self.order.largest_gap,
            service_gap_bound=self._gap_bound(),
            accepted=everybody.accepted,
            refused=everybody.refused,
            in_deadline=everybody.in_deadline,
            per_tenant={tenant: tenant_report(tally) for tenant, tally in sorted(tallies.items())},
        )

    def _gap_bound(self) -> float:
        """2 * (tau + quantum + delta), delta the most that one step can charge one tenant, over the least weight."""
        scenario, policy = self.scenario, self.scheduler.policy
        largest = max((pages for pages, _ in self._sizes().values()), default=0)
        loads = min(scenario.num_pages, largest * policy.lookahead) * policy.load_units_per_page
        delta = scenario.max_num_batched_tokens + 2 * scenario.max_num_seqs + loads
        return 2 * (policy.tau + policy.quantum + delta / min(source.weight for source in self.arrivals.sources))


def _arrivals(scenario: Scenario) -> Arrivals:
    return drawn(scenario.clients, scenario.duration_s, scenario.seed).on_engine(0, scenario.gpus)
