"""/admin: limits of tiers and tenants, and tenants' budgets."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.limits import Limits
from loramux.tenants import Tenants
from loramux_api.auth import requires
from loramux_api.openapi import PROBLEMS
from loramux_api.schemas.limits import (
    BudgetBody,
    BudgetObject,
    LimitBody,
    LimitObject,
    budget_object,
    budget_state_object,
    limit_object,
)
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing


class AdminTierLimitController(Controller):
    """What the tenants of a tier have, unless they have their own."""

    path = "/admin/tiers/{tier:str}/limits"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get(summary="List a tier's limits", responses=PROBLEMS)
    async def list_limits(self, tier: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """By name."""
        return Listing(data=[limit_object(limit) for limit in await Limits(operators.changes).of_tier(tier)])

    @put("/{name:str}", dto=StrictJSON[LimitBody], return_dto=None, summary="Set a tier's limit", responses=PROBLEMS)
    async def set_limit(
        self, tier: FromPath[str], name: FromPath[str], data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Counts from the next request on."""
        return limit_object(await Limits(operators.changes).put_for_tier(tier, name, data.value))

    @delete("/{name:str}", status_code=200, summary="Remove a tier's limit", responses=PROBLEMS)
    async def remove_limit(
        self, tier: FromPath[str], name: FromPath[str], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """There is none afterwards."""
        return limit_object(await Limits(operators.changes).remove_from_tier(tier, name))


class AdminTenantLimitController(Controller):
    """What a tenant may use and spend in all."""

    path = "/admin/tenants/{tenant:str}"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get("/limits", summary="List a tenant's limits", responses=PROBLEMS)
    async def list_limits(self, tenant: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """Its own, and those of its tier that it has none of its own for."""
        whose = await operators.named(tenant)
        found = await Limits(operators.changes).of(whose.id, whose.tier)
        return Listing(data=[limit_object(limit) for limit in found])

    @put(
        "/limits/{name:str}",
        dto=StrictJSON[LimitBody],
        return_dto=None,
        summary="Set a tenant's limit",
        responses=PROBLEMS,
    )
    async def set_limit(
        self, tenant: FromPath[str], name: FromPath[str], data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """In place of its tier's; counts from the next request on."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).put(id, id, name, data.value))

    @delete("/limits/{name:str}", status_code=200, summary="Remove a tenant's limit", responses=PROBLEMS)
    async def remove_limit(
        self, tenant: FromPath[str], name: FromPath[str], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Its tier's counts again."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).remove(id, id, name))

    @get("/budgets", summary="List a tenant's budgets", responses=PROBLEMS)
    async def list_budgets(self, tenant: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[BudgetObject]:
        """Of the tenant itself, and what the current periods have come to."""
        found = await Limits(operators.changes).budgets((await operators.named(tenant)).id)
        return Listing(data=[budget_state_object(state) for state in found])

    @put(
        "/budgets/{period:str}",
        dto=StrictJSON[BudgetBody],
        return_dto=None,
        summary="Set a tenant's budget",
        responses=PROBLEMS,
    )
    async def set_budget(
        self,
        tenant: FromPath[str],
        period: FromPath[str],
        data: JSONBody[BudgetBody],
        operators: NamedDependency[Tenants],
    ) -> BudgetObject:
        """`period` is day, month (both UTC) or total."""
        id = (await operators.named(tenant)).id
        return budget_object(
            await Limits(operators.changes).put_budget(id, id, period, data.amount_nano, data.thresholds)
        )

    @delete("/budgets/{period:str}", status_code=200, summary="Remove a tenant's budget", responses=PROBLEMS)
    async def remove_budget(
        self, tenant: FromPath[str], period: FromPath[str], operators: NamedDependency[Tenants]
    ) -> BudgetObject:
        """What was counted of it is forgotten; the bill is not."""
        id = (await operators.named(tenant)).id
        return budget_object(await Limits(operators.changes).remove_budget(id, id, period))
