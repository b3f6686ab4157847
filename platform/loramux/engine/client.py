"""The serving layer's side of an engine: it sends requests and receives events, to and from an engine in any place.

    EngineClient.submit(request, on_event) ── Command ──> Channel ──> worker loop ──> Engine.step()
    on_event(event) <── event loop <── StepReport <──────── Channel <────────────────────┘

The serving layer holds an `EngineClient`, which reaches its engine over a `Channel`. A channel is a thread of this
process (tests, small tools), a child process (servers: HTTP and tokenizing never wait for a step), or a connection to
another machine (`fleet.remote`). A step sends one report for all its requests, and wakes the event loop once.

Every submitted request gets a last event in bounded time. If the worker raises, dies or hangs, that event is an error
with the fault code `ENGINE_DIED`. A worker counts as hung if it has requests and reports neither a step nor a heartbeat
for `engine.step_timeout_s`; its process is then killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from loramux.common.settings.file import Settings
from loramux.engine.messages import (
    AdapterRef,
    Cancel,
    Command,
    EngineFault,
    EngineStats,
    Leaving,
    Lift,
    ModelFacts,
    Pin,
    Ready,
    Report,
    Request,
    Retire,
    Shutdown,
    StepReport,
    Stopped,
    Submit,
    TenantService,
    TokenEvent,
    Unpin,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""Seconds without a report after which a stopping worker that runs no request is given up."""

ENGINE_DIED = "engine_died"
"""Fault code of a request that ended because its engine ended."""

OnEvent = Callable[[TokenEvent], None]
OnService = Callable[[list[TenantService]], None]


class EngineDied(RuntimeError):
    """The engine ended without being stopped; the message says why."""


class Channel(Protocol):
    """A way to a worker and back."""

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the worker; `on_report` is called on another thread, in order. The last report is Stopped."""
        ...

    def send(self, command: Command) -> None:
        """Send `command` without blocking; a dead worker's commands are dropped. Raises ValueError if the command
        cannot be encoded.
        """
        ...

    def kill(self) -> None:
        """End the worker at once, if it is a process; a thread cannot be ended."""
        ...

    def join(self, timeout: float) -> None:
        """Wait for the worker's end; kill a process that does not end."""
        ...


