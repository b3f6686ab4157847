"""/v1/uploads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post, put
from litestar.di import NamedDependency
from litestar.exceptions import InternalServerException
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta

from loramux.tenants import Principal
from loramux.uploads import Uploads
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS, PieceOperation
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing
from loramux_api.schemas.uploads import Received, UploadBody, UploadDeleted, UploadObject, upload_object


class UploadController(Controller):
    """Uploads in pieces, which a cut connection does not end."""

    path = "/v1/uploads"
    tags = ("Uploads",)

    @post(
        guards=[requires("adapters")],
        dto=StrictJSON[UploadBody],
        return_dto=None,
        summary="Open an upload",
        responses=REFUSALS,
    )
    async def open(
        self, data: JSONBody[UploadBody], principal: NamedDependency[Principal], uploads: NamedDependency[Uploads]
    ) -> UploadObject:
        """Announce the files of an adapter's next revision; send them next, in any order, then complete it.

        With `source` there is nothing to send or to complete: the server fetches and validates at once.
        """
        return upload_object(await uploads.sessions.open(principal, data.request()), principal.tenant_name)

    @put(
        "/{upload_id:str}/files/{name:str}",
        guards=[requires("adapters")],
        summary="Send bytes of a file",
        responses=REFUSALS,
        operation_class=PieceOperation,
    )
    async def receive(
        self,
        request: Request[Any, Any, Any],
        upload_id: FromPath[str],
        name: FromPath[str],
        principal: NamedDependency[Principal],
        uploads: NamedDependency[Uploads],
        offset: FromQuery[Annotated[int, Meta(ge=0)]] = 0,
    ) -> Received:
        """The body is the file from `offset` on, all of it or as much as you like; after a cut, go on at `received`.

        Another offset is answered 409 with the right one in the header `Upload-Offset`.
        """
        body = _until_its_end(request)
        file = await uploads.reception.receive(principal, upload_id, name, offset, body)
        return Received(name=file.name, size=file.size, received=file.received)

    @post(
        "/{upload_id:str}/complete",
        guards=[requires("adapters")],
        status_code=202,
        summary="Complete an upload",
        responses=REFUSALS,
    )
    async def complete(
        self, upload_id: FromPath[str], principal: NamedDependency[Principal], uploads: NamedDependency[Uploads]
    ) -> UploadObject:
        """Have the files validated; the upload's `state` says how it goes, and a webhook how it went."""
        return upload_object(await uploads.sessions.complete(principal, upload_id), principal.tenant_name)

    @get(guards=[requires("read")], summary="List uploads", responses=REFUSALS)
    async def list_uploads(
        self,
        principal: NamedDependency[Principal],
        uploads: NamedDependency[Uploads],
        before: FromQuery[str | None] = None,
        limit: FromQuery[Annotated[int, Meta(ge=1, le=100)]] = 20,
    ) -> Listing[UploadObject]:
        """Newest first; `before` is the last page's last id. What is over is listed for 30 days."""
        found = await uploads.sessions.before(principal, before, limit)
        return Listing(data=[upload_object(upload, principal.tenant_name) for upload in found])

    @get("/{upload_id:str}", guards=[requires("read")], summary="Describe an upload", responses=REFUSALS)
    async def get_upload(
        self, upload_id: FromPath[str], principal: NamedDependency[Principal], uploads: NamedDependency[Uploads]
    ) -> UploadObject:
        """Its state, what of its files is stored, and what became of it."""
        return upload_object(await uploads.sessions.get(principal, upload_id), principal.tenant_name)

    @delete(
        "/{upload_id:str}",
        guards=[requires("adapters")],
        status_code=200,
        summary="Give an upload up",
        responses=REFUSALS,
    )
    async def cancel(
        self, upload_id: FromPath[str], principal: NamedDependency[Principal], uploads: NamedDependency[Uploads]
    ) -> UploadDeleted:
        """Forget it and its bytes. A revision that it became stays."""
        return UploadDeleted(id=(await uploads.sessions.cancel(principal, upload_id)).id)


async def _until_its_end(request: Request[Any, Any, Any]) -> AsyncIterator[bytes]:
    """The body as it comes; where its sender leaves, what has come until then."""
    with suppress(InternalServerException):  # Litestar's word for a client that is gone
        async for chunk in request.stream():
            yield chunk
