"""Plans, prices and subscriptions: only ever added, and never to a period that is closed."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.billing.errors import InvalidPlan
from loramux.billing.periods import Month
from loramux.billing.plans import PlanDraft, PriceDraft, day_of, midnight
from loramux.pricing import Currency, Price, Step, most
from loramux.records import Database, TenantId
from loramux.records.billing import PeriodRepository, PriceRepository
from loramux.records.billing_models import PlanRow, PriceRow, SubscriptionRow
from loramux.records.identity import new_id
from loramux.records.locks import PRICES, exclusive
from loramux.records.tenants import TenantRepository
from loramux.tenants import Change, Changes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it stands. `minimum` in minor units of the currency."""

    id: str
    name: str
    currency: Currency
    minimum: int
    prices: tuple[Price, ...]


class Subscriptions(msgspec.Struct, frozen=True):
    """The plans that one tenant had, each with the moment that it began at, oldest first."""

    plans: tuple[tuple[int, Plan], ...]

    def plan_at(self, at: int) -> Plan | None:
        """The plan of that moment."""
        return next((plan for since, plan in reversed(self.plans) if since <= at), None)

    def prices_at(self, at: int) -> tuple[Price, ...]:
        """The prices of the plan of that moment."""
        plan = self.plan_at(at)
        return plan.prices if plan else ()


class Given(msgspec.Struct, frozen=True):
    """A plan that a tenant has from a month on, as the audit log has it."""

    plan: str
    month: str


class Catalog:
    """What the operator offers, and who has taken what; every change is audited."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changes = Changes.of_this_machine(database)

    async def plans(self) -> list[Plan]:
        """Every plan, by name."""
        async with self._database.read() as session:
            repository = PriceRepository(session)
            return await _plans(repository, await repository.plans())

    async def apply(self, drafts: Sequence[PlanDraft]) -> int:
        """Add the plans and prices that are not there yet; how many rows. Raises InvalidPlan, and adds nothing then.

        What is there already must be the same: a price that changes is a new one with a later `valid_from`.
        """
        async with self._changes.begin() as change:
            await exclusive(change.session, PRICES)
            opened = await _open_since(change.session)
            return sum([await self._apply(change, draft, opened) for draft in drafts])

    async def subscribe(self, tenant_name: str, plan_name: str, month: Month) -> None:
        """Give a tenant a plan from the first day of a month on, until it gets another.

        Raises InvalidPlan for a closed month, an unknown tenant or plan, or another currency than the tenant has.
        """
        async with self._changes.begin() as change:
            session = change.session
            await exclusive(session, PRICES)
            prices = PriceRepository(session)
            tenant, plan = await TenantRepository(session).named(tenant_name), await prices.plan_named(plan_name)
            if tenant is None or plan is None:
                what = f"tenant {tenant_name[:80]!r}" if tenant is None else f"plan {plan_name[:80]!r}"
                raise InvalidPlan(f"there is no {what}", "tenant" if tenant is None else "plan")
            await _check_month(session, month)
            known = await _subscriptions(prices, tenant.id)
            if any(other.currency.code != plan.currency for _, other in known.plans):
                told = f"{tenant_name} is billed in {known.plans[0][1].currency.code} and stays so; choose such a plan"
                raise InvalidPlan(told, "plan")
            if any(since == month.starts_at for since, _ in known.plans):
                raise InvalidPlan(f"{tenant_name} has a plan from {month} on already; choose a later month", "month")
            row = SubscriptionRow(
                tenant_id=tenant.id, valid_from=month.starts_at, plan_id=plan.id, created_at=self._database.now()
            )
            await prices.add(row)
            await change.note(
                "plan.give",
                plan.id,
                tenant=tenant.id,
                before=_given(known, month),
                after=Given(plan.name, str(month)),
            )

    async def of(self, tenant: TenantId) -> Subscriptions:
        """The plans that a tenant had."""
        async with self._database.read() as session:
            return await subscriptions_of(session, tenant)

    async def most(
        self, tenant: TenantId, base_model: str, tier: str, *, prompt_tokens: int, max_tokens: int
    ) -> tuple[Currency, int] | None:
        """The most that a request of this tenant can cost now, in nano-units; None for a tenant without a plan."""
        now = self._database.now()
        plan = (await self.of(tenant)).plan_at(now)
        if plan is None:
            return None
        bound = most(plan.prices, base_model, tier, now, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        return plan.currency, bound

    async def _apply(self, change: Change, draft: PlanDraft, opened: int) -> int:
        prices = PriceRepository(change.session)
        plan, added = await prices.plan_named(draft.name), 0
        if plan is None:
            plan = PlanRow(
                id=new_id("plan"),
                name=draft.name,
                currency=draft.currency,
                minimum=draft.minimum_units(),
                created_at=self._database.now(),
            )
            await prices.add(plan)
            [made] = await _plans(prices, [plan])
            await change.note("plan.create", plan.id, tenant=None, after=made)
            added = 1
        elif (plan.currency, plan.minimum) != (draft.currency, draft.minimum_units()):
            raise InvalidPlan(
                f"plan {draft.name!r} is there already with another currency or minimum; name a new one", "name"
            )
        known = {_place(row): row for row in await prices.prices([plan.id])}
        for number, price in enumerate(draft.prices):
            where = f"{draft.name}.prices[{number}]"
            row = self._row(plan.id, price, where)
            if (there := known.get(_place(row))) is None:
                if row.valid_from < opened:
                    told = f"{where}.valid_from is in a period that is closed; the first open day is {day_of(opened)}"
                    raise InvalidPlan(told, "valid_from")
                await prices.add(row)
                await change.note("price.create", row.id, tenant=None, after=_price(row))
                known[_place(row)] = row
                added += 1
            elif (there.per, there.steps, there.valid_until) != (row.per, row.steps, row.valid_until):
                raise InvalidPlan(
                    f"{where} is there already with other numbers; give it a later valid_from", "valid_from"
                )
        return added

    def _row(self, plan_id: str, draft: PriceDraft, where: str) -> PriceRow:
        return PriceRow(
            id=new_id("price"),
            plan_id=plan_id,
            meter=draft.meter,
            base_model=draft.base_model,
            tier=draft.tier,
            valid_from=midnight(draft.valid_from),
            valid_until=midnight(draft.valid_until) if draft.valid_until else None,
            per=draft.per,
            steps=json.dumps([[step.above, step.nanos] for step in draft.graduated(where)]),
            created_at=self._database.now(),
        )


async def subscriptions_of(session: AsyncSession, tenant: TenantId) -> Subscriptions:
    """The plans that a tenant had, in a transaction of the caller's."""
    return await _subscriptions(PriceRepository(session), tenant)


