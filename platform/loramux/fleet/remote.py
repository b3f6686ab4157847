"""The server's end of the channel: a `Channel` to an engine in another process or on another machine.

One thread holds the socket. A connection that is lost, refused or given up is not opened again by this channel. Its
last report is Stopped, as for a dead process, and the `FleetEngine` starts another life with another channel. The
thread confirms reports that the event loop has processed; if the event loop is slow, the engine waits for it
(`fleet.sessions`).
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from loramux.engine.client import EngineDied
from loramux.engine.messages import Command, Report, Stopped, Submit
from loramux.fleet.wire import (
    BEAT,
    BYE,
    COMMAND,
    HELLO,
    MAX_UNSENT_BYTES,
    REFUSAL,
    REPORT,
    WELCOME,
    WINDOW_BYTES,
    Hello,
    KeyPair,
    Waker,
    Welcome,
    configure,
    message_version,
    release,
    version_conflict,
)

CONNECT_S = 30.0
"""Maximum seconds until an engine answers. Loading its model may take longer."""
LOCATE_S = 0.25
"""Seconds between two requests for the address of an engine that has no address yet."""
CONFIRMED_BYTES = WINDOW_BYTES // 16
"""Bytes of processed reports that are confirmed at once, and not with the next beat."""

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "does not know this server's key: add the last line of front.secret to its "
    "fronts.public",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "has another key than engine.public says",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "has another key than engine.public says, or ended at this moment",
    zmq.Event.DISCONNECTED: "closed the connection, or was silent for too long",
}


class EnginePlace(NamedTuple):
    """The address of an engine, and the only key that it may have."""

    address: str
    key: bytes


class Placement(NamedTuple):
    """The driver's answer. If it has neither an address nor an error, the engine has no address yet."""

    place: EnginePlace | None = None
    failure: str | None = None


Locate = Callable[[], EnginePlace | None]
"""Function that returns the engine's address, or None while the address is unknown; it is then called again. It may
block for a second.
"""


