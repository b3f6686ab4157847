"""Shares over a fleet: engines that exchange service admit by all of it; the bound of one engine holds on each."""

from __future__ import annotations

from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from loramux.engine.messages import ServiceClass, TenantService
from loramux.engine.scheduling.fairness import FairQueue, VirtualTokenCounter
from loramux.engine.scheduling.policy import Policy
from loramux.fleet.shares import ShareExchange
from loramux.simulator.report import ServiceGap

STANDARD = ServiceClass.STANDARD
ROWS, TOKENS = 4, 16


class Fleet:
    """Engines that step in turns and exchange service after some of them."""

    step_units = TOKENS + 2 * ROWS
    """The most that a step charges."""

    def __init__(self, count: int, every: int | None, policy: Policy) -> None:
        self.engines = [
            Harness(400, max_num_seqs=ROWS, max_tokens=TOKENS, policy=policy, pace=(1.0, 0.0)) for _ in range(count)
        ]
        self.exchange = ShareExchange()
        self.every = every
        self.steps = 0
        self.sent = 0

    def submit(self, engine: int, tenant: str, prompt: int = 10, output: int = 10, copies: int = 1) -> None:
        for _ in range(copies):
            self.sent += 1
            self.engines[engine].submit(f"r{self.sent}", prompt, output, tenant=tenant)

    def step(self) -> None:
        for engine in self.engines:
            engine.step()
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            for number, engine in enumerate(self.engines):
                self.exchange.report(str(number), engine.scheduler.queue.take_service())
            for name, services in self.exchange.collect(map(str, range(len(self.engines)))).items():
                self.engines[int(name)].scheduler.queue.lift(services)

    def served(self, tenant: str) -> float:
        return sum(flow.executed for e in self.engines for flow in e.scheduler.queue.flows if flow.tenant == tenant)

    def waits(self, engine: int, tenant: str) -> bool:
        flows = self.engines[engine].scheduler.queue.classes[STANDARD].tenants
        return any(flow.tenant == tenant for flow in flows)


def test_every_engine_hears_what_the_others_served_once() -> None:
    exchange = ShareExchange()
    exchange.report("e0", [TenantService("t", "standard", 5.0)])
    exchange.report("e0", [TenantService("t", "standard", 2.0), TenantService("u", "batch", 1.0)])
    exchange.report("e1", [TenantService("t", "standard", 3.0)])
    lifts = exchange.collect(["e0", "e1", "e2"])
    assert lifts["e0"] == [TenantService("t", "standard", 3.0)]
    assert set(map(tuple_of, lifts["e1"])) == {("t", "standard", 7.0), ("u", "batch", 1.0)}
    assert set(map(tuple_of, lifts["e2"])) == {("t", "standard", 10.0), ("u", "batch", 1.0)}
    assert exchange.collect(["e0", "e1", "e2"]) == {}


def tuple_of(service: TenantService) -> tuple[str, str, float]:
    return service.tenant, service.service_class, service.units


def test_lift_moves_back_in_the_order_and_never_suspends() -> None:
    queue: FairQueue[VirtualTokenCounter] = FairQueue()
    here, elsewhere = VirtualTokenCounter(), VirtualTokenCounter(weight=2.0)
    queue.enter(elsewhere)
    queue.lift(elsewhere, 100.0, 50.0)
    assert elsewhere.projected_service == 0.0, "where nobody else waits there is no order"
    queue.enter(here)
    queue.charge(here, 20.0)
    queue.project(here, 20.0)
    assert queue.first is elsewhere
    queue.lift(elsewhere, 60.0, 50.0)
    assert queue.first is here
    assert (elsewhere.projected_service, elsewhere.served) == (30.0, 0.0)
    queue.lift(elsewhere, 1000.0, 50.0)
    assert elsewhere.projected_service == 50.0, "so far behind the one that was first, and no further"
    assert (elsewhere.served, elsewhere.received) == (20.0, 0.0), "the one that is first need not wait for it"
    queue.project(elsewhere, 30.0)
    queue.lift(elsewhere, 1.0, 20.0)
    assert (elsewhere.projected_service, elsewhere.served) == (65.0, 20.0), "never forward, never ahead"
    queue.lift(here, 1.0, 50.0)
    assert queue.first is here
    assert here.served == 20.0, "the first is lifted to nothing"


def test_lift_between_two_steps_sees_the_parties_that_the_last_one_skipped() -> None:
    queue: FairQueue[VirtualTokenCounter] = FairQueue()
    first, second = VirtualTokenCounter(), VirtualTokenCounter()
    queue.enter(first)
    queue.enter(second)
    queue.project(second, 10.0)
    queue.skip(first)
    queue.lift(second, 1000.0, 50.0)
    assert second.projected_service == 50.0


