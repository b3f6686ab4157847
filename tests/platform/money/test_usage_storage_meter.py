"""Storage and residency on the bill: every second of every revision and every pin, once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from billing_harness import DAY, NOVEMBER, SECOND, Clock

from loramux.common.identity import Principal
from loramux.data.records.adapters import AdapterRepository, RevisionContent, RevisionRow, Stamp
from loramux.data.records.contents import register_revision
from loramux.data.records.database import Database
from loramux.data.records.ledger import LedgerEntry, LedgerRepository
from loramux.data.records.pins import UNPINNED, PinRepository
from loramux.money.usage.service import GRACE, StorageMeter, UsageService

pytestmark = pytest.mark.anyio

SIZE = 83_900_000
DAYS = DAY * SECOND


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


async def upload(database: Database, who: Principal, name: str = "a") -> RevisionRow:
    async with database.begin() as session:
        content = RevisionContent(digest="sha256:a", rank=8, size_bytes=SIZE, base="base")
        registered = await register_revision(session, who.tenant, name, content, Stamp(database.now(), "k"))
        return registered[1]


async def delete(database: Database, who: Principal) -> None:
    async with database.begin() as session:
        adapters = AdapterRepository(session, who.tenant)
        adapter = await adapters.lock("a")
        assert adapter is not None
        await adapters.delete(adapter, database.now(), database.now())


async def entries(database: Database) -> list[LedgerEntry]:
    async with database.read() as session:
        return await LedgerRepository(session).after(0, 100)


async def test_storage_meter_bills_whole_days_and_partial_first_and_last_days(
    database: Database, acme: Principal, clock: Clock
) -> None:
    meter = StorageMeter(database, "storage")
    clock.now += DAYS // 2
    await upload(database, acme)
    assert await meter.accrue() == 0
    clock.now += 2 * DAYS + GRACE
    assert await meter.accrue() == 2
    await delete(database, acme)
    gone_after = clock.now
    clock.now += 3 * DAYS
    assert await meter.accrue() == 1
    assert await meter.accrue() == 0
    written = await entries(database)
    lived = (gone_after - (NOVEMBER.starts_at + 14 * DAYS + DAYS // 2)) // SECOND
    assert sum(entry.adapter_byte_seconds for entry in written) == SIZE * lived
    assert [entry.adapter_byte_seconds for entry in written[:2]] == [SIZE * DAY // 2, SIZE * DAY]
    assert {(entry.kind, entry.model, entry.tenant_id) for entry in written} == {("storage", "acme/a@1", acme.tenant)}
    assert [entry.occurred_at // DAYS for entry in written] == sorted({entry.occurred_at // DAYS for entry in written})


async def test_storage_meter_bills_a_day_once_on_several_servers(
    url: str, database: Database, acme: Principal, clock: Clock
) -> None:
    for name in "abc":
        await upload(database, acme, name)
    clock.now += 5 * DAYS + GRACE
    others = [Database(url, clock=clock) for _ in range(4)]
    written = await asyncio.gather(*(StorageMeter(one, "storage").accrue() for one in others))
    for one in others:
        await one.close()
    assert sum(written) == 15
    assert sum(entry.adapter_byte_seconds for entry in await entries(database)) == 15 * SIZE * DAY


async def test_storage_meter_skips_the_time_of_a_deletion(database: Database, acme: Principal, clock: Clock) -> None:
    await upload(database, acme)
    clock.now += DAYS
    await delete(database, acme)
    await StorageMeter(database, "storage").accrue()
    clock.now += 10 * DAYS
    await upload(database, acme)
    clock.now += DAYS + GRACE
    await StorageMeter(database, "storage").accrue()
    assert sum(entry.adapter_byte_seconds for entry in await entries(database)) == 2 * SIZE * DAY


async def test_storage_meter_bills_each_pin_while_it_exists(database: Database, acme: Principal, clock: Clock) -> None:
    usage, revision = UsageService(database), await upload(database, acme)
    since = clock.now
    async with database.begin() as session:
        await PinRepository(session, acme.tenant).add(revision, Stamp(clock.now, "key_1"))
    clock.now += 2 * DAYS + DAYS // 3
    async with database.begin() as session:
        await PinRepository(session, acme.tenant).end([revision.id], UNPINNED, clock.now)
    stood = (clock.now - since) // SECOND
    clock.now += 2 * DAYS
    async with database.begin() as session:
        await PinRepository(session, acme.tenant).add(revision, Stamp(clock.now, "key_1"))
    again = clock.now
    clock.now = (clock.now // DAYS + 2) * DAYS + GRACE
    await asyncio.gather(*(usage.accrue() for _ in range(3)))
    stood += (clock.now - GRACE - again) // SECOND
    pinned = [entry for entry in await entries(database) if entry.kind == "residency"]
    assert sum(entry.adapter_resident_byte_seconds for entry in pinned) == SIZE * stood
    assert sum(entry.adapter_byte_seconds for entry in pinned) == 0
    assert {(entry.model, entry.status, entry.tenant_id) for entry in pinned} == {("acme/a@1", "pinned", acme.tenant)}
    assert len({entry.event_id for entry in pinned}) == len(pinned) == 5
    assert await usage.verify_chain() == len(await entries(database))
    assert await usage.accrue() == 0
