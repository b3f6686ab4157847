"""Transactions: all or nothing, one writer at a time on SQLite, snapshots that cannot write."""

import asyncio

import pytest
import sqlalchemy as sa

from loramux.records import Database, ProjectId, RecordsUnavailable, RowRefused, TenantId
from loramux.records import database as database_module
from loramux.records.models import TenantRow
from loramux.records.tenancy_models import ProjectRow

pytestmark = pytest.mark.anyio


def tenant(name: str) -> TenantRow:
    return TenantRow(id=TenantId(f"tenant_{name}"), name=name, tier="standard", created_at=1)


async def names(database: Database) -> list[str]:
    async with database.read() as session:
        return sorted(await session.scalars(sa.select(TenantRow.name)))


async def add(database: Database, *rows: object, then: BaseException | None = None) -> None:
    async with database.begin() as session:
        for row in rows:
            session.add(row)
            await session.flush()
        if then is not None:
            raise then


async def test_a_block_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        await add(database, tenant("a"), then=ZeroDivisionError())
    await add(database, tenant("b"))
    assert await names(database) == ["b"]


async def test_a_cancelled_block_leaves_nothing(database: Database) -> None:
    flushed = asyncio.Event()

    async def write() -> None:
        async with database.begin() as session:
            session.add(tenant("a"))
            await session.flush()
            flushed.set()
            await asyncio.sleep(60)

    writing = asyncio.create_task(write())
    await flushed.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await add(database, tenant("b"))
    assert await names(database) == ["b"]


async def test_a_broken_constraint_raises(database: Database) -> None:
    with pytest.raises(RowRefused):
        await add(database, tenant("a"), TenantRow(id=TenantId("tenant_b"), name="a", tier="standard", created_at=1))
    assert await names(database) == []


async def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(RowRefused):
        async with database.begin() as session:
            session.add(ProjectRow(id=ProjectId("p"), tenant_id=TenantId("nobody"), name="p", created_at=1))


async def test_a_reader_cannot_write(database: Database) -> None:
    async def write() -> None:
        async with database.read() as session:
            session.add(tenant("a"))
            await session.flush()

    with pytest.raises((sa.exc.DBAPIError, RecordsUnavailable), match=r"read-?only"):
        await write()
    assert await names(database) == []


async def test_a_reader_sees_one_snapshot(database: Database) -> None:
    async with database.read() as session:
        before = list(await session.scalars(sa.select(TenantRow.name)))
        await add(database, tenant("a"))
        after = list(await session.scalars(sa.select(TenantRow.name)))
    assert before == after == []
    assert await names(database) == ["a"]


async def test_writers_of_several_processes_take_turns(url: str) -> None:
    """Read, wait, write: with a lock taken only at the write, SQLite would refuse most of these as stale."""
    databases = [Database(url) for _ in range(4)]

    async def read_then_write(database: Database, number: int) -> None:
        async with database.begin() as session:
            await session.scalars(sa.select(TenantRow))
            await asyncio.sleep(0.01)
            session.add(tenant(f"t{number}"))

    await asyncio.gather(*(read_then_write(databases[number % 4], number) for number in range(12)))
    assert len(await names(databases[0])) == 12
    for database in databases:
        await database.close()


async def test_sqlite_is_durable_and_strict(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    async with database.begin() as session:
        pragmas = {
            name: await session.scalar(sa.text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout", "recursive_triggers")
        }
    await database.close()
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 30_000,
        "recursive_triggers": 1,
    }


async def test_a_database_locked_for_too_long_is_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.05)
    first, second = Database(sqlite_url), Database(sqlite_url)
    async with first.begin() as session:
        session.add(tenant("a"))
        await session.flush()
        with pytest.raises(RecordsUnavailable, match="locked"):
            await add(second, tenant("b"))
    await first.close()
    await second.close()


async def test_an_unreachable_server_is_unavailable() -> None:
    database = Database("postgresql://nobody@127.0.0.1:9/none")
    with pytest.raises(RecordsUnavailable, match="does not answer"):
        await add(database, tenant("a"))
    await database.close()
