"""How engines are chosen by the settings, and the keys of the channel."""

from __future__ import annotations

import stat
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from loramux.common.settings.file import Settings, SettingsError, load_settings
from loramux.common.settings.serving import BaseSettings, EngineRange, EngineSettings, FleetSettings, RaySettings
from loramux.engine.client import EngineClient, EngineDied
from loramux.fleet import launching
from loramux.fleet.launching import RayDriver, launcher_of, settings_of_engines
from loramux.fleet.remote import EnginePlace, Placement, RemoteChannel
from loramux.fleet.wire import (
    ENGINE_PUBLIC,
    ENGINE_SECRET,
    FRONT_SECRET,
    FRONTS_PUBLIC,
    read_authorized,
    read_pair,
    read_public,
    write_keys,
)

ADDRESSES = ("tcp://10.0.0.1:7101", "tcp://[::1]:7101")


def settings_of(folder: Path, engines: EngineRange, **fleet: object) -> Settings:
    base = BaseSettings(name="tiny", path="/model", engines=engines)
    return Settings(model=base.model, bases=(base,), fleet=FleetSettings(keys=str(folder), **fleet))


def test_keys_of_a_fleet_fit_together_and_are_their_owners_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_keys(folder)
    assert read_pair(folder / ENGINE_SECRET).public == read_public(folder / ENGINE_PUBLIC)
    assert read_authorized(folder / FRONTS_PUBLIC) == {read_pair(folder / FRONT_SECRET).public}
    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in (ENGINE_SECRET, FRONT_SECRET)]
    assert modes == [0o600, 0o600]
    with pytest.raises(SettingsError, match="is there already"):
        write_keys(folder)


def test_key_files_that_are_absent_open_or_spoilt_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="loramux engine keys"):
        read_pair(tmp_path / FRONT_SECRET)
    write_keys(tmp_path)
    (tmp_path / FRONT_SECRET).chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_pair(tmp_path / FRONT_SECRET)
    (tmp_path / ENGINE_SECRET).write_bytes(read_public(tmp_path / ENGINE_PUBLIC) * 1 + b"\nno key\n")
    with pytest.raises(SettingsError, match="a line that is no key"):
        read_pair(tmp_path / ENGINE_SECRET)
    (tmp_path / FRONTS_PUBLIC).write_bytes(b"# the office\n" + read_public(tmp_path / ENGINE_PUBLIC) + b" server-2\n")
    assert read_authorized(tmp_path / FRONTS_PUBLIC) == {read_public(tmp_path / ENGINE_PUBLIC)}


def test_addresses_attach_and_start_nothing(tmp_path: Path) -> None:
    write_keys(tmp_path)
    settings = settings_of(tmp_path, EngineRange(addresses=ADDRESSES))
    client = launcher_of(settings)("tiny-1", settings.of_base(settings.bases[0]))
    assert isinstance(client, EngineClient)
    assert isinstance(client._channel, RemoteChannel)
    assert client._channel._locate().address == ADDRESSES[1]


def test_addresses_are_as_many_engines_and_exclude_a_range(tmp_path: Path) -> None:
    engines = EngineRange(addresses=ADDRESSES)
    assert (engines.min, engines.most) == (2, 2)
    assert msgspec.convert(msgspec.to_builtins(engines), EngineRange) == engines
    base = '[[bases]]\nname = "a"\npath = "a"\nengines = { addresses = ["tcp://h:1"], max = 2 }\n'
    (tmp_path / "loramux.toml").write_text(base)
    with pytest.raises(SettingsError, match="leave out min, max and devices"):
        load_settings(tmp_path / "loramux.toml")
    (tmp_path / "loramux.toml").write_text(base.replace("tcp://h:1", "h:1").replace(", max = 2", ""))
    with pytest.raises(SettingsError, match="addresses"):
        load_settings(tmp_path / "loramux.toml")


def test_ray_that_is_not_installed_is_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"pip install 'loramux\[ray\]'"):
        launcher_of(settings_of(tmp_path, EngineRange(), launcher="ray"))


