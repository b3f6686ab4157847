"""/v1/adapters/{name}/revisions and /pins."""

from __future__ import annotations

from litestar import Controller, delete, get, patch, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from loramux.gateway import AdapterService
from loramux.registry import Preconditions
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
        return Listing(data=[revision_object(info) for info in await adapters.queries.revisions(principal, adapter)])

    @get(at("/revisions/{revision:str}"), guards=[requires("read")], summary="Describe a revision", responses=REFUSALS)
    async def get_revision(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Describe one revision, by its number."""
        return revision_object(await adapters.queries.revision(principal, adapter, number_of(adapter, revision)))

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
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Delete it in `ttl_s` seconds from now, or never. Aliases then keep their other targets."""
        number = number_of(adapter, revision)
        return revision_object(
            await adapters.deletion.set_revision_ttl(principal, adapter, number, data.ttl_s, preconditions)
        )

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
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        undo_s: FromQuery[int | None] = None,
    ) -> RevisionObject:
        """Delete a revision that no alias points at; running requests finish. Undo works for `undo_s` seconds."""
        number = number_of(adapter, revision)
        return revision_object(
            await adapters.delete_revision(principal, adapter, number, preconditions, check_undo(undo_s))
        )


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
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Wait until the revision is in the pool. Its memory is charged until DELETE, or long disuse."""
        return revision_object(await adapters.pins.pin(principal, adapter, number_of(adapter, revision), preconditions))

    @delete(at("/pins/{revision:str}"), status_code=200, summary="Let go of a revision", responses=REFUSALS)
    async def unpin(
        self,
        adapter: NamedDependency[str],
        revision: FromPath[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """End the pin. The revision is then loaded on request, like any other."""
        return revision_object(
            await adapters.pins.unpin(principal, adapter, number_of(adapter, revision), preconditions)
        )
