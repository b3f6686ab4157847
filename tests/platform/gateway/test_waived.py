"""Who pays for which token: what could be read is billed, the rest waived, and the engine agrees to the token."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_house import House, in_house, read

from loramux.billing import reconcile
from loramux.gateway import GatewayError
from loramux.gateway.tags import canonical_tags
from loramux.records.ledger import LedgerEntry, LedgerRepository

PROMPT = "say this"


async def entry(made: House) -> LedgerEntry:
    async with made.database.read() as session:
        [entry] = await LedgerRepository(session).after(0, 10)
    assert (await reconcile(made.database)).drift_tokens == 0
    assert made.usage.drift_tokens == 0
    return entry


@pytest.mark.parametrize("deltas", range(len(PROMPT) + 1))
def test_a_client_that_drops_at_any_chunk_pays_for_what_it_could_read(tmp_path: Path, deltas: int) -> None:
    async def test(made: House) -> None:
        generation = await made.begin(prompts=(PROMPT,), n=2)
        seen = 0
        if deltas:
            async for _ in generation:
                seen += 1
                if seen == deltas:
                    break
        generation.abandon()
        await generation.task
        billed = await entry(made)
        engine = sum(made.engine.told.values())
        assert billed.output_tokens + billed.waived_output_tokens == engine
        assert billed.output_tokens >= deltas
        assert billed.output_tokens == generation.usage.completion_tokens
        assert (billed.input_tokens > 0) == (billed.output_tokens > 0)
        assert made.engine.running == 0

    in_house(test, tmp_path, pause=0.002)


def test_a_prompt_is_paid_once_and_waived_for_the_other_answers(tmp_path: Path) -> None:
    async def test(made: House) -> None:
        await read(await made.begin(prompts=("abc",), n=3))
        billed = await entry(made)
        assert (billed.input_tokens, billed.waived_input_tokens) == (4, 8)
        assert (billed.output_tokens, billed.waived_output_tokens) == (12, 0)

    in_house(test, tmp_path)


def test_what_comes_after_a_stop_string_is_waived(tmp_path: Path) -> None:
    async def test(made: House) -> None:
        said = [*b"one two", *b"xxxx"]
        made.engine.script = lambda request: [*said, *[120] * 40]
        made.engine.overrun = 3
        assert await read(await made.begin(stop=("two",), max_tokens=60)) == "one "
        billed = await entry(made)
        assert (billed.output_tokens, billed.waived_output_tokens) == (7, 3)
        assert (billed.status, billed.finish_reason) == ("completed", "stop")

    in_house(test, tmp_path)


def test_a_failed_request_is_waived_whole(tmp_path: Path) -> None:
    from loramux.engine.messages import EngineFault

    async def test(made: House) -> None:
        with pytest.raises(GatewayError):
            await read(await made.begin(n=2, max_tokens=50))
        billed = await entry(made)
        assert (billed.status, billed.input_tokens, billed.output_tokens) == ("failed", 0, 0)
        assert billed.waived_output_tokens == sum(made.engine.told.values()) > 0

    fault = EngineFault("adapter_failed", "the adapter cannot be read")
    in_house(test, tmp_path, script=lambda request: [65, fault] if request.id.endswith("-1") else [65] * 50)


def test_tags_come_with_the_entry(tmp_path: Path) -> None:
    async def test(made: House) -> None:
        await read(await made.begin(tags=canonical_tags({"team": "é", "a": "b"})))
        assert (await entry(made)).tags == '{"a":"b","team":"é"}'

    in_house(test, tmp_path)


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
    with pytest.raises(GatewayError, match=told) as refusal:
        canonical_tags(tags)
    assert refusal.value.param == "metadata"
