"""Memory of answers that are not sent yet: a tenant's share, taken as tokens arrive, and given back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_harness import Harness, in_harness, read
from scripted_engine import FACTS

from loramux.common.jobs import HeldUnits, TenantSlots
from loramux.data.entities import IdempotencyClaim
from loramux.engine.messages import SamplingParams
from loramux.serving.errors import ServingError
from loramux.serving.generation import Generation
from loramux.serving.messages import Answer, Delta, GenerationRequest
from loramux.serving.unread import MAX_READ, AnswerMemory

MIB = 1 << 20
TOKENS = 4000
"""Tokens of a long answer. The engine gives two alternatives for each: 12,000 log probabilities count 1.9 MiB."""
LONG: dict[str, Any] = {
    "prompts": ([1] * TOKENS,),
    "sampling": SamplingParams(max_tokens=0, logprobs=2),
    "max_tokens": TOKENS,
}
ENGINE: dict[str, Any] = {"facts": msgspec.structs.replace(FACTS, max_model_len=8192, pages_total=4096)}


def limit_memory(made: Harness, mib: int) -> TenantSlots:
    memory = made.service._memory = TenantSlots(4 * mib * MIB, mib * MIB)
    return memory


async def end(answer: Answer) -> None:
    answer.abandon()
    assert isinstance(answer, Generation)
    await asyncio.wait([answer.task])
    await asyncio.sleep(0)  # callbacks of the task


def test_whole_answer_beyond_the_share_names_the_field_and_is_waived(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 1)
        answer = await made.begin(**LONG, is_streamed=False)
        with pytest.raises(ServingError, match=r"1 MiB that a tenant's answers may hold.*or a stream") as refusal:
            await read(answer)
        assert (refusal.value.status, refusal.value.field, refusal.value.code) == (400, "logprobs", "too_many_answers")
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0
        assert await made.entries() == [("cancelled", 0, 0, 0, "cancelled")]

    in_harness(test, tmp_path, **ENGINE)


def test_whole_answer_within_the_share_holds_memory_until_its_reader_ends(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 3)
        answer = await made.begin(**LONG, is_streamed=False)
        await read(answer)
        assert memory.held_by(made.principal.tenant) > 150 * 3 * TOKENS - MIB // 8
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0
        assert await made.entries() == [("completed", TOKENS, 0, TOKENS, "length")]

    in_harness(test, tmp_path, **ENGINE)


def test_stream_whose_reader_keeps_up_is_longer_than_the_share(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 1)
        answer = await made.begin(**LONG)
        count = 0
        while deltas := await answer.read():
            count += sum(len(delta.token_ids) for delta in deltas)
        assert count == TOKENS
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0

    in_harness(test, tmp_path, pause=0.0001, **ENGINE)


def test_stream_that_repeats_its_log_probabilities_is_bounded_like_a_whole_answer(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        limit_memory(made, 1)
        answer = await made.begin(**LONG, repeats_logprobs=True)
        with pytest.raises(ServingError, match="log probabilities of this answer take more than the 1 MiB"):
            await read(answer)
        await end(answer)

    in_harness(test, tmp_path, **ENGINE)


def test_unread_stream_beyond_the_share_is_too_slow_and_billed_as_for_a_disconnect(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 1)
        answer = await made.begin(**LONG)
        assert isinstance(answer, Generation)
        await answer.task
        with pytest.raises(ServingError, match="unread answers of yours hold 1 MiB") as refusal:
            await read(answer)
        assert refusal.value.code == "client_too_slow"
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0
        [(status, prompt, _, output, _)] = await made.entries()
        assert (status, prompt) == ("cancelled", TOKENS)
        assert 0 < output < TOKENS

    in_harness(test, tmp_path, **ENGINE)


def test_one_vector_beyond_the_share_is_refused_although_nothing_else_is_held() -> None:
    slots = TenantSlots(4 * MIB, MIB)
    pooled = GenerationRequest(
        kind="embd-",
        model="tiny",
        prompts=("x",),
        sampling=SamplingParams(max_tokens=0),
        pooling="last",
        is_streamed=False,
    )
    memory = AnswerMemory(HeldUnits(slots, "acme"), pooled)
    assert memory.add(Delta(index=0, pooled=bytes(4096)))
    assert not memory.add(Delta(index=1, pooled=bytes(MIB)))
    assert (memory.refusal().field, slots.held_by("acme")) == ("prompt", 0)


def test_second_answer_beyond_the_share_may_be_repeated_and_the_first_one_continues(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 3)
        first = await made.begin(**LONG, is_streamed=False)
        await read(first)
        second = await made.begin(**LONG, is_streamed=False)
        with pytest.raises(ServingError, match="Send fewer requests at once") as refusal:
            await read(second)
        assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
        await end(second)
        await end(first)
        assert memory.held_by(made.principal.tenant) == 0
        third = await made.begin(**LONG, is_streamed=False)
        await read(third)
        await end(third)

    in_harness(test, tmp_path, **ENGINE)


def test_prompt_log_probabilities_count_before_the_first_token(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory = limit_memory(made, 1)
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
        answer = await made.begin(prompts=LONG["prompts"], sampling=sampling, max_tokens=1, is_streamed=False)
        with pytest.raises(ServingError, match="of this answer") as refusal:
            await read(answer)
        assert refusal.value.field == "prompt_logprobs"
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0

    in_harness(test, tmp_path, **ENGINE)


def test_answer_with_an_idempotency_key_beyond_the_share_frees_its_key(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory, claim = limit_memory(made, 3), IdempotencyClaim("k", "digest")
        answer = await made.begin(**LONG, is_streamed=False, claim=claim)
        with pytest.raises(ServingError, match="of this answer"):
            await read(answer)
        await end(answer)
        assert memory.held_by(made.principal.tenant) == 0
        assert await made.entries() == [("cancelled", 0, 0, 0, "cancelled")]
        short = LONG | {"max_tokens": 100}
        again = await made.begin(**short, is_streamed=False, claim=claim)
        assert not again.replayed
        await read(again)
        await end(again)

    in_harness(test, tmp_path, **ENGINE)


def test_kept_answer_that_is_repeated_counts_until_it_is_sent(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        memory, claim = limit_memory(made, 10), IdempotencyClaim("k", "digest")
        await end(await made.begin(**LONG, is_streamed=False, claim=claim))
        assert memory.held_by(made.principal.tenant) == 0
        replays = [await made.begin(**LONG, is_streamed=False, claim=claim)]
        assert replays[0].replayed
        assert memory.held_by(made.principal.tenant) > 2 * MIB
        size = memory.held_by(made.principal.tenant)
        while memory.held_by(made.principal.tenant) + size <= memory.per_tenant:
            replays.append(await made.begin(**LONG, is_streamed=False, claim=claim))
        with pytest.raises(ServingError, match="fewer") as refusal:
            await made.begin(**LONG, is_streamed=False, claim=claim)
        assert refusal.value.status == 429
        assert len(await replays[0].read()) == MAX_READ
        for one in replays:
            one.abandon()
        assert memory.held_by(made.principal.tenant) == 0

    in_harness(test, tmp_path, **ENGINE)
