"""A generation's way back to its client: whole or as a stream, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import MediaType, Request, Response
from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from loramux.gateway import Answer, Delta, GatewayError, TokenUsage, join_by_choice
from loramux_api.problems import error_answer
from loramux_api.rates import rate_headers

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody reads."""
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Gives a generation the shape of one endpoint; OpenAI's where nothing else is said."""

    ending: bytes = b"data: [DONE]\n\n"
    """After the last event of a stream."""

    def opening(self) -> Iterable[msgspec.Struct]:
        """A stream's first events."""

    def chunk(self, delta: Delta) -> msgspec.Struct | None:
        """The event for a delta, if it makes one."""

    def closing(self, usage: TokenUsage) -> Iterable[msgspec.Struct]:
        """A stream's last events."""

    def whole(self, choices: list[Delta], usage: TokenUsage) -> msgspec.Struct:
        """The answer in one piece."""

    def failure(self, error: GatewayError) -> msgspec.Struct:
        """The event of what went wrong in the middle of a stream."""
        return error_answer(error)


class ClientGone(Exception):
    """The client closed the connection."""


async def answer(request: Request[Any, Any, Any], generation: Answer, writer: Writer, *, stream: bool) -> Response[Any]:
    """The response to a generation; the generation is abandoned as soon as the client leaves.

    A stream's response begins with its first token, so that whatever fails before has its proper status.
    """
    try:
        if stream:
            await unless_gone(request, generation.started())
            return GenerationStream(generation, writer)
        choices = await unless_gone(request, _gather(generation))
    except ClientGone:
        generation.abandon()
        return Response(None, status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        generation.abandon()
        raise
    whole = _encode(writer.whole(choices, generation.usage))
    return Response(whole, media_type=MediaType.JSON, headers=answer_headers(generation))


def answer_headers(generation: Answer) -> dict[str, str]:
    """What is left of the limits, and whether the answer is an old one."""
    replayed = {"Idempotent-Replayed": "true"} if generation.replayed else {}
    return rate_headers(generation.standing) | replayed


async def unless_gone(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
    """Await `work`, unless the client leaves first: then it is cancelled. Raises ClientGone.

    Servers do not cancel a handler whose client has left; they only say so to who asks. The body has been read.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


class GenerationStream(Stream):
    """Server-sent events, framed with LF, that abandon their generation however they end."""

    def __init__(self, generation: Answer, writer: Writer) -> None:
        headers = SSE_HEADERS | answer_headers(generation)
        super().__init__(_events(generation, writer), media_type="text/event-stream", headers=headers)
        self._generation = generation

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]  # Litestar calls it, no more
        """Litestar's own response, watched from outside: a generator that was never started is never told."""
        response = super().to_asgi_response(*args, **kwargs)

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await response(scope, receive, send)
            finally:
                self._generation.abandon()

        return watched


async def _events(generation: Answer, writer: Writer) -> AsyncIterator[bytes]:
    try:
        for event in writer.opening():
            yield _frame(event)
        async for delta in generation:
            if (chunk := writer.chunk(delta)) is not None:
                yield _frame(chunk)
        for event in writer.closing(generation.usage):
            yield _frame(event)
    except GatewayError as error:
        yield _frame(writer.failure(error))
    yield writer.ending


def _frame(event: msgspec.Struct) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


async def _gather(generation: Answer) -> list[Delta]:
    """Every choice's deltas joined into one, in order."""
    return join_by_choice([delta async for delta in generation])


async def _until_gone(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
