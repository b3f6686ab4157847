"""The bound that fairness.py claims, on the running scheduler: any weights, loads, preemptions and pool sizes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import Harness

from loramux.engine.memory.ranking import RankedItems
from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.fairness import FairQueue, VirtualTokenCounter
from loramux.engine.scheduling.policy import Policy
from loramux.simulator.report import ServiceGap

TENANTS = ["t", "u", "v"]
PAGES_OF_BOTH_ADAPTERS = 5


def test_ranking_repairs_grown_ranks_and_keeps_order_among_equals() -> None:
    a, b, c = VirtualTokenCounter(), VirtualTokenCounter(), VirtualTokenCounter()
    ranking: RankedItems[VirtualTokenCounter, float] = RankedItems(lambda account: account.served)
    for account in (a, b, c):
        ranking.put(account)
    assert ranking.first() is a
    a.served, b.served = 3.0, 1.0
    assert ranking.first() is c
    ranking.drop(c)
    assert ranking.first() is b
    b.served = 3.0
    assert ranking.first() is a


def test_returning_party_starts_at_the_floor_or_at_the_peak() -> None:
    contest: FairQueue[VirtualTokenCounter] = FairQueue()
    busy, sleeper, late = VirtualTokenCounter(), VirtualTokenCounter(), VirtualTokenCounter()
    contest.enter(busy)
    contest.charge(busy, 100.0)
    contest.enter(sleeper)
    assert sleeper.served == busy.served == 100.0
    assert sleeper.received == 0.0
    contest.leave(sleeper)
    contest.charge(busy, 50.0)
    contest.leave(busy)
    contest.charge(busy, 25.0)
    contest.enter(late)
    assert late.served == 175.0, "nobody waited: it starts beside the one who got most"


class FairnessMachine(RuleBasedStateMachine):
    """Three tenants in three classes; what two of them received while both waited stays together."""

    @initialize(
        pages=st.sampled_from([25, 60, 400]),
        rows=st.integers(2, 6),
        tokens=st.integers(4, 16),
        max_service_lead=st.sampled_from([0.0, 5.0, 20.0]),
        weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
        guaranteed=st.sampled_from([0.0, 0.3]),
        weight_pages=st.sampled_from([4.0, 1000.0]),
    )
    def open(
        self,
        pages: int,
        rows: int,
        tokens: int,
        max_service_lead: float,
        weights: list[float],
        guaranteed: float,
        weight_pages: float,
    ) -> None:
        self.policy = Policy(
            max_service_lead=max_service_lead,
            affinity_window=10.0,
            tenant_guaranteed_pages=guaranteed,
            weight_pages=weight_pages,
        )
        self.harness = Harness(pages, block_size=4, max_num_seqs=rows, max_tokens=tokens, policy=self.policy)
        self.weights = dict(zip(TENANTS, weights, strict=True))
        self.delta = tokens + 2 * rows + PAGES_OF_BOTH_ADAPTERS * self.policy.load_units_per_page
        self.gaps = {group: ServiceGap() for group in self.harness.scheduler.queue.groups}
        self.class_gap = ServiceGap()
        self.sent = 0
        self.arrive("t", 1, 150, None, ServiceClass.STANDARD, copies=rows)
        self.step(2)  # another tenant has every row, and for long

    @rule(
        tenant=st.sampled_from(TENANTS),
        prompt=st.integers(1, 30),
        output=st.integers(1, 50),
        adapter=st.sampled_from([None, None, "a", "b"]),
        service_class=st.sampled_from(list(ServiceClass)),
        copies=st.integers(1, 12),
    )
    def arrive(
        self, tenant: str, prompt: int, output: int, adapter: str | None, service_class: ServiceClass, copies: int
    ) -> None:
        for _ in range(copies):
            self.sent += 1
            weight = self.weights[tenant]
            self.harness.submit(f"r{self.sent}", prompt, output, adapter, service_class, tenant, weight)

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(1, 1000))
    def cancel(self, pick: int) -> None:
        self.harness.scheduler.cancel(f"r{pick % self.sent + 1}")

    @precondition(lambda self: self.harness.store.pending)
    @rule()
    def load(self) -> None:
        self.harness.store.finish()

    @rule(count=st.sampled_from([1, 5, 30]))
    def step(self, count: int) -> None:
        queue = self.harness.scheduler.queue
        for _ in range(count):
            self.harness.step()
            for group, gap in self.gaps.items():
                gap.observe(flow for flow in queue.flows if flow.group is group and flow in group.tenants)
            self.class_gap.observe(group for group in queue.groups if group.tenants.floor is not None)

    @invariant()
    def tenants_of_a_class_stay_together(self) -> None:
        delta = self.delta / min(self.weights.values())
        for gap in self.gaps.values():
            assert gap.largest <= 2 * (self.policy.max_service_lead + delta)

    @invariant()
    def classes_stay_together(self) -> None:
        assert self.class_gap.largest <= 2 * (self.policy.max_service_lead + self.delta)

    def made_progress(self) -> None:
        """A thousand steps bring some request a token further."""
        before = sum(self.harness.generated.values()), len(self.harness.finished)
        for _ in range(1000):
            self.harness.store.finish_all()
            self.harness.step()
        assert before != (sum(self.harness.generated.values()), len(self.harness.finished)), "nothing moves"

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            # Without a lead, classes that displace each other compute everything many times over: slow is not stuck.
            while not self.harness.scheduler.is_idle:
                self.made_progress()
            assert len(self.harness.finished) == self.sent


TestFairnessMachine = FairnessMachine.TestCase
TestFairnessMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