class RemoteChannel:
    """A connection to one engine."""

    def __init__(self, locate: Locate, base: str, pair: KeyPair, lease_s: float) -> None:
        """`pair` is this server's; `base` is the base model that the engine has to serve."""
        self._locate = locate
        self._base = base
        self._pair = pair
        self._lease_s = lease_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._outbox: deque[tuple[bytes, ...]] = deque()
        """Encoded commands with their patches."""
        self._unsent_bytes = 0
        self._processed = 0
        """Bytes of reports that the event loop has processed."""
        self._confirmed = 0
        self._counting = threading.Lock()
        self._waker = Waker()
        self._given_up: str | None = None
        self._thread: threading.Thread | None = None
        self._is_welcome = False

    def open(self, on_report: Callable[[Report], None]) -> None:
        """Connect, on a thread. An engine that does not answer within CONNECT_S is reported as Stopped."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(on_report, loop), daemon=True, name="engine-channel")
        self._thread.start()

    def send(self, command: Command) -> None:
        """Pass `command` to the thread. An engine that leaves too many bytes unread counts as lost."""
        command, patches = command.apart() if isinstance(command, Submit) else (command, [])
        try:
            data = self._encoder.encode(command)
        except OverflowError as error:
            raise ValueError(f"the command cannot be encoded: {error}") from error
        with self._counting:  # not the patches: the memory of images bounds them
            self._unsent_bytes += len(data)
        self._outbox.append((data, *patches))
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._give_up(f"does not read: {self._unsent_bytes >> 20} MiB of requests wait for it")
        self._waker.wake()

    def kill(self) -> None:
        """Leave the engine, which cancels all remaining requests of this server. Other servers may use it."""
        self._give_up("was given up")

    def join(self, timeout: float) -> None:
        """Leave the engine, and wait for the thread."""
        self._give_up("was left")
        if self._thread is not None:
            self._thread.join(timeout)

    def _give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason
        self._waker.wake()

    def _run(self, on_report: Callable[[Report], None], loop: asyncio.AbstractEventLoop) -> None:
        reason: str | None
        try:
            place = self._find()
        except EngineDied as died:
            on_report(Stopped(str(died)))
            return
        with zmq.Context() as context:
            socket, monitor = self._connect(context, place)
            try:
                reason = self._converse(socket, monitor, on_report, loop)
                self._send_frame(socket, BYE, b"")
            except (zmq.ZMQError, msgspec.MsgspecError) as error:
                reason = f"cannot be used: {error}"
            finally:
                socket.disable_monitor()
                monitor.close()
                socket.close()
        if reason is not None:
            on_report(Stopped(f"the engine at {place.address} {reason}"))

    def _find(self) -> EnginePlace:
        while self._given_up is None:
            if (place := self._locate()) is not None:
                return place
            time.sleep(LOCATE_S)
        raise EngineDied(f"the engine {self._given_up} before it had a place")

    def _converse(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        on_report: Callable[[Report], None],
        loop: asyncio.AbstractEventLoop,
    ) -> str | None:
        """Carry frames until the end; return the reason of the end, or None if the engine has reported it."""
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        beat_at, interval, connected_by = 0.0, self._lease_s / 4, time.monotonic() + CONNECT_S
        while self._given_up is None:
            now = time.monotonic()
            if not self._is_welcome and now > connected_by:
                return f"does not answer: there was no connection within {CONNECT_S:g} s"
            has_more = False
            if self._is_welcome:
                has_more = self._flush(socket)
                if now >= beat_at or self._processed - self._confirmed >= CONFIRMED_BYTES:
                    self._confirmed, beat_at = self._processed, now + interval
                    self._send_frame(socket, BEAT, self._confirmed.to_bytes(8))
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if has_more else 0))
            happened = dict(poller.poll(round(1000 * min(interval, 1.0))))
            if self._waker.fileno() in happened:
                self._waker.clear()
            if happened.get(socket, 0) & zmq.POLLIN:
                ended, reason = self._receive(socket, on_report, loop)
                if ended:
                    return reason
            if monitor in happened and (reason := self._note_event(socket, monitor)):
                return reason
        return self._given_up

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], place: EnginePlace
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = context.socket(zmq.DEALER)
        configure(socket, self._lease_s)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.SNDHWM, 64)
        socket.curve_secretkey, socket.curve_publickey = self._pair
        socket.curve_serverkey = place.key
        socket.set(zmq.RECONNECT_IVL, 200)
        socket.set(zmq.RECONNECT_IVL_MAX, 2000)
        monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | sum(_FAILURES))
        socket.connect(place.address)
        return socket, monitor

    def _note_event(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> str | None:
        """Greet the engine once the connection is open; return the reason if the connection cannot be opened."""
        event = zmq.Event(recv_monitor_message(monitor)["event"])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            front = f"{sockets.gethostname()}:{os.getpid()}"
            hello = Hello(version=message_version(), release=release(), base=self._base, front=front)
            self._send_frame(socket, HELLO, msgspec.msgpack.encode(hello))
            return None
        return _FAILURES.get(event)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send commands; return whether the socket accepts no more of them now."""
        while self._outbox:
            if not self._send_frame(socket, COMMAND, *self._outbox[0]):
                return True
            with self._counting:
                self._unsent_bytes -= len(self._outbox.popleft()[0])
        return False

    @staticmethod
    def _send_frame(socket: zmq.Socket[bytes], kind: bytes, *parts: bytes) -> bool:
        try:
            socket.send_multipart((kind, *parts), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(
        self, socket: zmq.Socket[bytes], on_report: Callable[[Report], None], loop: asyncio.AbstractEventLoop
    ) -> tuple[bool, str | None]:
        """Process arrived frames; return whether the channel has ended, and the reason."""
        while True:
            try:
                kind, body = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False, None
            if kind == REPORT:
                report = self._decoder.decode(body)
                on_report(report)
                self._confirm_after(len(body), loop)
                if isinstance(report, Stopped):
                    return True, None
            elif kind == WELCOME:
                mine, theirs = (
                    Welcome(version=message_version(), release=release()),
                    msgspec.msgpack.decode(body, type=Welcome),
                )
                if (conflict := version_conflict(mine, theirs)) is not None:
                    return True, f"refuses this server: {conflict}"
                self._is_welcome = True
            elif kind == REFUSAL:
                return True, f"refuses this server: {body.decode(errors='replace')}"
            elif kind == BYE:
                return True, f"has ended the connection: {body.decode(errors='replace')}"

    def _confirm_after(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Count a report as processed after the event loop has processed it: the loop keeps the order of its calls."""
        try:
            loop.call_soon_threadsafe(self._note_processed, size)
        except RuntimeError:
            self._give_up("was left: the event loop has closed")

    def _note_processed(self, size: int) -> None:
        self._processed += size
        if self._processed - self._confirmed >= CONFIRMED_BYTES:
            self._waker.wake()
