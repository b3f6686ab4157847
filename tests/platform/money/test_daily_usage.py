"""Sums of the ledger by day: equal to the ledger at every moment, made again from it, and compared by reconcile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from billing_harness import DAY, DECEMBER, NOVEMBER, SECOND, Clock, give_plan, use

from loramux.common.identity import Principal
from loramux.data.records.database import Database
from loramux.data.records.usage import DailyUsageRepository, DailyUsageRow, UsageSegmentRow
from loramux.money.billing.costs import CostPage, CostsQuery
from loramux.money.billing.errors import LedgerAltered
from loramux.money.billing.reconcile import reconcile
from loramux.money.billing.service import BillingService
from loramux.money.usage.query import UsageQuery, UsageResult
from loramux.money.usage.service import UsageService

pytestmark = pytest.mark.anyio


class Ledger:
    """Entries of a tenant with a plan, written at the times that the test says."""

    def __init__(self, database: Database, acme: Principal) -> None:
        self.database, self.acme, self.clock = database, acme, Clock()
        database.now = self.clock
        self.usage, self.billing = UsageService(database), BillingService(database)
        self.numbers = iter(range(10_000))

    async def use(self, at: int, model: str = "acme/a@1", output: int = 7_000) -> str:
        """`at`: seconds after the beginning of November."""
        self.clock.now = NOVEMBER.starts_at + at * SECOND
        number = next(self.numbers)
        return await use(self.usage, self.acme, f"r{number}", 100_000 + number, 1_000, output, model=model)

    async def advance(self, most: int) -> int:
        async with self.database.begin() as session:
            return await DailyUsageRepository(session).advance(most)

    async def segments(self) -> list[tuple[int, int]]:
        async with self.database.read() as session:
            rows = await session.execute(sa.select(UsageSegmentRow.first_sequence, UsageSegmentRow.last_sequence))
            return sorted(tuple(row) for row in rows)

    async def costs(self, *group_by: str, **facts: object) -> CostPage:
        start = NOVEMBER.starts_at // SECOND
        end = DECEMBER.next.starts_at // SECOND
        query = CostsQuery(start_time=start, end_time=end, group_by=group_by, limit=180)
        return await self.billing.costs(self.acme, msgspec.structs.replace(query, **facts))

    async def used(self, *group_by: str, **facts: object) -> list[UsageResult]:
        query = UsageQuery(start_time=NOVEMBER.starts_at // SECOND, group_by=group_by, limit=31)
        page = await self.usage.completions(self.acme, msgspec.structs.replace(query, **facts))
        return [result for bucket in page.data for result in bucket.results]


@pytest.fixture
async def ledger(database: Database, tmp_path: Path, enrol: Callable[[str], Awaitable[Principal]]) -> Ledger:
    made = Ledger(database, await enrol("acme"))
    await give_plan(database, tmp_path)
    return made


@pytest.fixture(autouse=True)
async def writing(ledger: Ledger) -> object:
    await ledger.usage.start()
    yield
    await ledger.usage.stop()


async def test_daily_sums_change_no_answer_however_far_they_are(ledger: Ledger) -> None:
    """Two months, a late entry of a server whose clock is slow, a correction, a closed month."""
    first = await ledger.use(10)
    for day in (0, 1, 1, 13, 29):
        await ledger.use(day * DAY + 5, model=f"acme/a@{day}")
    await ledger.use(30 * DAY + 1, model="acme/b@1")
    await ledger.use(30 * DAY - 1, model="acme/late@1")
    await ledger.use(30 * DAY + 2, model="acme/b@1")
    ledger.clock.now = DECEMBER.starts_at + DAY * SECOND
    [frozen] = await ledger.billing.close(NOVEMBER)
    await ledger.billing.correct(first, {"output_tokens": -1_000}, "goodwill")

    async def answers() -> list[object]:
        groups = ((), ("model",), ("model", "line_item"), ("project_id", "api_key_id"))
        costs = [await ledger.costs(*group_by) for group_by in groups]
        return [costs, await ledger.used("model"), await ledger.used(), await ledger.usage.rows(ledger.acme.tenant)]

    before = await answers()
    while await ledger.advance(2):
        assert await answers() == before
    assert await ledger.segments() == [(1, 2), (3, 4), (5, 5), (6, 6), (7, 9), (10, 10)]
    assert (await reconcile(ledger.database)).drift_tokens == 0
    total = sum(result.amount.value for bucket in (await ledger.costs()).data for result in bucket.results)
    assert total == frozen.total + (await ledger.billing.invoice("acme", DECEMBER)).total


async def test_reconcile_finds_sums_that_are_not_the_ledgers_and_rebuild_mends_them(ledger: Ledger) -> None:
    for day in range(3):
        await ledger.use(day * DAY)
    assert await ledger.usage.sum_days() == 3
    right = await ledger.costs("model")
    async with ledger.database.begin() as session:
        more = DailyUsageRow.output_tokens + 1
        await session.execute(sa.update(DailyUsageRow).where(DailyUsageRow.segment == 2).values(output_tokens=more))
    with pytest.raises(LedgerAltered, match="acme/a@1 in the segment of entry 2 are not the ledger's"):
        await reconcile(ledger.database)
    assert await ledger.usage.rebuild_days() == 3
    assert await ledger.costs("model") == right
    await reconcile(ledger.database)
    async with ledger.database.begin() as session:
        await session.execute(sa.delete(UsageSegmentRow).where(UsageSegmentRow.first_sequence == 2))
    with pytest.raises(LedgerAltered, match="go on with entry 3, and 2 comes next"):
        await reconcile(ledger.database)


async def test_top_models_are_named_and_the_others_added_up(ledger: Ledger) -> None:
    for number, output in enumerate((5_000, 9_000, 1_000, 700)):
        await ledger.use(number * DAY, model=f"acme/m{number}@1", output=output)
    await ledger.advance(2)
    used = await ledger.used("model", top_models=2)
    assert {result.model for result in used} == {"acme/m0@1", "acme/m1@1", None}
    assert sum(result.output_tokens for result in used if result.model is None) == 1_700
    some, whole = await ledger.costs("model", top_models=2), await ledger.costs()
    for divided, bucket in zip(some.data, whole.data, strict=True):
        assert sum(one.amount.value for one in divided.results) == sum(one.amount.value for one in bucket.results)
    assert {one.model for bucket in some.data for one in bucket.results} == {"acme/m0@1", "acme/m1@1", None}


async def test_day_costs_the_same_alone_and_in_the_month_and_however_divided(ledger: Ledger) -> None:
    for number in range(9):
        await ledger.use(number // 3 * DAY, model=f"acme/m{number % 4}@1", output=1_000 + 37 * number)
    whole = {bucket.start_time: bucket.results for bucket in (await ledger.costs("model")).data}
    undivided = {bucket.start_time: bucket.results for bucket in (await ledger.costs()).data}
    for start, results in whole.items():
        alone = await ledger.costs("model", start_time=start, end_time=start + DAY)
        assert alone.data[0].results == results
        assert sum(one.amount.value for one in results) == sum(one.amount.value for one in undivided[start])
