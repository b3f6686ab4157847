"""Limits and budgets in the transactions that open and settle requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count

import pytest
import sqlalchemy as sa
from flat_prices import FlatPrices, give_flat_plan

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import SECOND, TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.limits import AlertRow, BudgetHoldRow, CounterRow, HoldRow
from loramux.data.records.requests import OpenedRequest
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.limits.errors import BudgetSpent, LimitsError, RateReached, RequestTooLarge, TooManyRunning
from loramux.money.limits.limits import Limits
from loramux.money.usage import group_commit
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement, SettlementOutcome, UsageOperation

pytestmark = pytest.mark.anyio

T0 = 1_700_000_000 * SECOND
ids = count()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]], database: Database) -> Principal:
    clock = [T0]
    database.now = lambda: clock[0]
    database.clock = clock
    principal = await enrol("acme")
    await give_flat_plan(database, "acme")
    return principal


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[UsageService]:
    usage = UsageService(database, FlatPrices(1, 2))
    await usage.start()
    yield usage
    await usage.stop()


class Caller:
    """Opens and settles requests of 10 + 10 tokens, which may cost 30."""

    def __init__(self, usage: UsageService, principal: Principal) -> None:
        self.usage, self.principal = usage, principal

    async def open(self, **changes: object) -> tuple[str, RateLimitStatus]:
        facts = {"id": f"r{next(ids)}", "prompt_tokens": 10, "max_tokens": 10} | changes
        request = OpenedRequest(
            tenant_id=self.principal.tenant,
            key_id=self.principal.key_id,
            project_id=self.principal.project,
            tier=self.principal.tier,
            model="tiny",
            adapter_digest=None,
            lineage=self.principal.lineage,
            **facts,
        )
        standing = await self.usage.open(request)
        assert isinstance(standing, RateLimitStatus)
        return request.id, standing

    async def settle(self, id: str, output: int = 10) -> None:
        end = Settlement(
            request_id=id,
            ended_by="completion",
            finish_reason="stop",
            delivered=TokenCounts(prompt=10, output=output),
        )
        await self.usage.settle(end)

    async def try_many(self, number: int) -> tuple[list[str], list[LimitsError]]:
        outcomes = await asyncio.gather(*(self.open() for _ in range(number)), return_exceptions=True)
        admitted = [outcome[0] for outcome in outcomes if not isinstance(outcome, BaseException)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, LimitsError)]
        assert len(admitted) + len(refused) == number, outcomes
        return admitted, refused


@pytest.fixture
def caller(usage: UsageService, acme: Principal) -> Caller:
    return Caller(usage, acme)


async def held(database: Database) -> list[int]:
    async with database.read() as session:
        tables = (HoldRow, BudgetHoldRow)
        return [await session.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables]


async def test_request_without_limits_counts_nothing(caller: Caller, database: Database) -> None:
    id, standing = await caller.open()
    assert standing == RateLimitStatus()
    assert await held(database) == [0, 0]
    await caller.settle(id)
    async with database.read() as session:
        assert (await session.scalars(sa.select(CounterRow))).all() == []


async def test_tokens_per_minute_are_reserved_and_given_back(
    limits: Limits, caller: Caller, database: Database
) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "tokens_per_minute", 100)
    admitted, refused = await caller.try_many(9)
    assert (len(admitted), {type(error) for error in refused}) == (5, {RateReached})
    assert refused[0].rate_limits.tokens.remaining == 0
    for id in admitted[:2]:
        await caller.settle(id, output=0)
    assert len((await caller.try_many(3))[0]) == 1
    database.clock[0] += 12 * SECOND
    assert len((await caller.try_many(3))[0]) == 1
    with pytest.raises(RequestTooLarge, match="max_tokens"):
        await caller.open(max_tokens=1000)


async def test_caller_that_leaves_gets_back_only_tokens_that_were_not_computed(
    limits: Limits, caller: Caller, database: Database
) -> None:
    """A whole answer that is abandoned is waived on the bill, not in the limits: else one caller could load the engine
    without end."""
    await limits.put(caller.principal.tenant, caller.principal.tenant, "tokens_per_minute", 20)
    id, _ = await caller.open()
    computed = TokenCounts(prompt=10, output=4)
    entry = await caller.usage.settle(
        Settlement(request_id=id, ended_by="caller", finish_reason="cancelled", undelivered=computed)
    )
    assert (entry.billed, entry.waived) == (TokenCounts(), computed)
    with pytest.raises(RateReached, match="left 6"):
        await caller.open()


async def test_requests_per_minute_are_not_given_back(limits: Limits, caller: Caller) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "requests_per_minute", 3)
    id, standing = await caller.open()
    assert (standing.requests.limit, standing.requests.remaining, standing.requests.reset) == (3, 2, 20 * SECOND)
    await caller.settle(id)
    assert len((await caller.try_many(5))[0]) == 2


async def test_concurrent_requests_free_at_settlement(limits: Limits, caller: Caller) -> None:
    await limits.put(caller.principal.tenant, caller.principal.tenant, "concurrent_requests", 2)
    admitted, refused = await caller.try_many(4)
    assert (len(admitted), {type(error) for error in refused}) == (2, {TooManyRunning})
    await caller.settle(admitted[0])
    await caller.settle(admitted[0])
    assert len((await caller.try_many(4))[0]) == 1


async def test_request_takes_of_all_its_subjects_or_of_none(limits: Limits, caller: Caller, tenants: Tenants) -> None:
    mine = caller.principal
    await limits.put(mine.tenant, mine.tenant, "concurrent_requests", 5)
    await limits.put(mine.tenant, mine.project, "concurrent_requests", 3)
    await limits.put(mine.tenant, mine.key_id, "concurrent_requests", 1)
    admitted, refused = await caller.try_many(3)
    assert (len(admitted), "Your key" in str(refused[0])) == (1, True)
    _, secret = await (await tenants.account("acme")).keys.create(KeyRequest())
    other = Caller(caller.usage, await tenants.authenticator.authenticate(secret))
    admitted, refused = await other.try_many(3)
    assert (len(admitted), "Your project" in str(refused[0])) == (2, True)


async def test_tier_limits_apply_until_the_tenant_overrides_them(
    limits: Limits, caller: Caller, database: Database
) -> None:
    await limits.put_for_tier("standard", "concurrent_requests", 1)
    admitted, _ = await caller.try_many(3)
    assert len(admitted) == 1
    await limits.put(caller.principal.tenant, caller.principal.tenant, "concurrent_requests", 3)
    assert len((await caller.try_many(5))[0]) == 2
    values = {limit.name: limit.value for limit in await limits.of(caller.principal.tenant, "standard")}
    assert values == {"concurrent_requests": 3}


async def test_budget_is_not_overspent_by_concurrent_requests(
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


async def test_budget_spends_only_what_was_used(limits: Limits, caller: Caller, database: Database) -> None:
    await limits.put_budget(caller.principal.tenant, caller.principal.key_id, "total", 30)
    id, _ = await caller.open()
    await caller.settle(id, output=1)
    (state,) = await limits.budgets(caller.principal.tenant, [caller.principal.key_id])
    assert (state.spent, state.held, await held(database)) == (12, 0, [0, 0])
    with pytest.raises(BudgetSpent, match="total budget of your key") as refusal:
        await caller.open()
    assert refusal.value.retry_after is None


async def test_sweep_gives_back_what_a_dead_server_held(
    limits: Limits, caller: Caller, database: Database, usage: UsageService
) -> None:
    tenant = caller.principal.tenant
    await limits.put(tenant, tenant, "concurrent_requests", 2)
    await limits.put(tenant, tenant, "tokens_per_minute", 40)
    await limits.put_budget(tenant, tenant, "day", 60)
    assert len((await caller.try_many(4))[0]) == 2
    await usage.stop()
    other = UsageService(database, FlatPrices(1, 2))
    await other.start()
    assert await other.sweep() == 2
    assert len((await Caller(other, caller.principal).try_many(4))[0]) == 2
    await other.stop()


async def test_admission_repeated_after_a_lost_answer_takes_nothing_twice(
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


async def test_cancelled_admission_holds_nothing(limits: Limits, caller: Caller, database: Database) -> None:
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


async def test_admission_cancelled_during_an_outage_is_kept_and_gives_back_what_it_held(
    limits: Limits, caller: Caller, database: Database, usage: UsageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "PAUSES", ())
    tenant, commit = caller.principal.tenant, usage._writer._commit
    await limits.put(tenant, tenant, "concurrent_requests", 5)
    await limits.put_budget(tenant, tenant, "day", 1000)
    committed, is_abandoned = asyncio.Event(), asyncio.Event()

    async def lose_replies(operations: Sequence[UsageOperation]) -> Sequence[SettlementOutcome | Exception]:
        if not committed.is_set():
            await commit(operations)
            committed.set()
            await is_abandoned.wait()
        raise RecordsUnavailable("the database does not answer")

    usage._writer._commit = lose_replies
    leaving = asyncio.create_task(caller.open())
    await committed.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    is_abandoned.set()
    async with asyncio.timeout(30):
        while not usage.unsettled:  # noqa: ASYNC110  the service has no event for this
            await asyncio.sleep(0.001)
    assert await held(database) == [1, 1]
    usage._writer._commit = commit
    await usage.settle(usage.unsettled.popleft())
    assert ((await limits.budgets(tenant))[0].held, await held(database)) == (0, [0, 0])


async def test_hold_of_a_second_attempt_is_given_back(limits: Limits, caller: Caller, database: Database) -> None:
    tenant = caller.principal.tenant
    id, _ = await caller.open()
    await limits.put(tenant, tenant, "concurrent_requests", 1)
    await caller.open(id=id)
    assert await held(database) == [1, 0]
    await caller.settle(id)
    assert await held(database) == [0, 0]
    await caller.open()


async def test_key_limits_and_budgets_survive_rotation(limits: Limits, caller: Caller, tenants: Tenants) -> None:
    keys, mine = (await tenants.account("acme")).keys, caller.principal
    await limits.put(mine.tenant, mine.key_id, "concurrent_requests", 1)
    await limits.put_budget(mine.tenant, mine.key_id, "total", 40)
    rotated, secret = await keys.rotate(mine.key_id, 3600)
    successor = Caller(caller.usage, await tenants.authenticator.authenticate(secret))
    admitted, refused = await successor.try_many(2)
    assert (len(admitted), {type(error) for error in refused}) == (1, {TooManyRunning})
    assert (await caller.try_many(1))[0] == [], "both keys of the overlap share the limit"
    await successor.settle(admitted[0])
    with pytest.raises(BudgetSpent):
        await successor.open()
    changed = await limits.put(mine.tenant, rotated.id, "concurrent_requests", 5)
    assert changed.subject == mine.key_id
    await limits.remove_budget(mine.tenant, rotated.id, "total")
    assert len((await successor.try_many(3))[0]) == 3


async def test_key_cannot_escape_its_limits_by_making_keys(limits: Limits, caller: Caller, tenants: Tenants) -> None:
    keys, tenant = (await tenants.account("acme")).keys, caller.principal.tenant
    maker, secret = await keys.create(KeyRequest(scopes=frozenset({"keys", "inference"})))
    await limits.put(tenant, maker.id, "concurrent_requests", 2)
    own = tenants.account_of(await tenants.authenticator.authenticate(secret))
    admitted, refused = 0, []
    for _ in range(3):
        _, child_secret = await own.keys.create(KeyRequest(scopes=frozenset({"inference"})))
        child = Caller(caller.usage, await tenants.authenticator.authenticate(child_secret))
        ids, errors = await child.try_many(1)
        admitted, refused = admitted + len(ids), refused + errors
    assert (admitted, "key's maker" in str(refused[0])) == (2, True)


async def test_limits_are_audited_and_confined_to_the_tenant(limits: Limits, caller: Caller, tenants: Tenants) -> None:
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
