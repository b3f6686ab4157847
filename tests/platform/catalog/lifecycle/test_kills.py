"""kill -9 at every await of what changes an adapter: afterwards it was made whole, or not at all.

pytest tests/platform/catalog/lifecycle/test_kills.py -m slow      # at every one; the quick test takes some
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from crash_helpers import survives
from fake_registry import Shelf, digest_of

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.entities import WeightedRevision
from loramux.common.identity import Principal
from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.aliases import AliasRow, AliasTargetRow, AliasVersionRow
from loramux.data.records.database import Database
from loramux.data.records.pins import PinRow
from loramux.data.records.tenants import AuditRow
from loramux.data.records.webhooks import EventRow

BOTH = [WeightedRevision(1, 5), WeightedRevision(2, 95)]


class Files:
    """A store that outlives its processes: a file for each content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, digest: str) -> None:
        (self._folder / digest).touch()

    def known_directory(self, digest: str) -> Path | None:
        return self._folder if (self._folder / digest).exists() else None

    def remove(self, digest: str) -> None:
        (self._folder / digest).unlink(missing_ok=True)

    def digests(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def sweep_incoming(self) -> int:
        return 0


Change = Callable[[Shelf, Principal, str], Awaitable[Any]]


async def prepare_nothing(shelf: Shelf, acme: Principal, name: str) -> None:
    """Both revisions are there, and the second is the default."""


async def prepare_deletion(shelf: Shelf, acme: Principal, name: str) -> None:
    await shelf.registry.pins.pin(acme, name, 1)


async def prepare_undeletion(shelf: Shelf, acme: Principal, name: str) -> None:
    await shelf.registry.deletion.delete(acme, name)


async def delete_for_good(shelf: Shelf, acme: Principal, name: str) -> None:
    await shelf.registry.deletion.delete(acme, name, undo_seconds=0)
    shelf.pass_time(60)
    await shelf.registry.blob_gc.purge()


CHANGES: dict[str, tuple[Change, Change]] = {
    "promote": (prepare_nothing, lambda s, p, name: s.registry.aliases.promote(p, name, 1)),
    "canary": (prepare_nothing, lambda s, p, name: s.registry.aliases.point(p, name, "canary", BOTH)),
    "rollback": (prepare_nothing, lambda s, p, name: s.registry.aliases.roll_back(p, name, "default", None)),
    "delete": (prepare_deletion, lambda s, p, name: s.registry.deletion.delete(p, name)),
    "delete a revision": (prepare_deletion, lambda s, p, name: s.registry.deletion.delete_revision(p, name, 1)),
    "undelete": (prepare_undeletion, lambda s, p, name: s.registry.deletion.undelete(p, name)),
    "delete for good": (prepare_nothing, delete_for_good),
}


class Harness:
    """One tenant's shelf, in this process and in others."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._files = Files(folder)
        self._contents = count(1)
        self._number = count(1)
        self._began = 0
        asyncio.run(self._enrol())

    async def _enrol(self) -> None:
        database = Database(self._url)
        tenants = Tenants(database, b"p" * 32)
        await tenants.create("acme")
        self._acme = await tenants.authenticator.authenticate((await tenants.create_key("acme"))[1])
        self._began = database.now()
        await database.close()

    def do(self, change: Change, name: str) -> Callable[[], Awaitable[Any]]:
        async def work() -> Any:
            database = Database(self._url)
            shelf = Shelf(database, self._files, pins_per_tenant=10_000)
            shelf.now = self._began
            try:
                return await change(shelf, self._acme, name)
            finally:
                await database.close()

        return work

    def adapter(self, prepare: Change) -> str:
        """A new one with two revisions."""
        name = f"bot-{next(self._number)}"
        first, second = next(self._contents), next(self._contents)

        async def make(shelf: Shelf, acme: Principal, name: str) -> None:
            for content in (first, second):
                self._files.put(digest_of(content))
                await shelf.push(acme, name, content)
            await prepare(shelf, acme, name)

        asyncio.run(self.do(make, name)())
        return name

    def rows(self, name: str) -> dict[str, list[Any]]:
        """Everything that the records have of an adapter, but for identifiers."""

        async def read(shelf: Shelf, acme: Principal, name: str) -> dict[str, list[Any]]:
            async with shelf.database.read() as session:
                id = await session.scalar(sa.select(AdapterRow.id).where(AdapterRow.name == name))
                what = {
                    "adapter": sa.select(AdapterRow.version, AdapterRow.deleted_at).where(AdapterRow.id == id),
                    "revisions": sa.select(
                        RevisionRow.number, RevisionRow.state, RevisionRow.deleted_at, RevisionRow.purge_at
                    ).where(RevisionRow.adapter_id == id),
                    "aliases": sa.select(AliasRow.name, AliasRow.version).where(AliasRow.adapter_id == id),
                    "targets": sa.select(AliasTargetRow.alias, AliasTargetRow.weight, RevisionRow.number)
                    .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
                    .where(AliasTargetRow.adapter_id == id),
                    "history": sa.select(AliasVersionRow.alias, AliasVersionRow.version, AliasVersionRow.targets).where(
                        AliasVersionRow.adapter_id == id
                    ),
                    "pins": sa.select(PinRow.ended_by).where(PinRow.adapter_id == id),
                    "events": sa.select(EventRow.kind).where(EventRow.adapter == name),
                    "audit": sa.select(AuditRow.action).where(
                        sa.or_(
                            AuditRow.object_id == f"acme/{name}",
                            AuditRow.object_id.like(f"acme/{name}:%"),
                            AuditRow.object_id.like(f"acme/{name}@%"),
                        )
                    ),
                }
                return {part: sorted(map(tuple, await session.execute(query))) for part, query in what.items()}

        return asyncio.run(self.do(read, name)())

    def restart(self) -> None:
        """Start a server a minute later; then every kept content is there, and no other."""

        async def check(shelf: Shelf, acme: Principal, _: str) -> None:
            shelf.pass_time(61)
            await shelf.registry.blob_gc.purge()
            await shelf.registry.blob_gc.sweep()
            kept = set()
            for info in await shelf.registry.queries.all(acme):
                kept |= {revision.digest for revision in await shelf.registry.queries.revisions(acme, info.name)}
                for alias in info.aliases:
                    assert (await shelf.registry.resolver.resolve(acme, f"{info.name}:{alias.name}")).revision
            assert kept <= set(self._files.digests())
            async with shelf.database.read() as session:
                deleted = sa.select(RevisionRow.digest).where(RevisionRow.purge_at.is_not(None))
                kept |= set(await session.scalars(deleted))
            assert set(self._files.digests()) == kept

        asyncio.run(self.do(check, "")())


def kill_everywhere(harness: Harness, prepare: Change, change: Change, step: int) -> int:
    """Kill the change at every `step`th moment, each time on a new adapter; the number of kills."""
    whole = harness.adapter(prepare)
    before = harness.rows(whole)
    asyncio.run(harness.do(change, whole)())
    after = harness.rows(whole)
    assert before != after
    for kills, lives in enumerate(count(0, step)):
        name = harness.adapter(prepare)
        survived = survives(harness.do(change, name), lives)
        rows = harness.rows(name)
        if survived:
            assert rows == after
            return kills
        assert rows in (before, after) or change is delete_for_good, f"half a change after {lives} steps"
    raise AssertionError("count() does not end")


@pytest.fixture
def harness(url: str, tmp_path: Path) -> Harness:
    (tmp_path / "contents").mkdir()
    return Harness(url, tmp_path / "contents")


@pytest.mark.parametrize("what", ["promote", "delete", "delete for good"])
def test_a_change_is_made_whole_or_not_at_all(harness: Harness, what: str) -> None:
    assert kill_everywhere(harness, *CHANGES[what], step=29) >= 2
    harness.restart()


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_made_whole_or_not_at_all_at_every_await(harness: Harness, what: str) -> None:
    kills = kill_everywhere(harness, *CHANGES[what], step=1)
    harness.restart()
    print(f"{what}: killed at {kills} moments")
    assert kills > 20
