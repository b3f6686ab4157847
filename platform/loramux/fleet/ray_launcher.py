"""Engines as actors of a Ray cluster (extra `ray`): Ray places them, gives them GPUs and restarts them.

An actor is one engine that listens (`fleet.serving`). Ray says where it is, and nothing else: commands and tokens go
over the channel. Actors are named and detached, so that all servers of a namespace share them and a server's end costs
no reload; one that no server has used for `unused_s` ends. The name holds a digest of the messages and of the engine's
settings: a server of another release, or with other settings, has engines of its own. Keys are made for each process,
and only public ones go through Ray.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import msgspec

from loramux import logs
from loramux.engine import EngineClient, EngineDied
from loramux.engine.client import ChannelClient
from loramux.fleet.keys import new_pair
from loramux.fleet.member import Launch
from loramux.fleet.remote import EnginePlace, Locate, RemoteChannel
from loramux.fleet.wire import message_version
from loramux.settings import RaySettings, RecordsSettings, Settings, SettingsError

try:
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
except ImportError:
    raise SettingsError(
        "fleet.launcher: Ray is not installed; run `pip install 'loramux[ray]'`, or set launcher = \"local\""
    ) from None

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""The longest wait for one answer of Ray, so that a server that stops need not wait for a place."""

MAX_DEATHS = 3
"""Actors that end before they say where they are, until the engine counts as one that cannot be started."""


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
        finally:  # its servers start it again, after a pause
            ray.kill(self._me, no_restart=True)

    def _end_if_unused(self, seconds: float) -> None:
        if seconds > self._unused_s:
            logger.info("no server has used the engine for %.0f s: it ends", seconds)
            ray.kill(self._me, no_restart=True)


def launching_on_ray(settings: Settings) -> Launch:
    """Connect to the cluster, and return what attaches this server to its engines. Raises SettingsError."""
    for base in settings.served_bases:
        if base.engines.devices:
            raise SettingsError(f"bases.engines.devices of {base.name}: Ray chooses the GPUs; leave it out")
    _connect(settings.fleet.ray)
    pair = new_pair()

    def launch(name: str, own: Settings) -> EngineClient:
        locate = _locating(name, _settings_of_actor(own), pair.public)
        channel = RemoteChannel(locate, own.model.served_model_name, pair, own.fleet.lease_s)
        return ChannelClient(channel, own.engine.step_timeout_s)

    return launch


def actor_name(engine: str, settings: Settings) -> str:
    """Return the name under which servers with these settings share the engine."""
    settings = msgspec.structs.replace(settings, fleet=msgspec.structs.replace(settings.fleet, keys=""))
    text = message_version().encode() + msgspec.json.encode(settings)
    return f"{engine}-{blake2b(text, digest_size=6).hexdigest()}"


def _locating(engine: str, settings: Settings, front_key: bytes) -> Locate:
    """Return a function that has Ray start the engine, if need be, and asks it where it listens."""
    answers: list[Any] = []
    waits = deaths = 0

    def locate() -> EnginePlace | None:
        nonlocal waits, deaths
        try:
            if not answers:
                answers.append(_actor(engine, settings).join.remote(front_key))
            place = EnginePlace(*ray.get(answers[0], timeout=WAIT_S))
        except GetTimeoutError:
            waits += 1
            if waits % 60 == 30:
                logger.warning(
                    "Ray has no place for the engine %s yet: it needs %s", engine, _needs(settings.fleet.ray)
                )
            return None
        except (RayError, ValueError) as error:
            deaths += 1
            if isinstance(error, ActorDiedError) and deaths < MAX_DEATHS:  # unused, it ended at this moment
                answers.clear()
                return None
            raise EngineDied(f"Ray cannot start the engine {engine}: {str(error).splitlines()[0]}") from None
        return place

    return locate


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
            **_needs(cluster),
        )
        .remote(settings)
    )


def _needs(cluster: RaySettings) -> dict[str, Any]:
    return {"num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus, "resources": cluster.resources}


def _settings_of_actor(own: Settings) -> Settings:
    """Return what an engine needs; the database's address, with its password, stays here."""
    records = own.records
    kept = RecordsSettings(
        blobs=records.blobs, blob_options=records.blob_options, cache=records.cache, cache_bytes=records.cache_bytes
    )
    return Settings(
        model=own.model,
        engine=own.engine,
        scheduler=own.scheduler,
        fleet=own.fleet,
        logging=own.logging,
        records=kept,
    )


def _connect(cluster: RaySettings) -> None:
    if ray.is_initialized():
        return
    try:
        with _own_signals():
            ray.init(address=cluster.address, namespace=cluster.namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"fleet.ray.address: there is no Ray cluster at {cluster.address!r} ({str(error).splitlines()[0]}); "
            "`ray start --head` starts one"
        ) from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers: Ray's would end a server without its drain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
