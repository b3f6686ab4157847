"""POST /v1/responses: OpenAI's Responses, without anything kept between requests.

First come the structs of an answer and of its stream's events, with the same fields that OpenAI's clients expect, then
the route. `ResponseWriter` makes these structs from an answer's parts. `schemas.responses` reads requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal, cast

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from loramux.common.errors import LoramuxError
from loramux.common.sampling import given_numbers
from loramux.common.units import TokenCounts
from loramux.serving.messages import Answer, Delta, FinishReason, TokenLogprob
from loramux_api.answering import AnswerPart, AnswerParts, Inference, PartChange, Writer, named_frame
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.openapi import ApiController
from loramux_api.schemas.chat import ChatLogprob, TopLogprob
from loramux_api.schemas.conversation import renamed_fields
from loramux_api.schemas.responses import FIELDS, LOGPROBS, ResponseBody, ResponseTool, to_request, toolbox
from loramux_api.schemas.tools import Toolbox

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []
    """Log probabilities, one entry per token, if the request asks for them."""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of a thought."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The text of the answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The thought before the text, if the model thinks."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    """Always empty, because thoughts are given whole."""
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the answer makes."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """Arguments of the call, as JSON."""
    namespace: str | UnsetType = UNSET
    """Namespace of the function."""


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    """Namespace of the tool."""


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputTokensDetails(msgspec.Struct):
    """Part of the input's tokens."""

    cached_tokens: int
    """Number of tokens whose KV was reused."""
    cache_write_tokens: int = 0
    """Always 0, because keeping KV is not charged."""


class OutputTokensDetails(msgspec.Struct):
    """Part of the answer's tokens."""

    reasoning_tokens: int
    """Number of tokens of the thought before the answer's text."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens that are charged."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Reason why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Reason why an answer failed after its first token."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer, or the part of it that exists."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    safety_identifier: None = None
    service_tier: str
    store: Literal[False] = False
    """Always false, because answers are not stored."""
    temperature: float | None
    """Value of the request; null: the model's recommendation, or 1."""
    text: dict[str, Any]
    tool_choice: Any
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float | None
    """Value of the request; null: the model's recommendation, or 1."""
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """Base of a stream's events."""

    type: str
    sequence_number: int = 0


class LifecycleEvent(ResponseEvent, kw_only=True):
    """Event `response.created`, `in_progress`, `completed`, `incomplete` or `failed`."""

    response: ResponseObject


class ItemEvent(ResponseEvent, kw_only=True):
    """Event `response.output_item.added` or `done`."""

    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, kw_only=True):
    """Event `response.content_part.added` or `done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(ResponseEvent, kw_only=True):
    """Event `response.output_text.delta` or `done`, or the same of `response.reasoning_text`."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ArgumentsEvent(ResponseEvent, kw_only=True):
    """Event `response.function_call_arguments.delta` or `done`."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputEvent(ResponseEvent, kw_only=True):
    """Event `response.custom_tool_call_input.delta` or `done`."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


def response_usage(usage: TokenCounts, thought_tokens: int) -> ResponseUsage:
    """Write the charged tokens in OpenAI's form."""
    return ResponseUsage(
        input_tokens=usage.prompt,
        input_tokens_details=InputTokensDetails(usage.cached),
        output_tokens=usage.output,
        output_tokens_details=OutputTokensDetails(thought_tokens),
        total_tokens=usage.total,
    )


def output_logprob(one: TokenLogprob) -> ChatLogprob:
    """Write a generated token with its log probability."""
    return ChatLogprob(
        token=one.token.text,
        logprob=one.logprob,
        bytes=list(one.token.bytes),
        top_logprobs=[
            TopLogprob(token=token.text, logprob=logprob, bytes=list(token.bytes)) for token, logprob in one.top
        ],
    )


