"""The servers of one engine: the owner of each request, the reports for each server, and the limits for slow servers.

    server's command ──> FrontSessions.command ──> the engine's inbox
    engine's report  ──> FrontSessions.report  ──> each server's outbox: its own events, and statistics for all

The engine does not know that it has several servers. When a server dies, only its own requests and pins end. A server
that does not read gets its running requests back: if its outbox exceeds HIGH_WATER unsent bytes, they are cancelled.
After the server has read all reports, it submits these requests again, and they continue after the tokens that it got
(`fleet.group`). So the requests of a slow server wait without holding pages and are not lost, and the engine's memory
does not grow.

Thread-safe, because the engine's thread (reports), the socket's thread (commands) and the threads that fetch adapters
call it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from loramux.engine.messages import (
    AdapterRef,
    Cancel,
    Command,
    EngineCount,
    EngineFault,
    EngineStats,
    Leaving,
    Pin,
    Pinned,
    Ready,
    Report,
    Shutdown,
    StepReport,
    Stopped,
    Submit,
    TokenEvent,
    Unpin,
)
from loramux.fleet.wire import WINDOW_BYTES

logger = logging.getLogger(__name__)

HIGH_WATER, LOW_WATER = 8 << 20, 1 << 20
"""Unsent bytes above which a server's requests are given back, and below which it may send new requests."""

Then = Callable[[AdapterRef | EngineFault], None]


class AdapterFiles(Protocol):
    """Finds an adapter's files on the engine's machine."""

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        """Return the adapter with its folder on this machine; None if it must be fetched first. Never blocks."""
        ...

    def fetch(self, ref: AdapterRef, then: Then) -> None:
        """Fetch the adapter, and call `then` on another thread."""
        ...


@dataclass(eq=False)
class FrontSession:
    """One connection of one server."""

    front: str
    heard_at: float
    outbox: deque[bytes] = field(default_factory=deque)
    """Encoded reports to send."""
    unsent_bytes: int = 0
    on_the_way: int = 0
    """Bytes of reports that were sent and that the server has not processed."""
    processed: int = 0
    """Bytes of reports that the server has processed since it joined."""
    requests: dict[str, str] = field(default_factory=dict)
    """The engine's id of each of its requests, by the server's id."""
    pins: set[tuple[str, str]] = field(default_factory=set)
    held: deque[Command] | None = None
    """Commands of the server since it became too slow; None: it is not too slow."""
    is_leaving: bool = False
    """True if the server sends no more requests, and waits for the end of its current requests."""


@dataclass(eq=False)
class _Owner:
    """The owner of a request in the engine."""

    session: FrontSession | None
    """The server's session; None: the session has ended, and the engine's last event has not arrived yet."""
    id: str
    """Id of the request at its server."""
    held: list[Command] | None = None
    """Commands that wait until the adapter is fetched; None: no command has to wait."""


