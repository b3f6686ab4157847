"""/v1/limits and /v1/budgets, and below /admin the limits and budgets of a tier or a tenant.

A tenant reads all its own limits, and sets the limits of its projects, keys and members. Operators set the limits of a
whole tenant.
"""

from __future__ import annotations

from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.accounts.tenants.account import Account
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.money.billing.catalog import PlanPrices
from loramux.money.limits.errors import LimitNotFound
from loramux.money.limits.limits import Limits
from loramux.serving.errors import NotAllowed
from loramux_api.auth import requires
from loramux_api.openapi import ApiController, OperatorController
from loramux_api.parameters import PathName
from loramux_api.schemas.limits import (
    BudgetBody,
    BudgetObject,
    LimitBody,
    LimitObject,
    budget_object,
    budget_state_object,
    limit_object,
)
from loramux_api.schemas.tenancy import Listing


class LimitController(ApiController):
    """Limits."""

    path = "/v1/limits"
    tags = ("Limits",)

    @get(guards=[requires("read")], summary="List limits")
    async def list_limits(
        self, principal: NamedDependency[Principal], account: NamedDependency[Account], limits: NamedDependency[Limits]
    ) -> Listing[LimitObject]:
        """List the limits of the tenant, its projects, keys and members, and the tier's limits for all other names.

        A key without the scope `projects` sees the limits of the tenant, of its project, and of keys that it may
        manage.
        """
        found = await limits.of(principal.tenant, principal.tier, await subjects_of(account, principal))
        return Listing(data=[limit_object(limit) for limit in found])

    @put("/{subject:str}/{name:str}", guards=[requires("limits")], summary="Set a limit of a project, key or member")
    async def set_limit(
        self,
        subject: PathName,
        name: PathName,
        data: JSONBody[LimitBody],
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> LimitObject:
        """Set a limit. The limit applies from the next request on, in addition to the tenant's limits, which the
        operator sets.
        """
        await ensure_subject(account, principal, subject)
        return limit_object(await limits.put(principal.tenant, subject, name, data.value))

    @delete(
        "/{subject:str}/{name:str}",
        status_code=200,
        guards=[requires("limits")],
        summary="Remove a limit of a project, key or member",
    )
    async def remove_limit(
        self,
        subject: PathName,
        name: PathName,
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> LimitObject:
        """Remove a limit. The tenant's limits still apply."""
        await ensure_subject(account, principal, subject)
        return limit_object(await limits.remove(principal.tenant, subject, name))


class BudgetController(ApiController):
    """Budgets."""

    path = "/v1/budgets"
    tags = ("Limits",)

    @get(guards=[requires("billing")], summary="List budgets")
    async def list_budgets(
        self, principal: NamedDependency[Principal], account: NamedDependency[Account], limits: NamedDependency[Limits]
    ) -> Listing[BudgetObject]:
        """List the budgets of the tenant, its projects, keys and members, with the spending of the current periods.

        A key without the scope `projects` sees the budgets of its project, and of keys that it may manage.
        """
        found = await limits.budgets(principal.tenant, await subjects_of(account, principal))
        if principal.bound_project is not None:
            found = [state for state in found if state.budget.subject != principal.tenant]
        return Listing(data=[budget_state_object(state) for state in found])

    @put(
        "/{subject:str}/{period:str}",
        guards=[requires("billing")],
        summary="Set a budget of a project, key or member",
    )
    async def set_budget(
        self,
        subject: PathName,
        period: PathName,
        data: JSONBody[BudgetBody],
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> BudgetObject:
        """Set a budget. `period` is day, month (both UTC) or total."""
        await ensure_subject(account, principal, subject)
        budget = await limits.put_budget(principal.tenant, subject, period, data.amount_nano, data.thresholds)
        return budget_object(budget)

    @delete(
        "/{subject:str}/{period:str}",
        status_code=200,
        guards=[requires("billing")],
        summary="Remove a budget of a project, key or member",
    )
    async def remove_budget(
        self,
        subject: PathName,
        period: PathName,
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> BudgetObject:
        """Remove a budget and its counters. Invoices do not change."""
        await ensure_subject(account, principal, subject)
        return budget_object(await limits.remove_budget(principal.tenant, subject, period))


async def subjects_of(account: Account, principal: Principal) -> list[str]:
    """Return the ids of all subjects that can have limits, of the caller's tenant or of its only project."""
    keys = [one.id for one in await account.keys.all()]  # keys that the caller may manage
    if principal.bound_project is not None:
        return [principal.bound_project, principal.key_id, *keys]
    projects, members = await account.projects.all(), await account.members.all()
    return [*(one.id for one in projects), *keys, *(one.id for one in members)]


async def ensure_subject(account: Account, principal: Principal, subject: str) -> None:
    """Raise NotAllowed if the subject is the tenant itself, LimitNotFound if it is outside of the caller's project."""
    if principal.bound_project is not None and subject not in [
        principal.tenant,
        *await subjects_of(account, principal),
    ]:
        raise LimitNotFound(
            f"there is no key {subject[:80]!r} of your project; a key with the scope 'projects' reaches the others",
            "subject",
        )
    if subject == principal.tenant:
        raise NotAllowed(
            "Only the operator sets the limits of a whole organization; you can set those of your projects, "
            "keys and members.",
            field="subject",
            code="insufficient_permissions",
        )


class AdminTierLimitController(OperatorController):
    """Limits of a tier, which apply to its tenants without their own limits."""

    path = "/admin/tiers/{tier:str}/limits"

    @get(summary="List a tier's limits")
    async def list_limits(self, tier: PathName, operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """List a tier's limits by name."""
        return Listing(data=[limit_object(limit) for limit in await Limits(operators.changes).of_tier(tier)])

    @put("/{name:str}", summary="Set a tier's limit")
    async def set_limit(
        self, tier: PathName, name: PathName, data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Set a limit. The limit applies from the next request on."""
        return limit_object(await Limits(operators.changes).put_for_tier(tier, name, data.value))

    @delete("/{name:str}", status_code=200, summary="Remove a tier's limit")
    async def remove_limit(self, tier: PathName, name: PathName, operators: NamedDependency[Tenants]) -> LimitObject:
        """Remove a limit."""
        return limit_object(await Limits(operators.changes).remove_from_tier(tier, name))


class AdminTenantLimitController(OperatorController):
    """Limits and budgets of a tenant as a whole."""

    path = "/admin/tenants/{tenant:str}"

    @get("/limits", summary="List a tenant's limits")
    async def list_limits(self, tenant: PathName, operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """List a tenant's own limits, and its tier's limits for all other names."""
        found_tenant = await operators.named(tenant)
        found = await Limits(operators.changes).of(found_tenant.id, found_tenant.tier)
        return Listing(data=[limit_object(limit) for limit in found])

    @put("/limits/{name:str}", summary="Set a tenant's limit")
    async def set_limit(
        self, tenant: PathName, name: PathName, data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Set a limit that has priority over the tier's. The limit applies from the next request on."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).put(id, id, name, data.value))

    @delete("/limits/{name:str}", status_code=200, summary="Remove a tenant's limit")
    async def remove_limit(self, tenant: PathName, name: PathName, operators: NamedDependency[Tenants]) -> LimitObject:
        """Remove a limit. The tier's limit applies again."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).remove(id, id, name))

    @get("/budgets", summary="List a tenant's budgets")
    async def list_budgets(self, tenant: PathName, operators: NamedDependency[Tenants]) -> Listing[BudgetObject]:
        """List the budgets of the tenant itself, with the spending of the current periods."""
        found = await Limits(operators.changes).budgets((await operators.named(tenant)).id)
        return Listing(data=[budget_state_object(state) for state in found])

    @put("/budgets/{period:str}", summary="Set a tenant's budget")
    async def set_budget(
        self,
        tenant: PathName,
        period: PathName,
        data: JSONBody[BudgetBody],
        operators: NamedDependency[Tenants],
    ) -> BudgetObject:
        """Set a budget. `period` is day, month (both UTC) or total."""
        id = (await operators.named(tenant)).id
        limits = Limits(operators.changes, PlanPrices(operators.changes.database))
        return budget_object(await limits.put_budget(id, id, period, data.amount_nano, data.thresholds))

    @delete("/budgets/{period:str}", status_code=200, summary="Remove a tenant's budget")
    async def remove_budget(
        self, tenant: PathName, period: PathName, operators: NamedDependency[Tenants]
    ) -> BudgetObject:
        """Remove a budget and its counters. Invoices do not change."""
        id = (await operators.named(tenant)).id
        return budget_object(await Limits(operators.changes).remove_budget(id, id, period))
