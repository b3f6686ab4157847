"""Quotas, reserves, interruption and affinity: who gets a place, and who makes it."""

from __future__ import annotations

import pytest
from house import House
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.fairness import Account, Contest
from loramux.engine.policy import Policy
from loramux.engine.request import ServiceClass

BATCH, INTERACTIVE = ServiceClass.BATCH, ServiceClass.INTERACTIVE


def held(house: House, tenant: str) -> int:
    return sum(len(s.pages) for s in house.scheduler.running if s.request.tenant == tenant)


def running(house: House) -> set[str]:
    return {sequence.id for sequence in house.scheduler.running}


def full_of_batch(policy: Policy | None = None, rows: int = 8) -> House:
    """Twenty pages, all of them promised to requests of class batch."""
    house = House(num_pages=20, max_num_seqs=rows, max_tokens=32, policy=policy)
    for i in range(8):
        house.submit(f"b{i}", prompt=8, output=12, service_class=BATCH)
    house.step()
    assert running(house) == {"b0", "b1", "b2"}
    return house


def test_a_higher_class_interrupts_a_running_lower_one_between_two_steps() -> None:
    house = full_of_batch()
    house.submit("now", prompt=24, output=12, service_class=INTERACTIVE)
    house.step()
    assert running(house) == {"b0", "b1", "now"}, "the newest of the lower class went"
    house.run()
    assert set(house.finished.values()) == {"length"}
    assert house.generated["b2"] == 12


def test_an_equal_and_a_higher_class_are_not_interrupted() -> None:
    house = House(num_pages=20, max_num_seqs=8, max_tokens=32)
    for i in range(4):
        house.submit(f"i{i}", prompt=8, output=12, service_class=INTERACTIVE)
    house.step()
    before = running(house)
    house.submit("same", prompt=24, output=12, service_class=INTERACTIVE, tenant="u")
    house.submit("lower", prompt=24, output=12, service_class=BATCH, tenant="u")
    house.step()
    assert running(house) == before
    assert house.scheduler.num_preemptions == 0


def test_nobody_is_interrupted_where_it_would_not_be_enough() -> None:
    house = House(num_pages=20, max_num_seqs=8, max_tokens=64)
    house.submit("mine", prompt=30, output=20, service_class=INTERACTIVE)
    house.submit("low", prompt=8, output=8, service_class=BATCH)
    house.step()
    assert running(house) == {"mine", "low"}
    house.submit("large", prompt=40, output=20, service_class=INTERACTIVE)
    house.step()
    assert running(house) == {"mine", "low"}


def test_interruption_is_bounded_by_shares() -> None:
    """A flood of interactive requests does not keep batch out for good."""
    house = House(num_pages=20, max_num_seqs=4, max_tokens=16, policy=Policy(tau=32.0))
    for i in range(40):
        house.submit(f"i{i}", prompt=8, output=8, service_class=INTERACTIVE)
    house.submit("b", prompt=8, output=8, service_class=BATCH)
    house.run()
    assert house.order.index("b") < 35


def test_a_class_that_has_had_its_share_interrupts_nobody() -> None:
    shares = {INTERACTIVE: 2.0, ServiceClass.STANDARD: 1.5, BATCH: 1.0}
    house = House(num_pages=20, max_num_seqs=8, max_tokens=64, policy=Policy(class_shares=shares))
    house.submit("has", prompt=24, output=8, service_class=INTERACTIVE)
    house.submit("low", prompt=4, output=4, service_class=BATCH)
    house.step()
    house.submit("more", prompt=40, output=4, service_class=INTERACTIVE)
    house.step()
    assert running(house) == {"has", "low"}
    house.run()
    assert set(house.finished.values()) == {"length"}


def test_rows_are_taken_over_too() -> None:
    house = House(num_pages=100, max_num_seqs=2, max_tokens=32)
    for i in range(2):
        house.submit(f"b{i}", prompt=4, output=30, service_class=BATCH)
    house.step()
    house.submit("now", prompt=4, output=2, service_class=INTERACTIVE)
    house.step()
    assert running(house) == {"b0", "now"}


def test_a_class_finds_its_reserved_pages_free() -> None:
    policy = Policy(reserved_pages={INTERACTIVE: 0.5}, class_shares=dict.fromkeys(ServiceClass, 1.0))
    house = House(num_pages=20, max_num_seqs=8, max_tokens=32, policy=policy)
    for i in range(8):
        house.submit(f"b{i}", prompt=8, output=12, service_class=BATCH)
    house.step()
    assert running(house) == {"b0"}, "half of the pool is not for them"
    house.submit("now", prompt=12, output=16, service_class=INTERACTIVE)
    house.step()
    assert running(house) == {"b0", "now"}
    assert house.scheduler.num_preemptions == 0
    house.run()
    assert set(house.finished.values()) == {"length"}


