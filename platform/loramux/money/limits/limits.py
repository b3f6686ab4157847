"""Changes of limits and budgets. Operators set the limits of tiers and tenants; tenants set the limits of their
projects, keys and members.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.entities import Changes
from loramux.common.identity import TenantId, new_id
from loramux.data.records.ledger import LedgerRepository
from loramux.data.records.limits import BudgetRow, LimitRepository, LimitRow
from loramux.data.records.usage import Span
from loramux.money.limits.budgets import (
    Budget,
    BudgetState,
    NoPrices,
    Prices,
    Spent,
    begin_period,
    budget_of,
    period_start,
    spent_so_far,
)
from loramux.money.limits.definitions import LIMITS, tier_subject
from loramux.money.limits.errors import InvalidLimit, LimitNotFound

PERIODS = ("day", "month", "total")
DEFAULT_THRESHOLDS = (50, 80, 100)
MAX_THRESHOLDS = 10
MAX_BUDGET = 2**62
NOTHING_SPENT = Spent(0, 0)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of a subject."""

    subject: str
    name: str
    value: int


class CountedSpending(msgspec.Struct, frozen=True):
    """Cost of a period's requests up to an entry of the ledger; no requests if that entry is 0."""

    start: int
    """The period's start in microseconds."""
    last_sequence: int
    spent: Spent


