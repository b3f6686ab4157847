"""First-token deadlines: predicted when a request comes, refused early with the numbers, watched in the queue."""

from __future__ import annotations

import math
import queue
import re

import pytest
from scheduler_harness import Harness

from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.estimates import StepTimeModel
from loramux.engine.scheduling.policy import Policy
from loramux.engine.worker import _arrived

PACE = (0.05, 0.001)
"""A step takes 50 ms and a millisecond for each token."""


def busy(requests: int = 20, *, rows: int = 4, policy: Policy | None = None) -> Harness:
    """A harness that is full, with a queue, and knows its pace."""
    harness = Harness(num_pages=200, max_num_seqs=rows, max_tokens=32, policy=policy, pace=PACE)
    for i in range(requests):
        harness.submit(f"r{i}", prompt=8 + i % 3, output=16)
    for _ in range(6):
        harness.step()
    return harness


def predicted(harness: Harness, name: str, tenant: str, prompt: int = 8) -> float:
    """Return the predicted wait in seconds that refuses a request with an impossible deadline."""
    harness.submit(name, prompt, 4, tenant=tenant, deadline_ms=1)
    harness.step()
    assert harness.finished[name] == "error"
    return float(harness.faults[name].message.split("expected in ")[1].split(" ms")[0]) / 1000


def test_step_time_model_separates_steps_from_tokens() -> None:
    pace = StepTimeModel()
    assert pace.seconds(1, 100) == 0.0, "nothing is known"
    for tokens in (4, 100, 4, 30, 4, 4):
        pace.observe(tokens, 0.01 + 0.002 * tokens)
    assert pace.seconds(3, 50) == pytest.approx(3 * 0.01 + 50 * 0.002)


def test_step_time_model_predicts_steps_of_the_only_size_seen() -> None:
    pace = StepTimeModel()
    for _ in range(8):
        pace.observe(4, 0.02)
    assert pace.seconds(10, 40) == pytest.approx(0.2)


@pytest.mark.parametrize("requests", [4, 8, 20, 60])
def test_prediction_is_close_to_the_simulated_wait(requests: int) -> None:
    harness = busy(requests)
    expected = predicted(harness, "impatient", "t")
    begin = harness.time
    harness.submit("patient", 8, 4)
    harness.run()
    assert harness.first_token_at["patient"] - begin == pytest.approx(expected, rel=0.3)


def test_prediction_of_a_new_tenant_ignores_anothers_flood() -> None:
    harness = busy(60)
    assert predicted(harness, "other", "u") < 0.4 * predicted(harness, "own", "t")


def next_to_answers(token_context: float) -> Harness:
    """A harness with two endless answers, which has computed prompts of several lengths next to them."""
    harness = Harness(
        num_pages=900, max_num_seqs=8, max_tokens=64, pace=PACE, max_mixed=16, token_context=token_context
    )
    for name in ("x", "y"):
        harness.submit(name, prompt=4, output=900)
    for number, prompt in enumerate((4, 60, 200, 400)):
        harness.submit(f"p{number}", prompt, output=1)
        while f"p{number}" not in harness.finished:
            harness.step()
    return harness


@pytest.mark.parametrize("token_context", [math.inf, 300.0, 30.0])
@pytest.mark.parametrize("prompts", [(8,), (300,), (30, 200, 90)], ids=["short", "long", "queue"])
def test_prediction_next_to_answers_counts_attention_to_long_contexts(
    prompts: tuple[int, ...], token_context: float
) -> None:
    """After contexts of up to 400 tokens a step takes a fraction of its tokens, but not of a short prompt."""
    harness = next_to_answers(token_context)
    for number, prompt in enumerate(prompts[:-1]):
        harness.submit(f"before {number}", prompt, output=1)
    expected = predicted(harness, "impatient", "t", prompts[-1])
    begin = harness.time
    harness.submit("patient", prompts[-1], 4)
    while "patient" not in harness.first_token_at:
        harness.step()
    assert harness.first_token_at["patient"] - begin == pytest.approx(expected, rel=0.2)


def test_long_prompt_is_refused_only_if_it_misses_its_deadline() -> None:
    harness = next_to_answers(30.0)
    expected = predicted(harness, "impatient", "t", 300)
    begin = harness.time
    for name, share in (("late", 0.7), ("fine", 1.3)):
        harness.submit(name, 300, 1, deadline_ms=round(1000 * share * expected))
    while "fine" not in harness.finished:
        harness.step()
    assert harness.faults["late"].code == "engine_overloaded"
    assert harness.finished["fine"] == "length"
    assert 0.7 * expected < harness.first_token_at["fine"] - begin < 1.3 * expected


def test_rate_of_prompts_falls_with_the_contexts_that_wait() -> None:
    harness = next_to_answers(30.0)
    at_rest = harness.scheduler.prefill_tokens_per_s
    harness.submit("long", 400, 1)
    harness.step()
    assert harness.scheduler.prefill_tokens_per_s < 0.3 * at_rest


