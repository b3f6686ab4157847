"""Loads are claims: at any ratio of adapters to memory a bounded number of plans makes progress, and no load is
wasted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, ManualStore

from loramux.engine.memory.residency import AdapterState, StoreJob
from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.policy import Policy

MAX_EMPTY_PLANS = 4
"""Plans in a row that hold nothing although nothing is loading: enough to park, to load and to revoke."""


class TimedStore(ManualStore):
    """A store whose loads end between plans, each after its own number of plans, out of order; some of them fail."""

    def __init__(self, size: int, delays: list[int], fails: list[bool]) -> None:
        super().__init__({}, {})
        self.size = size
        self.delays = delays
        self.fails = fails
        self.loads: Counter[str] = Counter()
        self._started = 0
        self._due: list[tuple[int, StoreJob[Any], Any, bool]] = []
        self._now = 0

    def inspect(self, ref: Any) -> StoreJob[Any]:
        self.sizes[ref.digest] = self.size
        return super().inspect(ref)

    def fill(self, ref: Any, pages: list[int]) -> StoreJob[int]:
        self.loads[ref.digest] += 1
        slot = next(i for i in range(100_000) if i not in self.live)
        self.live[slot] = pages
        future: StoreJob[Any] = StoreJob()
        fails = self.fails[self._started % len(self.fails)]
        self._due.append((self._now + self.delays[self._started % len(self.delays)], future, slot, fails))
        self._started += 1
        return future

    @property
    def is_loading(self) -> bool:
        return bool(self._due)

    def pass_time(self) -> None:
        """One plan's time: inspections end, and the loads that are due."""
        self._now += 1
        self.finish_all()
        due = [entry for entry in self._due if entry[0] <= self._now]
        self._due = [entry for entry in self._due if entry[0] > self._now]
        for _, future, slot, fails in reversed(due):
            if fails:
                del self.live[slot]
                future.set_exception(OSError("the storage does not answer"))
            else:
                future.set_result(slot)


class Crowd:
    """More adapters than the pool holds, driven to the end; counts the plans that hold nothing."""

    def __init__(self, store: TimedStore, num_pages: int, rows: int, policy: Policy | None = None) -> None:
        self.harness = Harness(num_pages, block_size=4, max_num_seqs=rows, max_tokens=32, policy=policy, max_loading=4)
        self.harness.store = store
        self.harness.residency._store = store
        self.store = store
        self.plans = 0
        self._empty = 0

    def step(self) -> None:
        self.plans += 1
        loading = self.store.is_loading or bool(self.store.pending)
        self.store.pass_time()
        ran = self.harness.step()
        self._empty = 0 if ran or loading or self.store.is_loading else self._empty + 1
        state = self.harness.scheduler
        assert self._empty <= MAX_EMPTY_PLANS or state.is_idle, (
            f"{self._empty} plans in a row held nothing: {len(state.queue)} wait, {len(state.running)} run"
        )

    def run(self, limit: int) -> None:
        while not self.harness.scheduler.is_idle:
            self.step()
            assert self.plans <= limit, "requests wait for ever"

    def check_rest(self) -> None:
        while self.store.is_loading:
            self.step()
        self.step()
        assert not self.harness.scheduler.state.claims
        assert self.harness.scheduler.memory.counts.adapters == 0
        assert self.harness.scheduler.memory.counts.kv == 0


@pytest.mark.parametrize(
    ("pages", "size", "tenants", "requests"),
    [(100, 60, 2, 4), (100, 24, 5, 10), (100, 45, 100, 200), (500, 16, 128, 384)],
)
def test_adapters_over_the_pool_serve_every_request_with_a_load_each_at_most(
    pages: int, size: int, tenants: int, requests: int
) -> None:
    crowd = Crowd(TimedStore(size, delays=[1, 4, 2, 3], fails=[False]), pages, rows=16)
    for number in range(requests):
        name = f"x{number % tenants}"
        crowd.harness.submit(str(number), 4, 6, adapter=name, tenant=name)
    crowd.run(limit=40 * requests)
    assert set(crowd.harness.finished.values()) == {"length"}
    assert sum(crowd.store.loads.values()) <= requests
    assert crowd.harness.residency.counters.claims_revoked == 0
    crowd.check_rest()


def test_loaded_adapter_stays_until_its_requester_has_joined() -> None:
    """The head of another tenant is cold too, and only one of the two fits at a time."""
    harness = Harness(num_pages=10, block_size=4, max_num_seqs=4)
    harness.submit("first", 8, 4, adapter="b", tenant="t")
    harness.store.finish_all()
    harness.step()
    harness.submit("base", 8, 4, tenant="v")
    harness.submit("second", 8, 4, adapter="c", tenant="u")
    harness.store.finish(1)
    harness.step()
    assert harness.residency.state("b") is AdapterState.LOADING
    harness.store.finish(0)
    harness.step()
    assert harness.residency.state("b") is AdapterState.READY
    harness.run()
    assert set(harness.finished.values()) == {"length"}
    assert harness.residency.counters.adapter_loads == 2


