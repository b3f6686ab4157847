"""Quotas, reserves, interruption and affinity: which sequence gets a place, and which one gives it up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.fairness import FairQueue, VirtualTokenCounter
from loramux.engine.scheduling.policy import Policy
from loramux.engine.scheduling.sequence import Sequence

BATCH, INTERACTIVE = ServiceClass.BATCH, ServiceClass.INTERACTIVE


def held(harness: Harness, tenant: str) -> int:
    return sum(len(s.pages) for s in harness.scheduler.running if s.request.tenant == tenant)


def running(harness: Harness) -> set[str]:
    return {sequence.id for sequence in harness.scheduler.running}


def full_of_batch(policy: Policy | None = None, rows: int = 8) -> Harness:
    """Twenty pages, all of them promised to requests of class batch."""
    harness = Harness(num_pages=20, max_num_seqs=rows, max_tokens=32, policy=policy)
    for i in range(8):
        harness.submit(f"b{i}", prompt=8, output=12, service_class=BATCH)
    harness.step()
    assert running(harness) == {"b0", "b1", "b2"}
    return harness


def test_a_higher_class_interrupts_a_running_lower_one_between_two_steps() -> None:
    harness = full_of_batch()
    harness.submit("now", prompt=24, output=12, service_class=INTERACTIVE)
    harness.step()
    assert running(harness) == {"b0", "b1", "now"}, "the newest of the lower class went"
    harness.run()
    assert set(harness.finished.values()) == {"length"}
    assert harness.generated["b2"] == 12


def test_an_equal_and_a_higher_class_are_not_interrupted() -> None:
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=32)
    for i in range(4):
        harness.submit(f"i{i}", prompt=8, output=12, service_class=INTERACTIVE)
    harness.step()
    before = running(harness)
    harness.submit("same", prompt=24, output=12, service_class=INTERACTIVE, tenant="u")
    harness.submit("lower", prompt=24, output=12, service_class=BATCH, tenant="u")
    harness.step()
    assert running(harness) == before
    assert harness.scheduler.state.counters.preemptions == 0


def test_preemption_that_would_not_be_enough_does_not_happen() -> None:
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=64)
    harness.submit("mine", prompt=30, output=20, service_class=INTERACTIVE)
    harness.submit("low", prompt=8, output=8, service_class=BATCH)
    harness.step()
    assert running(harness) == {"mine", "low"}
    harness.submit("large", prompt=40, output=20, service_class=INTERACTIVE)
    harness.step()
    assert running(harness) == {"mine", "low"}


def test_preemption_by_class_is_bounded_by_shares() -> None:
    """A flood of interactive requests does not keep batch out for good."""
    harness = Harness(num_pages=20, max_num_seqs=4, max_tokens=16, policy=Policy(max_service_lead=32.0))
    for i in range(40):
        harness.submit(f"i{i}", prompt=8, output=8, service_class=INTERACTIVE)
    harness.submit("b", prompt=8, output=8, service_class=BATCH)
    harness.run()
    assert harness.order.index("b") < 35


def test_class_that_had_its_share_preempts_no_row() -> None:
    shares = {INTERACTIVE: 2.0, ServiceClass.STANDARD: 1.5, BATCH: 1.0}
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=64, policy=Policy(class_shares=shares))
    harness.submit("has", prompt=24, output=8, service_class=INTERACTIVE)
    harness.submit("low", prompt=4, output=4, service_class=BATCH)
    harness.step()
    harness.submit("more", prompt=40, output=4, service_class=INTERACTIVE)
    harness.step()
    assert running(harness) == {"has", "low"}
    harness.run()
    assert set(harness.finished.values()) == {"length"}


def test_preemption_by_class_frees_rows_as_well() -> None:
    harness = Harness(num_pages=100, max_num_seqs=2, max_tokens=32)
    for i in range(2):
        harness.submit(f"b{i}", prompt=4, output=30, service_class=BATCH)
    harness.step()
    harness.submit("now", prompt=4, output=2, service_class=INTERACTIVE)
    harness.step()
    assert running(harness) == {"b0", "now"}


def test_a_class_finds_its_reserved_pages_free() -> None:
    policy = Policy(reserved_pages={INTERACTIVE: 0.5}, class_shares=dict.fromkeys(ServiceClass, 1.0))
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=32, policy=policy)
    for i in range(8):
        harness.submit(f"b{i}", prompt=8, output=12, service_class=BATCH)
    harness.step()
    assert running(harness) == {"b0"}, "half of the pool is not for them"
    harness.submit("now", prompt=12, output=16, service_class=INTERACTIVE)
    harness.step()
    assert running(harness) == {"b0", "now"}
    assert harness.scheduler.state.counters.preemptions == 0
    harness.run()
    assert set(harness.finished.values()) == {"length"}


def test_borrowed_pages_return_to_a_tenant_below_its_guarantee() -> None:
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_guaranteed_pages=0.4))
    for i in range(8):
        harness.submit(f"t{i}", prompt=8, output=12)
    harness.step()
    assert running(harness) == {"t0", "t1", "t2"}
    harness.submit("u", prompt=12, output=8, tenant="u")
    harness.step()
    assert running(harness) == {"t0", "t1", "u"}
    harness.run()
    assert set(harness.finished.values()) == {"length"}


def test_beyond_its_guarantee_a_tenant_waits_its_turn() -> None:
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_guaranteed_pages=0.2))
    for i in range(8):
        harness.submit(f"t{i}", prompt=8, output=12)
    harness.step()
    harness.submit("u", prompt=12, output=8, tenant="u")
    harness.step()
    assert "u" not in running(harness)


def test_tenant_at_its_quota_holds_no_more_and_keeps_no_other_out() -> None:
    harness = Harness(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_max_pages=0.5))
    for i in range(4):
        harness.submit(f"t{i}", prompt=8, output=12)
    for _ in range(4):
        harness.step()
        assert held(harness, "t") <= 10
    assert running(harness) == {"t0", "t1"}
    harness.submit("u", prompt=8, output=12, tenant="u")
    harness.step()
    assert "u" in running(harness), "pages are free, and the one in front may not have them"
    harness.run()
    assert set(harness.finished.values()) == {"length"}


def test_request_over_any_quota_is_refused_at_once_with_numbers() -> None:
    harness = Harness(num_pages=20, block_size=4, policy=Policy(tenant_max_pages=0.5))
    harness.submit("big", prompt=30, output=11)
    (event,) = harness.scheduler.drain_events()
    assert event.fault is not None
    assert "41, more than the 40" in event.fault.message


@pytest.mark.parametrize(("adapter_overhead_target", "first"), [(0.1, "same"), (10.0, "new")])
def test_adapter_in_the_batch_goes_first_where_adapters_crowd_the_batch(
    adapter_overhead_target: float, first: str
) -> None:
    policy = Policy(weight_pages=10.0, adapter_overhead_target=adapter_overhead_target, affinity_window=1000.0)
    harness = Harness(num_pages=60, max_num_seqs=2, max_tokens=32, policy=policy)
    harness.submit("warm-b", prompt=4, output=1, adapter="b")
    harness.run()
    harness.submit("a", prompt=4, output=30, adapter="a")
    harness.submit("base", prompt=4, output=4, tenant="x")
    for _ in range(2):
        harness.store.finish_all()
        harness.step()
    harness.submit("new", prompt=4, output=4, adapter="b", tenant="u")
    harness.submit("same", prompt=4, output=4, adapter="a", tenant="v")
    harness.run()
    order = [name for name in harness.order if name in ("new", "same")]
    assert order[0] == first


def test_affinity_ends_at_its_window() -> None:
    contest: FairQueue[VirtualTokenCounter] = FairQueue()
    accounts = [VirtualTokenCounter(projected_service=booked) for booked in (5.0, 1.0, 3.0, 9.0)]
    for account in accounts:
        contest.enter(account)
    assert contest.first_near(lambda account: account.projected_service >= 3.0, 4.0, 10) is accounts[2]
    assert contest.first_near(lambda account: account.projected_service >= 5.0, 4.0, 10) is accounts[0]
    assert contest.first_near(lambda account: account.projected_service >= 5.0, 4.0, 2) is None, (
        "the third is not looked at"
    )
    assert contest.first_near(lambda account: account.projected_service >= 6.0, 4.0, 10) is None, (
        "further than the span"
    )
    assert contest.first is accounts[1], "asking changes nothing"


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=25),
    tenants=st.lists(st.sampled_from("tuv"), min_size=25, max_size=25),
    classes=st.lists(st.sampled_from(list(ServiceClass)), min_size=25, max_size=25),
    guaranteed=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    most=st.sampled_from([0.5, 1.0]),
    reserved=st.sampled_from([0.0, 0.3, 0.9]),
    weight_pages=st.sampled_from([1.0, 1000.0]),
)
def test_any_quotas_answer_every_request(sizes, tenants, classes, guaranteed, most, reserved, weight_pages) -> None:
    policy = Policy(
        max_service_lead=20.0,
        tenant_guaranteed_pages=guaranteed,
        tenant_max_pages=most,
        reserved_pages={INTERACTIVE: reserved},
        weight_pages=weight_pages,
    )
    harness = Harness(num_pages=16, max_num_seqs=4, max_tokens=12, policy=policy)
    for i, (prompt, output) in enumerate(sizes):
        adapter = (None, "a", "b", "huge")[i % 4]
        harness.submit(f"r{i}", prompt, output, adapter, classes[i], tenants[i])
        harness.step()
    harness.run(4000)
    assert len(harness.finished) == len(sizes)
    for i, (_, output) in enumerate(sizes):
        assert harness.finished[f"r{i}"] == "error" or harness.generated[f"r{i}"] == output


def test_sequences_that_outgrow_their_estimates_do_not_preempt_each_other_for_ever() -> None:
    """Short answers were learned, so each asks for no more than its tenant is guaranteed, and soon holds far more."""
    harness = Harness(
        25,
        block_size=4,
        max_num_seqs=2,
        max_tokens=16,
        policy=Policy(tenant_guaranteed_pages=0.3, max_service_lead=0.0),
    )
    for number in range(8):
        for tenant in ("t", "u"):
            harness.submit(f"{tenant}{number}", prompt=4, output=1, tenant=tenant)
    harness.run()
    for tenant in ("t", "u"):
        harness.submit(tenant, prompt=20, output=40, tenant=tenant)
    harness.run()
    assert harness.scheduler.state.counters.preemptions > 0
    assert (harness.generated["t"], harness.generated["u"]) == (40, 40)


def test_quota_is_asked_for_every_newcomer_at_the_cost_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages promised to tenants' running sequences are summed when a sequence joins, not all again for each one."""
    looks, likely_left = [], Sequence.likely_left
    harness = Harness(num_pages=1000, max_num_seqs=64, max_tokens=512, policy=Policy(tenant_max_pages=0.9))
    for i in range(64):
        harness.submit(f"r{i}", prompt=4, output=4, tenant=f"t{i % 4}")
    counted = property(lambda sequence: looks.append(sequence) or likely_left.__get__(sequence))
    monkeypatch.setattr(Sequence, "likely_left", counted)
    harness.step()
    assert len(harness.scheduler.running) > 32
    assert len(looks) < 8 * 64, "of 64 * 64 / 2 sums"
