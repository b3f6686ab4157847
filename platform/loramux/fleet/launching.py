"""How the engines of a server are started: processes of this machine, engines that listen elsewhere, or Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loramux.engine import EngineClient, spawn_engine
from loramux.engine.client import ChannelClient
from loramux.fleet import keys
from loramux.fleet.member import Launch
from loramux.fleet.remote import EnginePlace, RemoteChannel
from loramux.settings import Settings


def launcher_of(settings: Settings) -> Launch:
    """Return what makes the engines of these settings. Raises SettingsError."""
    addresses = {
        f"{base.name}-{number}": address
        for base in settings.served_bases
        for number, address in enumerate(base.engines.addresses)
    }
    attach = attaching(settings, addresses) if addresses else None
    if settings.fleet.launcher == "ray":
        from loramux.fleet.ray_launcher import launching_on_ray  # the extra `ray`

        start = launching_on_ray(settings)
    else:
        start = launch_here

    def launch(name: str, own: Settings) -> EngineClient:
        return attach(name, own) if attach is not None and name in addresses else start(name, own)

    return launch


def launch_here(_: str, settings: Settings) -> EngineClient:
    """Make an engine of this machine."""
    return spawn_engine(settings)


def attaching(settings: Settings, addresses: Mapping[str, str]) -> Launch:
    """Return what attaches this server to the engines at `addresses`, by their names. Raises SettingsError."""
    folder = Path(settings.fleet.keys)
    pair = keys.read_pair(folder / keys.FRONT_SECRET)
    engine_key = keys.read_public(folder / keys.ENGINE_PUBLIC)

    def launch(name: str, own: Settings) -> EngineClient:
        place = EnginePlace(addresses[name], engine_key)
        channel = RemoteChannel(lambda: place, own.model.served_model_name, pair, settings.fleet.lease_s)
        return ChannelClient(channel, own.engine.step_timeout_s)

    return launch
