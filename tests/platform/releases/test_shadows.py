"""Shadows below HTTP: what waits is bounded, likeness is measured right, and nothing of a shadow holds up a request."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gateway_harness import Harness, in_harness, read
from hypothesis import given
from hypothesis import strategies as st

from loramux.constraints.formats import JsonObject, JsonSchema, Regex
from loramux.engine.messages import SamplingParams, ServiceClass
from loramux.releases import shadow_runner
from loramux.releases.likeness import MEASURES, ChoiceAnswer, compare_answers, join_answer, measures_of, sums_of
from loramux.releases.shadow_runner import (
    KeptOutputs,
    ShadowQueue,
    ShadowRunner,
    ShadowTask,
    num_tokens,
    shadow_request,
    within_tokens,
)
from loramux.releases.statistics import interval_of_sums, mean_interval
from loramux.serving.errors import Draining
from loramux.serving.messages import Delta, GenerationRequest


def task(tenant: str = "acme", tokens: int = 10, number: int = 0, number_bytes: int = 0) -> Any:
    caller, id = SimpleNamespace(tenant=tenant), f"{tenant}-{number}"
    return SimpleNamespace(principal=caller, tokens=tokens, request_id=id, number_bytes=number_bytes)


def taken(queue: ShadowQueue) -> list[str]:
    found = []
    while (one := queue.take()) is not None:
        found.append(one.request_id)
    return found


def test_queue_of_shadows_lets_tenants_take_turns() -> None:
    queue = ShadowQueue()
    for number in range(3):
        queue.put(task("a", number=number))
    queue.put(task("b"))
    assert taken(queue) == ["a-0", "b-0", "a-1", "a-2"]
    assert (len(queue), queue.take()) == (0, None)


def test_queue_of_shadows_bounds_the_bytes_of_vectors_of_a_tenant_and_of_all() -> None:
    queue, each = ShadowQueue(), shadow_runner.MAX_NUMBER_BYTES_PER_TENANT // 2
    assert [queue.put(task(number=n, number_bytes=each)) is None for n in range(3)] == [True, True, False]
    tenants = shadow_runner.MAX_NUMBER_BYTES // each
    assert all(queue.put(task(f"t{n}", number_bytes=each)) is None for n in range(tenants - 2))
    queue.put(task(number=2))
    dropped = queue.put(task("last", number_bytes=each))
    assert dropped is not None
    assert dropped.request_id == "acme-1", "the newest vectors of the tenant with the most bytes give way"
    while queue.take() is not None:
        pass
    assert queue.put(task(number_bytes=each)) is None


def test_queue_of_shadows_drops_what_is_beyond_a_tenants_bounds() -> None:
    queue = ShadowQueue()
    dropped = [queue.put(task(number=number)) for number in range(shadow_runner.MAX_WAITING_PER_TENANT + 2)]
    assert [one.request_id for one in dropped if one is not None] == ["acme-50", "acme-51"]
    too_large = task("b", tokens=shadow_runner.MAX_TOKENS_PER_TENANT + 1)
    assert queue.put(too_large) is too_large
    assert queue.put(task("b")) is None


def test_full_queue_of_shadows_drops_of_the_tenant_that_waits_most() -> None:
    queue = ShadowQueue()
    tenants = shadow_runner.MAX_TOKENS // shadow_runner.MAX_TOKENS_PER_TENANT
    for number in range(tenants):
        assert queue.put(task(f"t{number}", tokens=shadow_runner.MAX_TOKENS_PER_TENANT - number)) is None
    small = task("small", tokens=1000)
    dropped = queue.put(small)
    assert dropped is not None
    assert dropped.request_id == "t0-0", "the largest gives way, and not the newcomer"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 150_000)), max_size=80), st.integers(0, 2**32))
def test_queue_of_shadows_never_loses_or_repeats_one(puts: list[tuple[str, int]], seed: int) -> None:
    queue, rng, gone, put = ShadowQueue(), random.Random(seed), Counter[str](), 0
    for number, (tenant, tokens) in enumerate(puts):
        put += 1
        if (dropped := queue.put(task(tenant, tokens, number))) is not None:
            gone[dropped.request_id] += 1
        if rng.random() < 0.3 and (one := queue.take()) is not None:
            gone[one.request_id] += 1
    gone.update(taken(queue))
    assert (gone.total(), set(gone.values()) <= {1}) == (put, True)


def said(text: str, reason: Any = "stop", **changes: Any) -> ChoiceAnswer:
    tokens = tuple(text.encode())
    return replace_struct(ChoiceAnswer(text, "", (), tokens, reason), **changes)


def replace_struct(answer: ChoiceAnswer, **changes: Any) -> ChoiceAnswer:
    return ChoiceAnswer(**{name: changes.get(name, getattr(answer, name)) for name in answer.__struct_fields__})


def likeness(
    current: str, candidate: str, format: Any = None, reason: Any = "stop", **options: Any
) -> dict[str, float]:
    options.setdefault("same_tokens", True)
    return compare_answers([said(current)], [said(candidate, reason)], format, **options)


def test_likeness_of_equal_answers_is_whole() -> None:
    for text in ("", "yes", "a longer answer"):
        found = likeness(text, text)
        assert found == {"exact": 1, "prefix": 1, "similarity": 1, "length_ratio": 0, "same_finish_reason": 1}


def test_likeness_counts_beginning_tokens_and_length() -> None:
    found = likeness("abcd", "abdcxx", reason="length")
    assert (found["exact"], found["same_finish_reason"]) == (0, 0)
    assert found["prefix"] == pytest.approx(2 / 6)
    assert found["similarity"] == pytest.approx(2 * 4 / 10)
    assert found["length_ratio"] == pytest.approx(math.log(6 / 4))


def test_likeness_across_bases_compares_words() -> None:
    current, candidate = said("one two three"), said("one two four", token_ids=(1, 2))
    found = compare_answers([current], [candidate], None, same_tokens=False)
    assert (found["prefix"], found["similarity"]) == (pytest.approx(2 / 3), pytest.approx(4 / 6))


def test_likeness_is_of_calls_and_thoughts_too() -> None:
    current = said("", calls=(("look_up", '{"id": 1}'),), thought="hm")
    for other in (said("", calls=(("look_up", '{"id": 2}'),), thought="hm"), said("", calls=current.calls)):
        assert compare_answers([current], [other], None, same_tokens=True)["exact"] == 0
    assert compare_answers([current], [current], None, same_tokens=True)["exact"] == 1


def test_likeness_is_the_mean_over_choices() -> None:
    found = compare_answers([said("a"), said("b")], [said("a"), said("c")], None, same_tokens=True)
    assert found["exact"] == 0.5


def numbers(*rows: list[float]) -> ChoiceAnswer:
    return replace_struct(said(""), numbers=np.array(rows, dtype="<f4").tobytes(), rows=len(rows))


def test_likeness_of_vectors_is_their_cosine() -> None:
    def compared(*pair: ChoiceAnswer) -> dict[str, float]:
        return compare_answers([pair[0]], [pair[1]], None, same_tokens=True)

    vector = numbers([3.0, 4.0])
    assert compared(vector, vector) == {"exact": 1, "cosine": pytest.approx(1)}
    assert compared(vector, numbers([-4.0, 3.0])) == {"exact": 0, "cosine": pytest.approx(0)}
    assert compared(vector, numbers([-6.0, -8.0])) == {"exact": 0, "cosine": pytest.approx(-1)}
    for other in (numbers([3.0, 4.0, 0.0]), numbers([0.0, 0.0])):
        assert compared(vector, other) == {"exact": 0, "cosine": 0}


def test_likeness_of_classes_is_the_share_of_equal_labels() -> None:
    def compared(*pair: ChoiceAnswer) -> dict[str, float]:
        return compare_answers([pair[0]], [pair[1]], None, same_tokens=True, are_classes=True)

    tokens = numbers([1, 2, 3], [5, 1, 0], [0, 1, 0], [9, 9, 10])
    assert compared(tokens, numbers([0, 0, 1], [2, 1, 0], [1, 0, 0], [0, 1, 0])) == {"exact": 0, "same_label": 0.5}
    assert compared(tokens, numbers([0, 0, 1])) == {"exact": 0, "same_label": 0}
    assert compared(numbers([0.3]), numbers([7.0])) == {"exact": 0, "same_label": 1}
    assert compared(numbers([0.3]), numbers([-0.3])) == {"exact": 0, "same_label": 0}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("format", "candidate", "reason", "valid"),
    [
        (JsonSchema(SCHEMA), '{"a": 2}', "stop", 1),
        (JsonSchema(SCHEMA), '{"a": "2"}', "stop", 0),
        (JsonSchema(SCHEMA), '{"a": 2}', "length", 0),
        (JsonSchema('{"type": "integer"}'), "12", "stop", 1),
        (JsonSchema({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x"}), "12", "stop", 1),
        (JsonSchema({"type": "string", "pattern": "(a+)+$"}), '"' + "a" * 60 + '!"', "stop", 1),
        (JsonSchema({"type": "string", "pattern": "(a+)+$"}), '"' + "a" * 60, "stop", 0),
        (JsonObject(), "{}", "stop", 1),
        (JsonObject(), "[]", "stop", 0),
    ],
)
def test_likeness_checks_the_formats_schema(format: Any, candidate: str, reason: str, valid: float) -> None:
    assert likeness('{"a": 1}', candidate, format, reason)["valid_candidate"] == valid


def test_likeness_of_other_formats_has_no_validity() -> None:
    assert "valid_candidate" not in likeness("a", "a", Regex("a"))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_interval_of_sums_is_the_interval_of_the_values(values: list[float]) -> None:
    whole = mean_interval(values)
    summed = interval_of_sums(len(values), math.fsum(values), math.fsum(value**2 for value in values))
    assert summed.mean == pytest.approx(whole.mean)
    if len(set(values)) > 1 and max(values) - min(values) > 1e-3:  # squares of equal values cancel up to rounding
        assert (summed.low, summed.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def test_measures_of_sums_have_intervals_that_cover_the_truth() -> None:
    rng, covered, runs = random.Random(5), 0, 300
    for _ in range(runs):
        sums: Counter[str] = Counter()
        for _ in range(60):
            sums.update(sums_of({"exact": float(rng.random() < 0.7), "length_ratio": rng.gauss(math.log(1.2), 0.3)}))
        found = measures_of(sums)
        assert set(found) == {"exact", "length_ratio"} <= set(MEASURES)
        covered += found["exact"].low <= 0.7 <= found["exact"].high
        covered += found["length_ratio"].low <= 1.2 <= found["length_ratio"].high
    assert covered >= 0.92 * 2 * runs


def test_shadow_request_repeats_what_decides_the_answer_and_nothing_else() -> None:
    sampling = SamplingParams(max_tokens=9, seed=3, temperature=0.5, logprobs=2)
    asked = GenerationRequest(
        kind="cmpl-", model="acme/a", is_streamed=True, prompts=("x",), sampling=sampling, n=2, stop=("END",), user="u",
        deadline_ms=100, echo=True, service_tier="priority",
    )  # fmt: skip
    shadow = shadow_request(asked, "acme/a@2")
    assert (shadow.model, shadow.prompts, shadow.n, shadow.stop) == ("acme/a@2", ("x",), 2, ("END",))
    assert (shadow.sampling.seed, shadow.sampling.temperature, shadow.sampling.logprobs) == (3, 0.5, None)
    assert (shadow.service_tier, shadow.deadline_ms, shadow.claim, shadow.echo) == ("shadow", None, None, False)


def test_drain_ends_shadows_at_once_and_lets_requests_end(tmp_path: Path) -> None:
    async def drains(made: Harness) -> None:
        made.engine.pause = 0.1
        request = await made.begin(prompts=("abcdefghij",), max_tokens=20)
        shadow = await made.begin(prompts=("abcdefghij",), max_tokens=20, service_tier="shadow", is_streamed=False)
        await request.started()
        await shadow.started()
        assert {one.service_class for one in made.engine.requests} == {ServiceClass.STANDARD, ServiceClass.BATCH}
        assert not made.service.others_waiting(), "a shadow is nobody's wait"
        draining = asyncio.create_task(made.service.drain(60))
        assert await read(request) == "abcdefghij"
        with pytest.raises(Draining):
            await read(shadow)
        await draining
        assert len(made.engine.cancelled) == 1

    in_harness(drains, tmp_path)


def test_recorder_gets_the_answer_as_the_caller_did(tmp_path: Path) -> None:
    async def records(made: Harness) -> None:
        heard: list[Any] = []
        made.service.record_with(lambda principal, asked, opened: heard.append)
        request = await made.begin(prompts=("abc", "xyz"), max_tokens=9)
        deltas = [delta async for delta in request]
        await request.task
        await asyncio.sleep(0)
        (ended,) = heard
        assert join_answer(ended.answer) == join_answer(deltas)
        assert [one.text for one in join_answer(deltas)] == ["abc", "xyz"]
        assert [one.finish_reason for one in join_answer(deltas)] == ["stop", "stop"]

    in_harness(records, tmp_path)


def test_shadows_begin_one_at_a_time_with_other_requests_and_never_while_one_waits() -> None:
    completions = SimpleNamespace(draining=False, waiting=False, quiet=0.0)
    completions.others_waiting = lambda: completions.waiting
    completions.quiet_seconds = lambda: completions.quiet
    runner = ShadowRunner(None, None, completions, None)  # type: ignore[arg-type]
    assert runner._may_begin()
    completions.waiting = True
    assert not runner._may_begin()
    completions.waiting = False
    runner._running.add("one")  # type: ignore[arg-type]
    assert not runner._may_begin()
    completions.quiet = 60.0
    assert runner._may_begin()
    runner._starting.add("one")  # type: ignore[arg-type]
    assert not runner._may_begin(), "one prefill at a time, whom the next request may meet"
    runner._starting.clear()
    completions.draining = True
    assert not runner._may_begin()


def test_kept_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_runner, "MAX_KEPT_BYTES", 10)
    monkeypatch.setattr(shadow_runner, "MAX_KEPT_BYTES_OF_ALL", 15)

    def of(project: str) -> ShadowTask:
        caller = SimpleNamespace(project=project, lineage=("key",))
        shadow = SimpleNamespace(shadow=SimpleNamespace(id="shadow_1"))
        return SimpleNamespace(principal=caller, shadow=shadow)  # type: ignore[return-value]

    kept = KeptOutputs()
    assert [kept.add(of("p"), b"12345") for _ in range(3)] == [True, True, False]
    assert [kept.add(of("q"), b"12345") for _ in range(2)] == [True, False]
    assert {key[1]: len(one.lines) for key, one in kept.take().items()} == {"p": 2, "q": 1}
    assert kept.add(of("p"), b"12345")


def test_kept_part_of_a_shadow_has_no_more_tokens_than_its_request_was_billed() -> None:
    deltas = [Delta(index=n % 2, text=f"{n}", token_ids=(n,)) for n in range(6)]
    ends = [Delta(index=index, finish_reason="stop") for index in (0, 1)]
    for limit in range(8):
        choices, cut = within_tokens([*deltas, *ends], limit)
        assert len(choices) == 2
        assert num_tokens(choices) == min(limit, 6)
        assert "".join(one.text for one in choices) == "".join(
            "".join(delta.text for delta in deltas[:limit] if delta.index == index) for index in (0, 1)
        )
        assert [one.finish_reason for one in choices] == [None if n in cut else "stop" for n in (0, 1)]
        assert bool(cut) == (limit < 6)


def test_kept_part_of_a_shadow_leaves_out_several_tokens_at_once_and_goes_on_with_other_choices() -> None:
    """Drafts bring several tokens in one delta."""
    deltas = [Delta(index=0, text="abc", token_ids=(1, 2, 3)), Delta(index=1, text="x", token_ids=(4,))]
    choices, cut = within_tokens([*deltas, Delta(index=0, text="d", token_ids=(5,))], 2)
    assert ([one.text for one in choices], cut) == (["", "x"], {0})


def test_join_answer_of_nothing_is_nothing() -> None:
    assert join_answer([]) == []
    assert join_answer([Delta(index=0, text="a"), Delta(index=0, text="b", finish_reason="stop")])[0].text == "ab"