async def _subscriptions(prices: PriceRepository, tenant: TenantId) -> Subscriptions:
    rows = await prices.subscriptions(tenant)
    wanted = {row.plan_id for row in rows}
    plans = {plan.id: plan for plan in await _plans(prices, [p for p in await prices.plans() if p.id in wanted])}
    return Subscriptions(tuple((row.valid_from, plans[row.plan_id]) for row in rows))


async def _plans(prices: PriceRepository, rows: Sequence[PlanRow]) -> list[Plan]:
    by_plan: dict[str, list[Price]] = {row.id: [] for row in rows}
    for row in await prices.prices(list(by_plan)):
        by_plan[row.plan_id].append(_price(row))
    return [
        Plan(
            id=row.id,
            name=row.name,
            currency=Currency.of(row.currency),
            minimum=row.minimum,
            prices=tuple(by_plan[row.id]),
        )
        for row in rows
    ]


def _given(known: Subscriptions, month: Month) -> Given | None:
    """What the tenant had in that month until now."""
    held = [(since, plan) for since, plan in known.plans if since <= month.starts_at]
    return Given(held[-1][1].name, str(Month.at(held[-1][0]))) if held else None


async def _open_since(session: AsyncSession) -> int:
    latest = await PeriodRepository(session).latest()
    return latest.ends_at if latest else 0


async def _check_month(session: AsyncSession, month: Month) -> None:
    if month.starts_at < await _open_since(session):
        raise InvalidPlan(f"{month} is closed; a plan begins in an open month", "month")


def _place(row: PriceRow) -> tuple[str, str, str, int]:
    return row.meter, row.base_model, row.tier, row.valid_from


def _price(row: PriceRow) -> Price:
    return Price(
        id=row.id,
        plan_id=row.plan_id,
        meter=row.meter,
        base_model=row.base_model,
        tier=row.tier,
        valid_from=row.valid_from,
        valid_until=row.valid_until,
        per=row.per,
        steps=tuple(Step(above, nanos) for above, nanos in json.loads(row.steps)),
    )
