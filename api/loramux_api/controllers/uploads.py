"""/v1/uploads: uploads in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import JSONBody, PathParameter

from loramux.catalog.uploads.sessions import UploadSessions
from loramux.common.identity import Principal
from loramux_api.auth import requires
from loramux_api.bodies import AdapterRequest, AnyRequest, ClientDisconnected, DocumentRequest
from loramux_api.openapi import ApiController, PartOperation
from loramux_api.parameters import Offset, OptionalText, PathName, ShortPageLimit
from loramux_api.schemas.tenancy import Listing
from loramux_api.schemas.uploads import Received, UploadBody, UploadDeleted, UploadObject, upload_object

FilePath = Annotated[Path, PathParameter(schema_extra={"max_length": 4096})]
"""A file's name, which may contain a folder. Only announced names are accepted."""


class UploadController(ApiController):
    """Uploads in parts, which survive a broken connection."""

    path = "/v1/uploads"
    tags = ("UploadSessions",)

    @post(guards=[requires("adapters")], summary="Open an upload", request_class=DocumentRequest)
    async def open(
        self,
        data: JSONBody[UploadBody],
        principal: NamedDependency[Principal],
        uploads: NamedDependency[UploadSessions],
    ) -> UploadObject:
        """Announce the files of an adapter's next revision. Then send the files in any order, and complete the upload.

        With `source`, do not send files and do not complete the upload: the server fetches and validates the files
        immediately.
        """
        return upload_object(await uploads.open(principal, data.request()), principal.tenant_name)

    @put(
        "/{upload_id:str}/files/{name:path}",
        guards=[requires("adapters")],
        summary="Send bytes of a file",
        operation_class=PartOperation,
        request_class=AdapterRequest,
    )
    async def receive(
        self,
        request: AnyRequest,
        upload_id: PathName,
        name: FilePath,
        principal: NamedDependency[Principal],
        uploads: NamedDependency[UploadSessions],
        offset: Offset = 0,
    ) -> Received:
        """Send the file from `offset` on, whole or in part. After a broken connection, continue at `received`.

        Any other offset gets 409, with the right offset in the header `Upload-Offset`.
        """
        body = _until_cut(request)
        file = await uploads.parts.receive(principal, upload_id, str(name).removeprefix("/"), offset, body)
        return Received(name=file.name, size=file.size, received=file.received)

    @post("/{upload_id:str}/complete", guards=[requires("adapters")], status_code=202, summary="Complete an upload")
    async def complete(
        self, upload_id: PathName, principal: NamedDependency[Principal], uploads: NamedDependency[UploadSessions]
    ) -> UploadObject:
        """Start the checks. The upload's `state` shows their progress, and a webhook reports their end."""
        return upload_object(await uploads.complete(principal, upload_id), principal.tenant_name)

    @get(guards=[requires("read")], summary="List uploads")
    async def list_uploads(
        self,
        principal: NamedDependency[Principal],
        uploads: NamedDependency[UploadSessions],
        before: OptionalText = None,
        limit: ShortPageLimit = 20,
    ) -> Listing[UploadObject]:
        """List your uploads, newest first; `before` is the id of the last upload on the previous page. Finished uploads
        are listed for 30 days.
        """
        found = await uploads.before(principal, before, limit)
        return Listing(data=[upload_object(upload, principal.tenant_name) for upload in found])

    @get("/{upload_id:str}", guards=[requires("read")], summary="Describe an upload")
    async def get_upload(
        self, upload_id: PathName, principal: NamedDependency[Principal], uploads: NamedDependency[UploadSessions]
    ) -> UploadObject:
        """Describe the upload: its state, the stored bytes of its files, and its result."""
        return upload_object(await uploads.get(principal, upload_id), principal.tenant_name)

    @delete("/{upload_id:str}", guards=[requires("adapters")], status_code=200, summary="Give an upload up")
    async def cancel(
        self, upload_id: PathName, principal: NamedDependency[Principal], uploads: NamedDependency[UploadSessions]
    ) -> UploadDeleted:
        """Cancel an upload and remove its bytes, or remove a finished one from the list. Its revision stays."""
        return UploadDeleted(id=(await uploads.cancel(principal, upload_id)).id)


async def _until_cut(request: AnyRequest) -> AsyncIterator[bytes]:
    """Yield the parts of the body as they arrive. If the client disconnects, end after the bytes received so far."""
    with suppress(ClientDisconnected):
        async for chunk in request.stream():
            yield chunk