@pytest.mark.parametrize("every", [1, 4, None])
def test_tenant_that_floods_every_engine_leaves_another_the_engine_it_needs(every: int | None) -> None:
    """Without an exchange the flooder has half of that engine in addition to all the others."""
    fleet = Fleet(4, every, Policy(max_service_lead=100.0, max_lift=4000.0))
    for engine in range(4):
        fleet.submit(engine, "flood", copies=400)
    fleet.submit(0, "modest", copies=200)
    for _ in range(400):
        fleet.step()
    one_engine = (fleet.served("flood") + fleet.served("modest")) / 4
    if every is None:
        assert fleet.served("modest") < 0.6 * one_engine
    else:
        assert fleet.served("modest") > 0.95 * one_engine


def test_tenant_ahead_elsewhere_is_still_admitted_after_a_bounded_service_of_others() -> None:
    fleet = Fleet(2, 1, Policy(max_service_lead=100.0, max_lift=500.0))
    fleet.submit(0, "ahead", copies=100)
    fleet.submit(1, "ahead", copies=1000)
    fleet.submit(0, "steady", copies=1000)
    gaps, latest = [], 0.0
    for _ in range(600):
        before = _admitted(fleet, 0, "ahead")
        fleet.step()
        if _admitted(fleet, 0, "ahead") - before:
            gaps.append(fleet.served("steady") - latest)
            latest = fleet.served("steady")
    assert len(gaps) > 5
    assert max(gaps) <= 500 + ROWS * 30
    assert latest > 0.85 * fleet.served("ahead"), "but for that, the steady one has its engine"


def test_service_is_reported_once_and_survives_a_flow_that_is_forgotten() -> None:
    harness = Harness(400, policy=Policy())
    harness.submit("r", 10, 10, tenant="t")
    harness.run()
    assert harness.scheduler.queue.take_service() == [TenantService("t", "standard", 10 + 2 * 10)]
    assert harness.scheduler.queue.take_service() == []
    harness.scheduler.queue.lift([TenantService("unknown", "standard", 5.0)])


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 4),
    every=st.integers(1, 6),
    lead=st.sampled_from([0.0, 20.0, 100.0]),
    lift=st.sampled_from([50.0, 2000.0]),
    crowd=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from("tuv"), st.integers(1, 40), st.integers(1, 40), st.integers(1, 30)
        ),
        max_size=40,
    ),
)
def test_bounds_of_the_fleet_hold_whatever_comes(
    count: int, every: int, lead: float, lift: float, crowd: list[tuple[int, str, int, int, int]]
) -> None:
    """1 on every engine, and 3 if tenants wait on all of them, from any state that earlier lifts left."""
    fleet = Fleet(count, every, Policy(max_service_lead=lead, affinity_window=0.0, max_lift=lift))
    delta, promised = fleet.step_units, ROWS * (40 + 2 * 40)
    gap = ServiceGap()
    totals = {tenant: VirtualTokenCounter() for tenant in "tuv"}
    arrivals = iter(crowd)
    for number in range(150):
        if number % 2 == 0 and (arrival := next(arrivals, None)):
            engine, tenant, prompt, output, copies = arrival
            fleet.submit(engine % count, tenant, prompt, output, copies)
        fleet.step()
        flows = [
            {flow.tenant: flow for flow in engine.scheduler.queue.classes[STANDARD].tenants} for engine in fleet.engines
        ]
        for waiting in flows:
            served = [flow.served for flow in waiting.values()]
            assert not served or max(served) - min(served) <= lead + delta
        everywhere = [tenant for tenant in "tuv" if all(tenant in waiting for waiting in flows)]
        for tenant in everywhere:
            totals[tenant].credited = sum(waiting[tenant].credited for waiting in flows)
            totals[tenant].served = totals[tenant].credited + sum(waiting[tenant].received for waiting in flows)
        gap.observe([totals[tenant] for tenant in everywhere])
        assert gap.largest <= (count + 1) * promised + 2 * (count - 1) * every * delta + 2 * lift
    for engine in fleet.engines:
        engine.run(20_000)
    assert sum(len(engine.finished) for engine in fleet.engines) == fleet.sent, "every request ends"


PROMPT = 8


