"""The ledger: gap-free, chained, append-only by the database itself, and every alteration is found."""

import asyncio
import hashlib
import json
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa

from loramux.common.identity import Principal, TenantId
from loramux.data.records.database import Database
from loramux.data.records.errors import ChainBroken
from loramux.data.records.ledger import GENESIS, EntryContent, LedgerEntry, LedgerHeadRow, LedgerRepository

pytestmark = pytest.mark.anyio

UNLOCK = {
    "sqlite": [f"DROP TRIGGER ledger_entries_{name}" for name in ("no_update", "no_delete", "no_gap")],
    "postgresql": ["ALTER TABLE ledger_entries DISABLE TRIGGER USER"],
}

TAMPERINGS = [
    ("UPDATE ledger_entries SET output_tokens = 0 WHERE sequence = 3", 3),
    ("UPDATE ledger_entries SET model = 'other/x@1' WHERE sequence = 1", 1),
    ("UPDATE ledger_entries SET prev_hash = hash WHERE sequence = 4", 4),
    ("UPDATE ledger_entries SET user_id = 'somebody else' WHERE sequence = 3", 3),
    ("UPDATE ledger_entries SET created_at = created_at - 1 WHERE sequence = 5", 5),
    ("UPDATE ledger_entries SET event_id = 'evt_0' WHERE sequence = 2", 2),
    ("DELETE FROM ledger_entries WHERE sequence = 2", 2),
    ("DELETE FROM ledger_entries WHERE sequence = 5", 5),
    ("UPDATE ledger_head SET sequence = 6", 6),
    ("DELETE FROM ledger_entries", 5),
]


def draft(tenant: TenantId, number: int, **changes: object) -> EntryContent:
    entry = EntryContent(
        kind="usage",
        tenant_id=tenant,
        key_id="key",
        request_id=f"request-{number}",
        model="acme/café@1",
        adapter_digest=None,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=number,
        finish_reason="stop",
        status="completed",
        created_at=1_000 + number,
    )
    return msgspec.structs.replace(entry, **changes)


async def append(database: Database, *drafts: EntryContent, then: Exception | None = None) -> list[LedgerEntry]:
    async with database.begin() as session:
        ledger = LedgerRepository(session)
        entries = await ledger.append(await ledger.lock(), drafts)
        if then is not None:
            raise then
    return entries


async def verify(database: Database) -> int:
    async with database.read() as session:
        return (await LedgerRepository(session).verify()).sequence


@pytest.fixture
async def acme(enrol: Callable[[str], asyncio.Future[Principal]]) -> TenantId:
    return (await enrol("acme")).tenant


async def test_an_auditor_can_recompute_a_hash(database: Database, acme: TenantId) -> None:
    first, second = await append(database, draft(acme, 1), draft(acme, 2))
    fields = {
        "adapter_digest": None,
        "cached_tokens": 4,
        "created_at": 1002,
        "event_id": "evt_" + hashlib.sha256(b"usage:request-2").hexdigest()[:32],
        "finish_reason": "stop",
        "input_tokens": 10,
        "key_id": "key",
        "kind": "usage",
        "model": "acme/café@1",
        "output_tokens": 2,
        "prev_hash": first.hash,
        "request_id": "request-2",
        "sequence": 2,
        "status": "completed",
        "tenant_id": acme,
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert second.hash == hashlib.sha256(text.encode()).hexdigest()
    assert first.prev_hash == GENESIS
    assert await verify(database) == 2


async def test_a_rollback_leaves_no_gap(database: Database, acme: TenantId) -> None:
    await append(database, draft(acme, 1))
    with pytest.raises(ZeroDivisionError):
        await append(database, draft(acme, 2), then=ZeroDivisionError())
    assert [entry.sequence for entry in await append(database, draft(acme, 3))] == [2]
    assert await verify(database) == 2


async def test_appenders_on_many_connections_leave_no_gap(url: str, database: Database, acme: TenantId) -> None:
    databases = [Database(url) for _ in range(6)]
    batches = [[draft(acme, 100 * writer + number) for number in range(5)] for writer in range(24)]
    written = await asyncio.gather(*(append(databases[i % 6], *batch) for i, batch in enumerate(batches)))
    assert sorted(entry.sequence for batch in written for entry in batch) == list(range(1, 121))
    assert await verify(database) == 120
    for other in databases:
        await other.close()


async def test_a_long_chain_is_verified_page_by_page(database: Database, acme: TenantId) -> None:
    await append(database, *(draft(acme, number) for number in range(2_500)))
    assert await verify(database) == 2_500


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger_entries SET output_tokens = 0",
        "UPDATE ledger_entries SET output_tokens = 0 WHERE sequence = 1",
        "DELETE FROM ledger_entries",
        "DELETE FROM ledger_entries WHERE sequence = 2",
    ],
)
async def test_rewriting_is_refused(
    database: Database, acme: TenantId, sql: Callable[[str], None], statement: str
) -> None:
    await append(database, draft(acme, 1), draft(acme, 2))
    with pytest.raises(sa.exc.DBAPIError, match="append-only"):
        sql(statement)
    assert await verify(database) == 2


