"""The engine behind its mailbox, on a thread and as a real child process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from zoo import Asked, Zoo, to_request

from loramux.engine import EngineClient, EngineDied, spawn_engine
from loramux.settings import EngineSettings, ModelSettings, Settings


@pytest.fixture(params=["thread", "process"])
def settings(request: pytest.FixtureRequest, zoo_of) -> Settings:
    return settings_for(zoo_of("llama").base, in_process=request.param == "thread")


def settings_for(base: Path, *, in_process: bool) -> Settings:
    return Settings(
        model=ModelSettings(path=str(base), served_model_name="base", dtype="float32"),
        engine=EngineSettings(num_threads=1, pool_bytes=4 << 20, in_process=in_process, max_num_batched_tokens=16),
    )


def with_engine(settings: Settings, use: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = spawn_engine(settings)
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.stop()
        assert not engine.alive

    asyncio.run(asyncio.wait_for(main(), 60))


async def tokens_of(engine: EngineClient, zoo: Zoo, asked: Asked) -> list[int]:
    events = [event async for event in engine.stream(to_request(zoo, asked))]
    assert events[-1].finish_reason == "length"
    return [event.token_id for event in events if event.token_id is not None]


def test_concurrent_streams_answer_as_peft_does(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"m{i}", adapter, (5, 6, 7, 8 + i), 6) for i, adapter in enumerate([None, "plain", "rslora"])]

    async def use(engine: EngineClient) -> None:
        answers = await asyncio.gather(*(tokens_of(engine, zoo, a) for a in asked))
        assert answers == [zoo.answer(a) for a in asked]
        assert engine.stats().max_distinct_adapters >= 1

    with_engine(settings, use)


def test_leaving_a_stream_frees_its_pages(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")

    async def use(engine: EngineClient) -> None:
        stream = engine.stream(to_request(zoo, Asked("left", None, (5, 6, 7), 200)))
        await anext(stream)
        assert engine.stats().pages_kv > 0
        await stream.aclose()
        await tokens_of(engine, zoo, Asked("next", None, (5, 6, 7), 3))
        assert engine.stats().pages_kv == 0
        assert engine.stats().running == 0

    with_engine(settings, use)


def test_stopping_lets_running_streams_end(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")

    async def use(engine: EngineClient) -> None:
        running = asyncio.create_task(tokens_of(engine, zoo, Asked("long", "plain", (5, 6, 7), 60)))
        await asyncio.sleep(0.05)
        await engine.stop()
        assert len(await running) == 60
        with pytest.raises(EngineDied):
            await tokens_of(engine, zoo, Asked("late", None, (5,), 1))

    with_engine(settings, use)


def test_a_model_that_cannot_be_loaded_says_why(settings: Settings, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(settings.model, path=str(tmp_path / "absent"))
    )

    async def main() -> None:
        with pytest.raises(EngineDied, match="absent"):
            await spawn_engine(broken).start()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_killed_engine_ends_its_streams(zoo_of) -> None:
    zoo = zoo_of("llama")

    async def main() -> None:
        engine = spawn_engine(settings_for(zoo.base, in_process=False))
        await engine.start()
        stream = engine.stream(to_request(zoo, Asked("cut", None, (5, 6, 7), 200)))
        await anext(stream)
        os.kill(engine._channel._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="-9"):
            async for _ in stream:
                pass
        assert not engine.alive
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
