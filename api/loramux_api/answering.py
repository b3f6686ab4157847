"""Sending an Answer to the client: in one piece or as server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import MediaType, Request, Response
from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import UNSET, UnsetType

from loramux.errors import LoramuxError
from loramux.gateway import Answer, CallDelta, Delta, FinishReason, PromptTokenLogprob, Token, TokenLogprob
from loramux.units import TokenCounts
from loramux_api.bodies import ClientDisconnected
from loramux_api.headers import rate_headers
from loramux_api.problems import CLIENT_CLOSED_REQUEST, error_answer
from loramux_api.schemas.answers import PromptLogprobEntry, PromptLogprobList, UsageObject, usage_object
from loramux_api.schemas.sampling import SamplingBody

T = TypeVar("T")
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


class NamedEvent(Protocol):
    """An event with a `type`."""

    type: str


class Writer(Protocol):
    """Gives an answer the shape of one endpoint; OpenAI's where nothing else is said."""

    ending: bytes = b"data: [DONE]\n\n"
    """Sent after the last event of a stream."""

    def opening(self) -> Iterable[msgspec.Struct]:
        """Return a stream's first events."""

    def chunk(self, delta: Delta) -> Iterable[msgspec.Struct]:
        """Return the events for a delta."""

    def closing(self, usage: TokenCounts) -> Iterable[msgspec.Struct]:
        """Return a stream's last events."""

    def collect(self, delta: Delta) -> None:
        """Take a delta of an answer that is sent in one piece; the costly parts are encoded as they come."""

    def whole(self, usage: TokenCounts) -> msgspec.Struct:
        """Return the collected answer in one piece."""

    def failure(self, error: LoramuxError) -> msgspec.Struct:
        """Return the event for an error in the middle of a stream."""
        return error_answer(error)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as it is sent."""
        return b"data: " + _encode(event) + b"\n\n"


async def respond(request: Request[Any, Any, Any], answer: Answer, writer: Writer, *, stream: bool) -> Response[Any]:
    """Return the response; the answer is abandoned as soon as the client disconnects.

    A stream's response begins with its first token, so that every earlier failure has its proper status.
    """
    try:
        if stream:
            await run_while_connected(request, answer.started())
            return AnswerStream(answer, writer)
        await run_while_connected(request, _collect(answer, writer))
    except ClientDisconnected:
        answer.abandon()
        return Response(None, status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        answer.abandon()
        raise
    whole = _encode(writer.whole(answer.usage))
    return Response(whole, media_type=MediaType.JSON, headers=answer_headers(answer))


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the limits by the minute, and whether the answer is a kept one."""
    replayed = {"Idempotent-Replayed": "true"} if answer.replayed else {}
    return rate_headers(answer.rate_limits) | replayed


async def run_while_connected(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
    """Await `work`, and cancel it where the client disconnects first. Raises ClientDisconnected.

    Servers do not cancel a handler whose client has left; `receive` reports it. The body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer that is sent in one piece."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of the chosen tokens, without alternatives."""
    encoded: list[msgspec.Raw] = field(default_factory=list)
    """The logprobs' JSON, or that of their alternatives: the costly part, one a token."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()

    def add(self, delta: Delta, encode: Callable[[TokenLogprob], object] | None) -> None:
        """Add a delta; `encode` returns what is written of a logprob."""
        self.texts.append(delta.text)
        self.thoughts.append(delta.thought)
        self.calls.extend(delta.calls)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.prompt_logprobs += delta.prompt_logprobs
        if encode is not None:
            self.logprobs.extend(msgspec.structs.replace(one, top=()) for one in delta.logprobs)
            self.encoded.extend(msgspec.Raw(_encode(encode(one))) for one in delta.logprobs)


def usage_of_chunk(body: SamplingBody, answer: Answer, num_tokens: int) -> UsageObject | UnsetType | None:
    """Return the `usage` of a chunk: where it is asked for the usage so far, with `num_tokens` tokens of the answer."""
    if not body.include_usage_in_chunks:
        return None if body.include_usage else UNSET
    prompt = sum(map(len, answer.prompt_token_ids))
    return usage_object(TokenCounts(prompt=prompt, cached=answer.usage.cached, output=num_tokens))


def spelled(token: Token, body: SamplingBody) -> str:
    """Return a token of log probabilities as the caller asked for it."""
    return f"token_id:{token.id}" if body.return_tokens_as_token_ids else token.text


def prompt_logprob_list(scores: Iterable[PromptTokenLogprob]) -> PromptLogprobList:
    """Write a prompt's log probabilities as vLLM does."""
    return [None, *map(_prompt_entries, scores)]


def _prompt_entries(one: PromptTokenLogprob) -> dict[str, PromptLogprobEntry]:
    entries = {
        str(token.id): PromptLogprobEntry(logprob, rank, token.text)
        for rank, (token, logprob) in enumerate(one.top, start=1)
    }
    return entries | {str(one.token.id): PromptLogprobEntry(one.logprob, one.rank, one.token.text)}


class AnswerStream(Stream):
    """Server-sent events, framed with LF, that abandon their answer however they end."""

    def __init__(self, answer: Answer, writer: Writer) -> None:
        headers = SSE_HEADERS | answer_headers(answer)
        super().__init__(_events(answer, writer), media_type="text/event-stream", headers=headers)
        self._answer = answer

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]  # Litestar calls it
        """Wrap Litestar's own response: a generator that was never started cannot clean up after itself."""
        response = super().to_asgi_response(*args, **kwargs)

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await response(scope, receive, send)
            finally:
                self._answer.abandon()

        return watched


async def _events(answer: Answer, writer: Writer) -> AsyncIterator[bytes]:
    try:
        for event in writer.opening():
            yield writer.frame(event)
        async for delta in answer:
            for event in writer.chunk(delta):
                yield writer.frame(event)
        for event in writer.closing(answer.usage):
            yield writer.frame(event)
    except LoramuxError as error:
        yield writer.frame(writer.failure(error))
    if writer.ending:
        yield writer.ending


def named_frame(event: NamedEvent) -> bytes:
    """Return an event that has its name twice: in its JSON, and beside it."""
    return b"event: " + event.type.encode() + b"\ndata: " + _encode(event) + b"\n\n"


async def _collect(answer: Answer, writer: Writer) -> None:
    async for delta in answer:
        writer.collect(delta)
        if delta.pooled:
            await asyncio.sleep(0)  # a vector takes up to a millisecond to encode, and many may be there at once


async def _until_disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
