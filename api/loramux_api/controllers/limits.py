"""/v1/limits and /v1/budgets: a tenant reads all its own, and sets those of its projects, keys and members."""

from __future__ import annotations

from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.gateway import NotAllowed
from loramux.limits import LimitNotFound, Limits
from loramux.tenants import Account, Principal
from loramux_api.auth import requires
from loramux_api.openapi import ApiController
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
        """List the limits of the tenant, its projects, keys and members, and those of its tier for the other names.

        A key without the scope `projects` sees the tenant's, its project's, and those of keys that it may manage.
        """
        found = await limits.of(principal.tenant, principal.tier, await subjects_of(account, principal))
        return Listing(data=[limit_object(limit) for limit in found])

    @put("/{subject:str}/{name:str}", guards=[requires("limits")], summary="Set a limit of a project, key or member")
    async def set_limit(
        self,
        subject: FromPath[str],
        name: FromPath[str],
        data: JSONBody[LimitBody],
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> LimitObject:
        """Set a limit. Applies from the next request on, beside the tenant's limits, which the operator sets."""
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
        subject: FromPath[str],
        name: FromPath[str],
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

        A key without the scope `projects` sees its project's and those of keys that it may manage.
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
        subject: FromPath[str],
        period: FromPath[str],
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
        subject: FromPath[str],
        period: FromPath[str],
        principal: NamedDependency[Principal],
        account: NamedDependency[Account],
        limits: NamedDependency[Limits],
    ) -> BudgetObject:
        """Remove a budget and its counters. Invoices do not change."""
        await ensure_subject(account, principal, subject)
        return budget_object(await limits.remove_budget(principal.tenant, subject, period))


async def subjects_of(account: Account, principal: Principal) -> list[str]:
    """Return the ids of everything of the caller's tenant, or of its only project, that can have limits of its own."""
    keys = [one.id for one in await account.keys.all()]  # that the caller may manage
    if principal.bound_project is not None:
        return [principal.bound_project, principal.key_id, *keys]
    projects, members = await account.projects.all(), await account.members.all()
    return [*(one.id for one in projects), *keys, *(one.id for one in members)]


async def ensure_subject(account: Account, principal: Principal, subject: str) -> None:
    """Raise NotAllowed if the subject is the tenant itself, LimitNotFound if it is beyond the caller's project."""
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
