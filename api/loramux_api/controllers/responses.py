"""/v1/responses: OpenAI's Responses, which are stored if the operator enables storage.

First the routes; then `ResponseWriter`, which makes the structs of `schemas.response_objects` from an answer's parts.
`schemas.responses` reads requests, and `schemas.stored_responses` defines the stored form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from litestar import MediaType, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, QueryParameter
from msgspec import UNSET

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import HeldUnits
from loramux.common.sampling import given_numbers
from loramux.common.units import TokenCounts
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Answer, Delta, FinishReason, GenerationRequest, TokenLogprob
from loramux.serving.stored_responses import ResponseStore, ResponseText
from loramux_api.answering import (
    AnswerPart,
    AnswerParts,
    Inference,
    PartChange,
    Writer,
    named_frame,
    run_while_connected,
)
from loramux_api.auth import platform_of, requires
from loramux_api.bodies import HELD_BODY, InferenceRequest, hold_more, hold_to_the_end, inference_body_bytes
from loramux_api.openapi import ApiController, ResponseSpec
from loramux_api.parameters import PathName, ShortPageLimit
from loramux_api.schemas.batches import Cursored, page_of
from loramux_api.schemas.bounds import MAX_NAME
from loramux_api.schemas.chat import ChatLogprob
from loramux_api.schemas.conversation import read_arguments, renamed_fields
from loramux_api.schemas.response_objects import (
    ArgumentsEvent,
    CustomToolCall,
    ErrorEvent,
    FunctionCall,
    IncompleteDetails,
    InputEvent,
    ItemEvent,
    ItemStatus,
    LifecycleEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    StreamError,
    TextEvent,
    ToolSearchCall,
    output_logprob,
    response_usage,
)
from loramux_api.schemas.responses import (
    FIELDS,
    LOGPROBS,
    InputItem,
    ResponseBody,
    stateless_request,
    to_request,
    toolbox,
)
from loramux_api.schemas.sampling import chosen_tier
from loramux_api.schemas.stored_responses import (
    ResponseDeleted,
    WrittenItems,
    conversation_of,
    listed_items,
    referred_responses,
    resolve_references,
    whole_response,
    written_input,
)
from loramux_api.schemas.tools import Toolbox


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


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
    async def create(
        self,
        data: JSONBody[ResponseBody],
        inference: NamedDependency[Inference],
        responses: NamedDependency[ResponseStore],
    ) -> Response[Any]:
        """Answer a conversation with an adapter of yours, or with the base model."""
        keep: Keep | None = None
        memory = HeldUnits(platform_of(inference.request).memory, inference.principal.tenant)
        with renamed_fields(FIELDS), ExitStack() as begun:
            begun.callback(memory.release)  # the writer needs no history
            if responses.is_on and responses.stores(inference.principal, data.store):
                hold_to_the_end(inference.request.scope)
                keep = partial(_keep, responses, inference.principal, data)
            asked, history = await _asked(responses, inference, data, memory)
            writer = partial(ResponseWriter, data, history=history, keep=keep)
            return await inference.answer(asked, writer, stream=bool(data.stream))

    @post(
        "/input_tokens",
        status_code=200,
        summary="Count the tokens of a response's prompt",
        responses={200: ResponseSpec(InputTokens, description="The tokens.")},
    )
    async def count_input_tokens(
        self,
        data: JSONBody[ResponseBody],
        inference: NamedDependency[Inference],
        responses: NamedDependency[ResponseStore],
    ) -> InputTokens:
        """Count a prompt's tokens. The call is free, and is refused if the limit per minute leaves no request."""
        memory = HeldUnits(platform_of(inference.request).memory, inference.principal.tenant)
        with renamed_fields(FIELDS), ExitStack() as counting:
            counting.callback(memory.release)
            asked, _ = await _asked(responses, inference, data, memory)
            counted = await inference.completions.tokenize(inference.principal, asked)
        return InputTokens(input_tokens=len(counted.token_ids))

    @get(
        "/{response_id:str}",
        summary="Read a stored response",
        responses={200: ResponseSpec(ResponseObject, description="The response as it was sent.")},
    )
    async def get_response(
        self,
        response_id: PathName,
        principal: NamedDependency[Principal],
        responses: NamedDependency[ResponseStore],
        stream: FromQuery[bool] = False,
    ) -> Response[Any]:
        """Return a response of your project as it was sent, without log probabilities, which are not stored."""
        if stream:
            raise InvalidRequest("A stored response is not streamed again; leave 'stream' out.", field="stream")
        stored = await responses.get(principal, response_id)
        return Response(whole_response(stored.items, stored.content), media_type=MediaType.JSON)

    @delete("/{response_id:str}", status_code=200, summary="Delete a stored response")
    async def delete_response(
        self,
        response_id: PathName,
        principal: NamedDependency[Principal],
        responses: NamedDependency[ResponseStore],
    ) -> ResponseDeleted:
        """Delete a response of your project. Later responses that continue the deleted response remain, but cannot be
        continued.
        """
        await responses.delete(principal, response_id)
        return ResponseDeleted(id=response_id)

    @get("/{response_id:str}/input_items", summary="List the input of a stored response")
    async def list_input_items(
        self,
        response_id: PathName,
        principal: NamedDependency[Principal],
        responses: NamedDependency[ResponseStore],
        limit: ShortPageLimit = 20,
        order: FromQuery[Literal["asc", "desc"]] = "desc",
        after: Annotated[
            str | None, QueryParameter(max_length=MAX_NAME, description="The last id of the previous page.")
        ] = None,
    ) -> Cursored[dict[str, Any]]:
        """List the items that the request itself sent, without the items of earlier responses that it continues."""
        items = listed_items((await responses.get(principal, response_id)).items)
        if order == "desc":
            items.reverse()
        if after is not None:
            place = next((i for i, item in enumerate(items) if item["id"] == after), len(items))
            items = items[place + 1 :]
        return page_of(items[: limit + 1], limit, [item["id"] for item in items[: limit + 1]])