def test_borrowed_pages_are_given_back_to_who_holds_less_than_it_is_guaranteed() -> None:
    house = House(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_guaranteed_pages=0.4))
    for i in range(8):
        house.submit(f"t{i}", prompt=8, output=12)
    house.step()
    assert running(house) == {"t0", "t1", "t2"}
    house.submit("u", prompt=12, output=8, tenant="u")
    house.step()
    assert running(house) == {"t0", "t1", "u"}
    house.run()
    assert set(house.finished.values()) == {"length"}


def test_beyond_its_guarantee_a_tenant_waits_its_turn() -> None:
    house = House(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_guaranteed_pages=0.2))
    for i in range(8):
        house.submit(f"t{i}", prompt=8, output=12)
    house.step()
    house.submit("u", prompt=12, output=8, tenant="u")
    house.step()
    assert "u" not in running(house)


def test_a_tenant_holds_no_more_than_it_may_and_keeps_nobody_out() -> None:
    house = House(num_pages=20, max_num_seqs=8, max_tokens=32, policy=Policy(tenant_max_pages=0.5))
    for i in range(4):
        house.submit(f"t{i}", prompt=8, output=12)
    for _ in range(4):
        house.step()
        assert held(house, "t") <= 10
    assert running(house) == {"t0", "t1"}
    house.submit("u", prompt=8, output=12, tenant="u")
    house.step()
    assert "u" in running(house), "pages are free, and the one in front may not have them"
    house.run()
    assert set(house.finished.values()) == {"length"}


def test_what_no_quota_allows_is_refused_at_once_with_the_numbers() -> None:
    house = House(num_pages=20, block_size=4, policy=Policy(tenant_max_pages=0.5))
    house.submit("big", prompt=30, output=11)
    (event,) = house.scheduler.take_news()
    assert event.fault is not None
    assert "41, more than the 40" in event.fault.message


@pytest.mark.parametrize(("overhead_target", "first"), [(0.1, "same"), (10.0, "new")])
def test_where_adapters_crowd_the_batch_one_of_the_batch_goes_before(overhead_target: float, first: str) -> None:
    policy = Policy(weight_pages=10.0, overhead_target=overhead_target, quantum=1000.0)
    house = House(num_pages=60, max_num_seqs=2, max_tokens=32, policy=policy)
    house.submit("warm-b", prompt=4, output=1, adapter="b")
    house.run()
    house.submit("a", prompt=4, output=30, adapter="a")
    house.submit("base", prompt=4, output=4, tenant="x")
    for _ in range(2):
        house.store.finish_all()
        house.step()
    house.submit("new", prompt=4, output=4, adapter="b", tenant="u")
    house.submit("same", prompt=4, output=4, adapter="a", tenant="v")
    house.run()
    order = [name for name in house.order if name in ("new", "same")]
    assert order[0] == first


def test_beyond_the_quantum_the_order_is_the_fair_one() -> None:
    contest: Contest[Account] = Contest()
    accounts = [Account(booked=booked) for booked in (5.0, 1.0, 3.0, 9.0)]
    for account in accounts:
        contest.enter(account)
    assert contest.first_near(lambda account: account.booked >= 3.0, 4.0, 10) is accounts[2]
    assert contest.first_near(lambda account: account.booked >= 5.0, 4.0, 10) is accounts[0]
    assert contest.first_near(lambda account: account.booked >= 5.0, 4.0, 2) is None, "the third is not looked at"
    assert contest.first_near(lambda account: account.booked >= 6.0, 4.0, 10) is None, "further than the span"
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
def test_whatever_the_quotas_everybody_is_answered(
    sizes, tenants, classes, guaranteed, most, reserved, weight_pages
) -> None:
    policy = Policy(
        tau=20.0,
        tenant_guaranteed_pages=guaranteed,
        tenant_max_pages=most,
        reserved_pages={INTERACTIVE: reserved},
        weight_pages=weight_pages,
    )
    house = House(num_pages=16, max_num_seqs=4, max_tokens=12, policy=policy)
    for i, (prompt, output) in enumerate(sizes):
        adapter = (None, "a", "b", "huge")[i % 4]
        house.submit(f"r{i}", prompt, output, adapter, classes[i], tenants[i])
        house.step()
    house.run(4000)
    assert len(house.finished) == len(sizes)
    for i, (_, output) in enumerate(sizes):
        assert house.finished[f"r{i}"] == "error" or house.generated[f"r{i}"] == output


def test_two_that_outgrow_what_they_were_expected_to_take_do_not_displace_each_other_for_ever() -> None:
    """Short answers were learned, so each asks for no more than its tenant is guaranteed, and soon holds far more."""
    house = House(25, block_size=4, max_num_seqs=2, max_tokens=16, policy=Policy(tenant_guaranteed_pages=0.3, tau=0.0))
    for number in range(8):
        for tenant in ("t", "u"):
            house.submit(f"{tenant}{number}", prompt=4, output=1, tenant=tenant)
    house.run()
    for tenant in ("t", "u"):
        house.submit(tenant, prompt=20, output=40, tenant=tenant)
    house.run()
    assert house.scheduler.num_preemptions > 0
    assert (house.generated["t"], house.generated["u"]) == (40, 40)
