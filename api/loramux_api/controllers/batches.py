"""/v1/batches and /v1/files: batches of requests, which run when the server has free capacity, and their input and
output files.
"""

from __future__ import annotations

from typing import Annotated, Literal

from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, QueryParameter

from loramux.batches.errors import FileTooLarge
from loramux.batches.files import Files
from loramux.batches.service import Batches
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.serving.errors import InvalidRequest
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest, FileRequest
from loramux_api.downloads import Download
from loramux_api.forms import FileForm
from loramux_api.openapi import ApiController
from loramux_api.parameters import OptionalText, PathName, ShortPageLimit
from loramux_api.schemas.batches import (
    BatchBody,
    BatchObject,
    Cursored,
    FileDeleted,
    FileObject,
    batch_object,
    file_object,
    page_of,
)

MAX_FILES_PAGE = 10_000
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class BatchController(ApiController):
    """Files of requests that run when the server has room, at the price of batches."""

    path = "/v1/batches"
    tags = ("Batches",)
    guards = (requires("inference"),)

    @post(status_code=200, summary="Create a batch")
    async def create(
        self, data: JSONBody[BatchBody], principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Run the lines of a file. A line that cannot run goes to the error file. If no line can run, the batch
        fails.
        """
        made = await batches.create(
            principal,
            endpoint=data.endpoint,
            input_file_id=data.input_file_id,
            completion_window=data.completion_window,
            metadata=data.metadata,
            output_seconds=None if data.output_expires_after is None else data.output_expires_after.seconds,
        )
        return batch_object(made)

    @get(summary="List batches")
    async def list_batches(
        self,
        principal: NamedDependency[Principal],
        batches: NamedDependency[Batches],
        after: OptionalText = None,
        limit: ShortPageLimit = 20,
    ) -> Cursored[BatchObject]:
        """List your project's batches, newest first. `after` is the id of the last batch on the previous page."""
        found = await batches.before(principal, after, limit + 1)
        return page_of([batch_object(batch) for batch in found], limit, [batch.id for batch in found])

    @get("/{batch_id:str}", summary="Describe a batch")
    async def get_batch(
        self, batch_id: PathName, principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Describe a batch: its state and counts, and after its end its output files."""
        return batch_object(await batches.get(principal, batch_id))

    @post("/{batch_id:str}/cancel", status_code=200, summary="Cancel a batch")
    async def cancel(
        self, batch_id: PathName, principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Cancel a batch: no further line begins. Running lines finish. The output file has the answers of all lines
        that ended.
        """
        return batch_object(await batches.cancel(principal, batch_id))


class FileController(ApiController):
    """Files that batches and fine-tuning jobs read, and that batches write."""

    path = "/v1/files"
    tags = ("Batches",)
    guards = (requires("inference"),)

    @post(status_code=200, summary="Upload a file", request_class=FileRequest)
    async def create(
        self,
        request: AnyRequest,
        principal: NamedDependency[Principal],
        files: NamedDependency[Files],
        settings: NamedDependency[Settings],
    ) -> FileObject:
        """Upload a file of JSON lines, or an image, as multipart/form-data: `file`, `purpose` (batch, evals, fine-tune;
        vision for an image), and optionally `expires_after`. Every line of a file to fine-tune on is checked before the
        answer.
        """
        limit = settings.batches.max_file_bytes
        announced = request.headers.get("content-length", "")
        async with files.receiving(principal, int(announced[:20]) if announced.isdigit() else None) as folder:
            threads, fields = files.threads.of(principal.tenant), ("purpose", ANCHOR, SECONDS)
            form = FileForm(folder / "file", threads, fields, limit, lambda: FileTooLarge(limit))
            await form.receive(request.headers.get("content-type"), request.stream())
            stored = await files.add(
                principal,
                form.path,
                form.size,
                filename=form.filename,
                purpose=form.fields.get("purpose", ""),
                expires_after=_expiry(form.fields),
            )
        return file_object(stored)

    @get(summary="List files")
    async def list_files(
        self,
        principal: NamedDependency[Principal],
        files: NamedDependency[Files],
        after: OptionalText = None,
        purpose: OptionalText = None,
        order: FromQuery[Literal["asc", "desc"]] = "desc",
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_FILES_PAGE)] = 1000,
    ) -> Cursored[FileObject]:
        """List your project's files. `after` is the id of the last file on the previous page."""
        found = await files.listed(principal, after, limit + 1, purpose, oldest_first=order == "asc")
        return page_of([file_object(file) for file in found], limit, [file.id for file in found])

    @get("/{file_id:str}", summary="Describe a file")
    async def get_file(
        self, file_id: PathName, principal: NamedDependency[Principal], files: NamedDependency[Files]
    ) -> FileObject:
        """Describe a file of your project."""
        return file_object(await files.get(principal, file_id))

    @get("/{file_id:str}/content", summary="Download a file")
    async def content(
        self, file_id: PathName, principal: NamedDependency[Principal], files: NamedDependency[Files]
    ) -> Download:
        """Return the file's bytes."""
        file = await files.get(principal, file_id)
        return Download(files.content(principal.tenant, file), file.filename, file.size)

    @delete("/{file_id:str}", status_code=200, summary="Delete a file")
    async def delete_file(
        self, file_id: PathName, principal: NamedDependency[Principal], files: NamedDependency[Files]
    ) -> FileDeleted:
        """Delete a file and its bytes at once; 409 while an unfinished batch or fine-tuning job reads it."""
        return FileDeleted(id=(await files.delete(principal, file_id)).id)


def _expiry(fields: dict[str, str]) -> int | None:
    if SECONDS not in fields and ANCHOR not in fields:
        return None
    seconds = fields.get(SECONDS, "")
    if fields.get(ANCHOR, "created_at") != "created_at" or not (seconds.isascii() and seconds.isdigit()):
        raise InvalidRequest("'expires_after' has the anchor created_at, and seconds.", field="expires_after")
    return int(seconds[:12])
