"""The start of a server's engines, with the settings of each: as processes of this machine, engines on other machines,
or actors of Ray.

On a Ray cluster (extra `ray`) Ray places the engines, gives them GPUs and restarts them:

    RemoteChannel ──> RayDriver.place_of ──pipe──> fleet.ray_driver ──> Ray: where is the engine?
          └───────── commands and tokens, over the channel ─────────> the engine (an actor)

Ray only gives the address of an engine. Ray ends the process of a driver that has lost the cluster's head for a minute,
so the driver is a separate process. When it ends, the server keeps its connected engines, and starts another driver to
find further engines. Keys are made for each server, and only public keys go through Ray.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from loramux.common.settings.file import Settings, SettingsError
from loramux.common.settings.server import RecordsSettings
from loramux.common.settings.serving import BaseSettings, RaySettings
from loramux.engine.client import EngineClient, EngineDied, spawn_engine
from loramux.fleet.member import LaunchEngine
from loramux.fleet.remote import EnginePlace, Locate, Placement, RemoteChannel
from loramux.fleet.wire import ENGINE_PUBLIC, FRONT_SECRET, KeyPair, new_pair, read_pair, read_public

logger = logging.getLogger(__name__)

WAIT_S = 0.2
"""Longest wait for the driver's answer, in seconds: a server that stops should not wait for a place."""
JOIN_S = 60.0
"""Seconds for the driver to join the cluster."""
PROBE_S = 5.0
"""Seconds for the cluster's head to accept a connection; Ray itself tries for many minutes."""
WARN_S = 60.0
"""Seconds between two warnings that Ray has no room for an engine."""


def settings_of_engines(
    base: BaseSettings, settings: Settings, bases: Iterable[BaseSettings] = ()
) -> dict[str, Settings]:
    """Return the settings of each engine of a base, by its name; if devices are listed, each engine gets a device.

    `bases` are all bases of the server, whose engines divide the devices' memory.
    """
    every = {other.name: other for other in (*bases, base)}
    sharing = Counter(device for other in every.values() for devices in other.devices for device in devices)
    engines = {}
    for number in range(base.engines.most):
        engine, num_sharing = settings.engine, 1
        if settings.fleet.launcher == "ray":
            num_sharing = settings.fleet.ray.engines_per_gpu
        elif not base.engines.addresses and base.devices[number] != ("cpu",):
            num_sharing = max(sharing[device] for device in base.devices[number])
        if base.engines.devices:
            device = base.engines.devices[number % len(base.engines.devices)]
            engine = msgspec.structs.replace(engine, device=device)
        if engine.engines_per_device is None and num_sharing > 1:
            engine = msgspec.structs.replace(engine, engines_per_device=num_sharing)
        engines[f"{base.name}-{number}"] = msgspec.structs.replace(settings, engine=engine)
    return engines


def launcher_of(settings: Settings, launch_local: LaunchEngine | None = None) -> LaunchEngine:
    """Return the function that makes the engines of these settings. `launch_local` makes the engines of this machine;
    None: as child processes. Raises SettingsError.
    """
    addresses = {
        f"{base.name}-{number}": address
        for base in settings.served_bases
        for number, address in enumerate(base.engines.addresses)
    }
    attach = attaching(settings, addresses) if addresses else None
    start = launching_on_ray(settings) if settings.fleet.launcher == "ray" else launch_local or launch_here

    def launch(name: str, own: Settings) -> EngineClient:
        return attach(name, own) if attach is not None and name in addresses else start(name, own)

    return launch


def launch_here(_: str, settings: Settings) -> EngineClient:
    """Make an engine of this machine."""
    return spawn_engine(settings)


def attaching(settings: Settings, addresses: Mapping[str, str]) -> LaunchEngine:
    """Return the function that attaches this server to the engines at `addresses`, by their names. Raises
    SettingsError."""
    folder = Path(settings.fleet.keys)
    pair, engine_key = read_pair(folder / FRONT_SECRET), read_public(folder / ENGINE_PUBLIC)

    def launch(name: str, own: Settings) -> EngineClient:
        place = EnginePlace(addresses[name], engine_key)
        return remote_client(lambda: place, own, pair)

    return launch


def remote_client(locate: Locate, own: Settings, pair: KeyPair) -> EngineClient:
    """Make the client of an engine that listens."""
    channel = RemoteChannel(locate, own.model.served_model_name, pair, own.fleet.lease_s)
    return EngineClient(channel, own.engine.step_timeout_s)


