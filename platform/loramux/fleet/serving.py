"""One engine as a process that listens for servers: `loramux engine serve`, and each actor of the Ray launcher.

The worker is the one that runs behind a pipe; it does not know the channel. The process ends with its worker, for its
supervisor to start it again; a worker that hangs ends it too, so that servers which gave it up find another one.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loramux.engine.messages import Command, Report, Stopped
from loramux.fleet import keys
from loramux.fleet.adapter_files import FetchedAdapters
from loramux.fleet.keys import KeyPair
from loramux.fleet.listener import EngineListener
from loramux.fleet.sessions import FrontSessions
from loramux.settings import Settings, SettingsError
from loramux.storage import open_blobs

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Time to send the last reports."""
LEAVE_SECONDS = 20.0
"""Time for a worker that was told to stop; it gives its requests back at its next step."""


class ListeningEngine:
    """One engine with its listener, in this process; `settings` name its one base."""

    def __init__(self, settings: Settings, pair: KeyPair, is_authorized: Callable[[bytes], bool]) -> None:
        """`is_authorized` is asked for the key of each new connection."""
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
        """Load the model and serve until `stop` or the worker's end; return why the worker ended by itself.

        `on_unused` is called now and then with the seconds since any server was attached.
        """

        def tend(now: float) -> None:
            self._end_if_hanging(now)
            if self._sessions.count:
                self._used_at = now
            on_unused(now - self._used_at)

        self._listener.start(self._sessions, tend)  # connections are answered while torch is imported
        from loramux.engine.execution.assembly import freeze_garbage
        from loramux.engine.worker import serve

        serve(self._settings, self._inbox, self._report, freeze_garbage)
        self._listener.close(FLUSH_SECONDS)
        self._has_ended.set()
        return self._reason

    def stop(self) -> None:
        """Give every request back to its server, and end; from any thread. While the model is loaded, end at once."""
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
    """Serve an engine with the keys of `fleet.keys` until it ends; return why, None where it was told to.

    `on_listening` gets the address and the engine before the model is loaded. Raises SettingsError.
    """
    folder = Path(settings.fleet.keys)
    authorized = folder / keys.FRONTS_PUBLIC
    keys.read_authorized(authorized)

    def is_authorized(key: bytes) -> bool:
        try:  # read for each connection, so that a server can be added or removed
            return key in keys.read_authorized(authorized)
        except SettingsError as error:
            logger.error("no server is let in: %s", error)
            return False

    engine = ListeningEngine(settings, keys.read_pair(folder / keys.ENGINE_SECRET), is_authorized)
    on_listening(engine.listen(address), engine)
    return engine.run()
