"""Engines behind a mailbox: on a thread for tests and small tools, in a process of its own for a server."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from loramux.engine.client import EngineClient, EngineDied
from loramux.engine.messages import (
    Cancel,
    Command,
    EngineFault,
    EngineStats,
    ModelFacts,
    Pin,
    Ready,
    Report,
    Retire,
    Shutdown,
    StepReport,
    Stopped,
    Submit,
    TokenEvent,
    Unpin,
)
from loramux.engine.request import AdapterRef, Request
from loramux.settings import Settings


class Channel(Protocol):
    """A way to a worker and back."""

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the worker; `on_report` is called on another thread, in order."""
        ...

    def send(self, command: Command) -> None:
        """Never blocks for long; a dead worker's commands are dropped."""
        ...

    def join(self, timeout: float) -> None:
        """Wait for the worker's end; a process that does not end is killed."""
        ...


class ThreadChannel:
    """The worker on a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the thread."""
        from loramux.engine.worker import serve  # loads torch: only where the engine lives

        self._thread = threading.Thread(
            target=serve, args=(self._settings, self._inbox, on_report), daemon=True, name="engine"
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """Put into the worker's inbox."""
        self._inbox.put(command)

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(timeout)


class ProcessChannel:
    """The worker in a child process, so that HTTP and tokenising never wait for a step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoder = msgspec.msgpack.Encoder()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the process and the thread that listens to it."""
        # Threads that spin while they wait take the cores from whoever has work; libgomp reads this once, at load.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_child, args=(self._settings, theirs), name="loramux-engine")
        self._process.start()
        theirs.close()
        threading.Thread(target=self._listen, args=(on_report,), daemon=True, name="engine-reports").start()

    def send(self, command: Command) -> None:
        """Write to the pipe."""
        assert self._connection is not None, "open() comes first"
        with contextlib.suppress(OSError):  # it died; the listener has said so
            self._connection.send_bytes(self._encoder.encode(command))

    def join(self, timeout: float) -> None:
        """Wait for the process, then insist."""
        if self._process is not None:
            self._process.join(timeout)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _listen(self, on_report: Callable[[Report], None]) -> None:
        assert self._connection is not None
        assert self._process is not None
        decoder = msgspec.msgpack.Decoder(Report)
        report: Report | None = None
        while not isinstance(report, Stopped):
            try:
                report = decoder.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._process.join(5)
                report = Stopped(f"the engine's process ended with exit code {self._process.exitcode}")
            on_report(report)


def _run_child(settings: Settings, connection: Connection) -> None:
    from loramux.engine.worker import serve_process  # imports torch, in the child only

    serve_process(settings, connection)


class MailboxEngine:
    """An EngineClient over a channel: routes each report to the request that waits for it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queues: dict[str, asyncio.Queue[TokenEvent | None]] = {}
        self._pins: dict[tuple[str, str], asyncio.Future[EngineFault | None]] = {}
        self._stats = EngineStats()
        self._unclaimed = 0
        self._ended: str | None = "the engine has not been started"
        self._facts: asyncio.Future[ModelFacts] | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> ModelFacts:
        """Start the worker and wait for its model; raises EngineDied when it cannot load it."""
        loop = asyncio.get_running_loop()
        self._facts = loop.create_future()
        self._ended = None
        self._channel.open(lambda report: _post(loop, self._take, report))
        return await self._facts

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Submit, then yield events to the last; leaving early cancels."""
        self._demand_alive()
        events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._queues[request.id] = events
        self._channel.send(Submit(request))
        finished = False
        try:
            while not finished:
                event = await events.get()
                if event is None:
                    self._demand_alive()
                assert event is not None
                finished = event.finish_reason is not None
                yield event
        finally:
            del self._queues[request.id]
            if not finished:
                self.cancel(request.id)

    def cancel(self, request_id: str) -> None:
        """Free the request's pages at the next step."""
        self._channel.send(Cancel(request_id))

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages once nothing uses them."""
        self._channel.send(Retire(digest))

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        """Keep a revision in the pool; waits until it is there, or cannot be."""
        self._demand_alive()
        told = self._pins.setdefault((ref.digest, owner), asyncio.get_running_loop().create_future())
        self._channel.send(Pin(ref, owner))
        return await asyncio.shield(told)

    def unpin(self, digest: str, owner: str = "") -> None:
        """Keep it no longer."""
        self._channel.send(Unpin(digest, owner))

    def stats(self) -> EngineStats:
        """Those of the latest report."""
        return self._stats

    @property
    def unclaimed_tokens(self) -> int:
        """Of requests whose stream had been closed when they ended."""
        return self._unclaimed

    @property
    def alive(self) -> bool:
        """Whether the model is loaded and the worker has not ended."""
        return self._ended is None and self._facts is not None and self._facts.done()

    async def stop(self) -> None:
        """Let what runs end, then stop."""
        if self._ended is None:
            self._channel.send(Shutdown())
            await self._stopped.wait()
        await asyncio.to_thread(self._channel.join, 10.0)

    def _demand_alive(self) -> None:
        if self._ended is not None:
            raise EngineDied(self._ended)

    def _take(self, report: Report) -> None:
        match report:
            case StepReport(events, stats, pins):
                self._stats = stats
                for pinned in pins:
                    if told := self._pins.pop((pinned.digest, pinned.owner), None):
                        told.set_result(pinned.fault)
                for event in events:
                    if waiting := self._queues.get(event.request_id):
                        waiting.put_nowait(event)
                    elif event.count is not None:
                        self._unclaimed += event.count.prompt_tokens + event.count.output_tokens
            case Ready(facts):
                assert self._facts is not None
                self._facts.set_result(facts)
            case Stopped(reason):
                self._end(reason)

    def _end(self, reason: str | None) -> None:
        self._ended = reason or "the engine was stopped"
        self._stopped.set()
        if self._facts is not None and not self._facts.done():
            self._facts.set_exception(EngineDied(self._ended))
        for waiting in self._queues.values():
            waiting.put_nowait(None)
        for told in self._pins.values():
            told.set_exception(EngineDied(self._ended))


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[Report], None], report: Report) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody listens any more
        loop.call_soon_threadsafe(function, report)


def spawn_engine(settings: Settings) -> EngineClient:
    """The engine that the settings ask for, not yet started."""
    return MailboxEngine(ThreadChannel(settings) if settings.engine.in_process else ProcessChannel(settings))
