"""Bounds of one request's cost for its server: turns of the event loop, memory, unread deltas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from gateway_harness import Harness, in_harness, read
from scripted_engine import FACTS

from loramux.data.entities import IdempotencyClaim
from loramux.engine.messages import SamplingParams
from loramux.serving import generation as generations
from loramux.serving.checks import MAX_KEPT_LOGPROBS, MAX_LOGPROBS, check_logprobs
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import GenerationRequest

ASKED = GenerationRequest(
    kind="cmpl-",
    model="tiny",
    is_streamed=True,
    prompts=("x",),
    sampling=SamplingParams(max_tokens=0, logprobs=20),
)


def test_long_prompts_of_many_choices_are_submitted_in_turns(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        turn, turns = 0, []

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        other, submit = asyncio.create_task(count()), made.engine.submit
        made.engine.submit = lambda request, on_event: (turns.append(turn), submit(request, on_event))
        generation = await made.begin(prompts=([1] * 5_000,), n=64, max_tokens=1)
        await read(generation)
        other.cancel()
        assert len(set(turns)) >= 64 // (generations.TOKENS_A_TURN // 5_000 + 1)

    in_harness(test, tmp_path, facts=msgspec.structs.replace(FACTS, max_model_len=8192, pages_total=512))


@pytest.mark.parametrize(
    ("claim", "limit"), [(None, MAX_LOGPROBS), (IdempotencyClaim("key", "digest"), MAX_KEPT_LOGPROBS)]
)
def test_answer_with_more_logprobs_than_the_limit_is_refused(claim: IdempotencyClaim | None, limit: int) -> None:
    asked = replace(ASKED, claim=claim)
    check_logprobs(asked, limit // 21)
    with pytest.raises(InvalidRequest, match=str(limit)) as refusal:
        check_logprobs(asked, limit // 21 + 1)
    assert refusal.value.field == "logprobs"
    check_logprobs(replace(asked, sampling=SamplingParams(max_tokens=0)), 10**9)


def test_reader_that_falls_far_behind_is_cut_off_and_pays_for_the_delivered_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_UNREAD", 10)

    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=([1, 2],), max_tokens=100)
        await generation.task
        seen = []

        async def follow() -> None:
            async for delta in generation:
                seen.append(delta)  # noqa: PERF401  it ends in an error

        with pytest.raises(InvalidRequest, match="not read as fast"):
            await follow()
        assert len(seen) == 11
        ((status, _, _, output, _),) = await made.entries()
        assert status == "cancelled"
        assert 11 <= output < 100

    in_harness(test, tmp_path, script=lambda _: [65] * 100)