def test_ray_with_devices_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(SettingsError, match="Ray chooses the GPUs"):
        launcher_of(settings_of(tmp_path, EngineRange(devices=("cuda:0",)), launcher="ray"))


@pytest.mark.parametrize(
    ("address", "says"), [("head", "HOST:PORT"), ("head:gcs", "HOST:PORT"), ("127.0.0.1:1", "ray start --head")]
)
def test_ray_cluster_that_is_not_there_is_refused_at_once_with_the_way_out(
    tmp_path: Path, address: str, says: str
) -> None:
    pytest.importorskip("ray")
    with pytest.raises(SettingsError, match=says):
        launcher_of(settings_of(tmp_path, EngineRange(), launcher="ray", ray=RaySettings(address=address)))


def answer_once(connection: Connection, _: RaySettings) -> None:
    """A driver that is ended by Ray after its first answer."""
    connection.send(None)
    engine, life, *_rest = connection.recv()
    connection.send((engine, life, Placement(EnginePlace(f"tcp://{engine}:{life}", b"key"))))


def test_server_outlives_its_ray_driver_and_starts_another_for_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_drive", answer_once)
    driver, settings = RayDriver(RaySettings()), settings_of(tmp_path, EngineRange())
    driver.start()
    for life in range(3):
        place = None
        while place is None:
            with suppress(EngineDied):  # at the moment of the driver's end; an engine's next start asks again
                place = driver.place_of("tiny-0", life, settings, b"front")
        assert place == EnginePlace(f"tcp://tiny-0:{life}", b"key")


def shares_of(*bases: BaseSettings, **fleet: object) -> list[int | None]:
    """Return `engines_per_device` of every engine of a server with these bases."""
    settings = Settings(model=bases[0].model, bases=bases, fleet=FleetSettings(**fleet))
    engines = [settings_of_engines(base, settings.of_base(base), bases) for base in bases]
    return [own.engine.engines_per_device for one in engines for own in one.values()]


def base_on(
    name: str, device: str = "auto", engines_per_device: int | None = None, num_ranks: int = 1, **engines: object
) -> BaseSettings:
    engine = EngineSettings(device=device, engines_per_device=engines_per_device, tensor_parallel_size=num_ranks)
    return BaseSettings(name=name, path="/model", engine=engine, engines=EngineRange(**engines))


@pytest.mark.parametrize(
    ("bases", "shares"),
    [
        ([base_on("a")], [None]),
        ([base_on("a", min=2)], [2, 2]),
        ([base_on("a", min=1, max=3)], [3, 3, 3]),
        ([base_on("a"), base_on("b")], [2, 2]),
        ([base_on("a", "cuda"), base_on("b", "cuda:0"), base_on("c", "cuda:1")], [2, 2, None]),
        ([base_on("a", "cpu", min=2), base_on("b")], [None, None, None]),
        ([base_on("a", min=3, devices=("cuda:0", "cuda:1"))], [2, None, 2]),
        ([base_on("a", min=2, devices=("cuda:1", "cuda:1")), base_on("b", "cuda:1")], [3, 3, 3]),
        ([base_on("a"), base_on("b", addresses=ADDRESSES)], [None, None, None]),
        ([base_on("a", engines_per_device=5), base_on("b")], [5, 2]),
        ([base_on("a", num_ranks=3), base_on("b", "cuda:2"), base_on("c", "cuda:3")], [2, 2, None]),
        ([base_on("a", min=2, devices=("cuda:0", "cuda:2"), num_ranks=2)], [None, None]),
    ],
)
def test_engines_on_one_gpu_divide_its_memory(bases: list[BaseSettings], shares: list[int | None]) -> None:
    assert shares_of(*bases) == shares


@pytest.mark.parametrize(("num_gpus", "share"), [(1.0, None), (0.5, 2), (0.3, 3), (2.0, None), (0.0, None)])
def test_engines_that_ray_places_on_a_gpu_divide_its_memory(num_gpus: float, share: int | None) -> None:
    assert shares_of(base_on("a", min=3), launcher="ray", ray=RaySettings(num_gpus=num_gpus)) == [share] * 3