def test_deadline_that_would_be_missed_is_refused_with_numbers_and_not_queued() -> None:
    harness = busy()
    waiting = len(harness.scheduler.queue)
    harness.submit("late", 8, 4, deadline_ms=500)
    assert len(harness.scheduler.queue) == waiting
    (event,) = harness.scheduler.drain_events()
    assert event.fault is not None
    assert event.fault.code == "engine_overloaded"
    wait, late = map(int, re.findall(r"(\d+)\s+ms", event.fault.message))
    assert wait - late == pytest.approx(500, abs=1)
    assert event.fault.retry_after is not None
    assert event.fault.retry_after >= 1


def test_deadline_that_can_be_met_is_accepted_and_met() -> None:
    harness = busy()
    begin = harness.time
    harness.submit("fine", 8, 4, deadline_ms=8000)
    harness.run()
    assert harness.finished["fine"] == "length"
    assert harness.first_token_at["fine"] - begin < 8


def test_deadline_prediction_counts_rows_that_must_yield_as_free() -> None:
    harness = Harness(num_pages=60, max_num_seqs=2, max_tokens=64, pace=PACE)
    for i in range(2):
        harness.submit(f"b{i}", 8, 100, service_class=ServiceClass.BATCH)
    for _ in range(6):
        harness.step()
    begin = harness.time
    harness.submit("now", 20, 4, tenant="u", service_class=ServiceClass.INTERACTIVE, deadline_ms=1000)
    harness.run()
    assert harness.finished["now"] == "length"
    assert harness.first_token_at["now"] - begin <= 1.0


def test_class_deadline_applies_to_requests_without_their_own() -> None:
    harness = busy(policy=Policy(deadlines_ms={ServiceClass.STANDARD: 100}))
    harness.submit("standard", 8, 4)
    harness.submit("batch", 8, 4, service_class=ServiceClass.BATCH)
    harness.submit("patient", 8, 4, deadline_ms=100_000)
    harness.run()
    assert harness.finished["standard"] == "error"
    assert {harness.finished["batch"], harness.finished["patient"]} == {"length"}


def test_deadline_that_passes_in_the_queue_ends_the_request_unrun() -> None:
    harness = Harness(pace=PACE)
    harness.submit("waits", 4, 4, adapter="a", deadline_ms=300)
    harness.step()
    harness.step()
    assert harness.scheduler.next_plan_at == 0.3
    harness.time = 0.29
    harness.step()
    assert "waits" not in harness.finished, "this is still in time"
    harness.step()
    assert not re.search(r"\d", harness.faults["waits"].message), "it would be what the front has left of the deadline"
    assert harness.faults["waits"].code == "deadline_exceeded"
    assert "waits" not in harness.generated
    assert harness.scheduler.is_idle
    assert harness.scheduler.next_plan_at == -math.inf
    harness.step()
    assert harness.scheduler.next_plan_at == math.inf


def test_deadline_does_not_end_a_request_that_has_begun() -> None:
    harness = Harness(max_tokens=4, pace=PACE)
    harness.submit("slow", 20, 4, deadline_ms=100)
    harness.run()
    assert harness.finished["slow"] == "length"


def test_waiting_loop_wakes_for_the_next_deadline() -> None:
    assert _arrived(queue.SimpleQueue(), 0.01) == []


def choices(harness: Harness, count: int, deadline_ms: int, group: str = "api") -> list[str]:
    names = [f"{group}-{index}" for index in range(count)]
    for name in names:
        harness.submit(name, 8, 4, deadline_ms=deadline_ms, group=group)
    return names


def test_late_choices_of_a_request_that_has_begun_are_not_ended_by_its_deadline() -> None:
    """66 choices on four rows: the first begin in time, the last long after the deadline."""
    harness = Harness(num_pages=200, max_num_seqs=4, max_tokens=32, pace=PACE)
    names = choices(harness, 66, deadline_ms=300)
    harness.run()
    assert harness.time > 3.0
    assert {harness.finished[name] for name in names} == {"length"}
    assert harness.residency.counters.missed_deadlines == 0


def test_deadline_that_passes_before_any_choice_began_ends_all_of_them() -> None:
    harness = Harness(pace=PACE, max_num_seqs=1)
    harness.submit("runs", 4, 30)
    harness.step()
    names = choices(harness, 3, deadline_ms=200)
    for _ in range(8):
        harness.step()
    assert {harness.faults[name].code for name in names} == {"deadline_exceeded"}
    assert not harness.generated.keys() & set(names)
    assert not harness.scheduler.state.groups.keys() - {"runs"}


def test_choices_of_a_refused_request_are_refused_alike_whenever_they_come() -> None:
    harness = busy()
    harness.submit("api-0", 8, 4, deadline_ms=500, group="api")
    harness.run()
    harness.submit("api-1", 8, 4, deadline_ms=500, group="api")
    harness.step()
    assert harness.faults["api-0"] == harness.faults["api-1"]
    assert harness.faults["api-0"].code == "engine_overloaded"


def test_choice_that_comes_after_the_others_have_ended_is_not_refused() -> None:
    harness = busy(4, rows=8)
    harness.submit("api-0", 8, 1, deadline_ms=10_000, group="api")
    harness.run()
    for number in range(60):
        harness.submit(f"more{number}", 8, 16)
    for _ in range(4):
        harness.step()
    harness.submit("api-1", 8, 4, deadline_ms=100, group="api")
    harness.run()
    assert harness.finished["api-1"] == "length", "its request has begun, and a caller has read from it"