class Limits:
    """Sets limits and budgets, with audit entries; changes apply from the next request on."""

    def __init__(self, changes: Changes, prices: Prices | None = None) -> None:
        """`prices` are used for a period's usage before its budget was made; None: all usage is free."""
        self._changes = changes
        self._prices = prices or NoPrices()

    async def of(self, tenant: TenantId, tier: str, subjects: Sequence[str] = ()) -> list[Limit]:
        """Return the tenant's limits, its tier's limits that it does not override, and the limits of its `subjects`."""
        async with self._changes.database.read() as session:
            rows = await LimitRepository(session).limits({tenant, tier_subject(tier), *subjects})
        own = {row.name for row in rows if row.subject == tenant}
        return [_limit(row) for row in rows if row.subject != tier_subject(tier) or row.name not in own]

    async def of_tier(self, tier: str) -> list[Limit]:
        """Return a tier's limits, which apply to its tenants unless a tenant overrides them."""
        async with self._changes.database.read() as session:
            return [_limit(row) for row in await LimitRepository(session).limits([tier_subject(tier)])]

    async def put_for_tier(self, tier: str, name: str, value: int) -> Limit:
        """Set a tier's limit. Raises InvalidLimit."""
        return await self._put(None, tier_subject(tier), name, value)

    async def put(self, tenant: TenantId, subject: str, name: str, value: int) -> Limit:
        """Set a limit of the tenant, or of its project, key or member. Raises InvalidLimit, LimitNotFound."""
        kind = LIMITS.get(name)
        if kind is not None and subject != tenant and not kind.everywhere:
            raise InvalidLimit(f"{name} is a limit of a tenant or a tier, not of a project or a key", "name")
        return await self._put(tenant, subject, name, value)

    async def remove_from_tier(self, tier: str, name: str) -> Limit:
        """Unset a tier's limit. Raises LimitNotFound."""
        return await self.remove(None, tier_subject(tier), name)

    async def remove(self, tenant: TenantId | None, subject: str, name: str) -> Limit:
        """Unset a limit of the tenant, or of its project, key or member. Without a tenant, unset a limit of a tier.

        Raises LimitNotFound.
        """
        async with self._changes.begin() as change:
            limits = LimitRepository(change.session)
            subject = await limits.subject(tenant, subject) or subject
            row = await limits.limit(subject, name)
            if row is None or row.tenant_id != tenant:
                raise LimitNotFound(f"there is no limit {name[:40]!r} on {subject[:80]!r}", "name")
            removed = _limit(row)
            await limits.remove(row)
            await change.note("limit.remove", f"{subject} {name}", tenant=tenant, before=removed)
        return removed

    async def budgets(self, tenant: TenantId, subjects: Sequence[str] = ()) -> list[BudgetState]:
        """Return the budgets of the tenant and of its `subjects`, with the state of their current periods."""
        now = self._changes.database.now()
        async with self._changes.database.read() as session:
            limits = LimitRepository(session)
            budgets = [budget_of(row) for row in await limits.budgets({tenant, *subjects})]
            starts = {budget.id: period_start(budget.period, now) for budget in budgets}
            rows = await limits.spendings(list(starts.items())) if starts else ()
            currency = (await limits.currencies({tenant})).get(tenant, "")
        spent = {row.budget_id: Spent(row.spent, row.held, row.abandoned) for row in rows}
        states = []
        for budget in budgets:
            found = msgspec.structs.asdict(spent.get(budget.id, NOTHING_SPENT))
            states.append(BudgetState(budget=budget, currency=currency, start=starts[budget.id], **found))
        return states

    async def put_budget(
        self, tenant: TenantId, subject: str, period: str, amount: int, thresholds: Sequence[int] = DEFAULT_THRESHOLDS
    ) -> Budget:
        """Set a budget of the tenant, or of its project, key or member. `amount` is in nano-units.

        A new budget counts its whole current period: the cost of ended requests, and the maximum cost of open requests.
        Raises InvalidLimit, LimitNotFound.
        """
        if period not in PERIODS:
            raise LimitNotFound(f"a budget's period is one of {', '.join(PERIODS)}", "period")
        if not 0 <= amount <= MAX_BUDGET:
            raise InvalidLimit(f"a budget is 0 to {MAX_BUDGET} nano-units", "amount")
        percents = sorted(set(thresholds))
        if len(percents) > MAX_THRESHOLDS or not all(1 <= percent <= 100 for percent in percents):
            raise InvalidLimit(f"thresholds are at most {MAX_THRESHOLDS} whole percentages, 1 to 100", "thresholds")
        counted = await self._count(tenant, subject, period)
        async with self._changes.begin() as change:
            # Lock order: the ledger's head first, as in every transaction that locks both.
            await LedgerRepository(change.session).lock()
            limits = LimitRepository(change.session)
            subject = await _owned_subject(change.session, tenant, subject)
            await _ensure_prices(limits, tenant)
            row = await limits.budget(subject, period)
            before = None if row is None else budget_of(row)
            if row is None:
                row = BudgetRow(id=new_id("budget"), tenant_id=tenant, subject=subject, period=period)
            row.amount, row.thresholds = amount, " ".join(map(str, percents))
            await limits.add(row)
            after = budget_of(row)
            if before is None:
                await self._begin(change.session, after, counted, change.now)
            await change.note("budget.put", row.id, tenant=tenant, before=before, after=after)
        return after

    async def _count(self, tenant: TenantId, subject: str, period: str) -> CountedSpending:
        """Add up the cost of a new budget's period before the ledger is locked, because settlements wait for that
        lock."""
        now = self._changes.database.now()
        async with self._changes.database.read() as session:
            limits = LimitRepository(session)
            subject = await _owned_subject(session, tenant, subject)
            await _ensure_prices(limits, tenant)
            found = [row.period for row in await limits.budgets([subject])]
            if period in found:
                return CountedSpending(0, 0, NOTHING_SPENT)
            start, last = period_start(period, now), (await LedgerRepository(session).head()).sequence
            tariff = await self._prices.tariff(session, [tenant])
            spent = await spent_so_far(session, tenant, subject, start, Span(1, last), tariff)
        return CountedSpending(start, last, spent)

    async def _begin(self, session: AsyncSession, budget: Budget, counted: CountedSpending, now: int) -> None:
        """Begin a new budget's period with the cost in `counted` and of requests that have ended since."""
        start = period_start(budget.period, now)
        if counted.start != start:
            counted = CountedSpending(start, 0, NOTHING_SPENT)
        tariff = await self._prices.tariff(session, [budget.tenant])
        rest = Span(counted.last_sequence + 1, None)
        spent = counted.spent + await spent_so_far(session, budget.tenant, budget.subject, start, rest, tariff)
        await begin_period(session, budget, start, spent, tariff, now)

    async def remove_budget(self, tenant: TenantId, subject: str, period: str) -> Budget:
        """Remove a budget and its counts. Raises LimitNotFound."""
        async with self._changes.begin() as change:
            limits = LimitRepository(change.session)
            subject = await limits.subject(tenant, subject) or subject
            row = await limits.budget(subject, period)
            if row is None or row.tenant_id != tenant:
                raise LimitNotFound(f"there is no {period[:40]} budget on {subject[:80]!r}", "period")
            removed = budget_of(row)
            await limits.remove(row)
            await change.note("budget.remove", removed.id, tenant=tenant, before=removed)
        return removed

    async def _put(self, tenant: TenantId | None, subject: str, name: str, value: int) -> Limit:
        kind = LIMITS.get(name)
        if kind is None:
            raise LimitNotFound(f"a limit is one of {', '.join(LIMITS)}; got {name[:40]!r}", "name")
        if not 0 <= value <= kind.max_value:
            raise InvalidLimit(f"{name} is 0 to {kind.max_value}; remove the limit to have none", "value")
        async with self._changes.begin() as change:
            limits = LimitRepository(change.session)
            subject = await _owned_subject(change.session, tenant, subject)
            row = await limits.limit(subject, name)
            before = None if row is None else _limit(row)
            row = row or LimitRow(subject=subject, name=name, tenant_id=tenant)
            row.value = value
            await limits.add(row)
            after = _limit(row)
            await change.note("limit.put", f"{subject} {name}", tenant=tenant, before=before, after=after)
        return after


async def _ensure_prices(limits: LimitRepository, tenant: TenantId) -> None:
    if not await limits.has_prices(tenant):
        raise InvalidLimit(
            "this organization has no price plan, so no request would ever count against a budget; have the "
            "operator assign a plan first (loramux price assign), or set limits by the minute instead",
            "period",
        )


async def _owned_subject(session: AsyncSession, tenant: TenantId | None, subject: str) -> str:
    """Return the subject on which limits are counted, from any id that names the subject. Raises LimitNotFound."""
    owned = await LimitRepository(session).subject(tenant, subject)
    if owned is None:
        raise LimitNotFound(f"there is no project, key, member or tier {subject[:80]!r} of yours", "subject")
    return owned


def _limit(row: LimitRow) -> Limit:
    return Limit(subject=row.subject, name=row.name, value=row.value)
