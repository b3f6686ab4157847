"""Price plans and subscriptions: they are read from an operator's TOML file, stored, and converted to the tariff of
budgets.

The whole file is checked before any part of it is stored. Prices are only added, never changed, and never added to a
closed period.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.entities import Change, Changes
from loramux.common.identity import GRAMMAR_IN_WORDS, TenantId, is_name, new_id
from loramux.common.settings.mistakes import describe_mistake
from loramux.common.units import DAY, SECOND
from loramux.data.records.base import to_struct
from loramux.data.records.billing import PeriodRepository, PlanRow, PriceRepository, PriceRow, SubscriptionRow
from loramux.data.records.database import PRICES, Database, advisory_lock
from loramux.data.records.requests import ANY, PRICED_TIERS, OpenedRequest, is_priced_tier
from loramux.data.records.tenants import TenantRepository, TenantRow
from loramux.money.billing.errors import BillingError, InvalidPlan
from loramux.money.billing.periods import Month
from loramux.money.limits.budgets import ChargedUsage
from loramux.money.pricing import (
    METERS,
    PROMPT_METERS,
    Currency,
    Price,
    PriceStep,
    UnknownCurrency,
    nanos_of,
    price_for,
)
from loramux.money.usage.settlement import MAX_BILLED_LOADS

Count = Annotated[int, Meta(ge=1, le=2**62)]


class StepSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a price: after the first `above` units of a period, `per` units cost `price`."""

    above: Annotated[int, Meta(ge=0, le=2**62)]
    price: str


class PriceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A price: a single number, or steps of volume. The first `free` units of a period cost nothing."""

    meter: str
    base_model: str = ANY
    tier: str = ANY
    valid_from: date
    valid_until: date | None = None
    per: Count = 1
    free: Annotated[int, Meta(ge=0, le=2**62)] = 0
    price: str | None = None
    steps: tuple[StepSpec, ...] = ()

    def check(self, where: str) -> None:
        """Raise InvalidPlan unless the price is valid."""
        if self.meter not in METERS:
            raise InvalidPlan(f"{where}.meter is one of {', '.join(METERS)}; got {self.meter[:40]!r}", "meter")
        if not is_priced_tier(self.tier):
            ends = ", ".join(f"/{tier}" for tier in PRICED_TIERS)
            raise InvalidPlan(f"{where}.tier is a tier or *, alone or with {ends}; got {self.tier[:80]!r}", "tier")
        if (self.price is None) == (not self.steps):
            raise InvalidPlan(f"{where} has either a price or steps", "price")
        if self.valid_until is not None and self.valid_until <= self.valid_from:
            raise InvalidPlan(f"{where}.valid_until is after its valid_from", "valid_until")
        above = [step.above for step in self.steps]
        if self.steps and (above[0] != 0 or above != sorted(set(above))):
            raise InvalidPlan(f"{where}.steps begin above 0 and rise", "steps")
        self.graduated(where)

    def graduated(self, where: str) -> tuple[PriceStep, ...]:
        """Return the steps, with a free quota as the first step. Raises InvalidPlan."""
        given = self.steps or (StepSpec(0, self.price or "0"),)
        try:
            priced = [PriceStep(self.free + step.above, nanos_of(step.price, f"{where}.price")) for step in given]
        except ValueError as error:
            raise InvalidPlan(str(error), "price") from None
        return (PriceStep(0, 0), *priced) if self.free else tuple(priced)


class PlanSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan and its prices."""

    name: str
    currency: str
    minimum: str = "0"
    """Minimum amount of a month."""
    prices: tuple[PriceSpec, ...] = ()

    def check(self) -> None:
        """Raise InvalidPlan unless the plan is valid."""
        if not is_name(self.name):
            raise InvalidPlan(f"a plan's name is {GRAMMAR_IN_WORDS}; got {self.name[:80]!r}", "name")
        self.minimum_units()
        for number, price in enumerate(self.prices):
            price.check(f"{self.name}.prices[{number}]")

    def minimum_units(self) -> int:
        """Return the minimum in the currency's minor units. Raises InvalidPlan."""
        try:
            currency, nanos = Currency.of(self.currency), nanos_of(self.minimum, f"{self.name}.minimum")
        except (UnknownCurrency, ValueError) as error:
            raise InvalidPlan(str(error), "currency") from None
        if nanos % currency.nanos:
            message = (
                f"{self.name}.minimum has at most {currency.digits} digits behind the point, as {self.currency} has"
            )
            raise InvalidPlan(message, "minimum")
        return nanos // currency.nanos


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file: [[plans]] and [[plans.prices]]."""

    plans: tuple[PlanSpec, ...]


def read_plans(path: Path) -> tuple[PlanSpec, ...]:
    """Read the plans in a file. Raises InvalidPlan with the names of the file and the field."""
    data: dict[str, Any] = {}
    try:
        data = tomllib.loads(path.read_text())
        plans = msgspec.convert(data, PlanFile).plans
    except OSError as error:
        raise InvalidPlan(f"{path} cannot be read: {error.strerror}", "file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidPlan(f"{path} is not valid TOML: {error}", "file") from None
    except msgspec.ValidationError as error:
        raise InvalidPlan(f"{path}: {describe_mistake(str(error), data, PlanFile)}", "file") from None
    for plan in plans:
        plan.check()
    return plans


def midnight(day: date) -> int:
    """Return the day's first moment, UTC, in microseconds."""
    return int(datetime.combine(day, time(), UTC).timestamp()) * SECOND


