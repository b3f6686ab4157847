"""Pins: the engine keeps what the records say, from the call on, and again after a restart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from fake_registry import Shelf, digest_of
from scripted_engine import ScriptedEngine

from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.errors import ChangeConflict, PreconditionFailed
from loramux.catalog.registry.resolver import engine_key
from loramux.common.identity import Principal
from loramux.data.records.database import Database
from loramux.engine.messages import EngineFault
from loramux.serving.adapters import AdapterService

pytestmark = pytest.mark.anyio


@pytest.fixture
def shelf(database: Database) -> Shelf:
    return Shelf(database)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def service(shelf: Shelf, engine: ScriptedEngine) -> AdapterService:
    return AdapterService(shelf.registry, {"tiny": engine})


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]], shelf: Shelf) -> Principal:
    acme = await enrol("acme")
    await shelf.push(acme, "bot", 1, 2)
    return acme


async def test_a_pin_is_kept_by_the_engine_until_it_is_let_go(
    service: AdapterService, engine: ScriptedEngine, acme: Principal
) -> None:
    for _ in range(2):
        assert (await service.pins.pin(acme, "bot", 1)).pin is not None
        await service.run_maintenance()
    assert engine.pinned == [(engine_key(acme.tenant, digest_of(1)), acme.tenant)]
    assert (await service.pins.unpin(acme, "bot", 1)).pin is None
    await service.run_maintenance()
    assert engine.pinned == []


async def test_what_the_engine_cannot_keep_is_not_pinned(
    service: AdapterService, engine: ScriptedEngine, shelf: Shelf, acme: Principal
) -> None:
    engine.refuses_pins = EngineFault("pin_limit", "the pool is full of pins")
    with pytest.raises(ChangeConflict, match=r"`acme/bot@1` cannot be kept in the pool: the pool is full"):
        await service.pins.pin(acme, "bot", 1)
    engine.refuses_pins = None
    with pytest.raises(PreconditionFailed):
        await service.pins.pin(acme, "bot", 1, Preconditions(if_match='"0"'))
    assert await shelf.registry.pins.active(()) == []
    assert engine.pinned == []


async def test_the_next_engine_keeps_what_was_pinned(
    service: AdapterService, shelf: Shelf, acme: Principal, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        await service.pins.pin(acme, "bot", number)
    restarted = ScriptedEngine()
    await AdapterService(shelf.registry, {"tiny": restarted}).run_maintenance()
    assert sorted(restarted.pinned) == sorted(
        (engine_key(acme.tenant, digest_of(number)), acme.tenant) for number in (1, 2)
    )
    broken = ScriptedEngine(refuses_pins=EngineFault("adapter_failed", "the disk is slow"))
    await AdapterService(shelf.registry, {"tiny": broken}).run_maintenance()
    assert len(await shelf.registry.pins.active(())) == 2, "it is tried again"
    smaller = ScriptedEngine(refuses_pins=EngineFault("pin_limit", "there is less room now"))
    await AdapterService(shelf.registry, {"tiny": smaller}).run_maintenance()
    assert await shelf.registry.pins.active(()) == []
    assert "there is less room now" in caplog.text


async def test_what_is_deleted_leaves_the_engine(
    service: AdapterService, engine: ScriptedEngine, shelf: Shelf, acme: Principal
) -> None:
    await service.pins.pin(acme, "bot", 1)
    await service.delete_revision(acme, "bot", 1)
    assert engine.retired == [engine_key(acme.tenant, digest_of(1))]
    await service.run_maintenance()
    assert engine.pinned == []
    await service.delete(acme, "bot")
    assert sorted(engine.retired) == sorted(engine_key(acme.tenant, digest_of(number)) for number in (1, 2))


async def test_what_deletes_itself_leaves_the_engine_too(
    service: AdapterService, engine: ScriptedEngine, shelf: Shelf, acme: Principal
) -> None:
    await service.deletion.set_ttl(acme, "bot", 10)
    await service.pins.pin(acme, "bot", 2)
    shelf.pass_time(10)
    await service.run_maintenance()
    assert sorted(engine.retired) == sorted(engine_key(acme.tenant, digest_of(number)) for number in (1, 2))
    assert engine.pinned == []
