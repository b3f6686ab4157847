"""Storage and residency on the bill: every second of every revision and every pin, once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from billed import DAY, NOVEMBER, SECOND, Clock

from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, RevisionContent
from loramux.records.aliases import Stamp
from loramux.records.ledger import LedgerEntry, LedgerRepository
from loramux.records.models import RevisionRow
from loramux.records.pins import UNPINNED, PinRepository
from loramux.usage import Usage
from loramux.usage.holdings import SETTLING, HoldingMeter

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
        registered = await AdapterRepository(session, who.tenant).register(name, content, Stamp(database.now(), "k"))
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


async def test_whole_days_and_the_days_it_came_and_went(database: Database, acme: Principal, clock: Clock) -> None:
    meter = HoldingMeter(database, "storage")
    clock.now += DAYS // 2
    await upload(database, acme)
    assert await meter.accrue() == 0
    clock.now += 2 * DAYS + SETTLING
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


async def test_a_day_is_counted_once_by_however_many_servers(
    url: str, database: Database, acme: Principal, clock: Clock
) -> None:
    for name in "abc":
        await upload(database, acme, name)
    clock.now += 5 * DAYS + SETTLING
    others = [Database(url, clock=clock) for _ in range(4)]
    written = await asyncio.gather(*(HoldingMeter(one, "storage").accrue() for one in others))
    for one in others:
        await one.close()
    assert sum(written) == 15
    assert sum(entry.adapter_byte_seconds for entry in await entries(database)) == 15 * SIZE * DAY


async def test_what_comes_back_is_not_charged_for_its_absence(
    database: Database, acme: Principal, clock: Clock
) -> None:
    await upload(database, acme)
    clock.now += DAYS
    await delete(database, acme)
    await HoldingMeter(database, "storage").accrue()
    clock.now += 10 * DAYS
    await upload(database, acme)
    clock.now += DAYS + SETTLING
    await HoldingMeter(database, "storage").accrue()
    assert sum(entry.adapter_byte_seconds for entry in await entries(database)) == 2 * SIZE * DAY


async def test_a_pin_is_charged_while_it_stands_and_each_of_several(
    database: Database, acme: Principal, clock: Clock
) -> None:
    usage, revision = Usage(database), await upload(database, acme)
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
    clock.now = (clock.now // DAYS + 2) * DAYS + SETTLING
    await asyncio.gather(*(usage.accrue() for _ in range(3)))
    stood += (clock.now - SETTLING - again) // SECOND
    pinned = [entry for entry in await entries(database) if entry.kind == "residency"]
    assert sum(entry.adapter_resident_byte_seconds for entry in pinned) == SIZE * stood
    assert sum(entry.adapter_byte_seconds for entry in pinned) == 0
    assert {(entry.model, entry.status, entry.tenant_id) for entry in pinned} == {("acme/a@1", "pinned", acme.tenant)}
    assert len({entry.event_id for entry in pinned}) == len(pinned) == 5
    assert await usage.verify_chain() == len(await entries(database))
    assert await usage.accrue() == 0