async def test_truncating_is_refused(
    backend: str, database: Database, acme: TenantId, sql: Callable[[str], None]
) -> None:
    if backend == "sqlite":
        pytest.skip("SQLite has no TRUNCATE")
    await append(database, draft(acme, 1))
    with pytest.raises(sa.exc.DBAPIError, match="append-only"):
        sql("TRUNCATE ledger_entries")


@pytest.mark.parametrize("sequence", [0, 2, 4])
async def test_a_gap_or_a_second_one_is_refused(
    database: Database, acme: TenantId, sql: Callable[[str], None], sequence: int
) -> None:
    await append(database, draft(acme, 1), draft(acme, 2))
    with pytest.raises(sa.exc.DBAPIError, match=r"gap-free|pk_ledger_entries"):
        sql(copy_of_the_last(sequence, "'evt_new'"))


async def test_replacing_is_refused(
    backend: str, database: Database, acme: TenantId, sql: Callable[[str], None]
) -> None:
    """SQLite's INSERT OR REPLACE would delete the row that has the event_id without asking a DELETE trigger."""
    if backend == "postgresql":
        pytest.skip("PostgreSQL has no INSERT OR REPLACE")
    await append(database, draft(acme, 1), draft(acme, 2))
    with pytest.raises(sa.exc.DBAPIError, match="append-only"):
        sql(copy_of_the_last(3, "event_id").replace("INSERT", "INSERT OR REPLACE"))
    assert await verify(database) == 2


def copy_of_the_last(sequence: int, event_id: str) -> str:
    rest = (
        "kind, tenant_id, key_id, request_id, model, adapter_digest, input_tokens, cached_tokens, output_tokens,"
        " finish_reason, status, created_at, prev_hash, hash"
    )
    return (
        f"INSERT INTO ledger_entries (sequence, event_id, {rest})"
        f" SELECT {sequence}, {event_id}, {rest} FROM ledger_entries WHERE sequence = 2"
    )


@pytest.mark.parametrize(("statement", "sequence"), TAMPERINGS)
async def test_tampering_is_found(
    backend: str,
    database: Database,
    acme: TenantId,
    sql: Callable[[str], None],
    statement: str,
    sequence: int,
) -> None:
    """The change comes from an administrator who may drop triggers."""
    await append(database, *(draft(acme, number) for number in range(5)))
    for unlock in UNLOCK[backend]:
        sql(unlock)
    sql(statement)
    with pytest.raises(ChainBroken) as broken:
        await verify(database)
    assert broken.value.sequence == sequence


async def test_the_same_event_is_not_written_twice(database: Database, acme: TenantId) -> None:
    await append(database, draft(acme, 1))
    with pytest.raises(Exception, match=r"event_id|append-only"):
        await append(database, draft(acme, 1, output_tokens=99))
    assert await verify(database) == 1


@pytest.mark.parametrize("field", ["input_tokens", "cached_tokens", "output_tokens"])
async def test_quantities_are_not_negative(database: Database, acme: TenantId, field: str) -> None:
    with pytest.raises(Exception, match="ck_ledger_entries"):
        await append(database, draft(acme, 1, **{field: -1}))
    async with database.read() as session:
        assert (await session.get_one(LedgerHeadRow, 1)).sequence == 0
