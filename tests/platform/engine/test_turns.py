"""Planning ahead of the tokens: the same answers as in turn, whatever ends, leaves or is preempted meanwhile."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_runner import late_engine
from zoo import RECIPES, Asked, Zoo, serve, to_request

from loramux.engine.engine import Engine
from loramux.engine.messages import TokenEvent

EVERY_MODEL = [None, *RECIPES]


def some_requests(seed: int, count: int) -> list[Asked]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 5, 16, 17, 33]))) for _ in range(count)]
    return [Asked(f"r{i}", EVERY_MODEL[i % len(EVERY_MODEL)], p, rng.randrange(1, 12)) for i, p in enumerate(prompts)]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    budget=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
)
def test_the_same_tokens_as_in_turn(zoo_of, seed: int, arrivals: list[int], budget: int, max_num_seqs: int) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(seed, count=7)
    engine, runner = late_engine(zoo, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    check(zoo, asked, serve(zoo, engine, asked, arrivals))
    assert runner.pending or all(request.output == 1 for request in asked), "no step was planned ahead"
    assert engine.idle
    assert engine.stats().pages_kv == 0


def test_a_pool_so_small_that_requests_wait_and_adapters_are_evicted(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(seed=2, count=18)
    engine, _ = late_engine(zoo, pool_bytes=28 * 16 * 3 * 2 * 2 * 16 * 4)
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().adapter_evictions > 0


def test_preempted_requests_answer_the_same(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"p{i}", adapter, (7 + i, 11, 13), 20) for i, adapter in enumerate(EVERY_MODEL)]
    engine, _ = late_engine(zoo)
    scheduler = engine.scheduler
    plan = scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 3 == 2:
            scheduler._admission.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().preemptions >= 6


@pytest.mark.parametrize("room", [1, 2, 6], ids=["the last there was room for", "the last but one", "any"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_token_ends_the_answer_where_it_stands(zoo_of, at: int, room: int) -> None:
    """The row that ran after it is told to nobody, and its neighbour does not notice."""
    zoo = zoo_of("llama")
    stopping, other = Asked("s", None, (5, 6, 7), 9), Asked("o", "plain", (9, 8), 9)
    tokens = zoo.answer(stopping)
    stop = tokens[at]
    engine, _ = late_engine(zoo)
    engine.submit(to_request(zoo, stopping, stop_token_ids=(stop,), max_tokens=tokens.index(stop) + room))
    engine.submit(to_request(zoo, other))
    events = drain(engine)
    told = [event for event in events if event.request_id == "s"]
    assert [event.token_id for event in told] == tokens[: tokens.index(stop) + 1]
    assert told[-1].finish_reason == "stop"
    assert [event.token_id for event in events if event.request_id == "o"] == zoo.answer(other)
    assert engine.stats().pages_kv == 0
    assert engine.stats().output_tokens == len([event for event in events if event.token_id is not None])


def test_cancelled_while_its_token_is_on_the_way(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine, runner = late_engine(zoo)
    engine.submit(to_request(zoo, Asked("c", None, (5, 6, 7), 9)))
    for _ in range(3):
        engine.step()
    assert runner.unread, "a step is on its way"
    engine.cancel("c")
    events = drain(engine)
    assert [(event.token_id, event.finish_reason) for event in events] == [(None, "cancelled")]
    assert engine.idle
    assert engine.stats().pages_kv == 0


def test_an_engine_with_a_step_on_its_way_is_not_idle(zoo_of) -> None:
    """Or its worker would wait for a command while the last token is still to be told."""
    zoo = zoo_of("llama")
    engine, _ = late_engine(zoo)
    engine.submit(to_request(zoo, Asked("x", None, (5, 6), 1)))
    report = engine.step()
    assert report is not None
    assert report.events == []
    assert not engine.idle
    assert not engine.stalled
    assert [event.finish_reason for event in drain(engine)] == ["length"]


def drain(engine: Engine) -> list[TokenEvent]:
    events = []
    while not engine.idle:
        report = engine.step()
        events += report.events if report else []
    return events
