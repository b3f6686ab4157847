"""The process that speaks to Ray for a server, and the engines as Ray's actors (extra `ray`).

An actor is one engine that listens (`fleet.serving`). Actors are named and detached: all servers of a namespace share
them, and a server's end costs no reload. An actor that no server has used for `unused_s` ends. The actor's name holds a
digest of the messages and of the engine's settings, so a server of another release, or with other settings, has
separate engines.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from loramux.common import logs
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import RaySettings
from loramux.fleet.remote import EnginePlace, Placement
from loramux.fleet.wire import message_version, new_pair

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Maximum wait for one answer of Ray in seconds, so that every engine is asked regularly."""
MAX_DEATHS = 3
"""Number of actors that end before they report their address, after which the engine counts as failed to start."""


class EngineActor:
    """One engine in a process of Ray."""

    def __init__(self, settings: Settings) -> None:
        from loramux.fleet.serving import ListeningEngine

        logs.configure(settings.logging.format, settings.logging.level)
        self._me = ray.get_runtime_context().current_actor
        self._unused_s = settings.fleet.ray.unused_s
        self._authorized: set[bytes] = set()
        pair = new_pair()
        self._engine = ListeningEngine(settings, pair, self._authorized.__contains__)
        address = self._engine.listen(f"tcp://{ray.util.get_node_ip_address()}:0")
        self._place = EnginePlace(address, pair.public)
        threading.Thread(target=self._run, name="engine").start()

    def join(self, front_key: bytes) -> EnginePlace:
        """Authorize a server, and return where the engine listens."""
        self._authorized.add(front_key)
        return self._place

    def pid(self) -> int:
        """Return the process's id."""
        return os.getpid()

    def _run(self) -> None:
        try:
            self._engine.run(self._end_if_unused)
        finally:  # the engine's servers restart it after a pause
            ray.kill(self._me, no_restart=True)

    def _end_if_unused(self, seconds: float) -> None:
        if seconds > self._unused_s:
            logger.info("no server has used the engine for %.0f s: it ends", seconds)
            ray.kill(self._me, no_restart=True)


class _Search:
    """One life of an engine: makes Ray start the engine if needed, and gets its address."""

    def __init__(self, engine: str, settings: Settings, front_key: bytes) -> None:
        self._engine = engine
        self._settings = settings
        self._front_key = front_key
        self._answer: Any = None
        self._deaths = 0

    def look(self) -> Placement:
        try:
            if self._answer is None:
                self._answer = _actor(self._engine, self._settings).join.remote(self._front_key)
            return Placement(EnginePlace(*ray.get(self._answer, timeout=LOOK_S)))
        except GetTimeoutError:
            return Placement()
        except (RayError, ValueError) as error:
            self._deaths += 1
            if isinstance(error, ActorDiedError) and self._deaths < MAX_DEATHS:  # the unused actor ended at this moment
                self._answer = None
                return Placement()
            return Placement(failure=_first_line(error))


def drive(connection: Connection, cluster: RaySettings) -> None:
    """Join the cluster, then report the addresses of engines until the server's end of `connection` is closed.

    The first message is None, or the reason why there is no cluster.
    """
    _ignore_signals()
    try:
        ray.init(address=cluster.address, namespace=cluster.namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        connection.send(_first_line(error))
        return
    _ignore_signals()  # because Ray has set its own handlers
    connection.send(None)
    searches: dict[str, tuple[int, _Search]] = {}
    with suppress(EOFError, OSError):
        while True:
            engine, life, settings, front_key = connection.recv()
            if engine not in searches or searches[engine][0] != life:
                searches[engine] = life, _Search(engine, settings, front_key)
            connection.send((engine, life, searches[engine][1].look()))
    os._exit(0)  # Ray's own exit prints to an output that may have ended with the server


def actor_name(engine: str, settings: Settings) -> str:
    """Return the name under which servers with these settings share the engine."""
    settings = msgspec.structs.replace(settings, fleet=msgspec.structs.replace(settings.fleet, keys=""))
    text = message_version().encode() + msgspec.json.encode(settings)
    return f"{engine}-{blake2b(text, digest_size=6).hexdigest()}"


def _actor(engine: str, settings: Settings) -> Any:
    cluster = settings.fleet.ray
    return (
        ray.remote(EngineActor)
        .options(
            name=actor_name(engine, settings),
            namespace=cluster.namespace,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",
            **cluster.needs,
        )
        .remote(settings)
    )


def _ignore_signals() -> None:
    """Ignore signals, because the server drains and its end closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
