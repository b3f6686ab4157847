"""/v1/messages/batches: Anthropic's batches of messages, which are batches of the endpoint /v1/messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.params import JSONBody, QueryParameter

from loramux.batches.files import Files
from loramux.batches.run import REASONS
from loramux.batches.service import Batches
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, TenantId
from loramux.data.entities import LineError, StoredFile
from loramux.serving.errors import InvalidRequest
from loramux_api.auth import requires
from loramux_api.bodies import RequestsRequest
from loramux_api.controllers.messages import ERRORS, MessageError, MessageErrorObject, refused
from loramux_api.downloads import Download
from loramux_api.openapi import ResponseSpec
from loramux_api.parameters import TWO_DIRECTIONS, OptionalText, PathName
from loramux_api.schemas.message_batches import (
    BATCHES,
    MESSAGES,
    MessageBatchBody,
    MessageBatchDeleted,
    MessageBatchObject,
    MessageBatchPage,
    lines_of,
    message_batch_object,
    page_of,
)

MAX_PAGE = 1000
JSON_LINES = "application/x-jsonl"
_encode: Any = msgspec.json.Encoder().encode


class ResultObject(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Outcome of a request."""

    type: Literal["succeeded", "errored", "canceled", "expired"]
    message: msgspec.Raw | None = None
    error: msgspec.Raw | MessageError | None = None


class ResultLine(msgspec.Struct, kw_only=True):
    """One line of the results."""

    custom_id: str
    result: ResultObject


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Outcome(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str | None
    response: _Response | None
    error: LineError | None


class MessageBatchController(Controller):
    """Messages that are answered when the server has room, at the price of batches."""

    path = BATCHES
    tags = ("Batches",)
    guards = (requires("inference"),)
    exception_handlers = {LoramuxError: refused, HTTPException: refused, Exception: refused}  # noqa: RUF012  Litestar's

    @post(status_code=200, summary="Create a batch of messages", request_class=RequestsRequest, responses=ERRORS)
    async def create(
        self,
        data: JSONBody[MessageBatchBody],
        principal: NamedDependency[Principal],
        batches: NamedDependency[Batches],
    ) -> MessageBatchObject:
        """Answer each request like one to /v1/messages. One that cannot be answered has its error in the results."""
        return message_batch_object(await batches.create_of(principal, MESSAGES, lines_of(data)))

    @get(summary="List batches of messages", responses=ERRORS)
    async def list_batches(
        self,
        principal: NamedDependency[Principal],
        batches: NamedDependency[Batches],
        after_id: OptionalText = None,
        before_id: OptionalText = None,
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = 20,
    ) -> MessageBatchPage:
        """List your project's batches, newest first: after the batch `after_id`, or those just before `before_id`."""
        if before_id is None:
            found = await batches.before(principal, after_id, limit + 1, MESSAGES)
            return page_of(found[:limit], has_more=len(found) > limit)
        if after_id is not None:
            raise InvalidRequest(TWO_DIRECTIONS, field="before_id", code="invalid_value")
        found = await batches.following(principal, before_id, limit + 1, MESSAGES)
        return page_of(found[-limit:], has_more=len(found) > limit)

    @get("/{batch_id:str}", summary="Describe a batch of messages", responses=ERRORS)
    async def get_batch(
        self, batch_id: PathName, principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> MessageBatchObject:
        """Describe a batch: its state, its counts, and after its end the path of its results."""
        return message_batch_object(await batches.get(principal, batch_id, MESSAGES))

    @post("/{batch_id:str}/cancel", status_code=200, summary="Cancel a batch of messages", responses=ERRORS)
    async def cancel(
        self, batch_id: PathName, principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> MessageBatchObject:
        """Cancel a batch: no further request begins. Running requests finish, and the results have their answers."""
        return message_batch_object(await batches.cancel(principal, batch_id, MESSAGES))

    @delete("/{batch_id:str}", status_code=200, summary="Delete a batch of messages", responses=ERRORS)
    async def delete_batch(
        self, batch_id: PathName, principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> MessageBatchDeleted:
        """Delete a batch that has ended, its requests and its results at once."""
        await batches.delete(principal, batch_id, MESSAGES)
        return MessageBatchDeleted(id=batch_id)

    @get(
        "/{batch_id:str}/results",
        summary="Download the results of a batch of messages",
        responses={200: ResponseSpec(ResultLine, description="One per line.", media_type=JSON_LINES), **ERRORS},
    )
    async def get_results(
        self,
        batch_id: PathName,
        principal: NamedDependency[Principal],
        batches: NamedDependency[Batches],
        files: NamedDependency[Files],
    ) -> Download:
        """Return the outcome of every request as lines of JSON, answers first; 400 until the batch has ended."""
        batch = await batches.get(principal, batch_id, MESSAGES)
        outputs = await batches.outputs(principal, batch)
        content = _results(_read(files, principal.tenant, outputs))
        return Download(content, f"{batch.id}_results.jsonl", None, JSON_LINES)


async def _read(files: Files, tenant: TenantId, outputs: Sequence[StoredFile]) -> AsyncGenerator[bytes, None]:
    for file in outputs:
        async for piece in files.content(tenant, file):
            yield piece


async def _results(files: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the results of the lines of output and error files, which come in pieces."""
    begun: list[bytes] = []
    async for piece in files:
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join([*begun, ended[0]])
            begun = []
            yield b"".join(_result(line) for line in ended)
        begun.append(rest)


def _result(line: bytes) -> bytes:
    found = msgspec.json.decode(line, type=_Outcome)
    return _encode(ResultLine(custom_id=found.custom_id or "", result=_outcome(found))) + b"\n"


def _outcome(found: _Outcome) -> ResultObject:
    if found.response is not None:
        if found.response.status_code < 400:
            return ResultObject(type="succeeded", message=found.response.body)
        return ResultObject(type="errored", error=found.response.body)
    assert found.error is not None, "a line has a response or an error"
    if found.error.code in REASONS:
        return ResultObject(type="expired" if found.error.code == "batch_expired" else "canceled")
    error = MessageErrorObject(type="invalid_request_error", message=found.error.message, code=found.error.code)
    return ResultObject(type="errored", error=MessageError(error=error))
