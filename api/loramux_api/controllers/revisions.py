"""/v1/adapters/{name}/revisions and /pins."""

from __future__ import annotations

from litestar import Controller, delete, get, patch, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from loramux.gateway import AdapterService
from loramux.registry import Terms
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at, check_undo, number_of
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.adapters import RevisionObject, TtlBody, revision_object
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing


class RevisionController(Controller):
    """An adapter's revisions."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED

    @get(at("/revisions"), guards=[requires("read")], summary="List revisions", responses=REFUSALS)
    async def list_revisions(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[RevisionObject]:
        """Newest first; deleted ones as long as they can be undeleted."""
        return Listing(data=[revision_object(info) for info in await adapters.reading.revisions(principal, adapter)])

    @get(at("/revisions/{revision:str}"), guards=[requires("read")], summary="Describe a revision", responses=REFUSALS)
    async def get_revision(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """One of them, by its number."""
        return revision_object(await adapters.reading.revision(principal, adapter, number_of(adapter, revision)))

    @patch(
        at("/revisions/{revision:str}"),
        dto=StrictJSON[TtlBody],
        return_dto=None,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Let a revision delete itself",
        responses=REFUSALS,
    )
    async def update_revision(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        data: JSONBody[TtlBody],
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """In `ttl_s` seconds from now, or never. Aliases go on with their other targets then."""
        number = number_of(adapter, revision)
        return revision_object(await adapters.retiring.set_revision_ttl(principal, adapter, number, data.ttl_s, terms))

    @delete(
        at("/revisions/{revision:str}"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Delete a revision",
        responses=REFUSALS,
    )
    async def delete_revision(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        undo_s: FromQuery[int | None] = None,
    ) -> RevisionObject:
        """One that no alias points at; requests that run finish. It can be undone for `undo_s` seconds."""
        number = number_of(adapter, revision)
        return revision_object(await adapters.delete_revision(principal, adapter, number, terms, check_undo(undo_s)))


class PinController(Controller):
    """Revisions that are kept in the pool."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED | CHANGING
    guards = (requires("adapters"),)

    @put(at("/pins/{revision:str}"), summary="Keep a revision in the pool", responses=REFUSALS)
    async def pin(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Waits until it is there. What it takes is charged until you let go, or nobody asks for it for long."""
        return revision_object(await adapters.pins.pin(principal, adapter, number_of(adapter, revision), terms))

    @delete(at("/pins/{revision:str}"), status_code=200, summary="Let go of a revision", responses=REFUSALS)
    async def unpin(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """It is loaded when it is asked for, like any other."""
        return revision_object(await adapters.pins.unpin(principal, adapter, number_of(adapter, revision), terms))
