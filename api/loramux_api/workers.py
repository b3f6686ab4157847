"""A server with several workers (`server.workers`): processes that answer at one address, over one set of engines.

    first process ── starts ──> worker 0, 1, ...     each is a whole server: HTTP, records, chores, its own requests
          └───────── starts ──> the engines          which all workers share (`loramux.fleet.shared`)

To each other the workers are servers of one database: limits, budgets, idempotency keys, leases and the ledger are in
the records. The first process reserves the addresses, and the kernel shares the connections out among the workers. The
first process starts worker 0, and the others when worker 0 is ready, so a start that fails is reported once. All listen
together, so that no worker gets the connections of all. A worker that dies is replaced after a pause; the others go on,
and so do the engines. If the first process dies, the workers stop as for SIGTERM, and then the engines. Workers and
engines ignore signals: the first process passes them on.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import loramux.fleet.shared as fleet
from loramux.common import logs
from loramux.common.errors import LoramuxError
from loramux.common.settings.file import Settings, SettingsError
from loramux.engine.client import start_ignoring_signals
from loramux.fleet.remote import Placement
from loramux_api.listening import Address, connection_limit, joined, reserved_addresses, shareable
from loramux_api.peers import (
    PEER_SECONDS,
    BusyNote,
    EngineOrder,
    EngineQuery,
    Failed,
    LevelOrder,
    Link,
    LinkClosed,
    Locate,
    MetricsQuery,
    Others,
    Peers,
    Question,
    Ready,
    Serving,
    Stop,
)
from loramux_api.process import STOPPING, Signals, exit_now, ignore_signals

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds between a worker's end and the start of the next one; doubled with each consecutive end."""
SOUND_SECONDS = 60.0
"""Seconds of service after which the next pause is FIRST_PAUSE again."""


class WorkerFailed(LoramuxError):
    """A worker has ended before the server served."""


def supervise(settings: Settings, on_serving: Callable[[], None]) -> int:
    """Serve with several workers until a signal or the engines' death, and return the exit code.

    Calls `on_serving` when all workers answer requests. Raises WorkerFailed if one cannot start, and SettingsError.
    """
    if settings.engine.in_process:
        raise SettingsError("engine.in_process: with server.workers above 1 every engine is a separate process")
    os.umask(0o077)
    with reserved_addresses(settings.server) as addresses:
        return asyncio.run(_supervise(settings, shareable(addresses), on_serving))


