"""The channel over real sockets: one engine, several servers, wrong keys and versions, slow, silent and lost peers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest
from listening import Listening, asked, listening, until, until_true
from scripted_engine import FACTS

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineRange
from loramux.engine.client import ENGINE_DIED, EngineClient, EngineDied
from loramux.engine.messages import AdapterRef, Cancel, ImageInput, Retire, Shutdown, Submit, TokenEvent
from loramux.fleet import remote, sessions, wire
from loramux.fleet.group import EngineGroup
from loramux.fleet.wire import new_pair


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def has_ended(events: list[TokenEvent]) -> bool:
    return bool(events) and events[-1].finish_reason is not None


async def problem_of(client: EngineClient) -> str:
    with pytest.raises(EngineDied) as died:
        await client.start()
    await client.stop()
    return str(died.value)


def group_of(engine: Listening) -> EngineGroup:
    """A server with one engine, through the fleet's own code."""
    base = BaseSettings(name="tiny", path="/model", engines=EngineRange(addresses=(engine.address,)))
    return EngineGroup(base, Settings(model=base.model), lambda *_: engine.client())


def test_two_servers_share_an_engine_with_requests_of_the_same_id() -> None:
    async def test() -> None:
        with listening() as engine:
            first, second = engine.client(), engine.client()
            assert await asyncio.gather(first.start(), second.start()) == [FACTS, FACTS]
            ours: list[TokenEvent] = []
            theirs: list[TokenEvent] = []
            engine.worker.is_open.clear()
            first.submit(asked("same", 5), ours.append)
            second.submit(asked("same", 7), theirs.append)
            await until(lambda: len(engine.worker.running) == 2)
            engine.worker.is_open.set()
            await until(lambda: has_ended(ours) and has_ended(theirs))
            assert (tokens(ours), tokens(theirs)) == (list(range(5)), list(range(7)))
            assert {event.request_id for event in ours + theirs} == {"same"}
            await until(lambda: first.stats().running and second.stats().running)
            await asyncio.gather(first.stop(), second.stop())

    run(test)


def test_server_that_stops_leaves_the_engine_to_the_others() -> None:
    async def test() -> None:
        with listening() as engine:
            first, second = engine.client(), engine.client()
            await asyncio.gather(first.start(), second.start())
            engine.worker.is_open.clear()
            ours: list[TokenEvent] = []
            first.submit(asked("a"), ours.append)
            stopping = asyncio.create_task(first.stop())
            await until(lambda: engine.worker.running)
            engine.worker.is_open.set()
            await stopping
            assert tokens(ours) == list(range(10)), "running requests end first"
            await until(lambda: engine.sessions.count == 1)
            theirs: list[TokenEvent] = []
            second.submit(asked("b"), theirs.append)
            await until(lambda: has_ended(theirs))
            assert not any(isinstance(command, Shutdown) for command in engine.worker.commands)
            await second.stop()

    run(test)


def test_silent_server_loses_its_requests_and_no_others() -> None:
    async def test() -> None:
        with listening(lease_s=1.0, is_open=False) as engine:
            await asyncio.to_thread(submit_from_a_process_that_is_stopped, engine)
            other = engine.client()
            await other.start()
            events: list[TokenEvent] = []
            other.submit(asked("kept"), events.append)
            await until(lambda: list(engine.worker.running) == ["kept"])
            engine.worker.is_open.set()
            await until(lambda: has_ended(events))
            assert tokens(events) == list(range(10))
            await other.stop()

    run(test)


