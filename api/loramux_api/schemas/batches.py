"""JSON objects of files and batches in OpenAI's form. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from loramux.common.units import SECOND
from loramux.data.entities import Batch, LineError, StoredFile
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name, Tags
from loramux_api.schemas.tenancy import seconds

T = TypeVar("T")


class OutputExpiry(msgspec.Struct, forbid_unknown_fields=True):
    """Time for which the output and error files are kept."""

    seconds: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    anchor: Literal["created_at"] = "created_at"


class BatchBody(Body, forbid_unknown_fields=True):
    """A batch to create."""

    input_file_id: Name
    """A file of purpose `batch`."""
    endpoint: Name
    """/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings or /v1/messages; every line has the same."""
    completion_window: Annotated[str, Meta(max_length=8)] = "24h"
    """Lines that have not begun after this time are not run. 24h, or 1h to 168h."""
    metadata: Tags | None = None
    """Up to 16 tags, by which the bill of lines without their own can be divided."""
    output_expires_after: OutputExpiry | None = None
    """Seconds for which the output and error files are kept: at least 3600, at most the time for which the server keeps
    files.
    """


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeleted(msgspec.Struct, kw_only=True):
    """The confirmation of a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Cursored(msgspec.Struct, Generic[T], kw_only=True):
    """One page of a list; the next one begins after `last_id`."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchErrors(msgspec.Struct, kw_only=True):
    """Errors of the input, or reasons why lines were not run."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(msgspec.Struct):
    """Number of a batch's lines in each state."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    """Status of the batch: validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled."""
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


def file_object(file: StoredFile) -> FileObject:
    """Return the file as a JSON object."""
    return FileObject(
        id=file.id,
        bytes=file.size,
        created_at=file.created_at // SECOND,
        expires_at=file.expires_at // SECOND,
        filename=file.filename,
        purpose=file.purpose,
    )


def batch_object(batch: Batch) -> BatchObject:
    """Return the batch as a JSON object."""
    ended = {batch.state: seconds(batch.finished_at)}
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=BatchErrors(data=list(batch.errors)) if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.state,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_at // SECOND,
        in_progress_at=seconds(batch.in_progress_at),
        expires_at=batch.expires_at // SECOND,
        finalizing_at=seconds(batch.finalizing_at),
        completed_at=ended.get("completed"),
        failed_at=ended.get("failed"),
        expired_at=ended.get("expired"),
        cancelling_at=seconds(batch.cancelling_at),
        cancelled_at=ended.get("cancelled"),
        request_counts=RequestCounts(batch.lines, batch.completed, batch.failed),
        metadata=msgspec.json.decode(batch.tags, type=dict[str, str]) if batch.tags else None,
    )


def page_of(items: list[T], limit: int, ids: list[str]) -> Cursored[T]:
    """Return the first `limit` of `items`, which were listed with one more; `ids` are the items' ids."""
    shown = ids[:limit]
    return Cursored(
        data=items[:limit],
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=len(items) > limit,
    )