def day_of(microseconds: int) -> str:
    """Format the day of a moment."""
    return datetime.fromtimestamp(microseconds // DAY * DAY // SECOND, UTC).date().isoformat()


LONGEST_REQUEST = DAY
"""Maximum time of a request in microseconds. So a settlement uses the prices of the day of the request's opening, or of
the next day.
"""


class PricePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A price plan with all its prices. `minimum` is in minor units of the currency."""

    id: str
    name: str
    currency: Currency
    minimum: int
    prices: tuple[Price, ...]


class Subscriptions(msgspec.Struct, frozen=True):
    """All plans of one tenant, each with the time of its beginning, oldest first."""

    plans: tuple[tuple[int, PricePlan], ...]

    def plan_at(self, at: int) -> PricePlan | None:
        """Return the plan of that moment."""
        return next((plan for since, plan in reversed(self.plans) if since <= at), None)

    def prices_at(self, at: int) -> tuple[Price, ...]:
        """Return the prices of the plan of that moment."""
        plan = self.plan_at(at)
        return plan.prices if plan else ()


class AssignedPlan(msgspec.Struct, frozen=True):
    """A plan that a tenant has from a month on, as the audit log shows it."""

    plan: str
    month: str


class Catalog:
    """The operator's plans and the tenants' subscriptions; every change is audited."""

    def __init__(self, database: Database, changes: Changes | None = None) -> None:
        """`changes` has the author of the changes; None: the user that runs this process."""
        self._database = database
        self._changes = changes or Changes.local(database)

    async def plans(self) -> list[PricePlan]:
        """List every plan by name."""
        async with self._database.read() as session:
            repository = PriceRepository(session)
            return await _plans(repository, await repository.plans())

    async def apply(self, specs: Sequence[PlanSpec]) -> int:
        """Add the missing plans and prices and return the number of rows. Raises InvalidPlan, and then adds nothing.

        Plans and prices that exist already must be the same: a changed price is a new one with a later `valid_from`.
        """
        async with self._changes.begin() as change:
            await advisory_lock(change.session, PRICES)
            opened = await _open_since(change.session)
            return sum([await self._apply(change, spec, opened) for spec in specs])

    async def subscribe(self, tenant_name: str, plan_name: str, month: Month, *, replace: bool = False) -> None:
        """Assign a plan to a tenant from the first day of a month on, until another plan is assigned.

        With `replace`, the plan replaces a plan that was assigned from the same month on; the month's usage is then
        charged at the new plan's prices. Raises InvalidPlan for a closed month, an unknown tenant or plan, a currency
        that differs from that of the tenant's other plans, or a plan that is already assigned and not replaced.
        """
        async with self._changes.begin() as change:
            session = change.session
            await advisory_lock(session, PRICES)
            prices = PriceRepository(session)
            tenant, plan = await named_tenant(session, tenant_name, InvalidPlan), await prices.plan_named(plan_name)
            if plan is None:
                raise InvalidPlan(f"there is no plan {plan_name[:80]!r}", "plan")
            await _check_month(session, month)
            known = await _subscriptions(prices, tenant.id)
            others = [other for since, other in known.plans if since != month.starts_at]
            is_assigned = len(others) < len(known.plans)
            if is_assigned and not replace:
                raise InvalidPlan(
                    f"{tenant_name} has a plan from {month} on already; use --replace or a later month",
                    "month",
                )
            if others and others[0].currency.code != plan.currency:
                raise InvalidPlan(
                    f"{tenant_name} is billed in {others[0].currency.code} and stays so; choose such a plan", "plan"
                )
            if is_assigned:
                await prices.remove_subscription(tenant.id, month.starts_at)
            row = SubscriptionRow(
                tenant_id=tenant.id, valid_from=month.starts_at, plan_id=plan.id, created_at=self._database.now()
            )
            await prices.add(row)
            await change.note(
                "plan.replace" if is_assigned else "plan.give",
                plan.id,
                tenant=tenant.id,
                before=_assigned(known, month),
                after=AssignedPlan(plan.name, str(month)),
            )

    async def unsubscribe(self, tenant_name: str, month: Month) -> None:
        """Remove the plan that was assigned from a month on, if the month is not closed yet.

        The tenant then has the plan from before, or none. Raises InvalidPlan if the month is closed or has no such
        plan.
        """
        async with self._changes.begin() as change:
            session = change.session
            await advisory_lock(session, PRICES)
            prices, tenant = PriceRepository(session), await named_tenant(session, tenant_name, InvalidPlan)
            await _check_month(session, month)
            known = await _subscriptions(prices, tenant.id)
            plan = next((plan for since, plan in known.plans if since == month.starts_at), None)
            if plan is None:
                raise InvalidPlan(f"{tenant_name} has no plan that begins in {month}", "month")
            await prices.remove_subscription(tenant.id, month.starts_at)
            earlier = Subscriptions(tuple(one for one in known.plans if one[0] < month.starts_at))
            await change.note(
                "plan.unassign",
                plan.id,
                tenant=tenant.id,
                before=AssignedPlan(plan.name, str(month)),
                after=_assigned(earlier, month),
            )

    async def of(self, tenant: TenantId) -> Subscriptions:
        """Return all plans that a tenant ever had."""
        async with self._database.read() as session:
            return await subscriptions_of(session, tenant)

    async def _apply(self, change: Change, spec: PlanSpec, opened: int) -> int:
        prices = PriceRepository(change.session)
        plan, added = await prices.plan_named(spec.name), 0
        if plan is None:
            plan = PlanRow(
                id=new_id("plan"),
                name=spec.name,
                currency=spec.currency,
                minimum=spec.minimum_units(),
                created_at=self._database.now(),
            )
            await prices.add(plan)
            [made] = await _plans(prices, [plan])
            await change.note("plan.create", plan.id, tenant=None, after=made)
            added = 1
        elif (plan.currency, plan.minimum) != (spec.currency, spec.minimum_units()):
            raise InvalidPlan(
                f"plan {spec.name!r} is there already with another currency or minimum; name a new one", "name"
            )
        known = {_place(row): row for row in await prices.prices([plan.id])}
        for number, price in enumerate(spec.prices):
            where = f"{spec.name}.prices[{number}]"
            row = self._row(plan.id, price, where)
            if (there := known.get(_place(row))) is None:
                if row.valid_from < opened:
                    message = (
                        f"{where}.valid_from is in a period that is closed; the first open day is {day_of(opened)}"
                    )
                    raise InvalidPlan(message, "valid_from")
                await prices.add(row)
                await change.note("price.create", row.id, tenant=None, after=_price(row))
                known[_place(row)] = row
                added += 1
            elif (there.per, there.steps, there.valid_until) != (row.per, row.steps, row.valid_until):
                raise InvalidPlan(
                    f"{where} is there already with other numbers; give it a later valid_from", "valid_from"
                )
        return added

    def _row(self, plan_id: str, spec: PriceSpec, where: str) -> PriceRow:
        return PriceRow(
            id=new_id("price"),
            plan_id=plan_id,
            meter=spec.meter,
            base_model=spec.base_model,
            tier=spec.tier,
            valid_from=midnight(spec.valid_from),
            valid_until=midnight(spec.valid_until) if spec.valid_until else None,
            per=spec.per,
            steps=json.dumps([[step.above, step.nanos] for step in spec.graduated(where)]),
            created_at=self._database.now(),
        )


class PlanTariff:
    """The prices of some tenants' plans at one moment. Each meter has the price of its highest step, without free
    quotas.

    So a budget never counts less than the invoice, independently of the quotas and steps that the whole period reaches.
    """

    def __init__(self, plans: Mapping[TenantId, Subscriptions], at: int) -> None:
        self._plans = plans
        self._at = at

    def currency(self, tenant: TenantId) -> str | None:
        """Return the currency of the tenant's plan; None without a plan."""
        plans = self._plans.get(tenant)
        plan = plans.plan_at(self._at) if plans else None
        return None if plan is None else plan.currency.code

    def most_it_can_cost(self, request: OpenedRequest) -> int:
        """Bound a request's cost: the whole prompt at the highest of the prices for cached and uncached tokens and for
        those of images, now or at the settlement.
        """
        loads = 0 if request.adapter_digest is None else MAX_BILLED_LOADS

        def dearest(meter: str, quantity: int) -> int:
            moments = (self._at, self._at + LONGEST_REQUEST)
            where = request.tenant_id, request.base_model, request.tier
            return max(self._meter(*where, meter, quantity, at) for at in moments)

        prompt = max(dearest(meter, request.prompt_tokens) for meter in PROMPT_METERS)
        rounding = len(PROMPT_METERS) - 1 if prompt else 0  # each meter's part of a prompt is rounded up
        return prompt + rounding + dearest("output", request.max_tokens) + dearest("adapter_load", loads)

    def cost(self, tenant: TenantId, base_model: str, tier: str, used: ChargedUsage, at: int | None = None) -> int:
        """Return the sum of the costs of all meters, each rounded up to a nano-unit, at the prices of the time `at`;
        None: now.
        """
        meters = {
            "input_uncached": used.tokens.prompt - used.tokens.cached - used.tokens.image,
            "input_cached": used.tokens.cached,
            "image_tokens": used.tokens.image,
            "output": used.tokens.output,
            "adapter_load": used.adapter_loads,
        }
        where, moment = (tenant, base_model, tier), self._at if at is None else at
        return sum(self._meter(*where, meter, quantity, moment) for meter, quantity in meters.items())

    def _meter(self, tenant: TenantId, base_model: str, tier: str, meter: str, quantity: int, at: int) -> int:
        plans = self._plans.get(tenant)
        price = price_for(plans.prices_at(at) if plans else (), meter, base_model, tier, at)
        if price is None:
            return 0
        return -(-quantity * max(step.nanos for step in price.steps) // price.per)


class PlanPrices:
    """Reads `PlanTariff`s. A tenant without a plan pays nothing, so it cannot have a budget (`Limits.put_budget`)."""

    def __init__(self, database: Database) -> None:
        self._now = database.now

    async def tariff(self, session: AsyncSession, tenants: Collection[TenantId]) -> PlanTariff:
        """Read the tariff in the transaction that admits or settles."""
        plans = {tenant: await subscriptions_of(session, tenant) for tenant in tenants}
        return PlanTariff(plans, self._now())


async def subscriptions_of(session: AsyncSession, tenant: TenantId) -> Subscriptions:
    """Return all plans that a tenant ever had, in the caller's transaction."""
    return await _subscriptions(PriceRepository(session), tenant)


async def _subscriptions(prices: PriceRepository, tenant: TenantId) -> Subscriptions:
    rows = await prices.subscriptions(tenant)
    wanted = {row.plan_id for row in rows}
    plans = {plan.id: plan for plan in await _plans(prices, [p for p in await prices.plans() if p.id in wanted])}
    return Subscriptions(tuple((row.valid_from, plans[row.plan_id]) for row in rows))


async def _plans(prices: PriceRepository, rows: Sequence[PlanRow]) -> list[PricePlan]:
    by_plan: dict[str, list[Price]] = {row.id: [] for row in rows}
    for row in await prices.prices(list(by_plan)):
        by_plan[row.plan_id].append(_price(row))
    return [
        PricePlan(
            id=row.id,
            name=row.name,
            currency=Currency.of(row.currency),
            minimum=row.minimum,
            prices=tuple(by_plan[row.id]),
        )
        for row in rows
    ]


async def named_tenant(session: AsyncSession, name: str, error: type[BillingError] = BillingError) -> TenantRow:
    """Return the tenant of that name. Raises `error`."""
    tenant = await TenantRepository(session).named(name)
    if tenant is None:
        raise error(f"there is no tenant {name[:80]!r}", "tenant")
    return tenant


def _assigned(known: Subscriptions, month: Month) -> AssignedPlan | None:
    """Return the plan that is currently assigned to the tenant for that month."""
    held = [(since, plan) for since, plan in known.plans if since <= month.starts_at]
    return AssignedPlan(held[-1][1].name, str(Month.at(held[-1][0]))) if held else None


async def _open_since(session: AsyncSession) -> int:
    latest = await PeriodRepository(session).latest()
    return latest.ends_at if latest else 0


async def _check_month(session: AsyncSession, month: Month) -> None:
    if month.starts_at < await _open_since(session):
        raise InvalidPlan(f"{month} is closed; a plan begins in an open month", "month")


def _place(row: PriceRow) -> tuple[str, str, str, int]:
    return row.meter, row.base_model, row.tier, row.valid_from


def _price(row: PriceRow) -> Price:
    return to_struct(Price, row, steps=tuple(PriceStep(above, nanos) for above, nanos in json.loads(row.steps)))
