"""Turn an admitted request into its HTTP response, in one piece or as server-sent events.

`Inference` is the dependency of every inference handler: caller, deadline, idempotency key. It starts the request and
calls `respond`, which reads the `Answer` of the serving layer and abandons it as soon as the client disconnects. A
`Writer` gives the deltas the shape of one endpoint. `AnswerParts` divides them for APIs that send a thought, a text and
each call as separate objects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec
from litestar import MediaType, Response
from litestar.response import Stream
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from msgspec import UNSET, UnsetType

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.entities import ServiceTier
from loramux.serving.calls import CallDelta
from loramux.serving.errors import deadline_exceeded
from loramux.serving.messages import (
    Answer,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptTokenLogprob,
    Token,
    TokenLogprob,
)
from loramux.serving.service import CompletionService
from loramux_api.auth import platform_of, principal_of
from loramux_api.bodies import AnyRequest, ClientDisconnected, drop_body
from loramux_api.custom_calls import InputReader
from loramux_api.headers import Deadline, IdempotencyKey, claim_of, rate_headers
from loramux_api.http_layer import ReaderLimit, body_sender
from loramux_api.problems import CLIENT_CLOSED_REQUEST, error_answer
from loramux_api.schemas.chat import PromptLogprobEntry, PromptLogprobList, UsageObject, usage_object
from loramux_api.schemas.sampling import SamplingBody
from loramux_api.schemas.tools import Toolbox


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, as far as it has arrived."""

    kind: Literal["thought", "text", "call", "custom", "search"]
    """Kind of the part. `custom`: a call of a custom tool, whose text is its input. `search`: a search for tools."""
    index: int
    """Position of the part in the answer."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool."""
    namespace: str | None = None
    """Namespace of the called tool."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text; for a call, its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class PartChange:
    """A change of one part."""

    step: Literal["begins", "grows", "ends"]
    part: AnswerPart
    piece: str = ""
    """Text that is added to the part."""


class AnswerParts:
    """Divides an answer's deltas into its parts. Only one part is open at a time."""

    def __init__(self, tools: Toolbox | None = None) -> None:
        """`tools` are those of the request; needed if the model uses other names than the caller."""
        self.count = 0
        """Number of parts that have begun."""
        self._open: AnswerPart | None = None
        self._tools = tools
        self._input = InputReader()
        """Reader of the current custom call."""

    def push(self, delta: Delta) -> Iterator[PartChange]:
        """Yield the changes that a delta makes."""
        if delta.thought:
            yield from self._grow("thought", delta.thought)
        if delta.text:
            yield from self._grow("text", delta.text)
        for call in delta.calls:
            yield from self._push_call(call)

    def begin(self, part: AnswerPart) -> Iterator[PartChange]:
        """Begin a part, and end the current one."""
        yield from self.end()
        self._open = part
        self.count += 1
        yield PartChange("begins", part)

    def end(self) -> Iterator[PartChange]:
        """End the current part, if there is one."""
        if self._open is not None:
            ended, self._open = self._open, None
            yield PartChange("ends", ended)

    def _grow(self, kind: Literal["thought", "text"], text: str) -> Iterator[PartChange]:
        if self._open is None or self._open.kind != kind:
            yield from self.begin(AnswerPart(kind, self.count))
        yield self._add(text)

    def _push_call(self, call: CallDelta) -> Iterator[PartChange]:
        if call.id is not None and call.name is not None:
            yield from self.begin(self._call(call.id, call.name))
        assert self._open is not None, "a call begins with its name"
        news = self._input.push(call.arguments) if self._open.kind == "custom" else call.arguments
        if news:
            yield self._add(news)

    def _call(self, id: str, name: str) -> AnswerPart:
        tool = self._tools.find(name) if self._tools is not None else None
        if tool is None:
            return AnswerPart("call", self.count, id, name)
        if tool.kind == "custom":
            self._input = InputReader()
        return AnswerPart("call" if tool.kind == "function" else tool.kind, self.count, id, tool.name, tool.namespace)

    def _add(self, piece: str) -> PartChange:
        assert self._open is not None, "it has begun"
        self._open.pieces.append(piece)
        return PartChange("grows", self._open, piece)


