"""Transactions: all or nothing, one writer at a time on SQLite, snapshots that cannot write."""

import asyncio

import pytest
import sqlalchemy as sa
from listening import until

from loramux.common.identity import ProjectId, TenantId
from loramux.common.jobs import work_for
from loramux.data.records import database as database_module
from loramux.data.records.database import SHARES, Database
from loramux.data.records.errors import RecordsUnavailable, RowRefused, ValueRefused
from loramux.data.records.tenants import ProjectRow, TenantRow

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


async def test_transaction_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        await add(database, tenant("a"), then=ZeroDivisionError())
    await add(database, tenant("b"))
    assert await names(database) == ["b"]


async def test_text_with_a_nul_is_the_callers_mistake_or_finds_nothing(database: Database) -> None:
    """PostgreSQL holds no NUL in a text, SQLite does: neither is an error of the server's."""

    async def look_up() -> list[str]:
        async with database.read() as session:
            return list(await session.scalars(sa.select(TenantRow.name).where(TenantRow.name == "a\0b")))

    if database.url.get_backend_name() == "sqlite":
        assert await look_up() == []
        return
    with pytest.raises(ValueRefused) as refusal:
        await look_up()
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_value")


async def test_transaction_that_is_cancelled_leaves_nothing(database: Database) -> None:
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


async def test_broken_constraint_raises_row_refused(database: Database) -> None:
    with pytest.raises(RowRefused):
        await add(database, tenant("a"), TenantRow(id=TenantId("tenant_b"), name="a", tier="standard", created_at=1))
    assert await names(database) == []


async def test_refused_row_costs_no_connection(database: Database) -> None:
    closed = []
    sa.event.listen(database._writer.sync_engine, "invalidate", lambda *_: closed.append("a connection"))
    with pytest.raises(RowRefused):
        async with database.begin() as session:  # the commit sends the row
            session.add(ProjectRow(id=ProjectId("p"), tenant_id=TenantId("nobody"), name="p", created_at=1))
    assert closed == []
    await add(database, tenant("a"))
    assert await names(database) == ["a"]


async def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(RowRefused):
        async with database.begin() as session:
            session.add(ProjectRow(id=ProjectId("p"), tenant_id=TenantId("nobody"), name="p", created_at=1))


async def test_read_transaction_cannot_write(database: Database) -> None:
    async def write() -> None:
        async with database.read() as session:
            session.add(tenant("a"))
            await session.flush()

    with pytest.raises((sa.exc.DBAPIError, RecordsUnavailable), match=r"read-?only"):
        await write()
    assert await names(database) == []


async def test_database_in_full_use_is_reachable(database: Database) -> None:
    """There are as many transactions as the pools have connections; a probe that shared the pools would wait."""
    entered, leave = asyncio.Semaphore(0), asyncio.Event()

    async def occupy() -> None:
        async with database.read() as session:
            await session.scalars(sa.select(TenantRow.name))
            entered.release()
            await leave.wait()

    number = 4 if database.url.get_backend_name() == "sqlite" else 20
    tasks = [asyncio.create_task(occupy()) for _ in range(number)]
    for _ in tasks:
        await entered.acquire()
    assert await database.is_reachable()
    leave.set()
    await asyncio.gather(*tasks)


async def test_read_transaction_sees_one_snapshot(database: Database) -> None:
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


async def test_sqlite_locked_for_too_long_is_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.05)
    first, second = Database(sqlite_url), Database(sqlite_url)
    async with first.begin() as session:
        session.add(tenant("a"))
        await session.flush()
        with pytest.raises(RecordsUnavailable, match="locked"):
            await add(second, tenant("b"))
    await first.close()
    await second.close()


async def test_row_locked_for_too_long_is_unavailable(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.2)
    with request.getfixturevalue("postgres").database() as url:
        first, second = Database(url), Database(url)
        async with first.begin() as session:
            await session.execute(sa.text("UPDATE tiers SET weight = 2"))
            with pytest.raises(RecordsUnavailable, match="lock timeout"):
                async with second.begin() as other:
                    await other.execute(sa.text("UPDATE tiers SET weight = 3"))
        for database in (first, second):
            await database.close()


async def test_unreachable_server_is_unavailable() -> None:
    database = Database("postgresql://nobody@127.0.0.1:9/none")
    with pytest.raises(RecordsUnavailable, match="does not answer"):
        await add(database, tenant("a"))
    await database.close()


async def test_cancelled_writer_leaves_no_lock_while_its_traceback_lives(database: Database) -> None:
    """A cursor in the traceback would keep SQLite's closed connection, and with it the write lock."""
    slow = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 10000000) SELECT max(x) FROM c"
    written = asyncio.Event()

    async def write() -> None:
        async with database.begin() as session:
            session.add(tenant("cancelled"))
            await session.flush()
            written.set()
            await session.execute(sa.text(slow))

    writing = asyncio.create_task(write())
    await written.wait()
    await asyncio.sleep(0.05)  # the statement has begun, and takes more than a second
    writing.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await writing
    async with asyncio.timeout(60):
        await add(database, tenant("next"))
    assert await names(database) == ["next"]
    del cancelled


async def test_slow_statements_of_one_tenant_leave_connections_to_others(database: Database) -> None:
    goes_on, others_turn, holding = asyncio.Event(), asyncio.Event(), list[str]()

    async def hold(tenant: str) -> None:
        work_for(tenant)
        async with database.read() as session:
            await session.execute(sa.select(1))
            holding.append(tenant)
            if tenant == "other":
                others_turn.set()
            await goes_on.wait()

    slow = [asyncio.create_task(hold("slow")) for _ in range(50)]
    most = SHARES[database.url.get_backend_name()][1]
    async with asyncio.timeout(30):
        await until(lambda: holding.count("slow") == most)
        other = asyncio.create_task(hold("other"))
        await others_turn.wait()
        async with database.read() as session:  # the server's own work
            assert await session.scalar(sa.select(1)) == 1
    assert holding.count("slow") == most
    goes_on.set()
    await asyncio.gather(other, *slow)
    assert holding.count("slow") == 50


async def test_nested_transactions_of_one_tenant_do_not_wait_for_each_other(database: Database) -> None:
    async def nest() -> None:
        work_for("acme")
        async with database.read() as outer:
            await outer.execute(sa.select(1))
            await asyncio.sleep(0.01)
            async with database.read() as inner:
                await inner.execute(sa.select(1))

    async with asyncio.timeout(30):
        await asyncio.gather(*(nest() for _ in range(SHARES[database.url.get_backend_name()][1])))


async def test_wait_for_a_tenants_share_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.05)
    goes_on = asyncio.Event()

    async def hold() -> None:
        work_for("slow")
        async with database.read() as session:
            await session.execute(sa.select(1))
            await goes_on.wait()

    share = SHARES[database.url.get_backend_name()][1]
    outcomes = [asyncio.create_task(hold()) for _ in range(share + 1)]
    done, _ = await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    goes_on.set()
    [refused] = done
    assert isinstance(refused.exception(), RecordsUnavailable)
    await asyncio.gather(*(one for one in outcomes if one is not refused))