class ResponseController(ApiController):
    """Conversations in the form of OpenAI's Responses."""

    path = "/v1/responses"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        status_code=200,
        summary="Create a response",
        responses={200: ResponseSpec(ResponseObject, description="With stream: server-sent response.* events.")},
    )
    async def create(self, data: JSONBody[ResponseBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Answer a conversation with one of your adapters, or with the base model. Answers are not stored."""
        with renamed_fields(FIELDS):
            return await inference.answer(to_request(data), partial(ResponseWriter, data), stream=bool(data.stream))


class ResponseWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    ending = b""

    def __init__(self, body: ResponseBody, answer: Answer) -> None:
        self._body = body
        self._answer = answer
        with_logprobs = LOGPROBS in (body.include or [])
        self._items = OutputItems(answer.id.removeprefix("resp_"), toolbox(body), with_logprobs=with_logprobs)
        self._thought_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._num_events = 0

    def opening(self) -> Iterable[ResponseEvent]:
        """Return the response without output, twice, because OpenAI's responses are queued between the two events."""
        for type in ("response.created", "response.in_progress"):
            yield LifecycleEvent(type=type, response=self._response())

    def chunk(self, delta: Delta) -> Iterable[ResponseEvent]:
        """Return the events for a delta."""
        self._thought_tokens += delta.thought_tokens
        yield from self._items.push(delta)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            yield from self._items.finish("completed" if delta.finish_reason == "stop" else "incomplete")

    def closing(self, usage: TokenCounts) -> Iterable[ResponseEvent]:
        """Return the whole response."""
        whole = self.whole(usage)
        yield LifecycleEvent(type=f"response.{whole.status}", response=whole)

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""
        for _ in self.chunk(delta):
            pass
        if delta.is_unended_thought:
            self._items.drop_thoughts()

    def whole(self, usage: TokenCounts) -> ResponseObject:
        """Return the answer; the finish reason determines its status."""
        response = self._response()
        response.output = self._items.ended
        response.usage = response_usage(usage, self._thought_tokens)
        match self._finish_reason:
            case "stop":
                response.status = "completed"
            case "length":
                response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
            case _:
                message = "The answer ended early, by a fault of its length or its adapter."
                response.status, response.error = "failed", ResponseError("server_error", message)
        return response

    def failure(self, error: LoramuxError) -> ResponseEvent:
        """Return the event for an error in the middle of a stream."""
        response = self._response()
        response.status, response.output = "failed", self._items.ended
        message = error.public_message or error.message
        response.error = ResponseError("rate_limit_exceeded" if error.status == 429 else "server_error", message)
        return LifecycleEvent(type="response.failed", response=response)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as the bytes that are sent, with its number."""
        assert isinstance(event, ResponseEvent)
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_frame(event)

    def _response(self) -> ResponseObject:
        """Return the response at its beginning: mostly the fields of the request."""
        body, numbers = self._body, given_numbers(self._body)
        given = body.text.format if body.text else None
        format = {"type": "text"} if given is None else _without_null(given)
        return ResponseObject(
            id=self._answer.id,
            created_at=self._answer.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._answer.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            service_tier=self._answer.service_tier,
            temperature=numbers.get("temperature"),
            text={"format": format, "verbosity": "medium"},
            tool_choice="auto" if body.tool_choice is None else _without_null(body.tool_choice),
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=numbers.get("top_p"),
            user=body.user,
        )


class OutputItems:
    """The items of an answer, made from its deltas: a thought, a text, and calls."""

    def __init__(self, suffix: str, tools: Toolbox, *, with_logprobs: bool) -> None:
        """`suffix` makes the items' ids unique; a replayed answer has the same ids."""
        self.ended: list[OutputItem] = []
        self._parts = AnswerParts(tools)
        self._suffix = suffix
        self._with_logprobs = with_logprobs
        self._held: list[ChatLogprob] = []
        """Logprobs of the message's tokens that no event has brought yet."""
        self._of_thought: list[tuple[TokenLogprob, ChatLogprob]] = []
        """Logprobs of a thought, without alternatives and encoded, kept because the thought may prove to be the
        message.
        """
        self._logprobs: list[ChatLogprob] = []
        """Logprobs of the current message."""

    def push(self, delta: Delta) -> Iterator[ResponseEvent]:
        """Yield the events of a delta."""
        if self._with_logprobs:
            self._take_logprobs(delta)
        for change in self._parts.push(delta):
            yield from self._events(change)

    def drop_thoughts(self) -> None:
        """Drop thoughts that the answer's text has repeated."""
        self.ended = [item for item in self.ended if not isinstance(item, ReasoningItem)]
        if not self.ended:
            self.ended.append(self._item(AnswerPart("text", 0), "completed"))

    def _take_logprobs(self, delta: Delta) -> None:
        """Keep the logprobs of the message's tokens."""
        if delta.is_unended_thought:
            first = next((one.offset for one, _ in self._of_thought if not one.token.text.isspace()), 0)
            shown = range(first, first + len(delta.text))
            self._held += [encoded for one, encoded in self._of_thought if one.offset in shown]
            self._of_thought.clear()
        for one in delta.logprobs:
            if one.is_text:
                self._held.append(_encoded(one))
            else:
                self._of_thought.append((msgspec.structs.replace(one, top=()), _encoded(one)))

    def finish(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the current item. An answer without any item gets an empty message."""
        if not self._parts.count:
            for change in self._parts.begin(AnswerPart("text", 0)):
                yield from self._events(change)
        for change in self._parts.end():
            yield from self._events(change, status)

    def _events(self, change: PartChange, status: ItemStatus = "completed") -> Iterator[ResponseEvent]:
        part = change.part
        if part.kind == "text":
            self._of_thought.clear()
        match change.step:
            case "begins":
                item = self._item(part, "in_progress")
                yield ItemEvent(type="response.output_item.added", output_index=part.index, item=item)
                if part.kind not in ("call", "custom"):
                    yield self._part_event("response.content_part.added", part)
            case "grows":
                yield self._delta(part, change.piece)
            case "ends":
                yield from self._end(part, status)

    def _delta(self, part: AnswerPart, piece: str) -> ResponseEvent:
        id, index = self._id(part), part.index
        if part.kind == "call":
            type = "response.function_call_arguments.delta"
            return ArgumentsEvent(type=type, item_id=id, output_index=index, delta=piece)
        if part.kind == "custom":
            type = "response.custom_tool_call_input.delta"
            return InputEvent(type=type, item_id=id, output_index=index, delta=piece)
        event = TextEvent(type=f"{_TEXTS[part.kind]}.delta", item_id=id, output_index=index, delta=piece)
        if part.kind == "text":
            event.logprobs = self._take_held()
        return event

    def _end(self, part: AnswerPart, status: ItemStatus) -> Iterator[ResponseEvent]:
        id, index = self._id(part), part.index
        if part.kind == "call":
            type = "response.function_call_arguments.done"
            yield ArgumentsEvent(type=type, item_id=id, output_index=index, name=part.name, arguments=part.text)
        elif part.kind == "custom":
            type = "response.custom_tool_call_input.done"
            yield InputEvent(type=type, item_id=id, output_index=index, input=part.text)
        else:
            event = TextEvent(type=f"{_TEXTS[part.kind]}.done", item_id=id, output_index=index, text=part.text)
            if part.kind == "text":
                event.logprobs = self._logprobs
            yield event
            yield self._part_event("response.content_part.done", part)
        item = self._item(part, status)
        self._logprobs = []
        self.ended.append(item)
        yield ItemEvent(type="response.output_item.done", output_index=index, item=item)

    def _item(self, part: AnswerPart, status: ItemStatus) -> OutputItem:
        """Return a part as an item; its content is sent at its end."""
        id, is_ended = self._id(part), status != "in_progress"
        match part.kind:
            case "call":
                call = FunctionCall(id=id, status=status, call_id=part.call_id, name=part.name, arguments=part.text)
                call.namespace = part.namespace or UNSET
                return call
            case "custom":
                custom = CustomToolCall(id=id, status=status, call_id=part.call_id, name=part.name, input=part.text)
                custom.namespace = part.namespace or UNSET
                return custom
            case "text":
                texts = [OutputText(text=part.text, logprobs=self._logprobs)] if is_ended else []
                return OutputMessage(id=id, status=status, content=texts)
            case "thought":
                thoughts = [ReasoningText(text=part.text)] if is_ended else []
                return ReasoningItem(id=id, status=status, content=thoughts)

    def _part_event(self, type: str, part: AnswerPart) -> PartEvent:
        text = part.text
        content = OutputText(text=text, logprobs=self._logprobs) if part.kind == "text" else ReasoningText(text=text)
        return PartEvent(type=type, item_id=self._id(part), output_index=part.index, part=content)

    def _take_held(self) -> list[ChatLogprob]:
        taken, self._held = self._held, []
        self._logprobs += taken
        return taken

    def _id(self, part: AnswerPart) -> str:
        prefix = {"thought": "rs", "text": "msg", "call": "fc", "custom": "ctc"}[part.kind]
        return f"{prefix}_{self._suffix}{part.index}"


_TEXTS = {"text": "response.output_text", "thought": "response.reasoning_text"}


def _encoded(one: TokenLogprob) -> ChatLogprob:
    """Encode a logprob at once, because an answer has many."""
    return cast(ChatLogprob, msgspec.Raw(msgspec.json.encode(output_logprob(one))))


def _without_null(value: Any) -> Any:
    """Return the value without the fields that were not sent."""
    if isinstance(value, str):
        return value
    return {name: one for name, one in msgspec.to_builtins(value).items() if one is not None}