T = TypeVar("T")
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DELTAS_A_TURN = 32
"""Number of deltas for which the reader of an answer that is sent whole is woken."""
BODY_PIECE = 256 << 10
"""Maximum bytes of a body that are handed to the ASGI server at once."""
_encode = msgspec.json.Encoder().encode


class NamedEvent(Protocol):
    """An event with a `type`."""

    type: str


class Writer(Protocol):
    """Gives an answer the shape of one endpoint. The defaults are OpenAI's shape."""

    ending: bytes = b"data: [DONE]\n\n"
    """Bytes that are sent after the last event of a stream."""

    def opening(self) -> Iterable[msgspec.Struct]:
        """Return a stream's first events."""

    def chunk(self, delta: Delta) -> Iterable[msgspec.Struct]:
        """Return the events for a delta."""

    def closing(self, usage: TokenCounts) -> Iterable[msgspec.Struct]:
        """Return a stream's last events."""

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece. The costly parts are encoded as they come."""

    def whole(self, usage: TokenCounts) -> msgspec.Struct:
        """Return the collected answer in one piece."""

    async def finish(self, usage: TokenCounts) -> None:  # noqa: ARG002 - for those that override it
        """Do what must be done after the last delta and before the caller sees the end; nothing if not overridden."""
        return

    def failure(self, error: LoramuxError) -> Iterable[msgspec.Struct]:
        """Return the events for an error in the middle of a stream."""
        return (error_answer(error),)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as the bytes that are sent."""
        return b"data: " + _encode(event) + b"\n\n"