def test_claim_of_a_cancelled_request_passes_to_the_next_one_of_the_adapter_or_ends() -> None:
    harness = Harness(num_pages=20, max_num_seqs=4)
    for name in ("one", "two"):
        harness.submit(name, 4, 2, adapter="a")
    harness.store.finish_all()
    harness.step()
    state = harness.scheduler.state
    assert state.claims["a"].id == "one"
    harness.scheduler.cancel("one")
    assert state.claims["a"].id == "two"
    harness.scheduler.cancel("two")
    assert not state.claims
    harness.run()
    assert harness.residency.pinned_pages() == 0, "what was loaded for them may be evicted"


def test_failed_load_ends_its_claim_and_its_requests() -> None:
    harness = Harness(num_pages=20, max_num_seqs=4)
    harness.submit("bad", 4, 2, adapter="a")
    harness.store.finish_all()
    harness.step()
    harness.store.finish(0, RuntimeError("disk on fire"))
    harness.run()
    assert harness.finished == {"bad": "error"}
    assert not harness.scheduler.state.claims
    assert harness.pool.num_free == harness.pool.num_pages


def test_tenant_that_waits_for_a_place_among_the_loads_keeps_no_row_idle() -> None:
    """Four loads run and do not end; the fifth cold tenant has the lowest counter."""
    policy = Policy(max_service_lead=16.0)
    harness = Harness(num_pages=400, max_num_seqs=64, max_tokens=256, policy=policy)
    store = TimedStore(2, delays=[10_000], fails=[False])
    harness.store = harness.residency._store = store
    for number in range(8):
        harness.submit(f"runs{number}", 4, 60, tenant=f"t{number % 4}")
    harness.step()
    for number in range(6):
        harness.submit(f"cold{number}", 4, 4, adapter=f"x{number}", tenant=f"cold{number}")
    store.pass_time()
    for number in range(4):
        harness.submit(f"more{number}", 4, 4, tenant=f"t{number}")
    empty = 0
    for _ in range(50):
        empty += not harness.step()
    assert empty == 0
    assert harness.generated["runs0"] >= 50


def test_cold_request_without_a_place_among_the_loads_keeps_its_tenants_other_requests_running() -> None:
    harness = Harness(num_pages=400, max_num_seqs=8)
    store = TimedStore(2, delays=[10_000], fails=[False])
    harness.store = harness.residency._store = store
    for number in range(6):
        harness.submit(f"cold{number}", 4, 4, adapter=f"x{number}", tenant="t")
    harness.submit("base", 4, 4, tenant="t")
    store.pass_time()
    for _ in range(8):
        harness.step()
    assert harness.finished == {"base": "length"}


def test_plan_that_waits_for_loads_only_is_followed_by_a_wait() -> None:
    harness = Harness(num_pages=40, max_num_seqs=8)
    store = TimedStore(4, delays=[10_000], fails=[False])
    harness.store = harness.residency._store = store
    for number in range(12):
        harness.submit(f"cold{number}", 4, 4, adapter=f"x{number}", tenant=f"u{number}")
    store.pass_time()
    plans = 0
    while harness.scheduler.next_plan_at == -math.inf:
        harness.step()
        plans += 1
        assert plans < 20, "the loop spins"
    assert harness.scheduler.next_plan_at == math.inf


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 400),  # adapter; the highest are the base
        st.integers(1, 24),  # prompt
        st.integers(1, 12),  # output
        st.sampled_from("tuvwxyz"),
        st.sampled_from(list(ServiceClass)),
        st.integers(0, 3),  # plans before the next one arrives
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    size=st.integers(1, 20),
    pages=st.integers(21, 40),
    rows=st.integers(1, 8),
    delays=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    fails=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=5),
    lead=st.sampled_from([0.0, 20.0, 8192.0]),
    quota=st.sampled_from([1.0, 1.0, 0.7]),
    guaranteed=st.sampled_from([0.0, 0.3]),
    cancel=st.sets(st.integers(0, 59), max_size=8),
)
def test_any_crowd_of_adapters_makes_progress_and_loads_serve(
    requests, size, pages, rows, delays, fails, lead, quota, guaranteed, cancel
) -> None:
    policy = Policy(
        max_service_lead=lead, tenant_max_pages=quota, tenant_guaranteed_pages=guaranteed, prefix_cache=bool(rows % 2)
    )
    crowd = Crowd(TimedStore(size, delays, fails), pages, rows, policy)
    crowd.harness.oracle = None
    for number, (adapter, prompt, output, tenant, service_class, pause) in enumerate(requests):
        name = f"x{adapter}" if adapter < 300 else None
        crowd.harness.submit(str(number), prompt, output, name, service_class, tenant)
        for _ in range(pause):
            crowd.step()
        if number in cancel:
            crowd.harness.scheduler.cancel(str(number // 2))
    crowd.run(limit=20_000)
    assert len(crowd.harness.finished) == len(requests)
    crowd.check_rest()
    counters = crowd.harness.residency.counters
    if lead > 8000 and not cancel and not guaranteed and not counters.preemptions:
        assert counters.claims_revoked == 0
        assert sum(crowd.store.loads.values()) <= len(requests) + counters.adapter_load_failures
