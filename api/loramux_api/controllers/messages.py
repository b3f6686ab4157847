"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients expect them.

First come the structs of an answer, of its stream's events and of errors, then the routes. `MessageWriter` makes these
structs from an answer's parts. `schemas.messages` reads requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

import msgspec
from litestar import Controller, MediaType, Response, post
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.serving.errors import PromptTooLong
from loramux.serving.messages import Answer, Delta, FinishReason
from loramux.serving.service import CompletionService
from loramux_api.answering import AnswerPart, AnswerParts, Inference, NamedEvent, PartChange, Writer, named_frame
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest, InferenceRequest
from loramux_api.headers import request_id
from loramux_api.openapi import REFUSALS, ResponseSpec
from loramux_api.problems import ErrorObject, Problem, error_answer, problem_of
from loramux_api.schemas.conversation import renamed_fields
from loramux_api.schemas.messages import CountBody, MessageBody, ThreadNotFound, renamed, to_counted, to_request

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """The answer's text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The thought before the text, if the model thinks."""

    thinking: str
    signature: str = ""
    """Always empty, because thoughts are not signed. Clients may send thoughts back, or leave them out."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the answer makes."""

    id: str
    name: str
    input: dict[str, Any]
    """Arguments of the call, an object; empty for a call that was cut off."""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens that are charged."""

    input_tokens: int
    """Number of the prompt's tokens that were computed."""
    cache_creation_input_tokens: int = 0
    """Always 0, because keeping KV is not charged."""
    cache_read_input_tokens: int
    """Number of the prompt's tokens whose KV was reused."""
    output_tokens: int
    service_tier: str | UnsetType = UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    """An answer, or the part of an answer that exists so far."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    content: list[Block]
    stop_reason: StopReason | None = None
    """Reason of the answer's end. Null: a fault of its length or its adapter ended the answer early."""
    stop_sequence: str | None = None
    """Stop sequence that ended the answer."""
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Number of tokens of a prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, kw_only=True):
    """A stream's first event."""

    type: Literal["message_start"] = "message_start"
    message: MessageObject


class BlockStart(msgspec.Struct, kw_only=True):
    """The beginning of a block, without its content."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class BlockNews(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New part of a block; exactly one of the texts is set."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(msgspec.Struct, kw_only=True):
    """Event with the new part of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockNews


class BlockStop(msgspec.Struct, kw_only=True):
    """The end of a block."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(msgspec.Struct):
    """Reason for the end of a message."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    """The end of the message, with its usage."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True):
    """A stream's last event."""

    type: Literal["message_stop"] = "message_stop"


class MessageErrorObject(msgspec.Struct, kw_only=True):
    """An error; `param` and `code` are as at the other endpoints."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None
    details: dict[str, str] | UnsetType = UNSET
    """Anthropic's own code of an error, which Anthropic's clients use to recover from the error."""


class MessageError(msgspec.Struct, kw_only=True):
    """The body of an error, and the event of one in the middle of a stream."""

    type: Literal["error"] = "error"
    error: MessageErrorObject
    request_id: str | None = None


def message_usage(usage: TokenCounts, service_tier: str | UnsetType = UNSET) -> MessageUsage:
    """Write the charged tokens in Anthropic's form."""
    return MessageUsage(
        input_tokens=usage.prompt - usage.cached,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.output,
        service_tier="standard" if service_tier == "default" else service_tier,
    )


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's `type` by status. All other statuses are errors of invalid requests."""
ERRORS = {status: ResponseSpec(MessageError, description=spec.description) for status, spec in REFUSALS.items()}


def refused(request: AnyRequest, error: Exception) -> Response[Any]:
    """Return the error in Anthropic's shape."""
    problem = problem_of(request, error)
    content = _in_its_shape(problem.status, problem.error, error, request_id(request.scope))
    return Response(content, status_code=problem.status, media_type=MediaType.JSON, headers=_headers(request, problem))


def message_error(error: LoramuxError) -> MessageError:
    """Return an error of a line of a batch, or in the middle of a stream."""
    return _in_its_shape(error.status, error_answer(error).error, error)


