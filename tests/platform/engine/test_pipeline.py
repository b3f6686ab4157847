"""Planning ahead of the tokens: the same answers as without, even if sequences end, leave or are preempted at the same
time."""

from __future__ import annotations

import random

import pytest
from adapter_zoo import RECIPES, Asked, Zoo, serve, to_request
from delayed_runner import late_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    budget=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
)
def test_async_pipeline_answers_as_peft_does(
    zoo_of, seed: int, arrivals: list[int], budget: int, max_num_seqs: int
) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(seed, count=7)
    engine, runner = late_engine(zoo, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    check(zoo, asked, serve(zoo, engine, asked, arrivals))
    assert runner.pending or all(request.output == 1 for request in asked), "no step was planned ahead"
    assert engine.is_idle
    assert engine.stats().pages_kv == 0


def test_async_pipeline_in_a_tiny_pool_answers_as_peft_does(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(seed=2, count=18)
    engine, _ = late_engine(zoo, pool_bytes=28 * 16 * 3 * 2 * 2 * 16 * 4)
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().adapter_evictions > 0


def test_async_pipeline_preempted_requests_answer_as_peft_does(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"p{i}", adapter, (7 + i, 11, 13), 20) for i, adapter in enumerate(EVERY_MODEL)]
    engine, _ = late_engine(zoo)
    scheduler = engine.scheduler
    plan = scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 3 == 2:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().preemptions >= 6


@pytest.mark.parametrize("room", [1, 2, 6], ids=["the last there was room for", "the last but one", "any"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_async_pipeline_stop_token_ends_the_answer_at_its_place(zoo_of, at: int, room: int) -> None:
    """The row that ran after the stop token is not reported, and the other sequence is not affected."""
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


def test_async_pipeline_cancelled_in_flight_ends_without_its_token(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine, runner = late_engine(zoo)
    engine.submit(to_request(zoo, Asked("c", None, (5, 6, 7), 9)))
    for _ in range(3):
        engine.step()
    assert runner.unread, "a step is on its way"
    engine.cancel("c")
    events = drain(engine)
    assert [(event.token_id, event.finish_reason) for event in events] == [(None, "cancelled")]
    assert engine.is_idle
    assert engine.stats().pages_kv == 0


def test_async_pipeline_with_a_step_in_flight_is_not_idle(zoo_of) -> None:
    """Or its worker would wait for a command while the last token is still to be told."""
    zoo = zoo_of("llama")
    engine, _ = late_engine(zoo)
    engine.submit(to_request(zoo, Asked("x", None, (5, 6), 1)))
    report = engine.step()
    assert report is not None
    assert report.events == []
    assert not engine.is_idle
    assert engine.wait_seconds == 0.0
    assert [event.finish_reason for event in drain(engine)] == ["length"]


def drain(engine: Engine) -> list[TokenEvent]:
    events = []
    while not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    return events


class PoisonedLogits:
    """Makes one sequence's logits NaN once it has `after` tokens, whatever else runs."""

    def __init__(self, engine: Engine, runner: object, name: str, after: int) -> None:
        self._runner, self._name, self._after = runner, name, after
        self._sampler = runner._sampler
        self._sample = self._sampler.sample
        self._sampler.sample = self.sample

    def sample(self, logits, chunks, masks=None):
        row = 0
        for chunk in chunks:
            for offset in range(chunk.num_sampled):
                if chunk.sequence.id == self._name and chunk.sequence.num_output_tokens + offset >= self._after:
                    logits[row] = float("nan")
                row += 1
        return self._sample(logits, chunks, masks)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("after", "output"), [(0, 9), (3, 9), (3, 4)], ids=["first", "fourth", "the last"])
def test_not_finite_logits_end_one_answer_and_leave_its_neighbours_alone(zoo_of, ahead, after, output) -> None:
    zoo = zoo_of("llama")
    if ahead:
        engine, late = late_engine(zoo)
        PoisonedLogits(engine, late._inner, "broken", after)
    else:
        engine = zoo.engine()
        PoisonedLogits(engine, engine._runner, "broken", after)
    broken, others = (
        Asked("broken", "plain", (5, 6, 7), output),
        [Asked("a", None, (9, 8), 9), Asked("b", "plain", (4,), 9)],
    )
    for asked in (broken, *others):
        engine.submit(to_request(zoo, asked))
    events = drain(engine)
    own = [event for event in events if event.request_id == "broken"]
    assert [event.token_id for event in own[:-1]] == zoo.answer(broken)[:after]
    assert (own[-1].finish_reason, own[-1].token_id) == ("error", None)
    assert own[-1].fault is not None
    assert own[-1].count is not None
    assert own[-1].count.tokens.output == after
    for asked in others:
        assert [e.token_id for e in events if e.request_id == asked.name] == zoo.answer(asked)
    assert engine.stats().pages_kv == 0
    assert engine.is_idle
