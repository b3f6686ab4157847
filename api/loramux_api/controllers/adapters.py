"""/v1/adapters."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, QueryParameter

from loramux.gateway import AdapterService
from loramux.registry import Preconditions, etag
from loramux.tenants import Principal
from loramux.uploads import UploadSessions
from loramux_api.auth import requires
from loramux_api.headers import IfNoneMatch
from loramux_api.managing import CHANGING, NAMED, at, check_undo, tagged
from loramux_api.openapi import REFUSALS, UploadOperation
from loramux_api.parameters import RevisionQuery
from loramux_api.schemas.adapters import Adapter, AdapterPage, Deleted, PromoteBody, TtlBody, adapter_object
from loramux_api.schemas.strict import StrictJSON
from loramux_api.uploads import receive_form

MAX_PAGE = 1000


class AdapterController(Controller):
    """The caller's adapters."""

    path = "/v1/adapters"
    tags = ("Adapters",)

    @post(
        guards=[requires("adapters")], summary="Upload an adapter", responses=REFUSALS, operation_class=UploadOperation
    )
    async def upload(
        self,
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        uploads: NamedDependency[UploadSessions],
    ) -> Adapter:
        """Make PEFT files the next revision of an adapter.

        The form has the field `name` and the files `adapter_config.json` and `adapter_model.safetensors`, as
        `save_pretrained` writes them, and may have the field `base_model`: the base that the adapter was trained on.
        The same files again change nothing.
        """
        async with uploads.parts.receiving(principal) as folder:
            form = await receive_form(request, folder)
            return adapter_object(await uploads.upload(principal, form.name, folder, form.base_model, form.ignored))

    @get(guards=[requires("read")], summary="List adapters", responses=REFUSALS)
    async def list_adapters(
        self,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        after: FromQuery[str | None] = None,
        limit: Annotated[int | None, QueryParameter(ge=1, le=MAX_PAGE)] = None,
        search: Annotated[str | None, QueryParameter(min_length=1, max_length=64)] = None,
    ) -> AdapterPage:
        """Your adapters at their current revisions, by name: all of them, or at most `limit` after the id `after`.

        `search`: only those with this text in their name.
        """
        infos, has_more = await adapters.queries.page(principal, after, limit, search and search.lower())
        data = [adapter_object(info) for info in infos]
        return AdapterPage(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )

    @get(at(), dependencies=NAMED, guards=[requires("read")], summary="Describe an adapter", responses=REFUSALS)
    async def get_adapter(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        if_none_match: IfNoneMatch = None,
    ) -> Response[Any]:
        """One of your adapters, as `adapter` or `tenant/adapter`."""
        info = await adapters.queries.get(principal, adapter)
        if if_none_match is not None and etag(info.version) in if_none_match:
            return Response(None, status_code=304, headers={"ETag": etag(info.version)})
        return tagged(info)

    @patch(
        at(),
        dto=StrictJSON[TtlBody],
        return_dto=None,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Let an adapter delete itself",
        responses=REFUSALS,
    )
    async def update_adapter(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[TtlBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Delete it in `ttl_s` seconds from now, or never."""
        return tagged(await adapters.deletion.set_ttl(principal, adapter, data.ttl_s, preconditions))

    @delete(
        at(),
        status_code=200,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Delete an adapter",
        responses=REFUSALS,
    )
    async def delete_adapter(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        undo_s: FromQuery[int | None] = None,
    ) -> Deleted:
        """Delete it with all its revisions; running requests finish. Undo works for `undo_s` seconds; 0: never."""
        info = await adapters.delete(principal, adapter, preconditions, check_undo(undo_s))
        return Deleted(id=info.id, name=info.name)

    @post(
        at("/undelete"),
        status_code=200,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Undo a deletion",
        responses=REFUSALS,
    )
    async def undelete(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        revision: RevisionQuery = None,
    ) -> Response[Adapter]:
        """Restore the adapter with all that was deleted with it, or one `revision` of an adapter that exists."""
        if revision is not None:
            return tagged(await adapters.deletion.undelete_revision(principal, adapter, revision, preconditions))
        return tagged(await adapters.deletion.undelete(principal, adapter, preconditions))

    @post(
        at("/promote"),
        status_code=200,
        dto=StrictJSON[PromoteBody],
        return_dto=None,
        dependencies=NAMED | CHANGING,
        guards=[requires("adapters")],
        summary="Promote a revision",
        responses=REFUSALS,
    )
    async def promote(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[PromoteBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Point an alias, by default `default`, at one revision alone."""
        return tagged(await adapters.aliases.promote(principal, adapter, data.revision, data.alias, preconditions))
