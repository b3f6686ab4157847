"""A budget that is made within its period counts the whole of it, as if it had been there from the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import date

import pytest
import sqlalchemy as sa
from billing_harness import DAY, NOVEMBER, SECOND, Clock, use

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.limits import AlertRow
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import Catalog, PlanPrices, PlanSpec, PriceSpec
from loramux.money.billing.service import BillingService
from loramux.money.limits.errors import BudgetSpent
from loramux.money.limits.limits import Limits
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

pytestmark = pytest.mark.anyio

NANO = 10**9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]], database: Database, clock: Clock) -> Principal:
    """Has a plan whose output is dearer from the 20th on."""
    acme = await enrol("acme")
    prices = (
        PriceSpec(meter="input_uncached", price="0.001", valid_from=date(2026, 11, 1)),
        PriceSpec(meter="output", price="0.002", valid_from=date(2026, 11, 1)),
        PriceSpec(meter="output", price="0.005", valid_from=date(2026, 11, 20)),
    )
    await Catalog(database).apply([PlanSpec(name="basic", currency="EUR", prices=prices)])
    await Catalog(database).subscribe("acme", "basic", NOVEMBER)
    return acme


@pytest.fixture
def limits(tenants: Tenants, database: Database) -> Limits:
    return Limits(tenants.changes, PlanPrices(database))


@pytest.fixture
async def usage(database: Database, acme: Principal) -> AsyncIterator[UsageService]:
    usage = UsageService(database, PlanPrices(database))
    await usage.start()
    yield usage
    await usage.stop()


async def spent(limits: Limits, acme: Principal, subject: str) -> dict[str, tuple[int, int]]:
    return {one.budget.period: (one.spent, one.held) for one in await limits.budgets(acme.tenant, [subject])}


def at(day: int) -> int:
    return NOVEMBER.starts_at + (day - 1) * DAY * SECOND + 1


async def test_budget_made_in_mid_month_has_spent_what_the_invoice_says(
    usage: UsageService, acme: Principal, limits: Limits, database: Database, clock: Clock
) -> None:
    clock.now = at(3)
    await use(usage, acme, "cheap", 1000, 0, 500)
    clock.now = at(25)
    await use(usage, acme, "dear", 1000, 400, 500)
    clock.now = at(26)
    await use(usage, acme, "today", 10, 0, 10)
    for period in ("day", "month", "total"):
        await limits.put_budget(acme.tenant, acme.tenant, period, 100 * NANO)
    invoice = await BillingService(database).invoice("acme", NOVEMBER)
    month = 2_000_000_000 + 600 * 10**6 + 2_500_000_000 + 60_000_000
    assert invoice.total * NANO == month
    found = await spent(limits, acme, acme.tenant)
    assert found == {"day": (60_000_000, 0), "month": (month, 0), "total": (month, 0)}


async def test_budget_made_late_equals_one_that_was_there_from_the_start(
    usage: UsageService, acme: Principal, limits: Limits, clock: Clock
) -> None:
    await limits.put_budget(acme.tenant, acme.tenant, "month", 100 * NANO)
    for day, id in ((4, "a"), (19, "b"), (20, "c"), (27, "d")):
        clock.now = at(day)
        await use(usage, acme, id, 7 * day, day, 3 * day)
    early = await spent(limits, acme, acme.tenant)
    await limits.remove_budget(acme.tenant, acme.tenant, "month")
    await limits.put_budget(acme.tenant, acme.tenant, "month", 100 * NANO)
    assert await spent(limits, acme, acme.tenant) == early


async def test_budget_made_in_mid_month_leaves_out_the_month_before_and_refuses_what_is_beyond_it(
    usage: UsageService, acme: Principal, limits: Limits, clock: Clock
) -> None:
    clock.now = at(30)
    await use(usage, acme, "november", 0, 0, 1000)
    clock.now = NOVEMBER.ends_at
    await use(usage, acme, "december", 0, 0, 10)
    await limits.put_budget(acme.tenant, acme.tenant, "month", 60_000_000)
    assert await spent(limits, acme, acme.tenant) == {"month": (50_000_000, 0)}
    with pytest.raises(BudgetSpent, match=r"0\.05 EUR is spent"):
        await use(usage, acme, "beyond", 0, 0, 3)


async def test_budget_of_a_key_counts_its_rotations_and_the_keys_that_it_made_and_no_other(
    usage: UsageService, acme: Principal, limits: Limits, tenants: Tenants
) -> None:
    keys = (await tenants.account("acme")).keys
    first, secret = await keys.create(KeyRequest(scopes=frozenset({"keys", "inference"})))
    own = tenants.account_of(await tenants.authenticator.authenticate(secret))
    made, _ = await own.keys.create(KeyRequest(scopes=frozenset({"inference"})))
    rotated, _ = await keys.rotate(first.id, 60)
    other, _ = await keys.create(KeyRequest())
    for number, key in enumerate((first, made, rotated, other)):
        await use(usage, acme, f"r{number}", 10**number, 0, 0, key_id=key.id, project_id=acme.project)
    await limits.put_budget(acme.tenant, rotated.id, "month", 10 * NANO)
    await limits.put_budget(acme.tenant, acme.project, "month", 10 * NANO)
    assert await spent(limits, acme, first.id) == {"month": (111_000_000, 0)}
    assert await spent(limits, acme, acme.project) == {"month": (1_111_000_000, 0)}


async def test_budget_holds_and_then_counts_the_requests_that_are_open_when_it_is_made(
    usage: UsageService, acme: Principal, limits: Limits, database: Database
) -> None:
    opened = OpenedRequest(
        id="open",
        tenant_id=acme.tenant,
        key_id=acme.key_id,
        model="base",
        adapter_digest=None,
        base_model="base",
        tier="standard",
        prompt_tokens=10,
        max_tokens=100,
    )
    await usage.open(opened)
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO, [1])
    # output is held at the dearest price within the longest request's life
    assert await spent(limits, acme, acme.tenant) == {"month": (0, 210_000_000 + 2)}
    delivered = TokenCounts(prompt=10, output=20)
    await usage.settle(Settlement(request_id="open", ended_by="completion", finish_reason="stop", delivered=delivered))
    assert await spent(limits, acme, acme.tenant) == {"month": (50_000_000, 0)}
    async with database.read() as session:
        assert [one.spent for one in await session.scalars(sa.select(AlertRow))] == [50_000_000]


async def test_budget_alerts_of_thresholds_that_are_passed_already_are_written_when_it_is_made(
    usage: UsageService, acme: Principal, limits: Limits, database: Database
) -> None:
    await use(usage, acme, "r", 0, 0, 350)
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO, [50, 70, 90])
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO, [50, 70, 90])
    async with database.read() as session:
        assert sorted(one.percent for one in await session.scalars(sa.select(AlertRow))) == [50, 70]


def left(id: str, **tokens: TokenCounts) -> Settlement:
    return Settlement(request_id=id, ended_by="caller", finish_reason="cancelled", **tokens)


async def open_only(usage: UsageService, acme: Principal, id: str, prompt: int, most: int) -> None:
    await usage.open(
        OpenedRequest(
            id=id,
            tenant_id=acme.tenant,
            key_id=acme.key_id,
            model="base",
            adapter_digest=None,
            base_model="base",
            tier="standard",
            prompt_tokens=prompt,
            max_tokens=most,
        )
    )


async def test_work_for_a_caller_that_left_counts_against_budgets_and_is_not_billed(
    usage: UsageService, acme: Principal, limits: Limits, database: Database
) -> None:
    """A client that drops each connection before its whole answer must not use the engine without end."""
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    await open_only(usage, acme, "whole", 400, 100)
    entry = await usage.settle(left("whole", undelivered=TokenCounts(prompt=400, output=50)))
    assert (entry.billed, entry.waived) == (TokenCounts(), TokenCounts(prompt=400, output=50))
    await open_only(usage, acme, "streamed", 100, 100)
    read, rest = TokenCounts(prompt=100, output=10), TokenCounts(output=5)
    assert (await usage.settle(left("streamed", delivered=read, undelivered=rest))).billed == read
    [state] = await limits.budgets(acme.tenant)
    assert (state.spent, state.held, state.abandoned) == (500_000_000 + 120_000_000 + 10_000_000, 0, 510_000_000)
    with pytest.raises(BudgetSpent):
        await open_only(usage, acme, "more", 400, 0)
    assert (await BillingService(database).invoice("acme", NOVEMBER)).total * NANO == 120_000_000
    await limits.remove_budget(acme.tenant, acme.tenant, "month")
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    [again] = await limits.budgets(acme.tenant)
    assert (again.spent, again.abandoned) == (state.spent, state.abandoned), "a later budget counts the same"


async def test_prompt_of_several_choices_that_were_left_counts_once(
    usage: UsageService, acme: Principal, limits: Limits
) -> None:
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    await open_only(usage, acme, "four", 100, 40)
    await usage.settle(left("four", undelivered=TokenCounts(prompt=400, cached=300, output=40)))
    [state] = await limits.budgets(acme.tenant)
    assert (state.spent, state.abandoned) == (180_000_000, 180_000_000)
    await limits.remove_budget(acme.tenant, acme.tenant, "month")
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    assert await spent(limits, acme, acme.tenant) == {"month": (180_000_000, 0)}


async def test_shadow_and_failure_of_the_platform_cost_no_budget(
    usage: UsageService, acme: Principal, limits: Limits
) -> None:
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    await open_only(usage, acme, "failed", 100, 0)
    computed = TokenCounts(prompt=100)
    failed = Settlement(request_id="failed", ended_by="platform", finish_reason="error", undelivered=computed)
    await usage.settle(failed)
    shadow = OpenedRequest(
        id="shadow",
        tenant_id=acme.tenant,
        key_id=acme.key_id,
        model="base",
        adapter_digest=None,
        base_model="base",
        tier="standard/shadow",
        prompt_tokens=100,
        max_tokens=0,
    )
    await usage.open(shadow)
    await usage.settle(left("shadow", undelivered=computed))
    assert await spent(limits, acme, acme.tenant) == {"month": (0, 0)}
    await limits.remove_budget(acme.tenant, acme.tenant, "month")
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    assert await spent(limits, acme, acme.tenant) == {"month": (0, 0)}


async def test_work_for_a_caller_that_left_is_billed_where_the_setting_says_so(
    database: Database, acme: Principal, limits: Limits
) -> None:
    usage = UsageService(database, PlanPrices(database), bill_abandoned=True)
    await usage.start()
    await limits.put_budget(acme.tenant, acme.tenant, "month", NANO)
    await open_only(usage, acme, "four", 100, 40)
    entry = await usage.settle(left("four", undelivered=TokenCounts(prompt=400, cached=300, output=40)))
    await usage.stop()
    assert entry.billed == TokenCounts(prompt=100, output=40)
    assert entry.waived == TokenCounts(prompt=300, cached=300)
    [state] = await limits.budgets(acme.tenant)
    assert (state.spent, state.abandoned) == (180_000_000, 0)
    assert (await BillingService(database).invoice("acme", NOVEMBER)).total * NANO == 180_000_000
