"""What the engine measures of itself."""

from __future__ import annotations

import pytest
from house import House

from loramux.engine.distribution import Histogram
from loramux.engine.policy import Policy
from loramux.engine.request import ServiceClass
from loramux.engine.service_meter import EVERY, LABELLED_TENANTS, OTHERS, ServiceMeter

PACE = (1.0, 0.0)


def test_a_value_is_counted_up_to_its_bound() -> None:
    histogram, other = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    other.observe(9.0)
    histogram.add(other)
    assert histogram.distribution.counts == [2, 1, 2]
    assert histogram.distribution.total == 14.5


def test_the_wait_in_the_queue_is_measured_once_for_each_request() -> None:
    house = House(num_pages=20, max_num_seqs=2, max_tokens=32, pace=PACE)
    house.submit("first", 4, 3)
    house.submit("low", 4, 30, service_class=ServiceClass.BATCH)
    house.step()
    house.submit("waits", 4, 3)
    house.submit("high", 4, 3, service_class=ServiceClass.INTERACTIVE)
    house.run()
    waits = house.scheduler.counters.queue_seconds
    assert house.scheduler.num_preemptions > 0
    assert sum(waits.counts) == 4
    assert waits.total > 0.0


def test_refusals_are_counted_by_kind() -> None:
    house = House(pace=PACE)
    for i in range(12):
        house.submit(f"r{i}", 4, 8)
    for _ in range(6):
        house.step()
    house.submit("hopeless", 4, 4, deadline_ms=1)
    house.submit("stuck", 4, 4, adapter="a", tenant="u", deadline_ms=60_000)
    house.time += 100.0
    house.step()
    assert (house.scheduler.counters.refused, house.scheduler.counters.missed) == (1, 1)


def test_hits_and_misses_of_adapters() -> None:
    house = House()
    house.submit("cold", 4, 2, adapter="a")
    house.run()
    house.submit("warm", 4, 2, adapter="a")
    house.run()
    assert (house.residency.counters.hits, house.residency.counters.misses) == (1, 1)
    assert sum(house.residency.counters.load_seconds.counts) == 1


def test_tenants_are_told_by_id_up_to_a_number_and_the_others_together() -> None:
    house = House(num_pages=400, max_num_seqs=64, max_tokens=256, policy=Policy(), pace=PACE)
    count = LABELLED_TENANTS + 5
    for i in range(count):
        house.submit(f"r{i}", prompt=2 + i, output=2, tenant=f"tenant-{i}")
    house.run()
    meter = ServiceMeter(house.scheduler.queue, house.clock)
    meter.look()
    told = {service.tenant: service.units for service in meter.tenants}
    assert len(told) == LABELLED_TENANTS + 1
    assert told[f"tenant-{count - 1}"] == 2 + (count - 1) + 2 * 2
    assert told[OTHERS] == sum(2 + i + 2 * 2 for i in range(5))


def test_the_gap_is_between_those_who_wait_and_is_looked_at_now_and_then() -> None:
    house = House(num_pages=12, max_num_seqs=1, max_tokens=8, pace=PACE)
    house.submit("runs", 4, 8, tenant="t")
    house.step()
    house.submit("t", 4, 8, tenant="t")
    house.submit("u", 4, 8, tenant="u")
    house.step()
    meter = ServiceMeter(house.scheduler.queue, house.clock)
    meter.look()
    first = meter.gap
    assert first == pytest.approx(max(f.served for f in house.scheduler.queue.flows) - 6.0)
    house.pace = (EVERY / 4, 0.0)
    house.step()
    meter.look()
    assert meter.gap == first, "too soon"
    for _ in range(4):
        house.step()
    meter.look()
    assert meter.gap > first
