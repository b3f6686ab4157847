"""/v1/adapters."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from loramux.gateway import AdapterService
from loramux.registry import Terms, etag
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at, check_undo, tagged
from loramux_api.openapi import REFUSALS, UploadOperation
from loramux_api.schemas.adapters import Adapter, Deleted, PromoteBody, TtlBody, adapter_object
from loramux_api.schemas.headers import IfNoneMatch
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing
from loramux_api.uploads import receive_upload


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
        adapters: NamedDependency[AdapterService],
    ) -> Adapter:
        """Make PEFT files the next revision of an adapter.

        The form has the field `name` and the files `adapter_config.json` and `adapter_model.safetensors`, as
        `save_pretrained` writes them. The same files again change nothing.
        """
        with adapters.staging() as folder:
            name = await receive_upload(request, folder)
            info = await adapters.upload(principal, name, folder / CONFIG_FILE, folder / WEIGHTS_FILE)
        return adapter_object(info)

    @get(guards=[requires("read")], summary="List adapters", responses=REFUSALS)
    async def list_adapters(
        self, principal: NamedDependency[Principal], adapters: NamedDependency[AdapterService]
    ) -> Listing[Adapter]:
        """Your adapters at their current revisions."""
        return Listing(data=[adapter_object(info) for info in await adapters.reading.all(principal)])

    @get(at(), dependencies=NAMED, guards=[requires("read")], summary="Describe an adapter", responses=REFUSALS)
    async def get_adapter(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        if_none_match: IfNoneMatch = None,
    ) -> Response[Any]:
        """One of your adapters, as `adapter` or `tenant/adapter`."""
        info = await adapters.reading.get(principal, adapter)
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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """In `ttl_s` seconds from now, or never."""
        return tagged(await adapters.retiring.set_ttl(principal, adapter, data.ttl_s, terms))

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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        undo_s: FromQuery[int | None] = None,
    ) -> Deleted:
        """With all its revisions; requests that run finish. It can be undone for `undo_s` seconds; 0: not at all."""
        info = await adapters.delete(principal, adapter, terms, check_undo(undo_s))
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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        revision: FromQuery[int | None] = None,
    ) -> Response[Adapter]:
        """Of the adapter with all that went with it, or of one `revision` of an adapter that is there."""
        if revision is not None:
            return tagged(await adapters.retiring.undelete_revision(principal, adapter, revision, terms))
        return tagged(await adapters.retiring.undelete(principal, adapter, terms))

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
        terms: NamedDependency[Terms],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Response[Adapter]:
        """Have an alias, by default what the bare name means, go to one revision alone."""
        return tagged(await adapters.releasing.promote(principal, adapter, data.revision, data.alias, terms))
