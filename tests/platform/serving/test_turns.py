"""Turns of the event loop: one answer's log probabilities are read, stored and repeated in many turns."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_harness import Harness, in_harness
from scripted_engine import FACTS
from tiny_base import byte_tokenizer

from loramux.data.entities import IdempotencyClaim
from loramux.engine.messages import PromptLogprob, PromptLogprobs, SamplingParams, TopLogprob
from loramux.serving.errors import ServingError
from loramux.serving.generation import Generation
from loramux.serving.messages import Answer, Delta, PromptTokenLogprob, Token, TokenLogprob
from loramux.serving.output import OutputProcessor
from loramux.serving.tokenizer import StopAutomaton, Tokenizer
from loramux.serving.unread import MAX_READ, MAX_READ_LOGPROBS, UnreadDeltas, take_readable

ENGINE: dict[str, Any] = {"facts": msgspec.structs.replace(FACTS, max_model_len=8192, pages_total=4096)}
TOKEN = Token("a", b"a", 97)
SCORES = tuple(PromptTokenLogprob(token=TOKEN, logprob=-0.5, rank=1, top=((TOKEN, -0.5),) * 20) for _ in range(128))
HEAVY = Delta(index=0, prompt_logprobs=SCORES)
"""Log probabilities of the most rows that a step scores, with the most alternatives."""


async def read(answer: Answer) -> list[Delta]:
    return [delta async for delta in answer]


def of(deltas: list[Delta]) -> int:
    return sum(1 + len(one.top) for delta in deltas for one in (*delta.logprobs, *delta.prompt_logprobs))


def test_read_ends_after_as_many_log_probabilities_as_one_turn_writes() -> None:
    light = Delta(index=0, token_ids=(1,), logprobs=(TokenLogprob(token=TOKEN, logprob=-1.0, top=(), offset=0),))
    assert len(take_readable([light] * 300)) == MAX_READ
    assert take_readable([HEAVY, HEAVY]) == [HEAVY]
    assert take_readable(()) == []
    deltas = iter([HEAVY, light, HEAVY, light])
    assert [len(take_readable(deltas)) for _ in range(3)] == [1, 2, 1], "no delta is lost"
    vectors = [Delta(index=0, pooled=bytes(4 * 4096))] * 128
    assert len(take_readable(vectors)) == MAX_READ_LOGPROBS * 32 // (4 * 4096) + 1


def test_reader_gives_way_between_heavy_deltas() -> None:
    order = list[str]()

    async def other() -> None:
        while len(order) < 7:
            order.append("other")
            await asyncio.sleep(0)

    async def test() -> None:
        unread = UnreadDeltas()
        for _ in range(4):
            unread.put(HEAVY)
        unread.end(None)
        task = asyncio.create_task(other())
        while deltas := await unread.read(1):
            assert of(deltas) <= 128 * 21
            order.append("read")
        await task

    asyncio.run(test())
    assert order[:7] == ["read", "other", "read", "other", "read", "other", "read"]


def test_log_probabilities_of_a_prompt_come_in_parts_and_only_once(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
        answer = await made.begin(prompts=([1] * 600,), sampling=sampling, max_tokens=2)
        deltas = await read(answer)
        assert [len(delta.prompt_logprobs) for delta in deltas][:2] == [2, 597]
        assert not any(delta.token_ids for delta in deltas[:2])

    in_harness(test, tmp_path, **ENGINE)


def test_engine_that_starts_a_prompt_again_adds_only_what_is_new() -> None:
    output = OutputProcessor(0, Tokenizer(byte_tokenizer()), [*range(97, 107)], StopAutomaton(()), 0)

    def scores(start: int, end: int) -> list[int]:
        tokens = [PromptLogprob(-0.25, 1, [TopLogprob(97, -0.25)]) for _ in range(start, end)]
        return [one.token.id for one in output.push_prompt(PromptLogprobs(start, tokens)).prompt_logprobs]

    assert scores(1, 5) == [98, 99, 100, 101]
    assert scores(1, 3) == []
    assert scores(3, 7) == [102, 103]
    assert scores(7, 10) == [104, 105, 106]


def test_stream_does_not_begin_with_log_probabilities_of_its_prompt(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
        answer = await made.begin(prompts=([1] * 600,), sampling=sampling, max_tokens=2)
        assert isinstance(answer, Generation)
        answer._put(HEAVY)
        assert not answer._started.is_set(), "a later fault gets its status"
        await read(answer)
        assert answer._started.is_set()

    in_harness(test, tmp_path, **ENGINE)


def test_kept_answer_is_decoded_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: Harness) -> None:
        body: dict[str, Any] = {
            "prompts": ([1] * 600,),
            "sampling": SamplingParams(max_tokens=0, logprobs=2, prompt_logprobs=2),
            "max_tokens": 400,
            "claim": IdempotencyClaim("k", "digest"),
        }
        first = await read(await made.begin(**body))
        again: Answer = await made.begin(**body)
        assert again.replayed
        decoded, decode = list[object](), msgspec.msgpack.decode

        def counted(data: bytes, *, type: Any) -> Any:
            decoded.append(type)
            return decode(data, type=type)

        monkeypatch.setattr(msgspec.msgpack, "decode", counted)
        part = await again.read()
        assert len(decoded) == len(part) < MAX_READ
        assert MAX_READ_LOGPROBS < of(part) < MAX_READ_LOGPROBS + 128 * 3
        repeated = [msgspec.structs.asdict(delta) for delta in [*part, *await read(again)]]
        assert repeated == [msgspec.structs.asdict(delta) for delta in first]

    in_harness(test, tmp_path, **ENGINE)


def test_log_probabilities_are_left_out_by_the_garbage_collector() -> None:
    tokens = [Token(str(number), b"a", number) for number in range(1000)]
    ones = [TokenLogprob(token=one, logprob=-1.0, top=tuple([(one, -1.0)]), offset=0) for one in tokens]
    scores = [PromptTokenLogprob(token=one, logprob=-1.0, rank=1, top=tuple([(one, -1.0)])) for one in tokens]
    gc.collect()  # a tuple is left out once a collection has seen that nothing in it is tracked
    tracked = [one for one in (*tokens, *ones, *scores) if gc.is_tracked(one)]
    assert not tracked
    assert not any(gc.is_tracked(pair) for one in (*ones, *scores) for pair in one.top)


def test_many_tokens_are_written_as_pieces_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = Tokenizer(byte_tokenizer()), set[int]()
    pieces = tokenizer.pieces
    monkeypatch.setattr(tokenizer, "pieces", lambda ids: threads.add(threading.get_ident()) or pieces(ids))
    assert asyncio.run(tokenizer.all_pieces([97] * 5000, "acme")) == ["a"] * 5000
    assert threading.get_ident() not in threads
    tokenizer.close()


def test_prompts_that_are_repeated_are_bounded_and_counted(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        prompt: dict[str, Any] = {"prompts": ([97] * 7000,), "max_tokens": 1}
        for field, n, fields in (
            ("echo", 1200, {"echo": True}),
            ("return_token_ids", 400, {"repeats_token_ids": True}),
        ):
            with pytest.raises(ServingError, match=r"Lower 'n', send shorter prompts") as refusal:
                await made.begin(**prompt, **fields, n=3 * n)
            assert (refusal.value.field, refusal.value.status) == (field, 400)
        answer = await made.begin(**prompt, echo=True, n=100, is_streamed=False)
        await read(answer)
        assert made.service._memory.held_by(made.principal.tenant) > 600_000
        answer.abandon()

    in_harness(test, tmp_path, **ENGINE)


def test_log_probabilities_of_a_prompt_count_for_each_of_its_choices(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=20)
        prompt: dict[str, Any] = {"prompts": ([97] * 1000,), "sampling": sampling, "max_tokens": 1}
        await read(await made.begin(**prompt, n=2))
        with pytest.raises(ServingError, match=r"in 10 choices\).* fewer alternatives or choices") as refusal:
            await made.begin(**prompt, n=10)
        assert refusal.value.field == "prompt_logprobs"

    in_harness(test, tmp_path, **ENGINE)
