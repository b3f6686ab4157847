"""The wanted set of bases, on both databases: two servers agree on it, and a base that does not load harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_registry import Shelf
from scripted_engine import ScriptedEngine
from tiny_base import make_base

from loramux.accounts.tenants.entities import Changes
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineSettings, ModelSettings
from loramux.data.records.bases import BaseRepository
from loramux.data.records.database import Database
from loramux.engine.client import EngineDied
from loramux.engine.messages import ModelFacts
from loramux.serving.engine_questions import EngineQuestions
from loramux.serving.errors import BaseConflict, InvalidBase, UnknownBase
from loramux.serving.lifecycle import BaseLifecycle

pytestmark = pytest.mark.anyio

ENGINE = EngineSettings(pool_bytes=1 << 20)


class UnloadableEngine(ScriptedEngine):
    """Its model cannot be loaded."""

    async def start(self) -> ModelFacts:
        raise EngineDied("the weights are damaged")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: make_base(root / name, seed=seed) for seed, name in enumerate(("amber", "birch", "cedar"))}


@pytest.fixture
def settings(folders: dict[str, Path]) -> Settings:
    first = BaseSettings(name="amber", path=str(folders["amber"]), engine=ENGINE)
    return Settings(model=first.model, bases=(first,), engine=ENGINE)


def launch(name: str, _: Settings) -> ScriptedEngine:
    return UnloadableEngine() if name.startswith("cedar") else ScriptedEngine()


@asynccontextmanager
async def server(settings: Settings, database: Database) -> AsyncIterator[BaseLifecycle]:
    lifecycle = BaseLifecycle(settings, database, EngineQuestions(1.0), launch)
    try:
        await lifecycle.start()
        yield lifecycle
    finally:
        await lifecycle.close()


def table(name: str, folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {"name": name, "path": str(folders[name]), **more}


async def until(lifecycle: BaseLifecycle, name: str, state: str) -> None:
    async with asyncio.timeout(120):
        while lifecycle.status(name).state != state:  # noqa: ASYNC110  it has no event
            await asyncio.sleep(0.01)


@pytest.fixture
def changes(database: Database) -> Changes:
    return Changes.local(database)


async def test_servers_of_one_database_serve_what_one_of_them_was_told(
    settings: Settings, database: Database, folders: dict[str, Path], changes: Changes
) -> None:
    async with server(settings, database) as first, server(settings, database) as second:
        await first.add(changes, table("birch", folders))
        await until(first, "birch", "serving")
        assert list(second.serving) == ["amber"]
        await second.reconcile()
        await until(second, "birch", "serving")
        assert second.models.names == first.models.names == ("amber", "birch")

        await second.retire(changes, "amber", "birch")
        await first.reconcile()
        for lifecycle in (first, second):
            await until(lifecycle, "amber", "retired")
            assert list(lifecycle.serving) == list(lifecycle.engines) == ["birch"]
            gone = lifecycle.models.absent("amber")
            assert gone is not None
            assert (gone.is_retired, gone.successor) == (True, "birch")
    async with server(settings, database) as restarted:
        assert list(restarted.serving) == ["birch"], "a restart keeps the wanted set"
        await restarted.add(changes, table("amber", folders, engine={"pool_bytes": 1 << 20}))
        await until(restarted, "amber", "serving")


async def test_added_base_that_does_not_load_is_tried_again_and_others_are_served(
    settings: Settings, database: Database, folders: dict[str, Path], changes: Changes
) -> None:
    async with server(settings, database) as lifecycle:
        await lifecycle.add(changes, table("cedar", folders))
        await until(lifecycle, "cedar", "failed")
        assert lifecycle.status("cedar").problem == "the weights are damaged"
        assert lifecycle.status("amber").state == "serving"
        await lifecycle.reconcile()
        assert lifecycle.status("cedar").state == "failed", "it is not tried again at once"
    async with server(settings, database) as restarted:
        assert restarted.status("cedar").state == "failed"
        assert list(restarted.serving) == ["amber"]
        again = await restarted.add(changes, table("cedar", folders))
        assert again.state == "loading", "an operator's command tries again at once"


async def test_added_engine_that_ends_for_good_is_loaded_again(
    settings: Settings, database: Database, folders: dict[str, Path], changes: Changes
) -> None:
    async with server(settings, database) as lifecycle:
        await lifecycle.add(changes, table("birch", folders))
        await until(lifecycle, "birch", "serving")
        lifecycle.engines["birch"]._ended.set()
        await lifecycle.reconcile()
        await until(lifecycle, "birch", "failed")
        assert lifecycle.status("amber").state == "serving"


async def test_base_of_the_settings_that_does_not_load_ends_the_start(
    database: Database, folders: dict[str, Path]
) -> None:
    bases = tuple(BaseSettings(name=name, path=str(folders[name]), engine=ENGINE) for name in ("amber", "cedar"))
    lifecycle = BaseLifecycle(
        Settings(model=ModelSettings(path=bases[0].path, served_model_name="amber"), bases=bases),
        database,
        EngineQuestions(1.0),
        launch,
    )
    with pytest.raises(EngineDied, match="the weights are damaged"):
        await lifecycle.start()
    await lifecycle.close()


async def test_retired_base_is_drained_before_its_engines_stop(
    settings: Settings, database: Database, folders: dict[str, Path], changes: Changes
) -> None:
    async with server(settings, database) as lifecycle:
        await lifecycle.add(changes, table("birch", folders))
        await until(lifecycle, "birch", "serving")
        may_end = asyncio.Event()
        drained: list[tuple[str, float]] = []

        async def drain(base: Any, seconds: float) -> None:
            drained.append((base.name, seconds))
            await may_end.wait()

        lifecycle.drain_with(drain)
        assert (await lifecycle.retire(changes, "birch")).state == "draining"
        assert lifecycle.models.named("birch") is None, "no new request finds it"
        assert "birch" in lifecycle.serving, "requests that were resolved before are served"
        await lifecycle.reconcile()
        assert lifecycle.status("birch").state == "draining"
        may_end.set()
        await until(lifecycle, "birch", "retired")
        assert drained == [("birch", settings.server.drain_seconds)]


async def test_changes_that_make_no_sense_are_refused_and_audited_changes_are_written_once(
    settings: Settings, database: Database, folders: dict[str, Path], changes: Changes
) -> None:
    async with server(settings, database) as lifecycle:
        with pytest.raises(BaseConflict, match="the only base model"):
            await lifecycle.retire(changes, "amber", force=True)
        with pytest.raises(UnknownBase, match="there are amber"):
            await lifecycle.retire(changes, "birch")
        with pytest.raises(InvalidBase, match="max_num_seqs"):
            await lifecycle.add(changes, table("birch", folders, engine={"max_num_seqs": 0}))
        await lifecycle.add(changes, table("birch", folders))
        await lifecycle.add(changes, table("birch", folders))
        with pytest.raises(BaseConflict, match="with other settings"):
            await lifecycle.add(changes, table("birch", folders, dtype="float32"))
    async with database.read() as session:
        assert [row.name for row in await BaseRepository(session).all()] == ["birch"]


async def test_refused_name_is_that_of_an_adapter(
    settings: Settings,
    database: Database,
    folders: dict[str, Path],
    changes: Changes,
    enrol: Callable[[str], Awaitable[Any]],
) -> None:
    acme = await enrol("acme")
    await Shelf(database).push(acme, "bot", 1)
    async with server(settings, database) as lifecycle:
        with pytest.raises(BaseConflict, match="is an adapter's name"):
            await lifecycle.add(changes, {"name": "acme/bot", "path": str(folders["birch"])})