class RayDriver:
    """The process that speaks to Ray for this server."""

    def __init__(self, cluster: RaySettings) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._asked: set[tuple[str, int]] = set()
        """Engines whose address was requested and not answered yet, each with the number of its life."""
        self._placements: dict[tuple[str, int], Placement] = {}

    def start(self) -> None:
        """Start the process, and wait until it has joined the cluster. Raises SettingsError."""
        _ensure_reachable(self._cluster.address)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_drive, args=(theirs, self._cluster), daemon=True, name="loramux-ray")
        process.start()
        theirs.close()
        self._asked.clear()
        try:
            refusal = self._connection.recv() if self._connection.poll(JOIN_S) else f"no answer within {JOIN_S:g} s"
        except EOFError:
            refusal = "the driver ended"
        if refusal is not None:
            process.kill()
            process.join()
            raise _no_cluster(self._cluster.address, refusal)
        self._process = process

    def place_of(self, engine: str, life: int, settings: Settings, front_key: bytes) -> EnginePlace | None:
        """Return the address on which an engine listens, or None while it is unknown. Ray starts the engine if it does
        not run.

        `life` distinguishes a new search from a continued search. Raises EngineDied.
        """
        key = engine, life
        with self._lock:
            connection = self._connected()
            try:
                if key not in self._asked:
                    connection.send((*key, settings, front_key))
                    self._asked.add(key)
                if connection.poll(WAIT_S):
                    *of, placement = connection.recv()
                    self._asked.discard(tuple(of))
                    self._placements[tuple(of)] = placement
            except (EOFError, OSError):
                raise EngineDied("the connection to Ray is lost") from None
            found = self._placements.pop(key, Placement())
        if found.failure is not None:
            raise EngineDied(f"Ray cannot start the engine {engine}: {found.failure}")
        return found.place

    def _connected(self) -> Connection:
        """Return the connection to a driver; start another driver if the last has ended. Raises EngineDied."""
        if self._process is None or not self._process.is_alive():
            try:
                self.start()
            except SettingsError as refusal:
                raise EngineDied(str(refusal)) from None
        assert self._connection is not None
        return self._connection


def launching_on_ray(settings: Settings) -> LaunchEngine:
    """Join the cluster, and return the function that attaches this server to its engines. Raises SettingsError."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            "fleet.launcher: Ray is not installed; run `pip install 'loramux[ray]'`, or set launcher = \"local\""
        )
    for base in settings.served_bases:
        if base.engines.devices:
            raise SettingsError(f"bases.engines.devices of {base.name}: Ray chooses the GPUs; leave it out")
    driver, pair, lives = RayDriver(settings.fleet.ray), new_pair(), itertools.count()
    driver.start()

    def launch(name: str, own: Settings) -> EngineClient:
        return remote_client(_locating(driver, name, next(lives), settings_of_process(own), pair.public), own, pair)

    return launch


def _drive(connection: Connection, cluster: RaySettings) -> None:
    from loramux.fleet.ray_driver import drive  # imports ray, in the driver only

    drive(connection, cluster)


def _locating(driver: RayDriver, engine: str, life: int, settings: Settings, front_key: bytes) -> Locate:
    warn_at: float | None = None

    def locate() -> EnginePlace | None:
        nonlocal warn_at
        place = driver.place_of(engine, life, settings, front_key)
        now = time.monotonic()
        warn_at = now + WARN_S / 2 if warn_at is None else warn_at
        if place is None and now > warn_at:
            warn_at = now + WARN_S
            logger.warning("Ray has no place for the engine %s yet: it needs %s", engine, settings.fleet.ray.needs)
        return place

    return locate


def settings_of_process(own: Settings) -> Settings:
    """Return the settings that a separate engine needs; the database's address, with its password,
    stays on this server."""
    records = own.records
    kept = RecordsSettings(
        blobs=records.blobs, blob_options=records.blob_options, cache=records.cache, cache_bytes=records.cache_bytes
    )
    return Settings(
        model=own.model,
        engine=own.engine,
        scheduler=own.scheduler,
        adapters=own.adapters,
        fleet=own.fleet,
        logging=own.logging,
        records=kept,
    )


def _ensure_reachable(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise SettingsError(f'fleet.ray.address: {address!r} is neither "auto" nor HOST:PORT of the cluster\'s head')
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> SettingsError:
    return SettingsError(
        f"fleet.ray.address: there is no Ray cluster at {address!r} ({reason}); `ray start --head` starts one"
    )
