"""Measurements that the engine makes of itself."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness

from loramux.engine.messages import ServiceClass
from loramux.engine.metrics import Histogram
from loramux.engine.scheduling.policy import Policy
from loramux.engine.statistics import LABELLED_TENANTS, OTHERS, ServiceMeter, StepTimeline

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
    harness = Harness(num_pages=20, max_num_seqs=2, max_tokens=32, pace=PACE)
    harness.submit("first", 4, 3)
    harness.submit("low", 4, 30, service_class=ServiceClass.BATCH)
    harness.step()
    harness.submit("waits", 4, 3)
    harness.submit("high", 4, 3, service_class=ServiceClass.INTERACTIVE)
    harness.run()
    waits = harness.scheduler.state.counters.queue_seconds
    assert harness.scheduler.state.counters.preemptions > 0
    assert sum(waits.counts) == 4
    assert waits.total > 0.0


def test_refusals_are_counted_by_kind() -> None:
    harness = Harness(pace=PACE)
    for i in range(12):
        harness.submit(f"r{i}", 4, 8)
    for _ in range(6):
        harness.step()
    harness.submit("hopeless", 4, 4, deadline_ms=1)
    harness.submit("stuck", 4, 4, adapter="a", tenant="u", deadline_ms=60_000)
    harness.time += 100.0
    harness.step()
    assert (
        harness.scheduler.state.counters.refused_over_capacity,
        harness.scheduler.state.counters.missed_deadlines,
    ) == (1, 1)


def test_hits_and_misses_of_adapters() -> None:
    harness = Harness()
    harness.submit("cold", 4, 2, adapter="a")
    harness.run()
    harness.submit("warm", 4, 2, adapter="a")
    harness.run()
    assert (harness.residency.counters.adapter_hits, harness.residency.counters.adapter_misses) == (1, 1)
    assert sum(harness.residency.counters.adapter_load_seconds.counts) == 1


def test_load_that_a_request_waited_for_is_in_its_first_event() -> None:
    harness = Harness()
    harness.submit("cold", 4, 2, adapter="a")
    harness.submit("base", 4, 2)
    harness.run()
    harness.submit("warm", 4, 2, adapter="a")
    harness.run()
    first = harness.first_events
    assert first["warm"].load is first["base"].load is None
    assert first["cold"].load is not None
    began, ended = first["cold"].load
    assert 0.0 <= began < ended <= first["cold"].waited_s


def test_service_is_labelled_for_most_served_tenants_and_summed_for_others() -> None:
    harness = Harness(num_pages=400, max_num_seqs=64, max_tokens=256, policy=Policy(), pace=PACE)
    count = LABELLED_TENANTS + 5
    for i in range(count):
        harness.submit(f"r{i}", prompt=2 + i, output=2, tenant=f"tenant-{i}")
    harness.run()
    meter = ServiceMeter(harness.scheduler.queue)
    told = {service.tenant: service.units for service in meter.label_tenants()}
    assert len(told) == LABELLED_TENANTS + 1
    assert told[f"tenant-{count - 1}"] == 2 + (count - 1) + 2 * 2
    assert told[OTHERS] == sum(2 + i + 2 * 2 for i in range(5))


def test_service_gap_is_between_tenants_that_wait() -> None:
    harness = Harness(num_pages=12, max_num_seqs=1, max_tokens=8, pace=PACE)
    harness.submit("runs", 4, 8, tenant="t")
    harness.step()
    harness.submit("t", 4, 8, tenant="t")
    harness.submit("u", 4, 8, tenant="u")
    harness.step()
    meter = ServiceMeter(harness.scheduler.queue)
    first = meter.gap
    assert first == pytest.approx(max(f.served for f in harness.scheduler.queue.flows) - 6.0)
    for _ in range(4):
        harness.step()
    assert meter.gap > first


def test_timeline_has_a_step_a_second_by_revision_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.engine.statistics.LABELLED_ROWS", 2)
    harness = Harness(num_pages=40, max_num_seqs=8, max_tokens=64, pace=PACE)
    timeline = StepTimeline(harness.scheduler.state.counters, 1_000.0)
    for adapter in ("a", "b", "c"):
        harness.submit(f"of {adapter}", 4, 8, adapter=adapter)
    harness.submit("base", 5, 8, service_class=ServiceClass.BATCH)
    plan, steps = harness.scheduler.plan, []
    monkeypatch.setattr(harness.scheduler, "plan", lambda: steps.append(plan()) or steps[-1])
    harness.run()
    step = max(steps, key=lambda one: len(one.chunks))
    assert len(step.chunks) == 4
    for now in (7.0, 7.5, 8.0):
        timeline.sample(step, now)
    assert [sample.at for sample in timeline.samples] == [1_007.0, 1_008.0]
    rows = timeline.samples[0].rows
    assert sum(row.prefill + row.decode for row in rows) == sum(chunk.length for chunk in step.chunks)
    assert len([row for row in rows if row.digest != OTHERS]) == 2
    assert any(row.digest == OTHERS for row in rows)
