"""/admin/price-plans, and the price plan of a tenant from a given month on.

`loramux price apply` adds plans and prices.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import Meta

from loramux.accounts.tenants.entities import Tenant
from loramux.accounts.tenants.tenants import Tenants
from loramux.money.billing.catalog import Catalog, PricePlan
from loramux.money.billing.periods import Month
from loramux_api.bodies import Body
from loramux_api.openapi import OperatorController
from loramux_api.parameters import PathName
from loramux_api.schemas.tenancy import Listing


class TenantPlanBody(Body, forbid_unknown_fields=True):
    """The price plan that a tenant gets."""

    plan: Annotated[str, Meta(min_length=1, max_length=63)]
    """Name of the plan in the list of price plans."""
    replace: bool = False
    """Replace a plan that was assigned from the same month on."""


class PricePlanObject(msgspec.Struct, kw_only=True):
    """A price plan."""

    object: Literal["price_plan"] = "price_plan"
    name: str
    currency: str
    """Currency of the plan, as an ISO 4217 code."""
    minimum: str
    """Minimum amount of a month, in the currency."""
    meters: list[str]
    """Meters that have a price."""


class TenantPlanObject(msgspec.Struct, kw_only=True):
    """Price plan of a tenant from a given month on, until the next one."""

    object: Literal["tenant.price_plan"] = "tenant.price_plan"
    plan: str
    currency: str
    month: str
    """First month of the plan, UTC, such as 2026-11."""


class AdminPricePlanController(OperatorController):
    """Price plans."""

    path = "/admin/price-plans"

    @get(summary="List price plans")
    async def list_plans(self, catalog: NamedDependency[Catalog]) -> Listing[PricePlanObject]:
        """List every price plan by name."""
        return Listing(data=[_plan_object(plan) for plan in await catalog.plans()])


class AdminTenantPlanController(OperatorController):
    """Price plans of a tenant."""

    path = "/admin/tenants/{tenant:str}/price-plans"

    @get(summary="List a tenant's price plans")
    async def list_of_tenant(
        self, tenant: PathName, operators: NamedDependency[Tenants], catalog: NamedDependency[Catalog]
    ) -> Listing[TenantPlanObject]:
        """List all price plans that a tenant ever had, or will have, oldest first."""
        return await _plans_of(catalog, await operators.named(tenant))

    @put("/{month:str}", summary="Assign a price plan")
    async def assign(
        self,
        tenant: PathName,
        month: PathName,
        data: JSONBody[TenantPlanBody],
        operators: NamedDependency[Tenants],
        catalog: NamedDependency[Catalog],
    ) -> Listing[TenantPlanObject]:
        """Give the tenant a price plan from the first day of an open month (UTC) on, until another one is assigned."""
        found = await operators.named(tenant)
        await catalog.subscribe(found.name, data.plan, Month.parse(month), replace=data.replace)
        return await _plans_of(catalog, found)

    @delete("/{month:str}", status_code=200, summary="Take a price plan back")
    async def unassign(
        self,
        tenant: PathName,
        month: PathName,
        operators: NamedDependency[Tenants],
        catalog: NamedDependency[Catalog],
    ) -> Listing[TenantPlanObject]:
        """Remove the price plan that was assigned from an open month on; the earlier plan applies again."""
        found = await operators.named(tenant)
        await catalog.unsubscribe(found.name, Month.parse(month))
        return await _plans_of(catalog, found)


async def _plans_of(catalog: Catalog, tenant: Tenant) -> Listing[TenantPlanObject]:
    held = await catalog.of(tenant.id)
    return Listing(
        data=[
            TenantPlanObject(plan=plan.name, currency=plan.currency.code, month=str(Month.at(since)))
            for since, plan in held.plans
        ]
    )


def _plan_object(plan: PricePlan) -> PricePlanObject:
    return PricePlanObject(
        name=plan.name,
        currency=plan.currency.code,
        minimum=str(Decimal(plan.minimum).scaleb(-plan.currency.digits)),
        meters=sorted({price.meter for price in plan.prices}),
    )
