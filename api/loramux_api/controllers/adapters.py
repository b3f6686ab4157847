"""/v1/adapters: a tenant's adapters, and each adapter's revisions, pins, aliases and grants.

Changes accept `If-Match` and `Idempotency-Key` (`preconditions`); a response with an adapter has its ETag (`tagged`).
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, delete, get, patch, post, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, QueryParameter

from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.entities import etag
from loramux.catalog.uploads.sessions import UploadSessions
from loramux.common.identity import Principal
from loramux.common.units import SECOND
from loramux.serving.adapters import AdapterService
from loramux_api.auth import requires
from loramux_api.bodies import AdapterRequest, AnyRequest
from loramux_api.forms import AdapterForm
from loramux_api.headers import IfNoneMatch
from loramux_api.openapi import ApiController, UploadOperation
from loramux_api.parameters import (
    CHANGING,
    NAMED,
    OneAdapterController,
    OptionalText,
    PageLimit,
    PathName,
    RevisionQuery,
    VersionQuery,
    at,
    check_undo,
    number_of,
    tagged,
)
from loramux_api.schemas.adapters import (
    Adapter,
    AdapterPage,
    AliasBody,
    AliasObject,
    AliasVersionObject,
    Deleted,
    DeletedAdapterObject,
    GrantObject,
    PromoteBody,
    RevisionObject,
    TtlBody,
    adapter_object,
    alias_object,
    alias_version_object,
    grant_object,
    revision_object,
)
from loramux_api.schemas.tenancy import Listing

MAX_PAGE = 1000


class AdapterController(ApiController):
    """The caller's adapters."""

    path = "/v1/adapters"
    tags = ("Adapters",)

    @post(
        guards=[requires("adapters")],
        summary="Upload an adapter",
        operation_class=UploadOperation,
        request_class=AdapterRequest,
    )
    async def upload(
        self,
        request: AnyRequest,
        principal: NamedDependency[Principal],
        uploads: NamedDependency[UploadSessions],
    ) -> Adapter:
        """Make PEFT files the next revision of an adapter.

        The form has the field `name` and the files `adapter_config.json` and `adapter_model.safetensors`, as
        `save_pretrained` writes them. The form may have the field `base_model`: the base that the adapter was trained
        on. Sending the same files again changes nothing.
        """
        async with uploads.parts.receiving(principal) as folder:
            form = AdapterForm(folder, uploads.parts.threads.of(principal.tenant))
            await form.receive(request.headers.get("content-type"), request.stream())
            ignored = tuple(sorted(form.ignored))
            return adapter_object(await uploads.upload(principal, form.name, folder, form.base_model, ignored))

    @get(guards=[requires("read")], summary="List adapters")
    async def list_adapters(
        self,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        after: OptionalText = None,
        limit: Annotated[int | None, QueryParameter(ge=1, le=MAX_PAGE)] = None,
        search: Annotated[str | None, QueryParameter(min_length=1, max_length=64)] = None,
    ) -> AdapterPage:
        """List your adapters by name, with their current revisions. Without `limit` the list has all adapters;
        otherwise it has at most `limit` adapters after the id `after`.

        `search`: list only adapters whose name contains this text.
        """
        infos, has_more = await adapters.queries.page(principal, after, limit, search and search.lower())
        data = [adapter_object(info) for info in infos]
        return AdapterPage(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )

    @get(at(), dependencies=NAMED, guards=[requires("read")], summary="Describe an adapter")
    async def get_adapter(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        if_none_match: IfNoneMatch = None,
    ) -> Response[Any]:
        """Return one of your adapters, named `adapter` or `tenant/adapter`."""
        info = await adapters.queries.get(principal, adapter)
        if if_none_match is not None and etag(info.version) in if_none_match:
            return Response(None, status_code=304, headers={"ETag": etag(info.version)})
        return tagged(info)

    @patch(at(), dependencies=NAMED | CHANGING, guards=[requires("adapters")], summary="Let an adapter delete itself")
    async def update_adapter(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[TtlBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Set the adapter to be deleted `ttl_s` seconds from now, or never."""
        return tagged(await adapters.deletion.set_ttl(principal, adapter, data.ttl_s, preconditions))

    @delete(
        at(),
        status_code=200,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Delete an adapter",
    )
    async def delete_adapter(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        undo_s: FromQuery[int | None] = None,
    ) -> Deleted:
        """Delete an adapter with all its revisions; running requests finish. The deletion can be undone for `undo_s`
        seconds (0: never).
        """
        info = await adapters.delete(principal, adapter, preconditions, check_undo(undo_s))
        return Deleted(id=info.id, name=info.name)

    @post(
        at("/undelete"),
        status_code=200,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Undo a deletion",
    )
    async def undelete(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        revision: RevisionQuery = None,
    ) -> Response[Adapter]:
        """Restore the adapter with everything that was deleted with it, or one `revision` of an adapter that exists."""
        if revision is not None:
            return tagged(await adapters.deletion.undelete_revision(principal, adapter, revision, preconditions))
        return tagged(await adapters.deletion.undelete(principal, adapter, preconditions))

    @post(
        at("/promote"),
        status_code=200,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Promote a revision",
    )
    async def promote(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[PromoteBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Point an alias, by default `default`, at one revision with all of its traffic."""
        return tagged(await adapters.aliases.promote(principal, adapter, data.revision, data.alias, preconditions))


class DeletedAdapterController(ApiController):
    """Deletions that can be undone."""

    path = "/v1/deleted_adapters"
    tags = ("Adapters",)

    @get(guards=[requires("read")], summary="List deleted adapters")
    async def list_deleted(
        self,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        limit: PageLimit = 100,
        search: Annotated[str | None, QueryParameter(min_length=1, max_length=64)] = None,
    ) -> Listing[DeletedAdapterObject]:
        """List your deleted adapters that can be restored, the newest deletion first.

        `search`: list only adapters whose name contains this text.
        """
        found = await adapters.queries.deleted(principal, limit, search and search.lower())
        return Listing(
            data=[
                DeletedAdapterObject(
                    name=f"{principal.tenant_name}/{one.name}",
                    deleted_at=one.deleted_at // SECOND,
                    undo_until=one.purge_at // SECOND,
                    revisions=one.revisions,
                )
                for one in found
            ]
        )


class RevisionController(OneAdapterController):
    """Revisions of an adapter."""

    @get(at("/revisions"), guards=[requires("read")], summary="List revisions")
    async def list_revisions(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[RevisionObject]:
        """List the revisions, newest first. Deleted revisions are included while they can be undeleted."""
        return Listing(data=[revision_object(info) for info in await adapters.queries.revisions(principal, adapter)])

    @get(at("/revisions/{revision:str}"), guards=[requires("read")], summary="Describe a revision")
    async def get_revision(
        self,
        adapter: NamedDependency[str],
        revision: PathName,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Describe one revision by its number."""
        return revision_object(await adapters.queries.revision(principal, adapter, number_of(adapter, revision)))

    @patch(
        at("/revisions/{revision:str}"),
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Let a revision delete itself",
    )
    async def update_revision(
        self,
        adapter: NamedDependency[str],
        revision: PathName,
        data: JSONBody[TtlBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Set the revision to be deleted `ttl_s` seconds from now, or never. When the revision is deleted, aliases keep
        their other targets.
        """
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
    )
    async def delete_revision(
        self,
        adapter: NamedDependency[str],
        revision: PathName,
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


class PinController(OneAdapterController):
    """Revisions that are kept in the pool."""

    dependencies = NAMED | CHANGING
    guards = (requires("adapters"),)

    @put(at("/pins/{revision:str}"), summary="Keep a revision in the pool")
    async def pin(
        self,
        adapter: NamedDependency[str],
        revision: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """Pin the revision, and wait until it is in the pool. The revision's memory is charged until DELETE, or until
        long disuse ends the pin.
        """
        return revision_object(await adapters.pins.pin(principal, adapter, number_of(adapter, revision), preconditions))

    @delete(at("/pins/{revision:str}"), status_code=200, summary="Let go of a revision")
    async def unpin(
        self,
        adapter: NamedDependency[str],
        revision: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> RevisionObject:
        """End the pin. The revision is then loaded on request, like any other."""
        return revision_object(
            await adapters.pins.unpin(principal, adapter, number_of(adapter, revision), preconditions)
        )


class AliasController(OneAdapterController):
    """Movable names of revisions: canary, promote, rollback."""

    @get(at("/aliases"), guards=[requires("read")], summary="List aliases")
    async def list_aliases(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[AliasObject]:
        """List the adapter's aliases by name, each with its targets."""
        info = await adapters.queries.get(principal, adapter)
        return Listing(data=[alias_object(alias) for alias in info.aliases])

    @put(at("/aliases/{alias:str}"), dependencies=CHANGING, guards=[requires("adapters")], summary="Point an alias")
    async def put_alias(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
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
    )
    async def remove_alias(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Remove any alias except `default`; its history stays."""
        return tagged(await adapters.aliases.remove(principal, adapter, alias, preconditions))

    @get(at("/aliases/{alias:str}/history"), guards=[requires("read")], summary="List versions")
    async def history(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[AliasVersionObject]:
        """List the alias's earlier targets, newest first: the last 100 changes."""
        versions = await adapters.queries.history(principal, adapter, alias)
        return Listing(data=[alias_version_object(version) for version in versions])

    @post(
        at("/aliases/{alias:str}/rollback"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Roll an alias back",
    )
    async def roll_back(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        version: VersionQuery = None,
    ) -> Response[Adapter]:
        """Restore the alias's previous targets, or the targets of `version`. Each further call goes back one more
        change.
        """
        return tagged(await adapters.aliases.roll_back(principal, adapter, alias, version, preconditions))


class GrantController(OneAdapterController):
    """Grants: other tenants that may call an adapter, at their own cost."""

    @get(at("/grants"), guards=[requires("read")], summary="List grants")
    async def list_grants(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Listing[GrantObject]:
        """List the adapter's grants by the tenants' names."""
        return Listing(data=[grant_object(info) for info in await adapters.queries.grants(principal, adapter)])

    @put(at("/grants/{tenant:str}"), dependencies=CHANGING, guards=[requires("adapters")], summary="Share an adapter")
    async def grant(
        self,
        adapter: NamedDependency[str],
        tenant: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> GrantObject:
        """Let the tenant with that name call the adapter as you do. The answer is the same if there is no such
        tenant.
        """
        return grant_object(await adapters.grants.grant(principal, adapter, tenant, preconditions))

    @delete(
        at("/grants/{tenant:str}"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Share an adapter no longer",
    )
    async def revoke(
        self,
        adapter: NamedDependency[str],
        tenant: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> GrantObject:
        """End the grant from the tenant's next request on; running requests finish."""
        return grant_object(await adapters.grants.revoke(principal, adapter, tenant, preconditions))
