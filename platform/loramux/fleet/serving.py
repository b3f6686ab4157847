"""One engine as a process that listens for servers: `loramux engine serve`, and each actor of the Ray launcher.

The worker is the same as in a child process with a pipe; it does not know the channel. The process ends with its
worker, and its supervisor starts it again. The process also ends if the worker hangs, so that servers find a new
engine.

`EngineListener` is the engine's end of the channel: one socket for all servers, on a separate thread. The listener
authorizes connections by their key, greets servers of the same base and message version, and carries frames between
their connections and `FrontSessions`.

`FetchedAdapters` finds an adapter's files on this machine. A server names an adapter by the path of a folder in
the server's own cache. The last three parts of this path are the same in every cache and in the store. So an engine on
another machine finds the files in its own cache, or fetches them from the same store and verifies them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from loramux.common.garbage import freeze_garbage
from loramux.common.jobs import TenantQueues
from loramux.common.settings.file import Settings, SettingsError
from loramux.data.storage.blobs import BlobStore, digest_at, open_blobs
from loramux.data.storage.errors import StorageError
from loramux.engine.messages import AdapterRef, Command, EngineFault, Report, Stopped, Submit
from loramux.fleet.sessions import FrontSessions, Then
from loramux.fleet.wire import (
    BEAT,
    BYE,
    COMMAND,
    ENGINE_SECRET,
    FRONTS_PUBLIC,
    HELLO,
    REFUSAL,
    REPORT,
    WELCOME,
    Hello,
    KeyPair,
    Waker,
    Welcome,
    configure,
    message_version,
    read_authorized,
    read_pair,
    release,
    version_conflict,
)

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Seconds for sending the last reports."""
LEAVE_SECONDS = 20.0
"""Maximum seconds for a worker that was told to stop. The worker gives its requests back at its next step."""


class ListeningEngine:
    """One engine with its listener, in this process; `settings` name its only base."""

    def __init__(self, settings: Settings, pair: KeyPair, is_authorized: Callable[[bytes], bool]) -> None:
        """`is_authorized` is called with the key of each new connection."""
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        records, fleet = settings.records, settings.fleet
        adapters = FetchedAdapters(open_blobs(records.blobs, records.cache, records.blob_options), records.cache_bytes)
        base = settings.model.served_model_name
        self._listener = EngineListener(base, pair, is_authorized, fleet.lease_s)
        self._sessions = FrontSessions(self._inbox.put, adapters, self._listener.wake)
        self._reported_at = self._used_at = time.monotonic()
        self._reason: str | None = None
        self._has_ended = threading.Event()

    def listen(self, address: str) -> str:
        """Listen on `address`; return it with the port. Raises SettingsError."""
        try:
            return self._listener.bind(address)
        except OSError as error:
            raise SettingsError(f"the engine cannot listen: {error.strerror}") from None

    def run(self, on_unused: Callable[[float], None] = lambda _: None) -> str | None:
        """Load the model and serve until `stop` or the worker's end; return the reason if the worker ended by itself.

        `on_unused` is called several times per lease with the seconds since a server was last attached.
        """

        def tend(now: float) -> None:
            self._end_if_hanging(now)
            if self._sessions.count:
                self._used_at = now
            on_unused(now - self._used_at)

        self._listener.start(self._sessions, tend)  # connections are answered while torch is imported
        from loramux.engine.worker import serve

        serve(self._settings, self._inbox, self._report, freeze_garbage)
        self._listener.close(FLUSH_SECONDS)
        self._has_ended.set()
        return self._reason

    @property
    def num_servers(self) -> int:
        """Servers that are attached now."""
        return self._sessions.count

    def stop(self) -> None:
        """Give every request back to its server, and end. While the model is being loaded, end immediately. Any thread
        may call this method.
        """
        threading.Thread(target=self._leave, daemon=True, name="leaving").start()

    def _leave(self) -> None:
        if not self._sessions.is_ready:
            logger.info("stopped before the model was loaded")
            os._exit(1)
        logger.info("stopping: requests go on at other engines")
        self._sessions.withdraw()
        if not self._has_ended.wait(LEAVE_SECONDS + FLUSH_SECONDS):
            logger.warning("the worker has not stopped within %g s: it is ended", LEAVE_SECONDS)
            os._exit(1)

    def _report(self, report: Report) -> None:
        self._reported_at = time.monotonic()
        if isinstance(report, Stopped):
            self._reason = report.reason
        self._sessions.report(report)

    def _end_if_hanging(self, now: float) -> None:
        timeout = self._settings.engine.step_timeout_s
        if not self._sessions.has_requests:
            self._reported_at = now
        elif now - self._reported_at > timeout:
            logger.error("the engine made no progress for %g s; it ends", timeout)
            os._exit(1)