async def _supervise(settings: Settings, addresses: list[Address], on_serving: Callable[[], None]) -> int:
    signals = Signals()
    signals.listen()
    server = Supervisor(settings, addresses)
    stopping = asyncio.create_task(signals.first.wait())
    starting = asyncio.create_task(server.start())
    try:
        beginnings: set[asyncio.Future[Any]] = {starting, stopping}
        await asyncio.wait(beginnings, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            logger.info("stopped before the server was started")
            server.kill()
            exit_now(128 + (signals.number or signal.SIGTERM))
        await starting
        on_serving()
        lost = asyncio.create_task(server.has_lost_engines.wait())
        await asyncio.wait({stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
        await server.stop(signals)
        ignore_signals()
        return 1 if server.has_lost_engines.is_set() or server.has_failed else 0
    finally:
        server.kill()


class Supervisor:
    """The workers and the engines of a server, in its first process."""

    def __init__(self, settings: Settings, addresses: list[Address]) -> None:
        self.has_lost_engines = asyncio.Event()
        self.has_failed = False
        """True if a worker did not stop properly."""
        self._settings = settings
        self._addresses = addresses
        self._keys = fleet.new_keys()
        self._engines = fleet.SharedEngines(self._keys)
        self._workers: dict[int, _Worker] = {}
        self._standing: dict[str, Question] = {}
        """Orders that hold until the server is stopped, by their object: a worker that is started later gets them."""
        self._busy_workers: set[int] = set()
        """Workers other than worker 0 that answer requests now."""
        self._keepers: list[asyncio.Task[None]] = []
        self._may_listen, self._stopping = asyncio.Event(), asyncio.Event()
        self._waits = ThreadPoolExecutor(settings.server.workers, thread_name_prefix="worker-end")

    async def start(self) -> None:
        """Start the workers, and return when all of them serve. Raises WorkerFailed."""
        first = await self._begin(0)
        others = await asyncio.gather(*(self._begin(number) for number in range(1, self._settings.server.workers)))
        self._may_listen.set()
        await asyncio.gather(*(worker.reaches(worker.serving) for worker in (first, *others)))
        self._keepers += [asyncio.create_task(self._keep(worker)) for worker in (first, *others)]

    async def stop(self, signals: Signals) -> None:
        """Stop the workers, which drain, and then the engines; a second signal ends the workers' lame-duck time."""
        self._stopping.set()
        await self._stop_workers()
        ended: asyncio.Future[list[None]] = asyncio.gather(*self._keepers)
        second = asyncio.create_task(signals.second.wait())
        endings: set[asyncio.Future[Any]] = {ended, second}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await self._stop_workers()
        await ended
        second.cancel()
        await asyncio.to_thread(self._engines.stop)

    def kill(self) -> None:
        """End at once what still runs."""
        self._stopping.set()
        for worker in self._workers.values():
            worker.kill()
        self._engines.kill()

    async def _stop_workers(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))

    async def _begin(self, number: int) -> _Worker:
        worker = self._start(number)
        await worker.reaches(worker.ready)
        return worker

    def _start(self, number: int) -> _Worker:
        answer = partial(self._answer, number)
        worker = _Worker(number, self._settings, self._addresses, self._keys, answer, self._waits)
        self._workers[number] = worker
        return worker

    async def _keep(self, worker: _Worker) -> None:
        """Replace a worker whenever it ends, until the server is stopped."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE / 2
        while True:
            began, code = loop.time(), await worker.ended
            if worker.number in self._busy_workers:
                self._note_busy(BusyNote(worker.number, is_busy=False))
            if worker.failed is not None and worker.failed.has_lost_engines:
                self.has_lost_engines.set()
            if self._stopping.is_set() or self.has_lost_engines.is_set():
                self.has_failed |= code not in (0, 128 + signal.SIGTERM)  # the second: it was still starting
                return
            reason = f"exit code {code}" if worker.failed is None else worker.failed.reason
            logger.error("worker %d has ended (%s); it is started again", worker.number, reason)
            pause = FIRST_PAUSE if loop.time() - began > SOUND_SECONDS else min(LONGEST_PAUSE, 2 * pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return
            worker = self._start(worker.number)

    async def _answer(self, number: int, message: Any) -> Any:
        """Answer a worker."""
        worker = self._workers[number]
        match message:
            case Locate(engine, settings):
                return Placement() if self._stopping.is_set() else self._engines.place_of(engine, settings)
            case Others(question):
                self._note(question)
                others = [one for one in self._workers.values() if one is not worker and one.serving.is_set()]
                answers = await asyncio.gather(*(one.ask(question) for one in others), return_exceptions=True)
                return {
                    one.number: answer
                    for one, answer in zip(others, answers, strict=True)
                    if not isinstance(answer, BaseException)
                }
            case Ready():
                worker.ready.set()
                await self._may_listen.wait()
            case Serving():
                worker.serving.set()
                logger.info("worker %d serves: process %d", number, worker.pid)
                if number == 0:
                    for busy in self._busy_workers:
                        worker.note(BusyNote(busy, is_busy=True))
                for order in self._standing.values():
                    await worker.ask(order)
            case BusyNote():
                self._note_busy(message)
            case Failed():
                worker.failed = message
        return None

    def _note_busy(self, note: BusyNote) -> None:
        """Keep a worker's note for the next life of worker 0, and pass it on to the present one."""
        if note.is_busy:
            self._busy_workers.add(note.worker)
        else:
            self._busy_workers.discard(note.worker)
        if self._workers[0].serving.is_set():
            self._workers[0].note(note)

    def _note(self, question: Question) -> None:
        match question:
            case EngineOrder(engine, restart, _):
                self._engines.release(engine)
                self._standing.pop(engine, None)
                if not restart:
                    self._standing[engine] = question
            case LevelOrder():
                self._standing[""] = question
            case MetricsQuery() | EngineQuery():
                pass


class _Worker:
    """One life of a worker, seen from the first process."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        addresses: list[Address],
        keys: fleet.FleetKeys,
        answer: Callable[[Any], Any],
        waits: ThreadPoolExecutor,
    ) -> None:
        self.number = number
        self.ready, self.serving = asyncio.Event(), asyncio.Event()
        self.failed: Failed | None = None
        ours, theirs = socket.socketpair()
        self._link = Link(ours, answer)
        context = multiprocessing.get_context("spawn")
        arguments = (number, settings, addresses, keys, theirs)
        self._process = context.Process(target=_work, args=arguments, name=f"loramux-worker-{number}")
        start_ignoring_signals(self._process)
        theirs.close()
        self._reading = asyncio.create_task(self._link.serve(), name=f"link of worker {number}")
        self.ended: asyncio.Task[int] = asyncio.create_task(self._wait_end(waits))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def reaches(self, state: asyncio.Event) -> None:
        """Wait until the worker is `ready` or `serving`. Raises WorkerFailed if it ends before."""
        reached = asyncio.create_task(state.wait())
        outcomes: set[asyncio.Future[Any]] = {reached, self.ended}
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if not state.is_set():
            reason = self.failed and self.failed.reason
            raise WorkerFailed(reason or f"worker {self.number} ended with exit code {await self.ended}")

    async def ask(self, question: Question | Stop) -> Any:
        """Return the worker's answer. Raises LinkClosed or TimeoutError."""
        async with asyncio.timeout(PEER_SECONDS):
            return await self._link.ask(question)

    def note(self, message: BusyNote) -> None:
        """Send the worker a note, unless it is ending."""
        with suppress(LinkClosed):
            self._link.note(message)

    async def stop(self) -> None:
        """Make the worker stop; the second time: at once."""
        with suppress(LinkClosed, TimeoutError):
            await self.ask(Stop())

    def kill(self) -> None:
        self._process.kill()

    async def _wait_end(self, waits: ThreadPoolExecutor) -> int:
        await asyncio.get_running_loop().run_in_executor(waits, self._process.join)
        await asyncio.wait({self._reading}, timeout=PEER_SECONDS)  # its last message
        self.serving.clear()
        return self._process.exitcode or 0


def _work(number: int, settings: Settings, addresses: list[Address], keys: fleet.FleetKeys, end: socket.socket) -> None:
    """Run a worker in this process."""
    for each in STOPPING:
        signal.signal(each, lambda *_: None)  # the first process passes them on; programs that are started get them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.umask(0o077)
    logs.configure(settings.logging.format, settings.logging.level, worker=number)
    exit_now(asyncio.run(_serve(number, settings, addresses, keys, end)))


async def _serve(
    number: int, settings: Settings, addresses: list[Address], keys: fleet.FleetKeys, end: socket.socket
) -> int:
    from loramux.training.local import watch_busy
    from loramux_api.app import create_app, refusal_of  # import torch, which the first process does without
    from loramux_api.server import run_server

    signals, app = Signals(), create_app(settings)
    link = Link(end, partial(_answer_first, app, signals))
    reading = asyncio.create_task(link.serve(), name="link")
    # The first process has ended, unless this worker is ending.
    reading.add_done_callback(lambda done: None if done.cancelled() else signals.receive())
    app.state.peers = Peers(number, link)

    def note_serving(_: object) -> None:
        app.state.note_serving = asyncio.create_task(link.ask(Serving()))
        if number and settings.training.enabled and settings.training.local_trainer:
            watch_busy(app.state.platform.completions, note_busy)

    def note_busy(is_busy: bool) -> None:
        with suppress(LinkClosed):  # the server is ending
            link.note(BusyNote(number, is_busy))

    async def place_of(engine: str, own: Settings) -> Placement:
        found: Placement = await link.ask(Locate(engine, own))
        return found

    try:
        launch = fleet.shared_launcher(settings, place_of, keys)
        own = [joined(address) for address in addresses]
        limit, may_listen = connection_limit(), partial(link.ask, Ready())
        code = await run_server(app, settings, own, limit, signals, note_serving, launch, may_listen)
        failed = Failed("no base has an engine left", has_lost_engines=True) if code else None
    except BaseException as error:
        if (refusal := refusal_of(error)) is None:
            raise
        code, failed = 1, Failed(refusal)
    if failed is not None:
        with suppress(LinkClosed):
            await link.ask(failed)
    return code


async def _answer_first(app: Any, signals: Signals, message: Any) -> Any:
    """Answer the first process, in a worker."""
    match message:
        case Stop():
            signals.receive()
        case MetricsQuery():
            return app.state.metrics.families()
        case EngineQuery():
            return app.state.platform.bases.engines()
        case EngineOrder(engine, restart, seconds):
            with suppress(LoramuxError):  # it has the order already
                app.state.platform.bases.order_engine(engine, restart=restart, seconds=seconds)
        case LevelOrder(level):
            logs.set_level(level)
        case BusyNote(worker, is_busy):
            app.state.programs.local_trainer.note_busy(is_busy, worker)
    return None