class ThreadChannel:
    """A worker on a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the thread."""
        from loramux.engine.worker import serve  # imports torch, so only if the engine runs here

        self._thread = threading.Thread(
            target=serve, args=(self._settings, self._inbox, on_report), daemon=True, name="engine"
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """Put `command` into the worker's inbox."""
        self._inbox.put(command)

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(timeout)


class ProcessChannel:
    """A worker in a child process; commands and reports cross a pipe as msgpack, and patches of images as they are."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoder = msgspec.msgpack.Encoder()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        # If two threads wait for one child, the second thread may learn that there is no child, and treat the child as
        # alive.
        self._reaping = threading.Lock()

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Start the process, a thread that reads its reports and a thread that writes its commands."""
        # Threads that spin while they wait take the cores from threads that work. libgomp reads the variable once, at
        # load.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_child, args=(self._settings, theirs), name="loramux-engine")
        start_ignoring_signals(self._process)
        theirs.close()
        threading.Thread(target=self._read, args=(on_report,), daemon=True, name="engine-reports").start()
        threading.Thread(target=self._write, daemon=True, name="engine-commands").start()

    def send(self, command: Command) -> None:
        """Pass `command` to the writing thread: the pipe may be full, because a child in a long step does not read."""
        command, patches = command.apart() if isinstance(command, Submit) else (command, [])
        try:
            self._outbox.put([self._encoder.encode(command), *patches])
        except OverflowError as error:
            raise ValueError(f"the command cannot be encoded: {error}") from error

    def kill(self) -> None:
        """Kill the process; the reading thread reports its end."""
        if self._process is not None:
            self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait for the process; kill it if it does not end."""
        if self._process is not None:
            with self._reaping:
                self._process.join(timeout)
                if self._process.is_alive():
                    self._process.kill()
                    self._process.join()
        self._outbox.put(None)

    def _write(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):  # the child has died; the reading thread reports it
            while (messages := self._outbox.get()) is not None:
                while messages:  # what is sent is not kept until the next command
                    self._connection.send_bytes(messages.pop(0))

    def _read(self, on_report: Callable[[Report], None]) -> None:
        assert self._connection is not None
        decoder = msgspec.msgpack.Decoder(Report)
        report: Report | None = None
        while not isinstance(report, Stopped):
            try:
                report = decoder.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                report = Stopped(f"the engine's process ended with {self._exit_code()}")
            except msgspec.MsgspecError as error:  # after an unreadable message no later one can be trusted
                report = Stopped(f"the engine's process sent an unreadable report: {error}")
            on_report(report)

    def _exit_code(self) -> str:
        assert self._process is not None
        with self._reaping:
            self._process.join(5)
        return f"exit code {self._process.exitcode}"


def start_ignoring_signals(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process in which SIGINT and SIGTERM are blocked: a Ctrl-C or a stopping service group must not end it
    while it imports torch.
    """
    # The child inherits the mask. The tracker is started first, because its start unblocks both signals.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run_child(settings: Settings, connection: Connection) -> None:
    from loramux.engine.worker import serve_process  # imports torch, in the child only

    serve_process(settings, connection)
    # The worker has sent its last report. A normal exit of the interpreter would take seconds to free torch's memory,
    # and native extensions (nanobind in libtriton) would print the objects that they leak.
    sys.stderr.flush()
    os._exit(0)


class EngineClient:
    """One engine, seen from an asyncio event loop: routes each event to its request's callback."""

    def __init__(self, channel: Channel, step_timeout_s: float = 600.0) -> None:
        self.on_service: OnService = lambda _: None
        """Callback that gets the service of the engine since its previous report."""
        self.stats_at = 0.0
        """The event loop's time at which `stats` arrived."""
        self.unclaimed_tokens = 0
        """Tokens of requests that ended without a listener; no bill can contain them."""
        self._channel = channel
        self._step_timeout_s = step_timeout_s
        self._listeners: dict[str, OnEvent] = {}
        self._pins: dict[tuple[str, str], asyncio.Future[EngineFault | None]] = {}
        self._stats = EngineStats()
        self._ended: str | None = "the engine has not been started"
        self._facts: asyncio.Future[ModelFacts] | None = None
        self._stopped = asyncio.Event()
        self._is_stopping = False
        self._is_leaving = False
        """True if the engine gives its requests back and accepts no more."""
        self._last_report_at = 0.0
        """Time of the worker's last report, or of the moment at which the client began to watch."""
        self._watchdog: asyncio.TimerHandle | None = None

    async def start(self) -> ModelFacts:
        """Start the engine and wait until it serves; raises EngineDied if it cannot."""
        loop = asyncio.get_running_loop()
        self._facts = loop.create_future()
        self._ended = None
        self._channel.open(lambda report: _post(loop, self._process_report, report))
        return await self._facts

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue `request`, whose id must be new.

        `on_event` is called on the event loop, once for each event in order; the last event has a finish_reason. If the
        engine ends first, the last event is an error with the fault code ENGINE_DIED. An `on_event` that raises is not
        called again, and its request is cancelled. Raises EngineDied if the engine does not serve.
        """
        self._ensure_alive()
        assert request.id not in self._listeners, f"request {request.id} was submitted before"
        self._channel.send(Submit(request))
        self._listeners[request.id] = on_event
        self._watch()

    def cancel(self, request_id: str) -> None:
        """End a request. The request's last event follows, with its usage. A request that has ended is ignored."""
        if request_id in self._listeners:
            self._channel.send(Cancel(request_id))

    def forget(self, request_id: str) -> None:
        """Cancel a request and stop calling its `on_event`; its tokens are added to `unclaimed_tokens`."""
        if self._listeners.pop(request_id, None) is not None:
            self._channel.send(Cancel(request_id))

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages once nothing uses them."""
        self._channel.send(Retire(digest))

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        """Keep a revision in the pool for `owner`, a tenant or (empty) the operator; wait until it is in the pool.

        The returned fault gives the reason if the revision cannot be in the pool. Raises EngineDied if the engine ends
        during the wait.
        """
        self._ensure_alive()
        outcome = self._pins.setdefault((ref.digest, owner), asyncio.get_running_loop().create_future())
        self._channel.send(Pin(ref, owner))
        return await asyncio.shield(outcome)

    def unpin(self, digest: str, owner: str = "") -> None:
        """Release `owner`'s pin."""
        self._channel.send(Unpin(digest, owner))

    def lift(self, services: list[TenantService]) -> None:
        """Report the service of other engines to this engine, because a tenant's share counts across all engines."""
        self._channel.send(Lift(services))

    def stats(self) -> EngineStats:
        """Return the latest counters; never blocks."""
        return self._stats

    @property
    def alive(self) -> bool:
        """True if the engine serves."""
        is_loaded = self._facts is not None and self._facts.done() and not self._facts.cancelled()
        return is_loaded and self._ended is None and not self._is_leaving

    async def wait_end(self) -> str:
        """Wait until the engine has ended for good; return why."""
        await self._stopped.wait()
        assert self._ended is not None, "it has ended"
        return self._ended

    async def stop(self) -> None:
        """Let running requests end, then stop the engine."""
        if self._ended is None:
            self._is_stopping = True
            self._channel.send(Shutdown())
            if not self.alive:  # nothing runs yet, and loading a model takes minutes
                self._channel.kill()
            self._watch()
            await self._stopped.wait()
        await asyncio.to_thread(self._channel.join, 10.0)

    def _watch(self) -> None:
        """Begin to watch for a silent worker; the watch ends when no request is left."""
        if self._watchdog is None or self._is_stopping:
            if self._watchdog is not None:
                self._watchdog.cancel()
            self._last_report_at = asyncio.get_running_loop().time()
            self._schedule_watchdog()

    def _schedule_watchdog(self) -> None:
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_at(self._last_report_at + self._timeout, self._check_progress)

    @property
    def _timeout(self) -> float:
        return self._step_timeout_s if self._listeners else STOP_TIMEOUT_S

    def _check_progress(self) -> None:
        self._watchdog = None
        if self._ended is not None or not (self._listeners or self._is_stopping):
            return
        silence = asyncio.get_running_loop().time() - self._last_report_at
        if silence < self._timeout:
            self._schedule_watchdog()
            return
        self._end(f"the engine made no progress for {silence:.0f} seconds")
        self._channel.kill()

    def _ensure_alive(self) -> None:
        if self._ended is not None:
            raise EngineDied(self._ended)

    def _process_report(self, report: Report) -> None:
        self._last_report_at = asyncio.get_running_loop().time()
        match report:
            case StepReport(events, stats, pins, service):
                if stats is not None:
                    self._stats, self.stats_at = stats, self._last_report_at
                if service:
                    self.on_service(service)
                for pinned in pins:
                    if outcome := self._pins.pop((pinned.digest, pinned.owner), None):
                        outcome.set_result(pinned.fault)
                for event in events:
                    self._deliver(event)
            case Ready(facts):
                if self._facts is not None and not self._facts.done():
                    self._facts.set_result(facts)
            case Leaving():
                self._is_leaving = True
            case Stopped(reason):
                self._end(reason)

    def _deliver(self, event: TokenEvent) -> None:
        ended = event.finish_reason is not None
        listener = self._listeners.pop(event.request_id, None) if ended else self._listeners.get(event.request_id)
        if listener is None:
            # The request was forgotten: its tokens were used, and no listener bills them.
            if event.count is not None:
                self.unclaimed_tokens += event.count.tokens.total
            return
        try:
            listener(event)
        except Exception:  # one listener's exception must not stop the report's other events
            logger.exception("the listener of request %s failed", event.request_id)
            self.forget(event.request_id)

    def _end(self, reason: str | None) -> None:
        if self._stopped.is_set():
            return  # this request was given up earlier, and only now reports its end
        self._ended = reason or "the engine was stopped"
        self._stopped.set()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._facts is not None and not self._facts.done():
            self._facts.set_exception(EngineDied(self._ended))
        fault = EngineFault(ENGINE_DIED, self._ended)
        for request_id in list(self._listeners):
            self._deliver(TokenEvent(request_id=request_id, finish_reason="error", fault=fault))
        for outcome in self._pins.values():
            outcome.set_exception(EngineDied(self._ended))
        self._pins.clear()


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[Report], None], report: Report) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has closed: there is no listener left
        loop.call_soon_threadsafe(function, report)


def spawn_engine(settings: Settings) -> EngineClient:
    """Return the engine of these settings, not yet started."""
    channel = ThreadChannel(settings) if settings.engine.in_process else ProcessChannel(settings)
    return EngineClient(channel, settings.engine.step_timeout_s)
