"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import msgspec
from litestar import Controller, MediaType, Request, Response, post
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody

from loramux.errors import LoramuxError
from loramux.gateway import Answer, CompletionService, Delta, FinishReason
from loramux.tenants import Principal
from loramux.units import TokenCounts
from loramux_api.answer_parts import AnswerPart, AnswerParts, PartChange
from loramux_api.answering import NamedEvent, Writer, named_frame
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.headers import request_id
from loramux_api.inference import Inference
from loramux_api.openapi import REFUSALS
from loramux_api.problems import Problem, error_answer, problem_of
from loramux_api.schemas.conversation import renamed_fields
from loramux_api.schemas.message_objects import (
    Block,
    BlockDelta,
    BlockNews,
    BlockStart,
    BlockStop,
    MessageDelta,
    MessageEnd,
    MessageError,
    MessageErrorObject,
    MessageObject,
    MessageStart,
    MessageStop,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
    message_usage,
)
from loramux_api.schemas.messages import CountBody, MessageBody, renamed, to_counted, to_request
from loramux_api.schemas.problems import ErrorObject
from loramux_api.schemas.strict import StrictJSON

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's `type` by status; all others are of invalid requests."""
ERRORS = {status: ResponseSpec(MessageError, description=spec.description) for status, spec in REFUSALS.items()}


def refused(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Return the refusal in Anthropic's shape."""
    problem = problem_of(request, error)
    content = message_error(problem.status, problem.error, request_id(request.scope))
    return Response(content, status_code=problem.status, media_type=MediaType.JSON, headers=_headers(request, problem))


def message_error(status: int, error: ErrorObject, id: str | None = None) -> MessageError:
    """Return an error in Anthropic's shape."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    content = MessageErrorObject(type=kind, message=error.message, param=error.param, code=error.code)
    return MessageError(error=content, request_id=id)


class MessageController(Controller):
    """Conversations, as Anthropic's Messages have them."""

    path = "/v1/messages"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest
    exception_handlers = {LoramuxError: refused, HTTPException: refused, Exception: refused}  # noqa: RUF012  Litestar's

    @post(
        dto=StrictJSON[MessageBody],
        return_dto=None,
        status_code=200,
        summary="Create a message",
        responses={
            200: ResponseSpec(MessageObject, description="With stream: server-sent events."),
            **ERRORS,
        },
    )
    async def create(
        self,
        data: JSONBody[MessageBody],
        inference: NamedDependency[Inference],
    ) -> Response[Any]:
        """Answer a conversation with an adapter of yours, or with the base model."""
        with renamed_fields(renamed(data)):
            writer = partial(MessageWriter, data)
            response = await inference.answer(to_request(data), writer, stream=bool(data.stream))
        response.headers["request-id"] = request_id(inference.request.scope)
        return response

    @post(
        "/count_tokens",
        dto=StrictJSON[CountBody],
        return_dto=None,
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
        """Count a prompt's tokens. It costs nothing, and is refused where no request is left in the minute."""
        with renamed_fields(renamed(data)):
            counted = await completions.tokenize(principal, to_counted(data))
        return TokenCount(len(counted.token_ids))


class MessageWriter(Writer):
    """Writes one answer in Anthropic's shape."""

    ending = b""

    def __init__(self, body: MessageBody, answer: Answer) -> None:
        self._body = body
        self._answer = answer
        self._parts = AnswerParts()
        self._ended: list[AnswerPart] = []
        self._finish_reason: FinishReason | None = None
        self._stop_string: str | None = None

    def opening(self) -> Iterable[msgspec.Struct]:
        """Return the message without content; what was reused of its prompt is told at the end."""
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
        """Take a delta of an answer that is sent in one piece."""
        for _ in self.chunk(delta):
            pass

    def whole(self, usage: TokenCounts) -> MessageObject:
        """Return the collected answer in one piece."""
        message = self._message(usage)
        message.content = [_block(part) for part in self._ended]
        message.stop_reason, message.stop_sequence = self._stop_reason(usage), self._stop_string
        return message

    def failure(self, error: LoramuxError) -> MessageError:
        """Return the event for an error in the middle of a stream."""
        return message_error(error.status, error_answer(error).error)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as it is sent."""
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
    """Return a part as a block, with as much of its content as there is."""
    match part.kind:
        case "thought":
            return ThinkingBlock(thinking=part.text)
        case "text":
            return TextBlock(text=part.text)
        case "call":
            return ToolUseBlock(id=part.call_id, name=part.name, input=_arguments(part.text))


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments, values undecoded; none where they are cut off."""
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
        case "call":
            return BlockNews(type="input_json_delta", partial_json=piece)


def _headers(request: Request[Any, Any, Any], problem: Problem) -> dict[str, str]:
    return problem.all_headers() | {"request-id": request_id(request.scope)}