def serve_engine(settings: Settings, address: str, on_listening: Callable[[str, ListeningEngine], None]) -> str | None:
    """Serve an engine with the keys of `fleet.keys` until it ends; return the reason, or None if it was told to end.

    `on_listening` gets the address and the engine before the model is loaded. Raises SettingsError.
    """
    folder = Path(settings.fleet.keys)
    authorized = folder / FRONTS_PUBLIC
    read_authorized(authorized)

    def is_authorized(key: bytes) -> bool:
        try:  # read for each connection, because a server can be added or removed while the engine runs
            return key in read_authorized(authorized)
        except SettingsError as error:
            logger.error("no server is let in: %s", error)
            return False

    engine = ListeningEngine(settings, read_pair(folder / ENGINE_SECRET), is_authorized)
    on_listening(engine.listen(address), engine)
    return engine.run()


ZAP = "inproc://zeromq.zap.01"
"""Address at which libzmq asks, for each connection, if its key is authorized (RFC 27)."""


class EngineListener:
    """Listens for servers until it is closed."""

    def __init__(self, base: str, pair: KeyPair, is_authorized: Callable[[bytes], bool], lease_s: float) -> None:
        """`is_authorized` is called with each new connection's key; a server that is silent for `lease_s` counts as
        gone."""
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
        """Bind to `address` (tcp://HOST:PORT; port 0: a free one) and return the resulting address. Raises OSError."""
        self._socket.set(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{address}: {error.strerror}") from None
        bound = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def start(self, sessions: FrontSessions, tend: Callable[[float], None] = lambda _: None) -> None:
        """Serve `sessions` on a thread, which calls `tend` several times a lease with the time."""
        self._thread = threading.Thread(target=self._run, args=(sessions, tend), daemon=True, name="fronts")
        self._thread.start()

    def wake(self) -> None:
        """Make the thread read the outboxes. Any thread may call this method."""
        self._waker.wake()

    def close(self, seconds: float) -> None:
        """Send the contents of the outboxes within `seconds`, and end."""
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
        """Process arrived frames, but at most a few hundred, so that reports are sent in between."""
        for _ in range(256):
            try:
                identity, *frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frame) >= 2:
                self._process(sessions, identity, *frame)

    def _process(self, sessions: FrontSessions, identity: bytes, kind: bytes, body: bytes, *patches: bytes) -> None:
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
                if isinstance(command, Submit):
                    command = command.with_patches(patches)
            except ValueError:  # MsgspecError among them
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
        except zmq.ZMQError:  # the server is gone, or does not read
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


FETCHES_AT_ONCE, FETCHES_OF_OWNER = 4, 2
IDLE_SECONDS = 600.0
"""Seconds since its last use within which a content is not evicted: a request may be about to read it."""


class FetchedAdapters:
    """Finds adapters in the cache of `blobs`, which this machine's engines share, and fetches missing ones."""

    def __init__(self, blobs: BlobStore, cache_bytes: int) -> None:
        """Above `cache_bytes`, the contents unused for longest leave the cache."""
        self._blobs = blobs
        self._cache_bytes = cache_bytes
        self._queues = TenantQueues("adapters", FETCHES_AT_ONCE, FETCHES_OF_OWNER)

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        """Return the adapter with its folder on this machine; None if it must be fetched first."""
        digest = _content_of(ref)
        known = self._blobs.known_directory(digest) if digest is not None else None
        if known is not None:
            return msgspec.structs.replace(ref, path=str(known))
        return ref if Path(ref.path).is_dir() else None

    def fetch(self, ref: AdapterRef, then: Then) -> None:
        """Fetch the adapter on another thread, in its owner's turn, and call `then` there."""
        owner = ref.digest.rpartition("/")[2]
        self._queues.submit(owner, lambda: then(self._fetched(ref)))

    def _fetched(self, ref: AdapterRef) -> AdapterRef | EngineFault:
        digest = _content_of(ref)
        if digest is None:
            return EngineFault("adapter_failed", f"The engine's machine has no folder {ref.path}.")
        try:
            folder = self._blobs.directory(digest)
            self._trim()
        except (StorageError, OSError) as error:
            logger.warning("an adapter cannot be fetched: %s", error)
            return EngineFault(
                "adapter_failed", "The adapter's files could not be fetched to the engine.", retry_after=1
            )
        return msgspec.structs.replace(ref, path=str(folder))

    def _trim(self) -> None:
        cached = self._blobs.cached()
        over = sum(content.size for content in cached) - self._cache_bytes
        for content in cached:
            if over <= 0 or content.idle < IDLE_SECONDS:
                return
            self._blobs.evict(content.digest)
            over -= content.size


def _content_of(ref: AdapterRef) -> str | None:
    return digest_at("/".join(Path(ref.path).parts[-3:]))
