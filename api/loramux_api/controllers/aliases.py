"""/v1/adapters/{name}/aliases."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from loramux.gateway import AdapterService
from loramux.registry import Terms
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at, tagged
from loramux_api.openapi import REFUSALS
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
        """By name, with what they point at."""
        info = await adapters.reading.get(principal, adapter)
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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """At one revision, or at several by weight: requests that name a `user` get always the same one for it."""
        return tagged(await adapters.releasing.point(principal, adapter, alias, data.targets, terms))

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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Any but `default`; its history stays."""
        return tagged(await adapters.releasing.remove(principal, adapter, alias, terms))

    @get(at("/aliases/{alias:str}/history"), guards=[requires("read")], summary="List versions", responses=REFUSALS)
    async def history(
        self,
        adapter: NamedDependency[str],
        alias: FromPath[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[AliasVersionObject]:
        """What it pointed at, newest first; the last hundred changes."""
        versions = await adapters.reading.history(principal, adapter, alias)
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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        version: FromQuery[int | None] = None,
    ) -> Response[Adapter]:
        """To what it meant before, and once more: to what it meant before that; or to one `version` of its history."""
        return tagged(await adapters.releasing.roll_back(principal, adapter, alias, version, terms))