FRONT = """
import asyncio, sys, time
sys.path[:0] = sys.argv[1].split(":")
from listening import asked
from loramux.engine.client import EngineClient
from loramux.fleet.wire import KeyPair
from loramux.fleet.remote import EnginePlace, RemoteChannel
address, secret, public, engine_key = sys.argv[2:6]
async def main():
    place = EnginePlace(address, engine_key.encode())
    channel = RemoteChannel(lambda: place, "tiny", KeyPair(secret.encode(), public.encode()), 1.0)
    client = EngineClient(channel, 600.0)
    await client.start()
    client.submit(asked("theirs", 1000), lambda event: None)
    print("submitted", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def submit_from_a_process_that_is_stopped(engine: Listening) -> None:
    """SIGSTOP of a server with a request that runs: its connection stays open, and no message comes."""
    pair, key = engine.front_pair, engine.engine_pair.public.decode()
    arguments = [":".join(sys.path), engine.address, pair.secret.decode(), pair.public.decode(), key]
    front = subprocess.Popen([sys.executable, "-c", FRONT, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert front.stdout is not None
        assert front.stdout.readline() == "submitted\n"
        until_true(lambda: "theirs" in engine.worker.told)
        front.send_signal(signal.SIGSTOP)
        until_true(lambda: not engine.worker.running)
    finally:
        front.kill()
        front.wait()
        front.stdout.close()


def test_keys_that_are_not_authorized_or_not_pinned_are_refused_with_the_way_out() -> None:
    async def test() -> None:
        with listening() as engine:
            stranger = new_pair()
            assert "fronts.public" in await problem_of(engine.client(pair=stranger))
            assert "engine.public" in await problem_of(engine.client(engine_key=stranger.public))
            engine.authorized.add(stranger.public)
            client = engine.client(pair=stranger)
            assert await client.start() == FACTS, "the file is read for each connection"
            await client.stop()

    run(test)


def test_other_message_version_or_base_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with listening() as engine:
            assert "serves the base 'tiny', and not 'other'" in await problem_of(engine.client(base="other"))
            monkeypatch.setattr(remote, "message_version", lambda: "older")
            problem = await problem_of(engine.client())
            assert "older" in problem
            assert "install the same release on both" in problem

    run(test)


def test_message_version_follows_fields_and_not_docstrings() -> None:
    def schema(text: str, kind: str) -> object:
        return {"title": "A", "description": text, "properties": {"a": {"type": kind, "description": text}}}

    assert wire._canonical(schema("x", "string")) == wire._canonical(schema("y", "string"))
    assert wire._canonical(schema("x", "string")) != wire._canonical(schema("x", "integer"))
    assert wire._canonical({"maximum": 100}) == wire._canonical({"maximum": 100.0})


def test_message_version_is_the_same_in_a_server_and_an_engine() -> None:
    """Each imports other modules, and typing gives equal annotations of both the form that came first."""
    show = "; from loramux.fleet.wire import message_version; print(message_version())"
    modules = ("loramux_api.server", "loramux.engine.messages")
    shown = [
        subprocess.run([sys.executable, "-c", f"import {module}{show}"], check=True, capture_output=True)
        for module in modules
    ]
    assert len({done.stdout for done in shown}) == 1, shown
    assert all(len(done.stdout.strip()) == 12 for done in shown), shown


def test_address_without_an_engine_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with listening() as engine:
            channel = engine.channel()
        monkeypatch.setattr(remote, "CONNECT_S", 0.2)
        assert "does not answer" in await problem_of(EngineClient(channel))

    run(test)


def test_lost_connection_ends_the_engine_and_a_new_one_continues_after_the_last_token() -> None:
    async def test() -> None:
        with listening() as engine:
            group = group_of(engine)
            await group.start()
            events: list[TokenEvent] = []
            group.submit(asked("a", 5000), events.append)
            await until(lambda: len(events) > 5)
            for identity in list(engine.sessions._sessions):
                engine.sessions.leave(identity, "the test says so")
            group.retire("anything")  # the next frame is answered with the connection's end
            await until(lambda: has_ended(events))
            assert tokens(events) == list(range(5000))
            assert events[-1].count is not None
            assert events[-1].count.tokens.output == 5000
            assert group.statuses()[0].starts == 2
            await group.stop()

    run(test)


def test_slow_server_gets_its_requests_back_and_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's event loop is blocked; another server and the engine go on, and no page is held for the blocked
    one."""
    monkeypatch.setattr(sessions, "HIGH_WATER", 20_000)
    monkeypatch.setattr(sessions, "LOW_WATER", 5_000)
    monkeypatch.setattr(sessions, "WINDOW_BYTES", 10_000)
    monkeypatch.setattr(remote, "CONFIRMED_BYTES", 600)

    async def test() -> None:
        with listening() as engine:
            slow = group_of(engine)
            await slow.start()
            events: list[TokenEvent] = []
            slow.submit(asked("slow", 3000), events.append)
            await until(lambda: len(events) > 5)
            cancelled = threading.Event()
            quick = threading.Thread(target=lambda: asyncio.run(other_front(engine, cancelled)))
            quick.start()
            assert cancelled.wait(60), "it is given back while this loop does not run"
            quick.join()
            await until(lambda: has_ended(events))
            assert tokens(events) == list(range(3000))
            assert events[-1].count is not None
            assert events[-1].count.tokens.output == 3000
            begun = [command.request for command in engine.worker.commands if isinstance(command, Submit)]
            assert [request.id for request in begun if request.output_token_ids], "it went on behind its tokens"
            await slow.stop()

    async def other_front(engine: Listening, cancelled: threading.Event) -> None:
        client = engine.client()
        await client.start()
        await until(lambda: Cancel("slow") in engine.worker.commands and "slow" not in engine.worker.running)
        events: list[TokenEvent] = []
        client.submit(asked("quick"), events.append)
        await until(lambda: has_ended(events))
        assert tokens(events) == list(range(10))
        await client.stop()
        cancelled.set()

    run(test)


