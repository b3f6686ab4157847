"""Generations over a scripted engine and the real usage, on SQLite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from gateway_harness import Harness, in_harness, read
from scripted_engine import EOS, FACTS

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineFault, SamplingParams
from loramux.serving.checks import MAX_CUT_CHARACTERS
from loramux.serving.errors import Draining, EngineDown, InvalidRequest, PromptTooLong, ServingError
from loramux.serving.generation import Generation
from loramux.serving.messages import Message, Truncation
from loramux.serving.service import ENDS


@pytest.mark.parametrize("shared", [False, True])
def test_projects_share_adapter_cache_and_base_cache_only_by_setting(tmp_path: Path, shared: bool) -> None:
    async def test(made: Harness) -> None:
        for model in ("tiny", "acme/one"):
            await read(await made.begin(model=model))
        base, adapter = made.engine.requests
        assert base.kv_identity == (made.principal.tenant, None, "" if shared else made.principal.project)
        assert adapter.kv_identity == (made.principal.tenant, "d1", "")

    in_harness(test, tmp_path, share_base_cache=shared)


def test_usage_is_recorded_before_the_finish_reason_is_sent(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin()
        async for delta in generation:
            settled = await made.entries()
            if delta.finish_reason is not None:
                assert settled == [("completed", 6, 0, 6, "stop")]
            elif delta.text == "h":
                assert settled == []
        assert generation.usage == TokenCounts(prompt=6, output=6)

    in_harness(test, tmp_path, pause=0.02)


def test_request_is_recorded_before_it_is_submitted(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        seen = []

        async def refuse(_: object) -> None:
            seen.append(len(made.engine.requests))
            raise RuntimeError("the disk is full")

        made.usage.open = refuse
        with pytest.raises(RuntimeError, match="the disk is full"):
            await made.begin()
        assert seen == [0]
        assert made.engine.requests == []

    in_harness(test, tmp_path)


def test_answer_with_unrecorded_usage_has_no_finish_reason(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        async def refuse(_: object) -> None:
            raise RuntimeError("the disk is full")

        made.usage.settle = refuse
        reasons: list[str | None] = []

        async def listen(generation: Generation) -> None:
            async for delta in generation:
                reasons.append(delta.finish_reason)  # noqa: PERF401  it ends in an error

        with pytest.raises(ServingError, match="could not be recorded"):
            await listen(await made.begin())
        assert set(reasons) == {None}

    in_harness(test, tmp_path)


def test_reader_leaving_midway_is_billed_for_generated_tokens(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=("a long prompt",))
        seen = 0
        async for _ in generation:
            seen += 1
            if seen == 3:
                break
        generation.abandon()
        await generation.task
        assert made.engine.cancelled == [f"{generation.id}-0"]
        assert await made.entries() == [("cancelled", 14, 0, generation.usage.output, "cancelled")]
        assert 3 <= generation.usage.output < 13
        assert made.service.counters.requests == dict.fromkeys(ENDS, 0) | {"cancelled": 1}

    in_harness(test, tmp_path, pause=0.02)


def test_reader_leaving_before_first_token_is_not_billed(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin()
        generation.abandon()
        await generation.task
        assert await made.entries() == [("cancelled", 0, 0, 0, "cancelled")]
        assert made.engine.running == 0

    in_harness(test, tmp_path, pause=5.0)


def test_stop_string_cancels_the_engine_request_and_bills_its_tokens(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=("one, two, three",), stop=(" two",), max_tokens=100)
        assert await read(generation) == "one,"
        assert made.engine.cancelled == [f"{generation.id}-0"]
        assert await made.entries() == [("completed", 16, 0, 8, "stop")]

    in_harness(test, tmp_path)


def test_choices_share_one_billed_prompt_and_have_own_seeds(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        sampling = SamplingParams(max_tokens=0, seed=2**63 - 1)
        generation = await made.begin(prompts=("ab", "cde"), n=2, sampling=sampling)
        texts: dict[int, str] = {}
        async for delta in generation:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        assert texts == {0: "ab", 1: "ab", 2: "cde", 3: "cde"}
        assert sorted(request.id for request in made.engine.requests) == [f"{generation.id}-{i}" for i in range(4)]
        assert [request.sampling.seed for request in made.engine.requests] == [2**63 - 1, 0, 2**63 - 1, 0]
        assert await made.entries() == [("completed", 3 + 4, 0, 2 * 3 + 2 * 4, "stop")]

    in_harness(test, tmp_path)


def test_engine_fault_is_not_billed(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(ServingError, match="cannot go on"):
            await read(await made.begin(n=3, max_tokens=100))
        assert await made.entries() == [("failed", 0, 0, 0, "error")]

    fault = EngineFault("internal_error", "the engine cannot go on")
    in_harness(test, tmp_path, script=lambda request: [65, fault] if request.id.endswith("-1") else [65] * 100)


def test_engine_death_ends_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin()
        await generation.started()
        made.engine.died.set()
        with pytest.raises(EngineDown):
            await read(generation)
        assert await made.entries() == [("failed", 0, 0, 0, "error")]
        with pytest.raises(EngineDown):
            await made.begin()

    in_harness(test, tmp_path, pause=0.05)


def test_draining_finishes_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin()
        draining = asyncio.create_task(made.service.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await made.begin()
        assert await read(generation) == "hello"
        await draining
        assert await made.entries() == [("completed", 6, 0, 6, "stop")]

    in_harness(test, tmp_path, pause=0.02)


def test_draining_aborts_late_requests_with_its_reason(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin()
        await generation.started()
        await made.service.drain(0.01)
        with pytest.raises(Draining):
            await read(generation)
        assert await made.entries() == [("failed", 0, 0, 0, "error")]

    in_harness(test, tmp_path, pause=0.2)


@pytest.mark.parametrize(
    ("changes", "max_tokens"),
    [
        ({"prompts": ((Message("user", "hi"),),)}, 256 - len("user: hi\nassistant:")),
        ({}, 16),
        ({"prompts": ([1] * 250,)}, 6),
        ({"max_tokens": 250}, 250),
        ({"prompts": ((Message("user", "hi"),),), "max_tokens": 256}, 256 - len("user: hi\nassistant:")),
    ],
    ids=["chat: what is left", "text: 16", "text: no more than is left", "as asked", "chat: the whole context"],
)
def test_max_tokens_defaults_and_given_value(tmp_path: Path, changes: dict[str, object], max_tokens: int) -> None:
    async def test(made: Harness) -> None:
        await read(await made.begin(**changes))
        assert made.engine.requests[0].sampling.max_tokens == max_tokens

    in_harness(test, tmp_path)


@pytest.mark.parametrize(
    ("changes", "param", "told"),
    [
        ({"prompts": ([1] * 256,)}, "prompt", "256 tokens. However, your prompt has 256"),
        ({"prompts": ([1] * 200,), "max_tokens": 57}, "prompt", r"257 tokens \(200 in the prompt, 57"),
        ({"prompts": ((Message("user", "x" * 300),),)}, "messages", "your prompt has"),
        ({"prompts": ("x" * 3000,)}, "prompt", "3000 characters and no token has more than 7"),
        (
            {"prompts": ("ok", [1, 260])},
            "prompt",
            "token 260, which is out of vocabulary: this model has 260 tokens, 0 to 259",
        ),
        ({"prompts": ([-1],)}, "prompt", "token -1"),
        ({"prompts": ([],)}, "prompt", "holds no token"),
        ({"sampling": SamplingParams(max_tokens=0, min_tokens=17)}, "min_tokens", "more than the 16"),
        ({"sampling": SamplingParams(max_tokens=0, stop_token_ids=(260,))}, "stop_token_ids", "token 260"),
        ({"sampling": SamplingParams(max_tokens=0, logit_bias={999: 1.0})}, "logit_bias", "token 999"),
    ],
)
def test_request_beyond_context_is_refused_with_the_numbers(
    tmp_path: Path, changes: dict[str, object], param: str, told: str
) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match=told) as refusal:
            await made.begin(**changes)
        assert refusal.value.field == param
        assert await made.entries() == []

    in_harness(test, tmp_path)


@pytest.mark.parametrize("keeps_end", [True, False])
def test_truncation_cuts_a_text_longer_than_every_tokenization_of_the_context(tmp_path: Path, keeps_end: bool) -> None:
    async def test(made: Harness) -> None:
        text = "a" * 3000 + "b" * 3000
        await read(await made.begin(prompts=(text,), truncation=Truncation(10, keeps_end)))
        token_ids = made.engine.requests[0].prompt_token_ids
        assert token_ids[-9:] == [ord("b" if keeps_end else "a")] * 9
        with pytest.raises(PromptTooLong, match=f"at most {MAX_CUT_CHARACTERS} are cut"):
            await made.begin(prompts=("a" * (MAX_CUT_CHARACTERS + 1),), truncation=Truncation(10, keeps_end))

    in_harness(test, tmp_path)


def test_context_is_limited_by_a_small_pool(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        assert made.service.context == 6 * 16
        await read(await made.begin(prompts=((Message("user", "hi"),),)))
        assert made.engine.requests[0].sampling.max_tokens == 6 * 16 - len("user: hi\nassistant:")

    in_harness(test, tmp_path, facts=msgspec.structs.replace(FACTS, pages_total=6))


def test_counters_add_up(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        ended: list[Generation] = []
        made.service.on_ended(ended.append)
        await read(await made.begin())
        await read(await made.begin(prompts=("ab",)))
        await asyncio.sleep(0)
        counters = made.service.counters
        assert counters.tokens == TokenCounts(prompt=6 + 3, output=6 + 3)
        assert counters.requests["completed"] == len(ended) == 2
        assert all(one.seconds_to_first_token is not None and one.seconds is not None for one in ended)
        assert made.service.running == 0

    in_harness(test, tmp_path, script=lambda request: [*request.prompt_token_ids[1:], EOS])


def test_reader_gets_each_token_at_once_and_a_late_reader_all_that_wait(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=([1, 2],), max_tokens=40)
        first = await generation.read()
        assert 1 <= len(first) < 40
        await generation.task
        rest = await generation.read()
        assert len(first) + len(rest) == 40
        assert [delta.finish_reason for delta in rest if delta.finish_reason] == ["length"]
        assert await generation.read() == []

    in_harness(test, tmp_path, script=lambda _: [65] * 40)


def test_reader_of_a_whole_answer_is_woken_once_for_many_tokens(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=([1, 2],), max_tokens=40)
        read = [len(await generation.read(32)), len(await generation.read(32)), len(await generation.read(32))]
        assert read[0] >= 32
        assert sum(read) == 40
        assert read[2] == 0

    in_harness(test, tmp_path, script=lambda _: [65] * 40)