async def respond(request: AnyRequest, answer: Answer, writer: Writer, *, stream: bool) -> Response[Any]:
    """Return the response. The answer is abandoned as soon as the client disconnects.

    A stream's response begins with its first token, so that every earlier failure gets its proper status.
    """
    try:
        if stream:
            await run_while_connected(request, answer.started())
            return AnswerStream(answer, writer)
        await run_while_connected(request, _collect(answer, writer))
        await writer.finish(answer.usage)
        return WholeAnswer(answer, _encode(writer.whole(answer.usage)))
    except ClientDisconnected:
        answer.abandon()
        return Response(None, status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        answer.abandon()
        raise


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the limits per minute, and whether the answer is a replay of a kept one."""
    replayed = {"Idempotent-Replayed": "true"} if answer.replayed else {}
    return rate_headers(answer.rate_limits) | replayed


async def run_while_connected(request: AnyRequest, work: Awaitable[T], deadline_ms: int | None = None) -> T:
    """Await `work`, and cancel it if the client disconnects first or the deadline passes. Raises ClientDisconnected,
    OverCapacity.

    Servers do not cancel a handler whose client has disconnected, but `receive` reports it. The body must have been
    read. Work on a thread or in another process ends by itself: the answer does not wait for it.
    """
    seconds = None if deadline_ms is None else deadline_ms / 1000
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if not leaving.done():
            raise deadline_exceeded()
        raise ClientDisconnected
    finally:
        working.cancel()
        leaving.cancel()


class JsonLists:
    """Parallel lists of a JSON object that are written while their values come, so that no turn of the event loop
    writes all of a large answer.
    """

    def __init__(self, *names: str) -> None:
        self.length = 0
        """Number of values of each list."""
        self._parts: dict[str, list[bytes]] = {name: [] for name in names}

    def extend(self, **values: Sequence[object]) -> None:
        """Write more values of each list: as many for each."""
        (number,) = {len(more) for more in values.values()}
        self.length += number
        for name, parts in self._parts.items() if number else ():
            parts.append(_encode(values[name])[1:-1])

    def written(self, after: JsonLists | None = None) -> dict[str, Any]:
        """Return the lists by name, each as JSON; with `after`, its values come first."""
        return {
            name: msgspec.Raw(b"[" + b",".join([*(after._parts[name] if after else ()), *parts]) + b"]")
            for name, parts in self._parts.items()
        }


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer that is sent in one piece."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Add a delta without its log probabilities, which the writer writes into separate JsonLists."""
        if delta.is_unended_thought:
            self.thoughts.clear()
        self.texts.append(delta.text)
        self.thoughts.append(delta.thought)
        self.calls.extend(delta.calls)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason


def asked_logprobs(delta: Delta, body: SamplingBody) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of the answer's text. If token ids are wanted too, return those of all tokens, one for each
    id.
    """
    return delta.logprobs + delta.unshown_logprobs if body.return_token_ids else delta.logprobs


def usage_of_chunk(body: SamplingBody, answer: Answer, num_tokens: int) -> UsageObject | UnsetType | None:
    """Return the `usage` of a chunk if the request asks for continuous usage; `num_tokens` counts the answer's tokens
    so far.
    """
    if not body.include_usage_in_chunks:
        return None if body.include_usage else UNSET
    prompt = sum(map(len, answer.prompt_token_ids))
    found = answer.usage
    return usage_object(TokenCounts(prompt=prompt, cached=found.cached, output=num_tokens, image=found.image))


def spelled(token: Token, body: SamplingBody) -> str:
    """Return a token of log probabilities in the form that the caller asked for."""
    return f"token_id:{token.id}" if body.return_tokens_as_token_ids else token.text


class PromptLogprobLists:
    """Log probabilities of a request's prompts in vLLM's form, written as they come, by the index of a choice."""

    def __init__(self) -> None:
        self._lists: dict[int, JsonLists] = {}

    def add(self, delta: Delta) -> None:
        """Write the delta's log probabilities of its choice's prompt."""
        if delta.prompt_logprobs:
            self._of(delta.index).extend(entries=[*map(_prompt_entries, delta.prompt_logprobs)])

    def written(self, index: int) -> PromptLogprobList:
        """Return the list of a choice's prompt, whose first token has null."""
        found: PromptLogprobList = self._of(index).written()["entries"]
        return found

    def _of(self, index: int) -> JsonLists:
        if index not in self._lists:
            self._lists[index] = JsonLists("entries")
            self._lists[index].extend(entries=[None])
        return self._lists[index]


def _prompt_entries(one: PromptTokenLogprob) -> dict[str, PromptLogprobEntry]:
    entries = {
        str(token.id): PromptLogprobEntry(logprob, rank, token.text)
        for rank, (token, logprob) in enumerate(one.top, start=1)
    }
    return entries | {str(one.token.id): PromptLogprobEntry(one.logprob, one.rank, one.token.text)}


class AnswerStream(Stream):
    """Server-sent events, framed with LF. They abandon their answer, however they end."""

    def __init__(self, answer: Answer, writer: Writer) -> None:
        headers = SSE_HEADERS | answer_headers(answer)
        super().__init__(_events(answer, writer), media_type="text/event-stream", headers=headers)
        self._answer = answer

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]  # Litestar calls it
        """Wrap Litestar's own response, because a generator that never started cannot clean up after itself."""
        return _abandoning(self._answer, super().to_asgi_response(*args, **kwargs))


class WholeAnswer(Response[bytes]):
    """An answer in one piece, which counts in its tenant's memory until the client has taken it."""

    def __init__(self, answer: Answer, content: bytes) -> None:
        super().__init__(content, media_type=MediaType.JSON, headers=answer_headers(answer))
        self._answer = answer

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]  # Litestar calls it
        """Wrap Litestar's own response, which would wait for its client without a limit."""
        return _abandoning(self._answer, super().to_asgi_response(*args, **kwargs))


def _abandoning(answer: Answer, response: ASGIApp) -> ASGIApp:
    """Return a response that abandons its answer at its end, and that ends if its client takes nothing."""

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        send_event = body_sender(scope, send)

        try:
            async with ReaderLimit(scope) as reader:

                async def send_part(message: Message) -> None:
                    for part in _in_pieces(message):
                        await reader.take((send_event if part.get("more_body") else send)(part))

                await response(scope, receive, send_part)
        finally:
            answer.abandon()

    return watched


