"""The engine client, over a thread and over a real child process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from adapter_zoo import Asked, Zoo, to_request
from event_stream import stream

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.client import ENGINE_DIED, EngineClient, EngineDied, spawn_engine
from loramux.engine.messages import TokenEvent


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

    asyncio.run(asyncio.wait_for(main(), 240))


async def tokens_of(engine: EngineClient, zoo: Zoo, asked: Asked) -> list[int]:
    events = [event async for event in stream(engine, to_request(zoo, asked))]
    assert events[-1].finish_reason == "length"
    return [event.token_id for event in events if event.token_id is not None]


def test_client_concurrent_requests_answer_as_peft_does(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"m{i}", adapter, (5, 6, 7, 8 + i), 6) for i, adapter in enumerate([None, "plain", "rslora"])]

    async def use(engine: EngineClient) -> None:
        answers = await asyncio.gather(*(tokens_of(engine, zoo, a) for a in asked))
        assert answers == [zoo.answer(a) for a in asked]
        assert engine.stats().max_distinct_adapters >= 1

    with_engine(settings, use)


def test_client_has_statistics_before_the_first_request(settings: Settings) -> None:
    async def use(engine: EngineClient) -> None:
        for _ in range(300):
            if engine.stats().pages_total:
                break
            await asyncio.sleep(0.01)
        assert engine.stats().pages_total > 0
        assert engine.stats().steps == engine.stats().step_graphs_missing == 0

    with_engine(settings, use)


def test_client_forgotten_request_frees_its_pages(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")

    async def use(engine: EngineClient) -> None:
        running = stream(engine, to_request(zoo, Asked("left", None, (5, 6, 7), 200)))
        await anext(running)
        assert engine.stats().pages_kv > 0
        await running.aclose()
        await tokens_of(engine, zoo, Asked("next", None, (5, 6, 7), 3))
        assert engine.stats().pages_kv == 0
        assert engine.stats().running == 0

    with_engine(settings, use)


def test_client_stop_lets_running_requests_end(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")

    async def use(engine: EngineClient) -> None:
        running = asyncio.create_task(tokens_of(engine, zoo, Asked("long", "plain", (5, 6, 7), 60)))
        await asyncio.sleep(0.05)
        await engine.stop()
        assert len(await running) == 60
        with pytest.raises(EngineDied):
            await tokens_of(engine, zoo, Asked("late", None, (5,), 1))

    with_engine(settings, use)


def test_client_start_without_a_model_says_why(settings: Settings, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(settings.model, path=str(tmp_path / "absent"))
    )

    async def main() -> None:
        with pytest.raises(EngineDied, match="absent"):
            await spawn_engine(broken).start()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_killed_engine_ends_a_running_stream(zoo_of) -> None:
    zoo = zoo_of("llama")

    async def main() -> None:
        engine = spawn_engine(settings_for(zoo.base, in_process=False))
        await engine.start()
        running = stream(engine, to_request(zoo, Asked("cut", None, (5, 6, 7), 200)))
        await anext(running)
        os.kill(engine._channel._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="-9"):
            async for _ in running:
                pass
        assert not engine.alive
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_submit_calls_back_each_event_in_order_and_an_exception_hurts_its_own_request_only(settings, zoo_of) -> None:
    zoo = zoo_of("llama")
    good, bad = Asked("good", "plain", (5, 6, 7), 6), Asked("bad", None, (5, 6, 7), 200)

    async def use(engine: EngineClient) -> None:
        events: list[TokenEvent] = []
        ended = asyncio.Event()

        def listen(event: TokenEvent) -> None:
            events.append(event)
            if event.finish_reason is not None:
                ended.set()

        def fail(event: TokenEvent) -> None:
            raise RuntimeError("a fault of the listener")

        engine.submit(to_request(zoo, bad), fail)
        engine.submit(to_request(zoo, good), listen)
        await ended.wait()
        assert [event.token_id for event in events if event.token_id is not None] == zoo.answer(good)
        assert events[-1].count is not None
        while engine.stats().running:
            await tokens_of(engine, zoo, Asked("next", None, (5, 6, 7), 2))
        assert engine.unclaimed_tokens > 0, "what the broken listener's request used is known"

    with_engine(settings, use)


@pytest.mark.parametrize("settings", ["process"], indirect=True)
def test_killed_engine_ends_each_submitted_request_with_a_fault(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")

    async def main() -> None:
        engine = spawn_engine(settings)
        await engine.start()
        ends: asyncio.Queue[TokenEvent] = asyncio.Queue()
        for name in ("a", "b"):
            engine.submit(
                to_request(zoo, Asked(name, None, (5, 6, 7), 200)),
                lambda event: event.finish_reason and ends.put_nowait(event),
            )
        os.kill(engine._channel._process.pid, signal.SIGKILL)
        faults = [(await ends.get()).fault for _ in range(2)]
        assert [fault and fault.code for fault in faults] == [ENGINE_DIED] * 2
        with pytest.raises(EngineDied, match="-9"):
            engine.submit(to_request(zoo, Asked("late", None, (5,), 1)), ends.put_nowait)
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.parametrize("settings", ["process"], indirect=True)
def test_stopped_child_blocks_no_event_loop_and_its_end_answers_everybody(settings: Settings, zoo_of) -> None:
    """An unread pipe is full after 64 KB; commands of megabytes wait on a separate thread."""
    zoo = zoo_of("llama")

    async def main() -> None:
        engine = spawn_engine(settings)
        await engine.start()
        process = engine._channel._process
        os.kill(process.pid, signal.SIGSTOP)
        ends: asyncio.Queue[TokenEvent] = asyncio.Queue()
        for number in range(200):
            prompt = tuple(range(3, 90)) * 100
            engine.submit(to_request(zoo, Asked(f"r{number}", None, prompt, 5)), ends.put_nowait)
        os.kill(process.pid, signal.SIGKILL)
        faults = [(await ends.get()).fault for _ in range(200)]
        assert {fault and fault.code for fault in faults} == {ENGINE_DIED}
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.parametrize("settings", ["process"], indirect=True)
def test_silent_engine_is_ended_and_its_requests_get_a_fault(settings: Settings, zoo_of) -> None:
    zoo = zoo_of("llama")
    engine_settings = msgspec.structs.replace(settings.engine, step_timeout_s=0.5)

    async def main() -> None:
        engine = spawn_engine(msgspec.structs.replace(settings, engine=engine_settings))
        await engine.start()
        process = engine._channel._process
        os.kill(process.pid, signal.SIGSTOP)
        ends: asyncio.Queue[TokenEvent] = asyncio.Queue()
        engine.submit(to_request(zoo, Asked("silent", None, (5, 6), 5)), ends.put_nowait)
        fault = (await ends.get()).fault
        assert fault is not None
        assert fault.code == ENGINE_DIED
        assert "no progress" in fault.message
        assert not engine.alive
        await engine.stop()
        assert not process.is_alive()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_exception_in_a_step_ends_every_request_with_a_fault(settings: Settings, zoo_of, tmp_path, monkeypatch) -> None:
    """The engine cannot know what the step had changed, so it ends, and says why."""
    zoo = zoo_of("llama")
    if not settings.engine.in_process:
        pytest.skip("the exception is put into this process")

    def fail(self: object, step: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("loramux.engine.execution.runner.CpuRunner.launch", fail)

    async def main() -> None:
        engine = spawn_engine(settings)
        await engine.start()
        ends: asyncio.Queue[TokenEvent] = asyncio.Queue()
        for name in ("a", "b", "c"):
            engine.submit(to_request(zoo, Asked(name, None, (5, 6), 5)), ends.put_nowait)
        faults = [(await ends.get()).fault for _ in range(3)]
        assert [fault and (fault.code, fault.message) for fault in faults] == [
            (ENGINE_DIED, "RuntimeError: out of luck")
        ] * 3
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ((5, 97), {}),
        ((5, -1), {}),
        ((), {}),
        ((5,), {"logit_bias": {97: 1.0}}),
        ((5,), {"logit_bias": {3: float("nan")}}),
        ((5,), {"stop_token_ids": (1000,)}),
        ((5,), {"logprobs": 98}),
        ((5,), {"temperature": float("nan")}),
        ((5,), {"repetition_penalty": 0.0}),
        ((5,), {"repetition_penalty": 1e-38}),
        ((5,), {"repetition_penalty": 1000.0}),
        ((5,), {"max_tokens": 0}),
    ],
)
@pytest.mark.parametrize("settings", ["thread"], indirect=True)
def test_request_that_the_model_cannot_take_is_refused_alone(settings: Settings, zoo_of, prompt, sampling) -> None:
    zoo = zoo_of("llama")
    good = Asked("good", None, (5, 6, 7), 8)

    async def use(engine: EngineClient) -> None:
        running = asyncio.create_task(tokens_of(engine, zoo, good))
        events = [event async for event in stream(engine, to_request(zoo, Asked("bad", None, prompt, 5), **sampling))]
        assert [event.fault and event.fault.code for event in events] == ["internal_error"]
        assert await running == zoo.answer(good)

    with_engine(settings, use)


PARENT = """
import asyncio, sys
from loramux.engine.client import spawn_engine
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.common.settings.file import Settings

async def main():
    engine = spawn_engine(Settings(
        model=ModelSettings(path=sys.argv[1], served_model_name="base", dtype="float32"),
        engine=EngineSettings(num_threads=1, pool_bytes=4 << 20),
    ))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    print(engine._channel._process.pid, flush=True)
    if sys.argv[2] == "serving":
        await starting
        print("ready", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["loading", "serving"])
def test_engine_process_ends_when_its_parent_is_killed(zoo_of, tmp_path: Path, state: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(zoo_of("llama").base), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if state == "serving":
            assert parent.stdout.readline() == "ready\n"
        parent.kill()
    deadline = time.monotonic() + 60  # a safety net: importing torch takes seconds on a busy machine
    while is_running(child):
        assert time.monotonic() < deadline, "the engine outlived its server"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("settings", ["process"], indirect=True)
def test_stop_while_the_model_loads_ends_the_process_at_once(settings: Settings) -> None:
    async def main() -> None:
        engine = spawn_engine(settings)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineDied):
            await starting
        assert not engine._channel._process.is_alive()

    asyncio.run(asyncio.wait_for(main(), 240))
