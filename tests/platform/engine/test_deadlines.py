"""First-token deadlines: predicted when a request comes, refused early with the numbers, watched in the queue."""

from __future__ import annotations

import queue

import pytest
from house import House

from loramux.engine.pace import Pace
from loramux.engine.policy import Policy
from loramux.engine.request import ServiceClass
from loramux.engine.worker import _arrived

PACE = (0.05, 0.001)
"""A step takes 50 ms and a millisecond for each token."""


def busy(requests: int = 20, *, rows: int = 4, policy: Policy | None = None) -> House:
    """A house that is full, with a queue, and knows its pace."""
    house = House(num_pages=200, max_num_seqs=rows, max_tokens=32, policy=policy, pace=PACE)
    for i in range(requests):
        house.submit(f"r{i}", prompt=8 + i % 3, output=16)
    for _ in range(6):
        house.step()
    return house


def predicted(house: House, name: str, tenant: str, prompt: int = 8) -> float:
    """What a request with an impossible deadline is told, in seconds."""
    house.submit(name, prompt, 4, tenant=tenant, deadline_ms=1)
    house.step()
    assert house.finished[name] == "error"
    return float(house.faults[name].message.split("expected in ")[1].split(" ms")[0]) / 1000


def test_the_pace_tells_steps_from_tokens() -> None:
    pace = Pace()
    assert pace.seconds(1, 100) == 0.0, "nothing is known"
    for tokens in (4, 100, 4, 30, 4, 4):
        pace.observe(tokens, 0.01 + 0.002 * tokens)
    assert pace.seconds(3, 50) == pytest.approx(3 * 0.01 + 50 * 0.002)


def test_steps_of_one_size_tell_how_long_such_a_step_takes() -> None:
    pace = Pace()
    for _ in range(8):
        pace.observe(4, 0.02)
    assert pace.seconds(10, 40) == pytest.approx(0.2)


@pytest.mark.parametrize("requests", [4, 8, 20, 60])
def test_the_prediction_is_close_to_what_happens(requests: int) -> None:
    house = busy(requests)
    expected = predicted(house, "impatient", "t")
    begin = house.time
    house.submit("patient", 8, 4)
    house.run()
    assert house.first_token_at["patient"] - begin == pytest.approx(expected, rel=0.3)


def test_another_tenants_flood_is_not_ahead_of_who_has_waited_for_nothing() -> None:
    house = busy(60)
    assert predicted(house, "other", "u") < 0.4 * predicted(house, "own", "t")


def test_who_would_miss_its_deadline_is_refused_with_the_numbers_and_never_queued() -> None:
    house = busy()
    waiting = len(house.scheduler.queue)
    house.submit("late", 8, 4, deadline_ms=500)
    assert len(house.scheduler.queue) == waiting
    (event,) = house.scheduler.take_news()
    assert event.fault is not None
    assert event.fault.code == "engine_overloaded"
    assert "deadline is 500 ms" in event.fault.message
    assert event.fault.retry_after is not None
    assert event.fault.retry_after >= 1


def test_who_can_make_it_is_accepted_and_makes_it() -> None:
    house = busy()
    begin = house.time
    house.submit("fine", 8, 4, deadline_ms=8000)
    house.run()
    assert house.finished["fine"] == "length"
    assert house.first_token_at["fine"] - begin < 8


def test_who_may_interrupt_the_others_is_not_refused_for_their_length() -> None:
    house = House(num_pages=60, max_num_seqs=2, max_tokens=64, pace=PACE)
    for i in range(2):
        house.submit(f"b{i}", 8, 100, service_class=ServiceClass.BATCH)
    for _ in range(6):
        house.step()
    begin = house.time
    house.submit("now", 20, 4, tenant="u", service_class=ServiceClass.INTERACTIVE, deadline_ms=1000)
    house.run()
    assert house.finished["now"] == "length"
    assert house.first_token_at["now"] - begin <= 1.0


def test_a_class_has_a_deadline_of_its_own() -> None:
    house = busy(policy=Policy(deadlines_ms={ServiceClass.STANDARD: 100}))
    house.submit("standard", 8, 4)
    house.submit("batch", 8, 4, service_class=ServiceClass.BATCH)
    house.submit("patient", 8, 4, deadline_ms=100_000)
    house.run()
    assert house.finished["standard"] == "error"
    assert {house.finished["batch"], house.finished["patient"]} == {"length"}


def test_a_deadline_that_passes_in_the_queue_is_answered_and_nothing_is_run() -> None:
    house = House(pace=PACE)
    house.submit("waits", 4, 4, adapter="a", deadline_ms=300)
    assert house.scheduler.stalled
    assert house.scheduler.seconds_to_deadline == pytest.approx(0.3)
    house.time += 0.3
    house.step()
    assert "waits" not in house.finished, "this is still in time"
    house.time += 0.1
    house.step()
    assert house.faults["waits"].code == "deadline_exceeded"
    assert "waits" not in house.generated
    assert house.scheduler.idle
    assert house.scheduler.seconds_to_deadline is None


def test_what_has_started_is_not_given_up() -> None:
    house = House(max_tokens=4, pace=PACE)
    house.submit("slow", 20, 4, deadline_ms=100)
    house.run()
    assert house.finished["slow"] == "length"


def test_a_stalled_loop_wakes_for_the_next_deadline() -> None:
    assert _arrived(queue.SimpleQueue(), wait=True, patience=0.01) == []
