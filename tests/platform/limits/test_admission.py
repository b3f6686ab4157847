"""Limits and budgets in the transactions that open and settle requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import pytest
import sqlalchemy as sa
from flat_prices import FlatPrices

from loramux.limits import (
    BudgetSpent,
    Limits,
    LimitsError,
    RateReached,
    RequestTooLarge,
    Standing,
    TooManyRunning,
)
from loramux.records import Database, Principal
from loramux.records.limit_models import AlertRow, BudgetHoldRow, CounterRow, HoldRow
from loramux.tenants import KeyRequest, Tenants
from loramux.usage import OpenedRequest, Settlement, Usage

pytestmark = pytest.mark.anyio

SECOND = 1_000_000
T0 = 1_700_000_000 * SECOND
ids = count()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]], database: Database) -> Principal:
    clock = [T0]
    database.now = lambda: clock[0]
    database.clock = clock
    return await enrol("acme")


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[Usage]:
    usage = Usage(database, FlatPrices(1, 2))
    await usage.start()
    yield usage
    await usage.stop()


class Caller:
    """Opens and settles requests of 10 + 10 tokens, which may cost 30."""

    def __init__(self, usage: Usage, principal: Principal) -> None:
        self.usage, self.principal = usage, principal

    async def open(self, **changes: object) -> tuple[str, Standing]:
        facts = {"id": f"r{next(ids)}", "prompt_tokens": 10, "max_tokens": 10} | changes
        request = OpenedRequest(
            tenant=self.principal.tenant,
            key_id=self.principal.key_id,
            project_id=self.principal.project,
            tier=self.principal.tier,
            model="tiny",
            adapter_digest=None,
            **facts,
        )
        standing = await self.usage.open(request)
        assert isinstance(standing, Standing)
        return request.id, standing

    async def settle(self, id: str, output: int = 10) -> None:
        end = Settlement(
            request_id=id,
            input_tokens=10,
            cached_tokens=0,
            output_tokens=output,
            finish_reason="stop",
            status="completed",
        )
        await self.usage.settle(end)

    async def try_many(self, number: int) -> tuple[list[str], list[LimitsError]]:
        outcomes = await asyncio.gather(*(self.open() for _ in range(number)), return_exceptions=True)
        admitted = [outcome[0] for outcome in outcomes if not isinstance(outcome, BaseException)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, LimitsError)]
        assert len(admitted) + len(refused) == number, outcomes
        return admitted, refused


@pytest.fixture
def caller(usage: Usage, acme: Principal) -> Caller:
    return Caller(usage, acme)


async def held(database: Database) -> list[int]:
    async with database.read() as session:
        tables = (HoldRow, BudgetHoldRow)
        return [await session.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables]


async def test_without_limits_nothing_is_counted(caller: Caller, database: Database) -> None:
    id, standing = await caller.open()
    assert standing == Standing()
    assert await held(database) == [0, 0]
    await caller.settle(id)
    async with database.read() as session:
        assert (await session.scalars(sa.select(CounterRow))).all() == []


async def test_tokens_are_reserved_and_given_back(limits: Limits, caller: Caller, database: Database) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "tokens_per_minute", 100)
    admitted, refused = await caller.try_many(9)
    assert (len(admitted), {type(error) for error in refused}) == (5, {RateReached})
    assert refused[0].standing.tokens.remaining == 0
    for id in admitted[:2]:
        await caller.settle(id, output=0)
    assert len((await caller.try_many(3))[0]) == 1
    database.clock[0] += 12 * SECOND
    assert len((await caller.try_many(3))[0]) == 1
    with pytest.raises(RequestTooLarge, match="max_tokens"):
        await caller.open(max_tokens=1000)


async def test_requests_are_not_given_back(limits: Limits, caller: Caller) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "requests_per_minute", 3)
    id, standing = await caller.open()
    assert (standing.requests.limit, standing.requests.remaining, standing.requests.reset) == (3, 2, 20 * SECOND)
    await caller.settle(id)
    assert len((await caller.try_many(5))[0]) == 2


async def test_places_among_the_running(limits: Limits, caller: Caller) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "concurrent_requests", 2)
    admitted, refused = await caller.try_many(4)
    assert (len(admitted), {type(error) for error in refused}) == (2, {TooManyRunning})
    await caller.settle(admitted[0])
    await caller.settle(admitted[0])
    assert len((await caller.try_many(4))[0]) == 1


async def test_every_subject_of_a_request_is_asked_and_all_or_none_is_taken(
    limits: Limits, caller: Caller, tenants: Tenants
) -> None:
    mine = caller.principal
    await limits.put(mine.tenant, mine.tenant, "concurrent_requests", 5)
    await limits.put(mine.tenant, mine.project, "concurrent_requests", 3)
    await limits.put(mine.tenant, mine.key_id, "concurrent_requests", 1)
    admitted, refused = await caller.try_many(3)
    assert (len(admitted), "Your key" in str(refused[0])) == (1, True)
    _, secret = await (await tenants.account("acme")).keys.create(KeyRequest())
    other = Caller(caller.usage, await tenants.authenticate(secret))
    admitted, refused = await other.try_many(3)
    assert (len(admitted), "Your project" in str(refused[0])) == (2, True)


async def test_a_tiers_limits_are_its_tenants_own_until_they_have_some(
    limits: Limits, caller: Caller, database: Database
) -> None:
    await limits.put_for_tier("standard", "concurrent_requests", 1)
    admitted, _ = await caller.try_many(3)
    assert len(admitted) == 1
    await limits.put(caller.principal.tenant, caller.principal.tenant, "concurrent_requests", 3)
    assert len((await caller.try_many(5))[0]) == 2
    values = {limit.name: limit.value for limit in await limits.of(caller.principal.tenant, "standard")}
    assert values == {"concurrent_requests": 3}


async def test_a_budget_is_never_overspent_by_those_who_come_together(
    limits: Limits, caller: Caller, database: Database
) -> None:
    await limits.put_budget(caller.principal.tenant, caller.principal.tenant, "month", 300)
    admitted, refused = await caller.try_many(500)
    assert (len(admitted), {type(error) for error in refused}) == (10, {BudgetSpent})
    assert refused[0].retry_after == (1_701_388_800 * SECOND - T0) // SECOND
    await asyncio.gather(*map(caller.settle, admitted))
    (state,) = await limits.budgets(caller.principal.tenant)
    assert (state.spent, state.held) == (300, 0)
    assert (await caller.try_many(1))[0] == []
    async with database.read() as session:
        alerts = (await session.scalars(sa.select(AlertRow).order_by(AlertRow.percent))).all()
    assert [(alert.percent, alert.delivered_at) for alert in alerts] == [(50, None), (80, None), (100, None)]
    database.clock[0] = 1_701_388_800 * SECOND
    assert len((await caller.try_many(20))[0]) == 10


async def test_what_was_not_used_is_not_spent(limits: Limits, caller: Caller, database: Database) -> None:
    await limits.put_budget(caller.principal.tenant, caller.principal.key_id, "total", 30)
    id, _ = await caller.open()
    await caller.settle(id, output=1)
    (state,) = await limits.budgets(caller.principal.tenant, [caller.principal.key_id])
    assert (state.spent, state.held, await held(database)) == (12, 0, [0, 0])
    with pytest.raises(BudgetSpent, match="total budget of your key") as refusal:
        await caller.open()
    assert refusal.value.retry_after is None


async def test_what_died_with_its_server_is_given_back(
    limits: Limits, caller: Caller, database: Database, usage: Usage
) -> None:
    tenant = caller.principal.tenant
    await limits.put(tenant, tenant, "concurrent_requests", 2)
    await limits.put(tenant, tenant, "tokens_per_minute", 40)
    await limits.put_budget(tenant, tenant, "day", 60)
    assert len((await caller.try_many(4))[0]) == 2
    await usage.stop()
    other = Usage(database, FlatPrices(1, 2))
    await other.start()
    assert await other.sweep() == 2
    assert len((await Caller(other, caller.principal).try_many(4))[0]) == 2
    await other.stop()


async def test_admitting_again_after_a_lost_answer_takes_nothing_twice(
    limits: Limits, caller: Caller, database: Database
) -> None:
    tenant = caller.principal.tenant
    await limits.put(tenant, tenant, "concurrent_requests", 5)
    await limits.put_budget(tenant, tenant, "day", 1000)
    for _ in range(3):
        await caller.open(id="same")
    async with database.read() as session:
        assert await session.scalar(sa.select(CounterRow.running)) == 1
    assert (await limits.budgets(tenant))[0].held == 30


async def test_who_leaves_while_the_writer_is_busy_holds_nothing(
    limits: Limits, caller: Caller, database: Database
) -> None:
    tenant = caller.principal.tenant
    await limits.put(tenant, tenant, "concurrent_requests", 5)
    await limits.put_budget(tenant, tenant, "day", 1000)
    staying = asyncio.create_task(caller.open())
    await asyncio.sleep(0.001)
    leaving = [asyncio.create_task(caller.open()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(staying, *leaving, return_exceptions=True)
    await caller.settle(staying.result()[0])
    assert await held(database) == [0, 0]
    assert len((await caller.try_many(6))[0]) == 5


async def test_what_was_taken_by_a_second_attempt_only_is_given_back(
    limits: Limits, caller: Caller, database: Database
) -> None:
    tenant = caller.principal.tenant
    id, _ = await caller.open()
    await limits.put(tenant, tenant, "concurrent_requests", 1)
    await caller.open(id=id)
    assert await held(database) == [1, 0]
    await caller.settle(id)
    assert await held(database) == [0, 0]
    await caller.open()


async def test_limits_are_audited_and_ones_own(limits: Limits, caller: Caller, tenants: Tenants) -> None:
    tenant = caller.principal.tenant
    globex = await tenants.create("globex")
    for attempt in (
        lambda: limits.put(globex.id, caller.principal.key_id, "concurrent_requests", 1),
        lambda: limits.put(tenant, tenant, "wishes", 1),
        lambda: limits.put(tenant, tenant, "adapters", -1),
        lambda: limits.put(tenant, caller.principal.project, "adapters", 1),
        lambda: limits.put_for_tier("nowhere", "adapters", 1),
        lambda: limits.remove(globex.id, tenant, "concurrent_requests"),
        lambda: limits.put_budget(tenant, tenant, "year", 1),
        lambda: limits.put_budget(tenant, tenant, "day", -1),
        lambda: limits.put_budget(tenant, tenant, "day", 1, [0]),
        lambda: limits.put_budget(globex.id, tenant, "day", 1),
    ):
        with pytest.raises(LimitsError):
            await attempt()
    await limits.put(tenant, tenant, "adapters", 3)
    await limits.put(tenant, tenant, "adapters", 4)
    await limits.remove(tenant, tenant, "adapters")
    await limits.put_budget(tenant, tenant, "day", 5)
    await limits.remove_budget(tenant, tenant, "day")
    actions = [entry.action for entry in await tenants.audit.read(tenant=tenant, limit=5)]
    assert actions == ["budget.remove", "budget.put", "limit.remove", "limit.put", "limit.put"]