def _in_its_shape(status: int, shown: ErrorObject, error: Exception, id: str | None = None) -> MessageError:
    """Return an error in Anthropic's shape. `shown`: what the caller may see of it."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    content = MessageErrorObject(type=kind, message=shown.message, param=shown.param, code=shown.code)
    if isinstance(error, PromptTooLong):  # the words that tell Anthropic's clients to compact the conversation
        content.message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    if shown.code == ThreadNotFound.code:
        content.details = {"error_code": ThreadNotFound.code}
    return MessageError(error=content, request_id=id)


class MessageController(Controller):
    """Conversations in the form of Anthropic's Messages."""

    path = "/v1/messages"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest
    exception_handlers = {LoramuxError: refused, HTTPException: refused, Exception: refused}  # noqa: RUF012  Litestar's

    @post(
        status_code=200,
        summary="Create a message",
        responses={
            200: ResponseSpec(MessageObject, description="With stream: server-sent events."),
            **ERRORS,
        },
    )
    async def create(self, data: JSONBody[MessageBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Answer a conversation with one of your adapters, or with the base model."""
        with renamed_fields(renamed(data)):
            writer = partial(MessageWriter, data)
            response = await inference.answer(to_request(data), writer, stream=bool(data.stream))
        response.headers["request-id"] = request_id(inference.request.scope)
        return response

    @post(
        "/count_tokens",
        status_code=200,
        summary="Count the tokens of a message's prompt",
        responses={200: ResponseSpec(TokenCount, description="The tokens."), **ERRORS},
    )
    async def count_tokens(
        self,
        data: JSONBody[CountBody],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
    ) -> TokenCount:
        """Count a prompt's tokens. The call is free, and is refused if the limit per minute leaves no request."""
        with renamed_fields(renamed(data)):
            counted = await completions.tokenize(principal, to_counted(data))
        return TokenCount(len(counted.token_ids))


class MessageWriter(Writer):
    """Writes one answer in Anthropic's shape."""

    ending = b""

    def __init__(self, body: MessageBody, answer: Answer) -> None:
        self._body = msgspec.structs.replace(body, messages=[])  # images are large, and a stream is long
        self._answer = answer
        self._parts = AnswerParts()
        self._ended: list[AnswerPart] = []
        self._finish_reason: FinishReason | None = None
        self._stop_string: str | None = None

    def opening(self) -> Iterable[msgspec.Struct]:
        """Return the message without content. The stream's end gives the number of reused tokens of the prompt."""
        prompt = TokenCounts(prompt=sum(map(len, self._answer.prompt_token_ids)))
        yield MessageStart(message=self._message(prompt))

    def chunk(self, delta: Delta) -> Iterable[msgspec.Struct]:
        """Return the events for a delta."""
        self._stop_string = delta.stop_string or self._stop_string
        for change in self._parts.push(delta):
            yield self._event(change)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            for change in self._parts.end():
                yield self._event(change)

    def closing(self, usage: TokenCounts) -> Iterable[msgspec.Struct]:
        """Return the end, with the usage."""
        end = MessageEnd(self._stop_reason(usage), self._stop_string)
        yield MessageDelta(delta=end, usage=message_usage(usage))
        yield MessageStop()

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""
        for _ in self.chunk(delta):
            pass
        if delta.is_unended_thought:
            self._ended = [part for part in self._ended if part.kind != "thought"]

    def whole(self, usage: TokenCounts) -> MessageObject:
        """Return the collected answer in one piece."""
        message = self._message(usage)
        message.content = [_block(part) for part in self._ended]
        message.stop_reason, message.stop_sequence = self._stop_reason(usage), self._stop_string
        return message

    def failure(self, error: LoramuxError) -> Iterable[MessageError]:
        """Return the events for an error in the middle of a stream."""
        return (message_error(error),)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as the bytes that are sent."""
        return named_frame(cast(NamedEvent, event))

    def _event(self, change: PartChange) -> msgspec.Struct:
        part = change.part
        match change.step:
            case "begins":
                return BlockStart(index=part.index, content_block=_block(part))
            case "grows":
                return BlockDelta(index=part.index, delta=_news(part, change.piece))
            case "ends":
                self._ended.append(part)
                return BlockStop(index=part.index)

    def _stop_reason(self, usage: TokenCounts) -> StopReason | None:
        match self._finish_reason:
            case "length":
                is_asked = usage.output >= self._body.max_tokens
                return "max_tokens" if is_asked else "model_context_window_exceeded"
            case "stop" if self._stop_string is not None:
                return "stop_sequence"
            case "stop":
                return "tool_use" if any(part.kind == "call" for part in self._ended) else "end_turn"
        return None

    def _message(self, usage: TokenCounts) -> MessageObject:
        return MessageObject(
            id=self._answer.id,
            model=self._answer.model,
            content=[],
            usage=message_usage(usage, self._answer.service_tier),
        )


def _block(part: AnswerPart) -> Block:
    """Return a part as a block, with the content that exists."""
    match part.kind:
        case "thought":
            return ThinkingBlock(thinking=part.text)
        case "text":
            return TextBlock(text=part.text)
        case _:
            return ToolUseBlock(id=part.call_id, name=part.name, input=_arguments(part.text))


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments with undecoded values, or no arguments if they are cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return {}


def _news(part: AnswerPart, piece: str) -> BlockNews:
    match part.kind:
        case "thought":
            return BlockNews(type="thinking_delta", thinking=piece)
        case "text":
            return BlockNews(type="text_delta", text=piece)
        case _:
            return BlockNews(type="input_json_delta", partial_json=piece)


def _headers(request: AnyRequest, problem: Problem) -> dict[str, str]:
    return problem.all_headers() | {"request-id": request_id(request.scope)}