def largest_lead_at_an_admission(
    count: int, every: int | None, output: int, shared: set[int], idle_after: int, lead: float
) -> float:
    """Return the flooder's greatest lead in the whole fleet while it is admitted and the modest tenant waits."""
    fleet = Fleet(count, every, Policy(max_service_lead=lead, affinity_window=0.0, max_lift=1e9))
    for engine in range(count):
        fleet.submit(engine, "flood", PROMPT, output, copies=300 if engine in shared else idle_after)
    for _ in range(10):
        fleet.step()
    for engine in shared:
        fleet.submit(engine, "modest", PROMPT, output, copies=300)
    start = fleet.served("flood") - fleet.served("modest")
    largest = 0.0
    for _ in range(120):
        before = {engine: _admitted(fleet, engine, "flood") for engine in shared}
        ahead = fleet.served("flood") - fleet.served("modest") - start
        fleet.step()
        for engine in shared:
            if fleet.waits(engine, "modest") and _admitted(fleet, engine, "flood") - before[engine]:
                largest = max(largest, ahead)
    return largest


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(2, 4),
    every=st.integers(1, 6),
    output=st.integers(1, 20),
    where=st.sets(st.integers(0, 3), min_size=1),
    idle_after=st.integers(1, 300),
    lead=st.sampled_from([0.0, 20.0, 100.0]),
)
def test_tenant_that_waits_is_not_overtaken_by_one_that_is_ahead(
    count: int, every: int, output: int, where: set[int], idle_after: int, lead: float
) -> None:
    """Bound 2 of a new tenant, which no engine has served before: it has one of the two sigmas. The flooder has work
    elsewhere for a while or all the time."""
    shared = {engine % count for engine in where}
    largest = largest_lead_at_an_admission(count, every, output, shared, idle_after, lead)
    promised = ROWS * (PROMPT + 2 * output)
    assert largest <= promised + Fleet.step_units + (count - 1) * every * Fleet.step_units


def test_tenant_that_waits_is_overtaken_where_engines_exchange_nothing() -> None:
    assert largest_lead_at_an_admission(4, None, 10, {0}, 300, 100.0) > 5 * (ROWS * 28 + 3 * 6 * Fleet.step_units)


def test_tenant_with_lift_that_is_pending_does_not_make_the_first_sit_out() -> None:
    queue: FairQueue[VirtualTokenCounter] = FairQueue()
    lifted, first = VirtualTokenCounter(), VirtualTokenCounter()
    queue.enter(lifted)
    queue.enter(first)
    queue.lift(lifted, 100.0, 1000.0)
    queue.charge(first, 90.0)
    queue.spend_lifts(95.0)
    assert (lifted.served, lifted.pending_lift) == (0.0, 100.0), "it need not follow yet"
    queue.spend_lifts(80.0)
    assert (lifted.served, lifted.pending_lift, lifted.projected_service) == (90.0, 10.0, 100.0)
    queue.charge(first, 110.0)
    queue.spend_lifts(80.0)
    assert (lifted.served, lifted.pending_lift) == (100.0, 0.0)
    queue.spend_lifts(80.0)
    assert queue.floor == 100.0, "the lift is spent: now the first sits out"


def test_tenant_that_comes_back_pays_with_its_pending_lift_for_the_others_service() -> None:
    queue: FairQueue[VirtualTokenCounter] = FairQueue()
    lifted, other = VirtualTokenCounter(), VirtualTokenCounter()
    queue.enter(lifted)
    queue.enter(other)
    queue.lift(lifted, 100.0, 1000.0)
    queue.leave(lifted)
    queue.charge(other, 60.0)
    assert queue.entry(lifted) == 100.0
    queue.enter(lifted)
    assert (lifted.served, lifted.projected_service, lifted.credited) == (60.0, 100.0, 0.0)
    queue.leave(lifted)
    queue.charge(other, 60.0)
    assert queue.entry(lifted) == 120.0
    queue.enter(lifted)
    assert (lifted.served, lifted.projected_service, lifted.pending_lift) == (120.0, 120.0, 0.0)


def _admitted(fleet: Fleet, engine: int, tenant: str) -> set[str]:
    return {sequence.id for sequence in fleet.engines[engine].scheduler.running if sequence.request.tenant == tenant}


def test_service_of_a_tenant_whose_flow_is_forgotten_again_and_again_is_one_sum() -> None:
    """Each of them would otherwise be kept, with its counters, until service is taken."""
    harness = Harness(400, policy=Policy())
    for turn in range(12):
        harness.submit(f"r{turn}", 10, 10, tenant=f"t{turn % 3}")
        harness.run()
    taken = harness.scheduler.queue.take_service()
    assert sorted(taken, key=attrgetter("tenant")) == [TenantService(f"t{i}", "standard", 4 * 30) for i in range(3)]
