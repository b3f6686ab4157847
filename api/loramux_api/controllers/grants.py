"""/v1/adapters/{name}/grants."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath

from loramux.gateway import AdapterService
from loramux.registry import Preconditions
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.adapters import GrantObject, grant_object
from loramux_api.schemas.tenancy import Listing


class GrantController(Controller):
    """Other tenants that may call an adapter, at their own cost."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED

    @get(at("/grants"), guards=[requires("read")], summary="List grants", responses=REFUSALS)
    async def list_grants(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[GrantObject]:
        """List the adapter's grants by the tenants' names."""
        return Listing(data=[grant_object(info) for info in await adapters.queries.grants(principal, adapter)])

    @put(
        at("/grants/{tenant:str}"),
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Share an adapter",
        responses=REFUSALS,
    )
    async def grant(
        self,
        adapter: NamedDependency[str],
        tenant: FromPath[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> GrantObject:
        """The tenant of that name calls it as you do. The answer is the same whether or not there is such a tenant."""
        return grant_object(await adapters.grants.grant(principal, adapter, tenant, preconditions))

    @delete(
        at("/grants/{tenant:str}"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Share an adapter no longer",
        responses=REFUSALS,
    )
    async def revoke(
        self,
        adapter: NamedDependency[str],
        tenant: FromPath[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> GrantObject:
        """End the grant from the tenant's next request on; running requests finish."""
        return grant_object(await adapters.grants.revoke(principal, adapter, tenant, preconditions))