class FrontSessions:
    """All servers of one engine, by the ids of their connections."""

    def __init__(
        self, send: Callable[[Command], None], adapters: AdapterFiles, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`send` gives a command to the engine; `wake` is called when a report was put into an outbox."""
        self._send = send
        self._adapters = adapters
        self._wake = wake
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.RLock()
        self._sessions: dict[bytes, FrontSession] = {}
        self._owners: dict[str, _Owner] = {}
        """Owners of requests, by the engine's ids."""
        self._ready: Ready | None = None
        self._stopped: Stopped | None = None
        self._stats: EngineStats | None = None
        self._is_leaving = False
        self._num_renamed = 0

    # fronts

    def join(self, identity: bytes, front: str, now: float) -> None:
        """Begin a session. The reports of the engine about itself are repeated for it."""
        with self._lock:
            session = self._sessions[identity] = FrontSession(front, now)
            logger.info("the server %s is attached; servers: %d", front, len(self._sessions))
            if self._ready is not None:
                self._post(session, self._ready)
                if self._stats is not None:
                    self._post(session, StepReport([], self._stats))
            if self._is_leaving:
                self._post(session, Leaving())
            if self._stopped is not None:
                self._post(session, self._stopped)

    def leave(self, identity: bytes, reason: str) -> None:
        """End a session with its requests and pins; an unknown session has already ended."""
        with self._lock:
            if (session := self._sessions.pop(identity, None)) is None:
                return
            logger.info(
                "the server %s is gone (%s); requests cancelled: %d", session.front, reason, len(session.requests)
            )
            for engine_id in session.requests.values():
                self._owners[engine_id].session = None
                self._cancel(engine_id)
            for key in list(session.pins):
                self._unpin(session, key)

    def hear(self, identity: bytes, now: float) -> bool:
        """Note that a server is alive; return False if it has no session."""
        with self._lock:
            session = self._sessions.get(identity)
            if session is not None:
                session.heard_at = now
            return session is not None

    def confirm(self, identity: bytes, processed: int) -> None:
        """Note how many bytes of reports a server has processed since it joined."""
        with self._lock:
            if (session := self._sessions.get(identity)) is not None:
                session.on_the_way -= processed - session.processed
                session.processed = processed

    def expire(self, before: float) -> None:
        """End the sessions that were last heard before this time."""
        with self._lock:
            for identity, session in list(self._sessions.items()):
                if session.heard_at < before:
                    self.leave(identity, "it has been silent for too long")

    @property
    def count(self) -> int:
        """Servers that are attached."""
        return len(self._sessions)

    @property
    def is_ready(self) -> bool:
        """True if the model is loaded."""
        return self._ready is not None

    @property
    def has_requests(self) -> bool:
        """True if the engine has requests."""
        return bool(self._owners)

    # outboxes

    def take(self) -> list[tuple[bytes, bytes]]:
        """Take the reports that may be sent now, each with its session's identity."""
        with self._lock:
            return [
                (identity, report) for identity, session in self._sessions.items() for report in self._take_of(session)
            ]

    @property
    def is_flushed(self) -> bool:
        """True if there is nothing left to send."""
        with self._lock:
            return not any(session.outbox for session in self._sessions.values())

    def _take_of(self, session: FrontSession) -> list[bytes]:
        taken = []
        while session.outbox and session.on_the_way < WINDOW_BYTES:
            report = session.outbox.popleft()
            session.unsent_bytes -= len(report)
            session.on_the_way += len(report)
            taken.append(report)
        if session.held is not None and session.unsent_bytes < LOW_WATER:
            held, session.held = session.held, None
            logger.info("the server %s reads again", session.front)
            for command in held:
                self._execute(session, command)
        return taken

    def _post(self, session: FrontSession, report: Report) -> None:
        data = self._encoder.encode(report)
        session.outbox.append(data)
        session.unsent_bytes += len(data)
        self._wake()
        if session.unsent_bytes > HIGH_WATER and session.held is None:
            session.held = deque()
            logger.warning("the server %s does not read; requests given back: %d", session.front, len(session.requests))
            for engine_id in session.requests.values():
                self._cancel(engine_id)

    # commands

    def command(self, identity: bytes, command: Command) -> None:
        """Execute a server's command."""
        with self._lock:
            if (session := self._sessions.get(identity)) is not None:
                self._execute(session, command)

    def _execute(self, session: FrontSession, command: Command) -> None:
        if session.held is not None:
            session.held.append(command)
            return
        match command:
            case Submit():
                self._submit(session, command)
            case Cancel(request_id):
                if (engine_id := session.requests.get(request_id)) is not None:
                    self._cancel(engine_id)
            case Pin(ref, owner):
                session.pins.add((ref.digest, owner))
                self._with_files(ref, lambda found: self._pin(session, command, found))
            case Unpin(digest, owner):
                self._unpin(session, (digest, owner))
            case Shutdown():
                session.is_leaving = True
                self._end_if_left(session)
            case _:
                self._send(command)

    def _submit(self, session: FrontSession, command: Submit) -> None:
        request = command.request
        if self._is_leaving:
            self._post(session, StepReport([_given_back(request.id)]))
            return
        engine_id = request.id
        if (
            engine_id in self._owners
        ):  # a request of a lost connection: it is being cancelled, and its events do not belong to this session
            self._num_renamed += 1
            engine_id = f"{engine_id}~{self._num_renamed}"
            command = Submit(msgspec.structs.replace(request, id=engine_id))
        session.requests[request.id] = engine_id
        owner = self._owners[engine_id] = _Owner(session, request.id)
        if request.adapter is None:
            self._send(command)
            return
        owner.held = []
        self._with_files(request.adapter, lambda found: self._begin(owner, command, found))

    def _begin(self, owner: _Owner, command: Submit, found: AdapterRef | EngineFault) -> None:
        """Give a request to the engine after its adapter has been fetched. The request ends immediately if it was
        cancelled before.
        """
        request, held, owner.held = command.request, owner.held, None
        if isinstance(found, EngineFault) or held:
            fault = found if isinstance(found, EngineFault) else None
            self._deliver([_given_back(request.id, None if held else fault)])
        else:
            self._send(command if found == request.adapter else Submit(msgspec.structs.replace(request, adapter=found)))

    def _cancel(self, engine_id: str) -> None:
        owner = self._owners[engine_id]
        if owner.held is None:
            self._send(Cancel(engine_id))
        else:
            owner.held.append(Cancel(engine_id))

    def _pin(self, session: FrontSession, command: Pin, found: AdapterRef | EngineFault) -> None:
        key = (command.ref.digest, command.owner)
        if key not in session.pins:
            return  # the pin was released while the files were fetched
        if isinstance(found, EngineFault):
            session.pins.discard(key)
            self._post(session, StepReport([], pins=[Pinned(*key, found)]))
        else:
            self._send(Pin(found, command.owner))

    def _unpin(self, session: FrontSession, key: tuple[str, str]) -> None:
        """Release a server's pin; the engine's pin is released with the last server's."""
        session.pins.discard(key)
        if not any(key in other.pins for other in self._sessions.values()):
            self._send(Unpin(*key))

    def _with_files(self, ref: AdapterRef, then: Then) -> None:
        if (found := self._adapters.find(ref)) is not None:
            then(found)
            return

        def locked(fetched: AdapterRef | EngineFault) -> None:
            with self._lock:
                then(fetched)

        self._adapters.fetch(ref, locked)

    # reports

    def report(self, report: Report) -> None:
        """Pass a report of the engine on to the servers."""
        with self._lock:
            if isinstance(report, StepReport):
                self._pass_on(report)
                return
            if isinstance(report, Ready):
                self._ready = report
            elif isinstance(report, Stopped):
                self._stopped = report
            self._post_to_all(report)

    def withdraw(self) -> None:
        """Give every request back, and accept no more; the engine stops after its last request."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._post_to_all(Leaving())
            for engine_id in self._owners:
                self._cancel(engine_id)
            self._send(Shutdown())

    def _pass_on(self, report: StepReport) -> None:
        self._stats = report.stats or self._stats
        events = self._sorted(report.events)
        reading = [session for session in self._sessions.values() if session.held is None]
        heir = next((session for session in reading if not session.is_leaving), None)
        is_heartbeat = not (report.events or report.pins or report.service)
        for session in self._sessions.values():
            own = events.get(session, [])
            pins = [pinned for pinned in report.pins if (pinned.digest, pinned.owner) in session.pins]
            service = report.service if session is heir else []
            stats = report.stats if session in reading else None
            if own or pins or service or stats is not None or (is_heartbeat and session.requests):
                self._post(session, StepReport(own, stats, pins, service))
            self._end_if_left(session)
        for pinned in report.pins:
            if pinned.fault is not None:
                for session in self._sessions.values():
                    session.pins.discard((pinned.digest, pinned.owner))

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        """Post events that no step caused."""
        for session, own in self._sorted(events).items():
            self._post(session, StepReport(own))
            self._end_if_left(session)

    def _sorted(self, events: Iterable[TokenEvent]) -> dict[FrontSession, list[TokenEvent]]:
        """Return each server's events under its own ids; requests that end are forgotten."""
        by_session: dict[FrontSession, list[TokenEvent]] = {}
        for event in events:
            if (owner := self._owners.get(event.request_id)) is None:
                continue
            own = event if owner.id == event.request_id else msgspec.structs.replace(event, request_id=owner.id)
            if event.finish_reason is not None:
                del self._owners[event.request_id]
                if owner.session is not None:
                    del owner.session.requests[owner.id]
            if owner.session is not None:
                by_session.setdefault(owner.session, []).append(own)
        return by_session

    def _end_if_left(self, session: FrontSession) -> None:
        if session.is_leaving and not session.requests:
            session.is_leaving = False
            self._post(session, Stopped())

    def _post_to_all(self, report: Report) -> None:
        for session in self._sessions.values():
            self._post(session, report)


def _given_back(request_id: str, fault: EngineFault | None = None) -> TokenEvent:
    """Return the last event of a request that the engine never had."""
    reason = "cancelled" if fault is None else "error"
    return TokenEvent(request_id=request_id, finish_reason=reason, fault=fault, count=EngineCount())
