"""The loop: engines that run the engine's own scheduler, and requests that reach them through the fleet's router."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import msgspec

from loramux.engine.memory.prefix_digests import prefix_digests
from loramux.engine.messages import Request, TokenEvent
from loramux.fleet.placement import place_pins
from loramux.fleet.shares import ShareExchange
from loramux.fleet.view import EngineState, EngineView, RoutingRequest
from loramux.simulator.baselines import ROUTERS
from loramux.simulator.engine import NEVER, SimulatedEngine
from loramux.simulator.hardware import ESTIMATED_FRONT
from loramux.simulator.report import (
    FleetGap,
    FrontQueue,
    Meter,
    Resource,
    Share,
    SimulatedTimeline,
    SimulationReport,
    overall,
    tenant_report,
)
from loramux.simulator.scenario import Loss, Scenario
from loramux.simulator.traffic import Arrivals, Stage, draw_arrivals

FULL = 0.9
"""Share of a resource in use above which it counts as the one that binds."""
FULL_POOL = 0.75
"""The same for the pool while requests wait: a part of it is kept for answers that grow."""


class Stalled(RuntimeError):
    """Requests wait and no event will ever come: the simulation has found a fault of the engine."""


@dataclass(frozen=True, slots=True)
class ConversationRun:
    """A conversation that has begun."""

    row: int
    """Place of its first request in the arrivals."""
    began_at: float
    stages: Iterator[Stage]
    """Stages that were not sent yet."""


class Simulation:
    """One scenario, served from its first request to its last token."""

    def __init__(self, scenario: Scenario, arrivals: Arrivals | None = None) -> None:
        """`arrivals` replaces the arrivals that the scenario would draw."""
        drawn = draw_arrivals(scenario.clients, scenario.duration_s, scenario.seed) if arrivals is None else arrivals
        self.arrivals = drawn
        self.scenario = scenario
        front = scenario.device.front
        self._fronts = [FrontQueue(front) for _ in range(scenario.fronts)] if front else []
        """The servers, if they were measured; an estimated server delays nothing."""
        self.meter = Meter(scenario.warmup_s, self._fronts)
        self.now = 0.0
        self.engines = [self._start(f"engine-{number}", 0.0) for number in range(scenario.engines)]
        self.routers = [ROUTERS[scenario.routing]() for _ in range(scenario.fronts)]
        self.timeline = SimulatedTimeline(interval=scenario.duration_s / 500)
        self.sent_to: list[int] = []
        """The engine of every arrival, in order; for a request that was sent twice, the first."""
        self._coming = drawn.requests()
        self._next = next(self._coming, None)
        self._passing: list[tuple[float, int, Request]] = []
        """Requests that a measured server works on, by the time at which they reach their engine."""
        self._prompts: dict[str, int] = {}
        self._conversations: dict[str, ConversationRun] = {}
        """Conversations by their open request."""
        self._num_opened = len(drawn)
        """Number of the next request of a conversation: the arrivals have the numbers before."""
        self._front_of: dict[str, int] = {}
        self._unstarted: set[str] = set()
        self._exchange = ShareExchange()
        self._exchange_at = scenario.exchange_s if scenario.exchange_s and scenario.engines > 1 else NEVER
        self._fleet_gap = FleetGap()
        self._faults = sorted(_faults(scenario.losses), key=lambda fault: fault[0])
        self._lost: dict[str, SimulatedEngine] = {}
        self._past_loads = self._past_preemptions = self._past_swapped = self._past_prompt_tokens = 0

    @property
    def engine(self) -> SimulatedEngine:
        """The first engine; in most scenarios it is the only one."""
        return self.engines[0]

    def run(self, progress: Callable[[int], None] = lambda _: None) -> SimulationReport:
        """Run to the end; `progress` gets the number of newly answered requests. Raises Stalled if an engine stops."""
        self.preload()
        reported = 0
        while self.advance():
            if self.meter.num_answered > reported:
                progress(self.meter.num_answered - reported)
                reported = self.meter.num_answered
        return self.report()

    def preload(self) -> None:
        """Bring the adapters of clients with `preload` into the pools before time begins: each into one."""
        wanted = {ref.digest: ref for ref in self.arrivals.preloaded}
        sizes = {digest: pages for digest, (pages, _) in self.engine.sizes.items()}
        placed = place_pins(wanted, [engine.name for engine in self.engines], sizes)
        for engine in self.engines:
            engine.preload(wanted[digest] for digest in placed[engine.name])

    def advance(self) -> bool:
        """Do the next event: a request arrives, an engine steps or dies, or service is exchanged. Return False at the
        end.
        """
        engine = min(self.engines, key=attrgetter("wake_at"))
        arrives_at = self._next[0] if self._next else NEVER
        fault_at = self._faults[0][0] if self._faults else NEVER
        passes_at = self._passing[0][0] if self._passing else NEVER
        due = min(arrives_at, passes_at, engine.wake_at, fault_at)
        if due == NEVER or (not self._next and not self._passing and due == fault_at and self._is_idle):
            self._ensure_idle()
            return False
        # An exchange of service while nothing happens moves no flow.
        if self._exchange_at <= due:
            self.now = self._exchange_at
            self._exchange_service(due)
        elif fault_at <= due:
            self.now = due
            self._faults.pop(0)[1](self)
        elif arrives_at <= due:
            self.now = due
            self._let_in()
        elif passes_at <= due:
            self.now = due
            self._route(heapq.heappop(self._passing)[2])
        else:
            self.now = due
            self._step(engine)
        return True

    @property
    def _is_idle(self) -> bool:
        return all(engine.is_idle for engine in self.engines)

    def _ensure_idle(self) -> None:
        waiting = sum(len(engine.scheduler.queue) for engine in self.engines if not engine.is_idle)
        if waiting:
            raise Stalled(f"{waiting} requests wait at {self.now:.3f} s, and nothing is to come")

    # requests

    def _let_in(self) -> None:
        assert self._next is not None, "a request is due"
        at, source, output_tokens, request = self._next
        self._next = next(self._coming, None)
        row = int(request.id)
        if (stages := self.arrivals.stages(row)) is not None:
            self._conversations[request.id] = ConversationRun(row, at, iter(stages))
        self.meter.arrive(request.id, at, source, output_tokens, None if stages is None else "first turn")
        self._send(request, at)

    def _continue(self, ended: TokenEvent) -> None:
        """Send the next request of the conversation whose request ended. A failed request ends its conversation."""
        conversation = self._conversations.pop(ended.request_id, None)
        if conversation is None or ended.fault is not None:
            return
        stage = next(conversation.stages, None)
        if stage is None:
            self.meter.end_conversation(conversation.began_at, self.now)
            return
        request = self.arrivals.follow_up(self._num_opened, conversation.row, stage)
        self._num_opened += 1
        self._conversations[request.id] = conversation
        self.meter.arrive(request.id, self.now, stage.source, stage.output_tokens, stage.name)
        self._send(request, self.now)

    def _send(self, request: Request, at: float) -> None:
        """Send a request that comes `at` through a server, if servers were measured, to an engine."""
        self._prompts[request.id] = len(request.prompt_token_ids)
        if len(self.engines) > 1 and self.scenario.policy.prefix_cache:
            digests = prefix_digests(b"", request.tenant, request.prompt_token_ids, self.scenario.block_size)
            request = msgspec.structs.replace(request, prefix_digests=digests)
        if self._fronts:
            front = self._fronts[int(request.id) % len(self._fronts)]
            heapq.heappush(self._passing, (front.pass_request(at), int(request.id), request))
        else:
            self._route(request)

    def _route(self, request: Request) -> None:
        number = 0
        if len(self.engines) > 1:
            front = int(request.id) % len(self.routers)
            router, asked = self.routers[front], RoutingRequest.of(request, self.scenario.block_size)
            name = router.choose(asked, [self._view(engine) for engine in self.engines], self.now)
            assert name is not None, "a scenario leaves one engine alive"
            router.sent(asked, name, self.now)
            number = int(name.removeprefix("engine-"))
            self._front_of[request.id] = front
            self._unstarted.add(request.id)
        if int(request.id) == len(self.sent_to) < len(self.arrivals):
            self.sent_to.append(number)
        self.engines[number].submit(request, self.now)

    def _view(self, engine: SimulatedEngine) -> EngineView:
        if engine.name in self._lost:
            return msgspec.structs.replace(engine.view, state=EngineState.LOST)
        return engine.view

    def _step(self, engine: SimulatedEngine) -> None:
        events = engine.run()
        if self.timeline.due(self.now):
            self._look()
        for event in events:
            if len(self.engines) > 1:
                self._tell_router(event)
            if event.cached_tokens:
                self.meter.note_cached(event)
            if event.finish_reason is not None:
                self.meter.end(event, self._prompts.pop(event.request_id))
                self._continue(event)

    def _tell_router(self, event: TokenEvent) -> None:
        if event.request_id in self._unstarted:
            self._unstarted.remove(event.request_id)
            self.routers[self._front_of[event.request_id]].started(event.request_id, self.now)
        if event.finish_reason is not None:
            self.routers[self._front_of.pop(event.request_id)].ended(event.request_id, self.now)

    def _look(self) -> None:
        waiting = sum(len(engine.scheduler.queue) for engine in self.engines)
        running = sum(len(engine.scheduler.running) for engine in self.engines)
        use = sum(engine.pool_use for engine in self.engines) / len(self.engines)
        self.timeline.look(self.now, use, (waiting, running), self.meter.tallies)

    # the fleet

    def _exchange_service(self, due: float) -> None:
        alive = [engine for engine in self.engines if engine.name not in self._lost]
        for engine in alive:
            services = engine.scheduler.queue.take_service()
            self._exchange.report(engine.name, services)
        self._fleet_gap.observe([engine.scheduler.queue for engine in alive])
        by_name = {engine.name: engine for engine in alive}
        for name, services in self._exchange.collect(by_name).items():
            by_name[name].scheduler.queue.lift(services)
        idle_until = math.floor(due / self.scenario.exchange_s) * self.scenario.exchange_s if self._is_idle else 0.0
        self._exchange_at = max(idle_until, self._exchange_at) + self.scenario.exchange_s

    def _start(self, name: str, now: float) -> SimulatedEngine:
        return SimulatedEngine(name, self.scenario, self.arrivals, self.meter, now)

    def lose(self, name: str) -> None:
        """Let an engine die; its requests continue on other engines after the tokens that clients have."""
        number = int(name.removeprefix("engine-"))
        dead = self.engines[number]
        self._count_past(dead)
        self._lost[name] = dead
        for router in self.routers:
            router.forget(name)
        self.engines[number] = self._start(name, self.now)
        for request in dead.opened.values():
            told = [0] * self.meter.tokens_told(request.id)
            self._route(msgspec.structs.replace(request, output_token_ids=told))

    def bring_back(self, name: str) -> None:
        """Make a lost engine ready again."""
        del self._lost[name]

    def _count_past(self, engine: SimulatedEngine) -> None:
        self._past_loads += sum(engine.store.num_loads.values())
        self._past_prompt_tokens += engine.num_prompt_tokens
        self._past_preemptions += engine.scheduler.state.counters.preemptions
        self._past_swapped += engine.scheduler.state.counters.kv_pages_swapped_out

    # the report

    @property
    def num_loads(self) -> int:
        """Loads of adapters on all engines, including engines that died."""
        return self._past_loads + sum(sum(engine.store.num_loads.values()) for engine in self.engines)

    def report(self) -> SimulationReport:
        """Return the figures so far."""
        tallies = self.meter.tallies
        everyone = overall(tallies.values())
        seconds = self.meter.last_token_at - max(float(self.arrivals.at[0]), self.scenario.warmup_s)
        waited_for = _joined(engine.use_when_waited_for for engine in self.engines)
        use = waited_for if waited_for.seconds else _joined(engine.use for engine in self.engines)
        counters = [engine.scheduler.state.counters for engine in self.engines]
        preemptions = self._past_preemptions + sum(counter.preemptions for counter in counters)
        swapped = self._past_swapped + sum(counter.kv_pages_swapped_out for counter in counters)
        return SimulationReport(
            throughput_tokens_per_s=(everyone.prompt_tokens + everyone.output_tokens) / seconds if seconds else 0.0,
            ttft_ms=everyone.ttft_ms,
            itl_ms=everyone.itl_ms,
            preemption_rate=preemptions / max(1, everyone.accepted),
            pages_swapped=swapped,
            pool_use=use.mean,
            service_gap_max=self._fleet_gap.largest if len(self.engines) > 1 else self.engine.order.largest_gap,
            service_gap_bound=self._gap_bound(),
            adapter_loads=self.num_loads,
            prompt_tokens_computed=self._past_prompt_tokens + sum(e.num_prompt_tokens for e in self.engines),
            bound_by=self._binding(use, waited_for.seconds > 0.0, (everyone.accepted, everyone.output_tokens), seconds),
            moves=sum(router.num_moves for router in self.routers),
            accepted=everyone.accepted,
            refused=everyone.refused,
            in_deadline=everyone.in_deadline,
            per_stage={name: tally.report for name, tally in self.meter.stages.items()},
            conversation_ms=self.meter.conversations.quantiles,
            per_tenant={tenant: tenant_report(tally) for tenant, tally in sorted(tallies.items())},
        )

    def _binding(self, pool: Share, waited: bool, served: tuple[int, int], seconds: float) -> Resource:
        """Return the resource that is closest to its limit, from the pool's use, the accepted requests and their output
        tokens.
        """
        requests, tokens = served
        front = self.scenario.device.front or ESTIMATED_FRONT
        if seconds and (requests * front.request_s + tokens * front.token_s) / seconds > FULL:
            return "front"
        if waited and pool.mean > FULL_POOL:
            return "memory"
        reading = sum(engine.busy["bandwidth"] for engine in self.engines)
        computing = sum(engine.busy["arithmetic"] for engine in self.engines)
        loading = sum(engine.busy["link"] for engine in self.engines)
        if loading > FULL * (reading + computing):
            return "link"
        return "bandwidth" if reading >= computing else "arithmetic"

    def _gap_bound(self) -> float:
        """Return the bound of two tenants' difference: decision 0004's on one engine, that of `fleet.shares` on a
        fleet."""
        least = min(source.weight for source in self.arrivals.sources)
        if len(self.engines) == 1:
            policy = self.scenario.policy
            return 2 * (policy.max_service_lead + policy.affinity_window + self.engine.most_units_of_a_step / least)
        arrivals, scenario = self.arrivals, self.scenario
        promised = scenario.max_num_seqs * float(arrivals.most_units)
        step = self.engine.most_units_of_a_step
        sigma = 2 * scenario.exchange_s * self.engine.most_units_per_s + step
        others = len(self.engines) - 1
        return ((others + 2) * promised + step + 2 * others * sigma) / least + scenario.policy.affinity_window


def _faults(losses: Iterable[Loss]) -> Iterable[tuple[float, Callable[[Simulation], None]]]:
    for loss in losses:
        yield loss.at_s, partial(Simulation.lose, name=loss.engine)
        yield loss.back_s, partial(Simulation.bring_back, name=loss.engine)


def _joined(shares: Iterable[Share]) -> Share:
    total = Share()
    for share in shares:
        total.integral += share.integral
        total.seconds += share.seconds
    return total
