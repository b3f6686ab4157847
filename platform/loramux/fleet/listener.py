"""The engine's end of the channel: one socket for all fronts, on a thread of its own.

It authorizes connections by their key, greets fronts of the same base and message version, and carries frames between
their connections and `FrontSessions`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils import z85

from loramux.engine.messages import Command
from loramux.fleet.keys import KeyPair
from loramux.fleet.sessions import FrontSessions
from loramux.fleet.wire import (
    BEAT,
    BYE,
    COMMAND,
    HELLO,
    REFUSAL,
    REPORT,
    WELCOME,
    Hello,
    Waker,
    Welcome,
    configure,
    message_version,
    release,
    version_conflict,
)

logger = logging.getLogger(__name__)

ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks for each connection whether its key is authorized (RFC 27)."""


class EngineListener:
    """Listens for fronts until it is closed."""

    def __init__(self, base: str, pair: KeyPair, is_authorized: Callable[[bytes], bool], lease_s: float) -> None:
        """`is_authorized` is asked for each new connection's key; a front that is silent for `lease_s` is gone."""
        self._base = base
        self._is_authorized = is_authorized
        self._lease_s = lease_s
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, lease_s)
        self._socket.set(zmq.HEARTBEAT_TTL, min(6_553_000, round(1000 * lease_s)))
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.ZAP_DOMAIN, b"loramux")
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = pair
        self._waker = Waker()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._closing_at: float | None = None
        self._thread: threading.Thread | None = None

    def bind(self, address: str) -> str:
        """Bind to `address` (tcp://HOST:PORT; port 0: a free one) and return what it became. Raises OSError."""
        self._socket.set(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{address}: {error.strerror}") from None
        bound = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def start(self, sessions: FrontSessions, tend: Callable[[float], None] = lambda _: None) -> None:
        """Serve `sessions` on a thread; `tend` is called there several times a lease, with the time."""
        self._thread = threading.Thread(target=self._run, args=(sessions, tend), daemon=True, name="fronts")
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at the outboxes; from any thread."""
        self._waker.wake()

    def close(self, seconds: float) -> None:
        """Send what is in the outboxes, for `seconds` at most, and end."""
        self._closing_at = time.monotonic() + seconds
        self.wake()
        if self._thread is not None:
            self._thread.join(seconds + 5.0)
        self._context.destroy(linger=200)

    def _run(self, sessions: FrontSessions, tend: Callable[[float], None]) -> None:
        try:
            self._loop(sessions, tend)
        except Exception:  # the engine cannot be reached any more
            logger.exception("the channel to the servers has failed; the engine ends")
            os._exit(1)

    def _loop(self, sessions: FrontSessions, tend: Callable[[float], None]) -> None:
        poller = zmq.Poller()
        for one in (self._socket, self._zap, self._waker):
            poller.register(one, zmq.POLLIN)
        interval = self._lease_s / 4
        tend_at = 0.0
        while not self._is_done(sessions):
            happened = dict(poller.poll(round(1000 * interval)))
            if self._waker.fileno() in happened:
                self._waker.clear()
            if self._zap in happened:
                self._answer_zap()
            if self._socket in happened:
                self._receive(sessions)
            if (now := time.monotonic()) >= tend_at:
                tend_at = now + interval
                sessions.expire(now - self._lease_s)
                tend(now)
            self._flush(sessions)

    def _is_done(self, sessions: FrontSessions) -> bool:
        if self._closing_at is None:
            return False
        return sessions.is_flushed or time.monotonic() > self._closing_at

    def _receive(self, sessions: FrontSessions) -> None:
        """Take what has come; a few hundred frames at most, so that reports are sent in between."""
        for _ in range(256):
            try:
                identity, *frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frame) == 2:
                self._process(sessions, identity, *frame)

    def _process(self, sessions: FrontSessions, identity: bytes, kind: bytes, body: bytes) -> None:
        now = time.monotonic()
        if kind == HELLO:
            self._greet(sessions, identity, body, now)
        elif not sessions.hear(identity, now):
            self._reply(identity, BYE, b"the engine does not know this connection any more")
        elif kind == BEAT:
            sessions.confirm(identity, int.from_bytes(body))
        elif kind == BYE:
            sessions.leave(identity, "it has left")
        elif kind == COMMAND:
            try:
                command = self._decoder.decode(body)
            except msgspec.MsgspecError:
                logger.exception("a server sent an unreadable command")
                sessions.leave(identity, "it sent an unreadable command")
                self._reply(identity, BYE, b"the engine could not read a command")
            else:
                sessions.command(identity, command)

    def _greet(self, sessions: FrontSessions, identity: bytes, body: bytes, now: float) -> None:
        welcome = Welcome(version=message_version(), release=release())
        try:
            hello = msgspec.msgpack.decode(body, type=Hello)
        except msgspec.MsgspecError:
            self._reply(identity, REFUSAL, b"the engine cannot read this server's greeting; install the same release")
            return
        refusal = version_conflict(hello, welcome)
        if refusal is None and hello.base != self._base:
            refusal = f"the engine serves the base {self._base!r}, and not {hello.base!r}"
        if refusal is not None:
            logger.error("the server %s is refused: %s", hello.front, refusal)
            self._reply(identity, REFUSAL, refusal.encode())
        elif not sessions.hear(identity, now):
            self._reply(identity, WELCOME, msgspec.msgpack.encode(welcome))
            sessions.join(identity, hello.front, now)

    def _reply(self, identity: bytes, kind: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart((identity, kind, body), zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone, or does not read
            logger.debug("a server did not get an answer")

    def _flush(self, sessions: FrontSessions) -> None:
        for identity, report in sessions.take():
            try:
                self._socket.send_multipart((identity, REPORT, report), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                sessions.leave(identity, "its connection is lost")

    def _answer_zap(self) -> None:
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        is_known = mechanism == b"CURVE" and len(credentials) == 1 and self._is_authorized(z85.encode(credentials[0]))
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        self._zap.send_multipart((version, request_id, *status, b"", b""))