def _in_pieces(message: Message) -> Iterable[Message]:
    """Divide a long body, so that its sender sees whether the client takes it."""
    if message["type"] != "http.response.body" or len(message["body"]) <= BODY_PIECE:
        return (message,)  # a stream's part for each token
    body, starts = message["body"], range(0, len(message["body"]), BODY_PIECE)
    return (
        cast(
            Message,
            message
            | {"body": body[start : start + BODY_PIECE], "more_body": start != starts[-1] or message["more_body"]},
        )
        for start in starts
    )


async def _events(answer: Answer, writer: Writer) -> AsyncIterator[bytes]:
    """Yield the events of all that has come since the last ones were sent: of one token, unless the client is slow."""
    frames = [writer.frame(event) for event in writer.opening()]
    try:
        while deltas := await answer.read():
            for delta in deltas:
                for event in writer.chunk(delta):
                    frames.append(writer.frame(event))
                    if len(frames[-1]) > BODY_PIECE:  # events that repeat all log probabilities are not joined
                        yield b"".join(frames)
                        frames = []
            if frames:
                yield b"".join(frames)
                frames = []
        await writer.finish(answer.usage)
        frames += [writer.frame(event) for event in writer.closing(answer.usage)]
    except LoramuxError as error:
        frames += [writer.frame(event) for event in writer.failure(error)]
    if last := b"".join(frames) + writer.ending:
        yield last


def named_frame(event: NamedEvent) -> bytes:
    """Return an event with its name in two places: in its JSON, and in the line before it."""
    return b"event: " + event.type.encode() + b"\ndata: " + _encode(event) + b"\n\n"


async def _collect(answer: Answer, writer: Writer) -> None:
    while deltas := await answer.read(DELTAS_A_TURN):
        for delta in deltas:
            writer.collect(delta)


async def _until_disconnected(request: AnyRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class Inference:
    """Starts requests of inference for the handlers; as a dependency it reads the headers that they share."""

    request: AnyRequest
    principal: Principal
    completions: CompletionService
    deadline_ms: int | None
    idempotency_key: str | None
    began: float = field(default_factory=time.monotonic)
    """Time from which the deadline counts: the body has been read."""

    def remaining_ms(self, service_tier: ServiceTier) -> int | None:
        """Return the milliseconds that are left to the request's deadline, or to that of its class; None without a
        deadline. Raises NotAllowed.
        """
        deadline_ms = self.deadline_ms or self.completions.class_deadline_ms(self.principal, service_tier)
        return None if deadline_ms is None else max(0, deadline_ms - round(1000 * (time.monotonic() - self.began)))

    async def answer(
        self, asked: GenerationRequest, writer: Callable[[Answer], Writer], *, stream: bool
    ) -> Response[Any]:
        """Return the response to `asked`, in the shape of `writer`. Raises the errors of CompletionService.begin."""
        claim = await claim_of(self.request, self.idempotency_key)
        drop_body(self.request.scope)
        deadline_ms = self.remaining_ms(asked.service_tier)
        asked = replace(asked, deadline_ms=deadline_ms, claim=claim)
        # Work before the admission has no row yet, so it ends with its client even if its answer would be kept.
        beginning = self.completions.begin(self.principal, asked)
        del asked  # its images are kept as patches once it has begun
        answer = await run_while_connected(self.request, beginning, deadline_ms)
        return await respond(self.request, answer, writer(answer), stream=stream)


def inference(
    request: AnyRequest,
    x_loramux_deadline_ms: Deadline = None,
    idempotency_key: IdempotencyKey = None,
) -> Inference:
    """Return the inference dependency of the request, on guarded routes."""
    completions = platform_of(request).completions
    return Inference(request, principal_of(request), completions, x_loramux_deadline_ms, idempotency_key)