Keep = Callable[[ResponseObject], Awaitable[bool]]
"""Stores a response; the result says whether it is stored."""


async def _asked(
    responses: ResponseStore, inference: Inference, body: ResponseBody, memory: HeldUnits
) -> tuple[GenerationRequest, list[InputItem]]:
    """Return what a body asks for, and the items before its input. Raises ClientDisconnected, OverCapacity, and as
    `_history` does."""
    if not responses.is_on:
        return stateless_request(body), []
    remaining_ms = inference.remaining_ms(chosen_tier(body.service_tier))
    reading = _history(responses, inference, body, memory)
    history = await run_while_connected(inference.request, reading, remaining_ms)
    return to_request(body, history), history


async def _history(
    responses: ResponseStore, inference: Inference, body: ResponseBody, memory: HeldUnits
) -> list[InputItem]:
    """Return the items before the input, whose bytes `memory` holds, and replace references in the input by their
    items, whose bytes are held with the body's.

    Raises PreviousResponseNotFound, ItemNotFound, InvalidRequest, TooManyBodies.
    """
    principal, completions = inference.principal, inference.completions
    most_bytes = inference_body_bytes(completions.context, completions.image_bytes)
    referred, previous = referred_responses(body), body.previous_response_id
    if not referred and previous is None:
        return []
    async with responses.reads.slot(principal.tenant):
        if referred:
            items = (await responses.items(principal, referred, most_bytes)).values()
            hold_more(inference.request.scope.get(HELD_BODY), sum(map(len, items)))
            resolve_references(body, items)
        if previous is None:
            return []
        history = await responses.history(principal, previous, most_bytes)
        hold_more(memory, sum(map(len, history)))
        return conversation_of(history)


async def _keep(responses: ResponseStore, principal: Principal, body: ResponseBody, response: ResponseObject) -> bool:
    """Store a response, without log probabilities, because these are many times larger than the text."""
    output = [_without_logprobs(item) for item in response.output]
    text = ResponseText(
        items=msgspec.json.encode(WrittenItems(written_input(body, response.id), output)),
        content=msgspec.json.encode(msgspec.structs.replace(response, output=[])),
    )
    previous = body.previous_response_id
    return await responses.add(principal, response.id, previous, text, created=response.created_at)


def _without_logprobs(item: OutputItem) -> OutputItem:
    if not isinstance(item, OutputMessage):
        return item
    content = [msgspec.structs.replace(text, logprobs=[]) for text in item.content]
    return msgspec.structs.replace(item, content=content)


class ResponseWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    ending = b""

    def __init__(
        self, body: ResponseBody, answer: Answer, history: Sequence[InputItem] = (), keep: Keep | None = None
    ) -> None:
        """`history`: the items before the input. `keep`: None for a response that is not stored."""
        self._body = msgspec.structs.replace(body, input=[])  # images are large, and a stream is long
        self._keep = keep
        self._answer = answer
        with_logprobs = LOGPROBS in (body.include or [])
        tools = toolbox(body, history)
        self._items = OutputItems(answer.id.removeprefix("resp_"), tools, with_logprobs=with_logprobs)
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
        yield from _ending(self.whole(usage))

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

    async def finish(self, usage: TokenCounts) -> None:
        """Store the response. The response is stored before the caller gets the end of the answer, so that the next
        request can refer to it.

        The answer of an earlier request under the same idempotency key was stored at that time, and may have been
        deleted since.
        """
        if self._keep is not None and not self._answer.replayed and not await self._keep(self.whole(usage)):
            self._keep = None

    def failure(self, error: LoramuxError) -> Iterable[ResponseEvent]:
        """Return the events for an error in the middle of a stream."""
        response = self._response()
        response.status, response.output, response.store = "failed", self._items.ended, False
        message = error.public_message or error.message
        response.error = ResponseError("rate_limit_exceeded" if error.status == 429 else "server_error", message)
        return _ending(response)

    def frame(self, event: msgspec.Struct) -> bytes:
        """Return an event as the bytes that are sent, with its number."""
        assert isinstance(event, ResponseEvent)
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_frame(event)

    def _response(self) -> ResponseObject:
        """Return the response at its beginning, which has mostly the fields of the request."""
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
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            service_tier=self._answer.service_tier,
            store=self._keep is not None,
            temperature=numbers.get("temperature"),
            text={"format": format, "verbosity": "medium"},
            tool_choice="auto" if body.tool_choice is None else _without_null(body.tool_choice),
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=numbers.get("top_p"),
            user=body.user,
        )


def _ending(response: ResponseObject) -> Iterator[ResponseEvent]:
    """Yield the last events of a stream."""
    if (error := response.error) is not None:
        whole = StreamError(type=error.code, code=error.code, message=error.message)
        yield ErrorEvent(code=error.code, message=error.message, error=whole)
    yield LifecycleEvent(type=f"response.{response.status}", response=response)


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
                if part.kind in _TEXTS:
                    yield self._part_event("response.content_part.added", part)
            case "grows" if part.kind != "search":  # its arguments are an object, and come whole
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
        elif part.kind in _TEXTS:
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
        """Return a part as an item. The item's content is sent at the end of the part."""
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
            case "search":
                return ToolSearchCall(
                    id=id, status=status, call_id=part.call_id, arguments=read_arguments(part.text or "{}")
                )
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
        prefix = {"thought": "rs", "text": "msg", "call": "fc", "custom": "ctc", "search": "tsc"}[part.kind]
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
