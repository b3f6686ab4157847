"""JSON objects of batches of messages in Anthropic's form: other names for a batch of the endpoint /v1/messages."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.batches.lines import MAX_CUSTOM_ID, BatchLine
from loramux.common.units import SECOND
from loramux.data.entities import Batch, LineError
from loramux.serving.errors import InvalidRequest
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import MAX_KEYS, Name

MESSAGES = "/v1/messages"
"""Endpoint of the lines of these batches."""
BATCHES = f"{MESSAGES}/batches"
MAX_REQUESTS = 100_000
"""Requests of a batch at Anthropic. The bounds of a body and of a batch's lines allow fewer."""


class MessageRequest(msgspec.Struct):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    """The caller's name for the request, unique in the batch."""
    params: Annotated[dict[Name, msgspec.Raw], Meta(max_length=MAX_KEYS)]
    """Body of a request to /v1/messages. It is checked when its turn comes."""


class MessageBatchBody(Body, forbid_unknown_fields=True):
    """A batch to create."""

    requests: Annotated[list[MessageRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]

    ignored: ClassVar[frozenset[str]] = frozenset({"betas", "user_profile_id", "workspace_id"})


class MessageRequestCounts(msgspec.Struct):
    """Number of a batch's requests in each state."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatchObject(msgspec.Struct, kw_only=True):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageRequestCounts
    created_at: datetime
    expires_at: datetime
    cancel_initiated_at: datetime | None
    ended_at: datetime | None
    archived_at: datetime | None = None
    """Always null: results are files, which expire."""
    results_url: str | None
    """Path of the results, below the base URL of this API; null until the batch has ended."""
    errors: list[LineError]
    """Reasons why the batch failed as a whole; empty if it did not."""


class MessageBatchPage(msgspec.Struct, kw_only=True):
    """One page of a list of batches, newest first."""

    data: list[MessageBatchObject]
    has_more: bool
    """True: there are more batches in the direction of the page."""
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, kw_only=True):
    """The confirmation of a deletion."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def lines_of(body: MessageBatchBody) -> list[BatchLine]:
    """Return the requests as lines of an input. Raises InvalidRequest if two have the same `custom_id`."""
    seen: dict[str, int] = {}
    for i, request in enumerate(body.requests):
        first = seen.setdefault(request.custom_id, i)
        if first != i:
            where = f"requests[{i}].custom_id"
            message = f"Invalid value for '{where}': 'requests[{first}]' has the same. Each request needs its own."
            raise InvalidRequest(message, field=where, code="invalid_value")
    return [
        BatchLine(custom_id=one.custom_id, url=MESSAGES, body=msgspec.Raw(_encode(one.params))) for one in body.requests
    ]


def message_batch_object(batch: Batch) -> MessageBatchObject:
    """Return the batch as a JSON object."""
    status: Literal["in_progress", "canceling", "ended"] = "in_progress" if batch.finished_at is None else "ended"
    return MessageBatchObject(
        id=batch.id,
        processing_status="canceling" if batch.state == "cancelling" else status,
        request_counts=_counts(batch),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        ended_at=None if batch.finished_at is None else _time(batch.finished_at),
        results_url=f"{BATCHES}/{batch.id}/results" if batch.output_file_id or batch.error_file_id else None,
        errors=list(batch.errors) if batch.state == "failed" else [],
    )


def page_of(batches: Collection[Batch], *, has_more: bool) -> MessageBatchPage:
    """Return a page of a list."""
    data = [message_batch_object(batch) for batch in batches]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchPage(data=data, has_more=has_more, first_id=first, last_id=last)


def _counts(batch: Batch) -> MessageRequestCounts:
    """Count the requests. As at Anthropic, all of them are being processed until the batch ends."""
    if batch.finished_at is None:
        return MessageRequestCounts(processing=batch.lines)
    if batch.state == "failed":
        return MessageRequestCounts(errored=batch.lines)
    return MessageRequestCounts(
        succeeded=batch.completed,
        errored=batch.failed - batch.not_run,
        canceled=batch.not_run if batch.state == "cancelled" else 0,
        expired=batch.not_run if batch.state == "expired" else 0,
    )


def _time(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds // SECOND, UTC)


_encode: Any = msgspec.json.Encoder().encode
