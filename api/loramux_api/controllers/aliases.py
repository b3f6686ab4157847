"""/v1/adapters/{name}/aliases."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.gateway import AdapterService
from loramux.registry import Preconditions
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at, tagged
from loramux_api.openapi import REFUSALS
from loramux_api.parameters import VersionQuery
from loramux_api.schemas.adapters import (
    Adapter,
    AliasBody,
    AliasObject,
    AliasVersionObject,
    alias_object,
    alias_version_object,
)
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing


class AliasController(Controller):
    """Movable names: canary, promote, rollback."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED

    @get(at("/aliases"), guards=[requires("read")], summary="List aliases", responses=REFUSALS)
    async def list_aliases(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[AliasObject]:
        """List the adapter's aliases by name, each with its targets."""
        info = await adapters.queries.get(principal, adapter)
        return Listing(data=[alias_object(alias) for alias in info.aliases])

    @put(
        at("/aliases/{alias:str}"),
        dto=StrictJSON[AliasBody],
        return_dto=None,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Point an alias",
        responses=REFUSALS,
    )
    async def put_alias(
        self,
        adapter: NamedDependency[str],
        alias: FromPath[str],
        data: JSONBody[AliasBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Point the alias at one revision, or at several by weight. One `user` always gets the same revision."""
        return tagged(await adapters.aliases.point(principal, adapter, alias, data.targets, preconditions))

    @delete(
        at("/aliases/{alias:str}"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Remove an alias",
        responses=REFUSALS,
    )
    async def remove_alias(
        self,
        adapter: NamedDependency[str],
        alias: FromPath[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Remove any alias but `default`; its history stays."""
        return tagged(await adapters.aliases.remove(principal, adapter, alias, preconditions))

    @get(at("/aliases/{alias:str}/history"), guards=[requires("read")], summary="List versions", responses=REFUSALS)
    async def history(
        self,
        adapter: NamedDependency[str],
        alias: FromPath[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[AliasVersionObject]:
        """List the alias's earlier targets, newest first: the last hundred changes."""
        versions = await adapters.queries.history(principal, adapter, alias)
        return Listing(data=[alias_version_object(version) for version in versions])

    @post(
        at("/aliases/{alias:str}/rollback"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Roll an alias back",
        responses=REFUSALS,
    )
    async def roll_back(
        self,
        adapter: NamedDependency[str],
        alias: FromPath[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        version: VersionQuery = None,
    ) -> Response[Adapter]:
        """Restore the alias's previous targets, or those of one `version`. Each call goes one change further back."""
        return tagged(await adapters.aliases.roll_back(principal, adapter, alias, version, preconditions))
