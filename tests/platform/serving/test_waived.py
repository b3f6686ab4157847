"""The bill of every token: what could be read is billed, the rest waived, and the engine agrees to the token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_harness import Harness, in_harness, read

from loramux.common.units import TokenCounts
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.ledger import LedgerEntry, LedgerRepository
from loramux.money.billing.reconcile import reconcile
from loramux.serving import generation as generations
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import ServingError
from loramux.serving.generation import Generation

PROMPT = "say this"


async def entry(made: Harness) -> LedgerEntry:
    async with made.database.read() as session:
        [entry] = await LedgerRepository(session).after(0, 10)
    assert (await reconcile(made.database)).drift_tokens == 0
    assert made.usage.drift_tokens == 0
    return entry


@pytest.mark.parametrize("deltas", range(len(PROMPT) + 1))
def test_client_dropping_at_any_chunk_is_billed_for_delivered_tokens(tmp_path: Path, deltas: int) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=(PROMPT,), n=2)
        await leave_after(generation, deltas)
        billed = await entry(made)
        engine = sum(made.engine.told.values())
        assert billed.output_tokens + billed.waived_output_tokens == engine
        assert billed.output_tokens >= deltas
        assert billed.output_tokens == generation.usage.output
        assert (billed.input_tokens > 0) == (billed.output_tokens > 0)
        assert made.engine.running == 0

    in_harness(test, tmp_path, pause=0.002)


@pytest.mark.parametrize("deltas", [0, 1, len(PROMPT)])
def test_client_leaving_before_a_whole_answer_pays_nothing(tmp_path: Path, deltas: int) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=(PROMPT,), n=2, is_streamed=False)
        await leave_after(generation, deltas)
        billed = await entry(made)
        assert (billed.status, billed.input_tokens, billed.output_tokens, billed.adapter_load) == ("cancelled", 0, 0, 0)
        assert billed.waived_output_tokens == sum(made.engine.told.values())
        assert generation.usage == TokenCounts()

    in_harness(test, tmp_path, pause=0.002)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
def test_client_leaving_during_prefill_waives_the_computed_part_of_each_prompt(
    tmp_path: Path, is_streamed: bool, choices: int
) -> None:
    async def test(made: Harness) -> None:
        made.engine.prefilled = 5
        generation = await made.begin(prompts=(PROMPT,), n=choices, is_streamed=is_streamed)
        await asyncio.sleep(0)
        assert len(made.engine.requests) == choices
        await leave_after(generation, 0)
        billed = await entry(made)
        assert (billed.status, billed.input_tokens, billed.output_tokens) == ("cancelled", 0, 0)
        assert billed.waived == TokenCounts(prompt=5 * choices)

    in_harness(test, tmp_path, pause=60.0)


def test_client_leaving_between_a_first_choice_and_the_prefill_of_the_next_waives_that_part(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        made.engine.prefilled = 3
        generation = await made.begin(prompts=("abc", "abcdefgh"))
        first, second = await submitted(made, 2)
        made.engine.left[first].set()  # its first token comes
        await generation.started()
        await leave_after(generation, 1)
        billed = await entry(made)
        assert (billed.input_tokens, billed.output_tokens) == (4, 1)
        assert billed.waived.prompt == 3
        assert second not in made.engine.told or made.engine.told[second] == 0

    in_harness(test, tmp_path, pause=60.0)


def test_client_leaving_during_the_submission_of_many_choices_waives_those_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "TOKENS_A_TURN", 2 * generations.TOKENS_A_CHOICE)

    async def test(made: Harness) -> None:
        made.engine.prefilled = 5
        generation = await made.begin(prompts=(PROMPT,), n=8)
        assert 0 < len(await submitted(made, 1)) < 8
        await leave_after(generation, 0)
        billed = await entry(made)
        assert billed.waived == TokenCounts(prompt=5 * len(made.engine.requests))
        assert len(made.engine.requests) < 8

    in_harness(test, tmp_path, pause=60.0)


async def submitted(made: Harness, number: int) -> list[str]:
    """Wait until the engine has so many requests; return their ids."""
    for _ in range(1000):
        if len(made.engine.requests) >= number:
            break
        await asyncio.sleep(0)
    return [request.id for request in made.engine.requests]


def test_client_leaving_before_a_whole_answer_pays_for_a_kept_one(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        claim = IdempotencyClaim("k", "digest")
        await leave_after(await made.begin(prompts=(PROMPT,), is_streamed=False, claim=claim), 1)
        billed = await entry(made)
        assert (billed.status, billed.waived_output_tokens) == ("completed", 0)
        assert billed.output_tokens == sum(made.engine.told.values()) > 1
        again = await made.begin(prompts=(PROMPT,), is_streamed=False, claim=claim)
        assert again.replayed
        assert again.usage.output == billed.output_tokens

    in_harness(test, tmp_path, pause=0.002)


def test_whole_answer_that_was_recorded_is_billed(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await made.begin(prompts=(PROMPT,), is_streamed=False)
        await read(generation)
        generation.abandon()
        await generation.task
        assert (await entry(made)).output_tokens == generation.usage.output > 0

    in_harness(test, tmp_path)


async def leave_after(generation: Generation, deltas: int) -> None:
    """Read so many deltas, leave, and wait for the settlement."""
    if deltas:
        seen = 0
        async for _ in generation:
            seen += 1
            if seen == deltas:
                break
    generation.abandon()
    await generation.task


def test_prompt_of_many_choices_is_billed_once(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        await read(await made.begin(prompts=("abc",), n=3))
        billed = await entry(made)
        assert (billed.input_tokens, billed.waived_input_tokens) == (4, 8)
        assert (billed.output_tokens, billed.waived_output_tokens) == (12, 0)

    in_harness(test, tmp_path)


def test_tokens_after_a_stop_string_are_waived(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        said = [*b"one two", *b"xxxx"]
        made.engine.script = lambda request: [*said, *[120] * 40]
        made.engine.overrun = 3
        assert await read(await made.begin(stop=("two",), max_tokens=60)) == "one "
        billed = await entry(made)
        assert (billed.output_tokens, billed.waived_output_tokens) == (7, 3)
        assert (billed.status, billed.finish_reason) == ("completed", "stop")

    in_harness(test, tmp_path)


def test_failed_request_is_waived_whole(tmp_path: Path) -> None:
    from loramux.engine.messages import EngineFault

    async def test(made: Harness) -> None:
        with pytest.raises(ServingError):
            await read(await made.begin(n=2, max_tokens=50))
        billed = await entry(made)
        assert (billed.status, billed.input_tokens, billed.output_tokens) == ("failed", 0, 0)
        assert billed.waived_output_tokens == sum(made.engine.told.values()) > 0

    fault = EngineFault("internal_error", "the engine cannot go on")
    in_harness(test, tmp_path, script=lambda request: [65, fault] if request.id.endswith("-1") else [65] * 50)


def test_tags_are_stored_with_the_entry(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        await read(await made.begin(tags=canonical_tags({"team": "é", "a": "b"})))
        assert (await entry(made)).tags == '{"a":"b","team":"é"}'

    in_harness(test, tmp_path)


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ({str(i): "x" for i in range(17)}, "at most 16"),
        ({"": "x"}, "1 to 64"),
        ({"k" * 65: "x"}, "1 to 64"),
        ({"k\n": "x"}, "1 to 64"),
        ({"k": "v" * 513}, "at most 512"),
        ({"k": "a\x00b"}, "printable"),
    ],
)
def test_tags_are_bounded(tags: dict[str, str], told: str) -> None:
    with pytest.raises(ServingError, match=told) as refusal:
        canonical_tags(tags)
    assert refusal.value.field == "metadata"
