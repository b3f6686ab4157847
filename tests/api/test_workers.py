"""Messages between the processes of a server with several workers, and their metrics, without the processes."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from running_server import free_port

from loramux.common.settings.file import Settings, SettingsError
from loramux.common.settings.server import ServerSettings
from loramux.common.settings.serving import ModelSettings
from loramux_api import workers
from loramux_api.listening import joined, reserved_addresses, shareable
from loramux_api.metrics import CollectedFamilies, of_workers
from loramux_api.peers import BusyNote, Failed, Link, LinkClosed, Peers, Ready, Serving
from loramux_api.workers import Supervisor

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refuse(_: Any) -> Any:
    raise ValueError("no")


async def echo(question: Any) -> Any:
    await asyncio.sleep(0.02 if question == "slow" else 0.0)
    return question


@asynccontextmanager
async def linked(answer: Any) -> AsyncIterator[tuple[Link, socket.socket]]:
    """A link to a process that answers with `answer`, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    link, other = Link(ours, echo), Link(theirs, answer)
    tasks = [asyncio.create_task(one.serve()) for one in (link, other)]
    await asyncio.sleep(0.01)
    yield link, theirs
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_link_answers_questions_in_any_order_and_of_any_size() -> None:
    async with linked(echo) as (link, _):
        large = "x" * 5_000_000
        assert await asyncio.gather(*(link.ask(one) for one in ("slow", large, "c"))) == ["slow", large, "c"]


async def test_link_to_a_process_that_fails_or_has_ended_does_not_wait() -> None:
    async with linked(refuse) as (link, other):
        with pytest.raises(LinkClosed, match="could not answer"):
            await link.ask("a")
        other.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LinkClosed, match="has ended"):
            await link.ask("b")
        assert await Peers(1, link).ask("c") == {}


async def test_notes_on_a_link_arrive_in_their_order_and_their_answers_are_left_out() -> None:
    notes: list[BusyNote] = []

    async def keep(note: Any) -> Any:
        notes.append(note)

    sent = [BusyNote(1, is_busy=bool(number % 2)) for number in range(40)]
    async with linked(keep) as (link, other):
        for note in sent:
            link.note(note)
        await link.ask("the last")
        assert notes == [*sent, "the last"]
        other.shutdown(socket.SHUT_RDWR)
        await asyncio.sleep(0.01)
        with pytest.raises(LinkClosed, match="has ended"):
            link.note(sent[0])


@dataclass
class Life:
    """One life of a worker without a process: it serves at once, and ends when its test says so."""

    number: int
    answer: Callable[[Any], Awaitable[Any]]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    failed: Failed | None = None
    pid: int = 0
    notes: list[BusyNote] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note = self.notes.append
        self._end = asyncio.Event()
        self.ended = asyncio.create_task(self._wait_end())
        self._begun = asyncio.gather(self.answer(Ready()), self.answer(Serving()))

    async def reaches(self, state: asyncio.Event) -> None:
        await state.wait()

    async def end(self) -> None:
        """End, and return when the first process has seen it."""
        self._end.set()
        await self.ended
        await asyncio.sleep(0)

    async def _wait_end(self) -> int:
        await self._end.wait()
        self.serving.clear()
        return -9


class Lives:
    """The lives of a server's three workers. A life that ends is followed by another at once."""

    def __init__(self) -> None:
        self.all: list[Life] = []
        self._new = asyncio.Queue[Life]()

    def begin(self, number: int, settings: Any, addresses: Any, keys: Any, answer: Any, waits: Any) -> Life:
        self.all.append(Life(number, answer))
        self._new.put_nowait(self.all[-1])
        return self.all[-1]

    async def next(self) -> Life:
        """Wait until the next life serves."""
        life = await self._new.get()
        await life.serving.wait()
        return life


@pytest.fixture
async def lives(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lives]:
    lives = Lives()

    monkeypatch.setattr(workers, "_Worker", lives.begin)
    monkeypatch.setattr(workers, "FIRST_PAUSE", 0.0)
    server = ServerSettings(workers=3)
    supervisor = Supervisor(Settings(model=ModelSettings(path=".", served_model_name="tiny"), server=server), [])
    await supervisor.start()
    yield lives
    supervisor._stopping.set()
    for life in lives.all:
        await life.end()


async def test_worker_with_the_trainer_is_told_if_another_answers_requests(lives: Lives) -> None:
    trainer, first, second = [await lives.next() for _ in range(3)]
    sent = [BusyNote(1, is_busy=True), BusyNote(2, is_busy=True), BusyNote(1, is_busy=False)]
    for note in sent:
        await (first if note.worker == 1 else second).answer(note)
    assert trainer.notes == sent
    assert first.notes == second.notes == []


async def test_killed_worker_answers_no_requests(lives: Lives) -> None:
    trainer, first, second = [await lives.next() for _ in range(3)]
    await first.answer(BusyNote(1, is_busy=True))
    for life in (first, second):
        await life.end()
        await lives.next()
    assert trainer.notes == [BusyNote(1, is_busy=True), BusyNote(1, is_busy=False)]


async def test_next_life_of_the_worker_with_the_trainer_is_told_which_others_answer_requests(lives: Lives) -> None:
    trainer, first, second = [await lives.next() for _ in range(3)]
    for life in (first, second):
        await life.answer(BusyNote(life.number, is_busy=True))
    await trainer.end()
    await first.answer(BusyNote(1, is_busy=False))
    assert len(trainer.notes) == 2, "it gets nothing after its end"
    assert (await lives.next()).notes == [BusyNote(2, is_busy=True)]


async def test_address_is_shared_with_workers_and_refused_to_a_second_server() -> None:
    settings = ServerSettings(port=free_port())
    with reserved_addresses(settings) as addresses:
        shared = shareable(addresses)
        own = [joined(replace(shared[0], socket=shared[0].socket.dup())) for _ in range(2)]
        for address in own:
            address.socket.listen()
        with pytest.raises(SettingsError, match="Address already in use"), reserved_addresses(settings):
            pass
        accepted = {address.socket.fileno(): 0 for address in own}
        for _ in range(64):
            with socket.create_connection((settings.host, settings.port)):
                for listener in select.select(list(accepted), [], [], 5)[0]:
                    accepted[listener] += 1
                    next(one.socket for one in own if one.socket.fileno() == listener).accept()[0].close()
        assert all(accepted.values()), accepted
        for address in own:
            address.socket.close()


def families(answered: float, steps: float) -> list[Metric]:
    own = CounterMetricFamily("answers", "Answers.", labels=["status"])
    own.add_metric(["200"], answered)
    engine = GaugeMetricFamily("steps", "Steps.", labels=["engine"])
    engine.add_metric(["tiny-0"], steps)
    return [own, engine]


async def test_metrics_of_workers_name_them_and_count_engines_once() -> None:
    joined = generate_latest(CollectedFamilies(of_workers(1, families(3, 7), {0: families(4, 6)}))).decode()
    samples = [line for line in joined.splitlines() if not line.startswith("#")]
    assert samples == [
        'answers_total{status="200",worker="1"} 3.0',
        'answers_total{status="200",worker="0"} 4.0',
        'steps{engine="tiny-0"} 7.0',
    ]
