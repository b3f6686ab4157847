"""The engines of a server with several workers: child processes of the server's first process, which its workers share.

    worker ── place_of ──> SharedEngines (first process) ── starts ──> the engine's process
      └──────────── commands and tokens (`fleet.remote`) ────────────> `fleet.serving.ListeningEngine`

An engine is started when the first worker asks for its address. It ends when no worker has used it for `fleet.lease_s`,
because its base is retired or it is not needed. An engine that is released ends as soon as no worker uses it, and only
then another life of it is started.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from loramux.common import logs
from loramux.common.settings.file import Settings
from loramux.engine.client import EngineClient, EngineDied, start_ignoring_signals
from loramux.fleet.launching import launcher_of, remote_client, settings_of_process
from loramux.fleet.member import LaunchEngine
from loramux.fleet.remote import EnginePlace, Placement
from loramux.fleet.wire import KeyPair, new_pair

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds that a worker waits for the address of an engine, before it asks again."""
LOOK_S = 0.05
"""Seconds between two looks of a released engine at its workers."""
STOP_S = 25.0
"""Seconds for an engine that no worker uses to end."""

AskPlace = Callable[[str, Settings], Coroutine[Any, Any, Placement]]
"""Asks the first process where an engine listens, by the engine's name and settings."""


class FleetKeys(NamedTuple):
    """The key pairs of the two sides of the channel, which only processes of this server have."""

    engine: KeyPair
    front: KeyPair


def new_keys() -> FleetKeys:
    """Make the keys of a server."""
    return FleetKeys(new_pair(), new_pair())


def shared_launcher(settings: Settings, ask: AskPlace, keys: FleetKeys) -> LaunchEngine:
    """Return the function that makes a worker's engines: those of this machine are shared. Raises SettingsError."""
    loop = asyncio.get_running_loop()

    def launch(name: str, own: Settings) -> EngineClient:
        needed = settings_of_process(own)

        def locate() -> EnginePlace | None:
            asked = asyncio.run_coroutine_threadsafe(ask(name, needed), loop)
            try:
                place, failure = asked.result(ANSWER_S)
            except TimeoutError:
                return None
            if failure is not None:
                raise EngineDied(failure)
            return place

        return remote_client(locate, own, keys.front)

    return launcher_of(settings, launch)


class SharedEngines:
    """The engines of this machine, in the server's first process."""

    def __init__(self, keys: FleetKeys) -> None:
        self._keys = keys
        self._engines: dict[str, _EngineProcess] = {}

    def place_of(self, name: str, settings: Settings) -> Placement:
        """Return where the engine listens, or an empty placement while it starts or ends. Starts the engine if it does
        not run with these settings.
        """
        engine = self._engines.get(name)
        if engine is not None and engine.is_alive:
            if engine.settings != settings:
                engine.release()
            return Placement(engine.place())
        if engine is not None and not engine.has_listened:
            del self._engines[name]
            return Placement(failure=f"the process of the engine {name} ended with exit code {engine.exit_code}")
        engine = self._engines[name] = _EngineProcess(settings, self._keys)
        logger.info("the engine %s is started: process %d", name, engine.pid)
        return Placement()

    def release(self, name: str) -> None:
        """End the engine as soon as no worker uses it."""
        if name in self._engines:
            self._engines[name].release()

    def stop(self) -> None:
        """End every engine after its last worker; blocks until all have ended."""
        for engine in self._engines.values():
            engine.release()
        until = time.monotonic() + STOP_S
        for engine in self._engines.values():
            engine.join(until - time.monotonic())
        self.kill()

    def kill(self) -> None:
        """End every engine at once."""
        for engine in self._engines.values():
            engine.kill()


class _EngineProcess:
    """One life of an engine."""

    def __init__(self, settings: Settings, keys: FleetKeys) -> None:
        self.settings = settings
        self._key = keys.engine.public
        self._address: str | None = None
        self._is_released = False
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (settings, keys.engine, keys.front.public, theirs)
        self._process = context.Process(target=_serve, args=arguments, name="loramux-engine")
        start_ignoring_signals(self._process)
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def has_listened(self) -> bool:
        return self._address is not None

    def place(self) -> EnginePlace | None:
        """Return where the engine listens; None if it does not listen yet, or ends."""
        if self._is_released:
            return None
        if self._address is None and self._connection.poll():
            with suppress(EOFError):  # it has ended
                self._address = self._connection.recv()
        return None if self._address is None else EnginePlace(self._address, self._key)

    def release(self) -> None:
        self._is_released = True
        self._connection.close()  # the engine sees the end

    def join(self, seconds: float) -> None:
        self._process.join(max(0.0, seconds))

    def kill(self) -> None:
        self._process.kill()


def _serve(settings: Settings, pair: KeyPair, front_key: bytes, connection: Connection) -> None:
    """Serve an engine in this process until it is released, or unused for too long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for an engine with one server (`engine.client`)
    from transformers.utils.logging import disable_progress_bar

    from loramux.fleet.serving import ListeningEngine

    logs.configure(settings.logging.format, settings.logging.level)
    disable_progress_bar()  # a server's log is no terminal
    engine = ListeningEngine(settings, pair, {front_key}.__contains__)
    connection.send(engine.listen(f"ipc://@loramux-{secrets.token_hex(8)}"))

    def end_if_unused(seconds: float) -> None:
        if seconds > settings.fleet.lease_s:
            engine.stop()

    def end_if_released() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        while engine.num_servers:
            time.sleep(LOOK_S)
        engine.stop()

    threading.Thread(target=end_if_released, daemon=True, name="release").start()
    engine.run(end_if_unused)
    sys.stderr.flush()
    os._exit(0)  # a normal end would take seconds to free torch's memory