def test_engine_that_does_not_read_is_lost_when_too_much_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_UNSENT_BYTES", 100_000)

    async def test() -> None:
        with listening() as engine:
            client = engine.client()
            await client.start()
            events: list[TokenEvent] = []
            client.submit(asked("large", prompt_token_ids=[1] * 200_000), events.append)
            await until(lambda: has_ended(events))
            assert events[-1].fault is not None
            assert events[-1].fault.code == ENGINE_DIED
            assert "does not read" in events[-1].fault.message
            await client.stop()

    run(test)


def test_images_larger_than_what_may_wait_reach_the_engine_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_UNSENT_BYTES", 100_000)
    images = tuple(
        ImageInput(digest=f"{i}" * 64, patches=bytes([i]) * 150_000, grid=(1, 2, 2), start=i, num_tokens=1)
        for i in range(3)
    )

    async def test() -> None:
        with listening() as engine:
            client = engine.client()
            await client.start()
            events: list[TokenEvent] = []
            client.submit(asked("seen", images=images), events.append)
            await until(lambda: has_ended(events))
            assert events[-1].fault is None
            assert engine.worker.commands[0].request.images == images
            await client.stop()

    run(test)


def test_engine_that_leaves_gives_requests_back_and_takes_no_more() -> None:
    async def test() -> None:
        with listening() as engine:
            client = engine.client()
            await client.start()
            events: list[TokenEvent] = []
            client.submit(asked("a", 100_000), events.append)
            await until(lambda: len(events) > 3)
            engine.sessions.withdraw()
            assert (await client.wait_end()) == "the engine was stopped"
            assert not client.alive
            assert events[-1].finish_reason == "cancelled"
            assert events[-1].count is not None
            assert events[-1].count.tokens.output == len(tokens(events))
            await client.stop()

    run(test)


def test_pin_is_released_with_the_last_server_that_holds_it() -> None:
    async def test() -> None:
        with listening() as engine:
            first, second = engine.client(), engine.client()
            await asyncio.gather(first.start(), second.start())
            ref = AdapterRef("d", "/here")
            assert [await first.pin(ref), await second.pin(ref)] == [None, None]
            names = lambda: [type(command).__name__ for command in engine.worker.commands]  # noqa: E731
            first.unpin("d")
            first.retire("other")
            await until(lambda: Retire("other") in engine.worker.commands)
            assert "Unpin" not in names()
            await second.stop()
            await until(lambda: "Unpin" in names())
            await first.stop()

    run(test)


def test_adapter_that_is_not_on_the_engines_machine_is_fetched_first() -> None:
    async def test() -> None:
        with listening() as engine:
            client = engine.client()
            await client.start()
            far = AdapterRef("d", "far")
            begun: list[TokenEvent] = []
            cancelled: list[TokenEvent] = []
            client.submit(asked("begun", adapter=far), begun.append)
            client.submit(asked("cancelled", adapter=far), cancelled.append)
            client.cancel("cancelled")
            await until(lambda: len(engine.files.waiting) == 2 and engine.sessions._owners["cancelled"].held)
            engine.files.arrive()
            await until(lambda: has_ended(begun) and has_ended(cancelled))
            assert tokens(begun) == list(range(10))
            assert (cancelled[-1].finish_reason, tokens(cancelled)) == ("cancelled", [])
            (submitted,) = [command.request for command in engine.worker.commands if isinstance(command, Submit)]
            assert submitted.adapter == AdapterRef("d", "/here")
            await client.stop()

    run(test)
