"""Responses as they are sent: the structs of an answer and of its stream's events, as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loramux.common.units import TokenCounts
from loramux.serving.messages import TokenLogprob
from loramux_api.schemas.chat import ChatLogprob, TopLogprob
from loramux_api.schemas.responses import ResponseTool

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []
    """Log probabilities, with one entry per token, if they were requested."""


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
    """The thought before the text, where the model thinks."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    """Thoughts are given whole."""
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the answer makes."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """JSON."""
    namespace: str | UnsetType = UNSET
    """The namespace of the function."""


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    """The namespace of the tool."""


class ToolSearchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A search for tools, which the caller runs."""

    id: str
    status: ItemStatus
    call_id: str
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall | ToolSearchCall


class InputTokensDetails(msgspec.Struct):
    """Part of the input's tokens."""

    cached_tokens: int
    """Tokens whose KV was reused."""
    cache_write_tokens: int = 0
    """Always 0, because keeping KV is not charged."""
    image_tokens: int | UnsetType = UNSET
    """Number of tokens of images, without those among `cached_tokens`; absent if there is none."""


class OutputTokensDetails(msgspec.Struct):
    """Part of the answer's tokens."""

    reasoning_tokens: int
    """Tokens of the thought before the answer's text."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    """The charged tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """The reason why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """The reason why an answer failed after its first token."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer, or as much of one as there is."""

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
    previous_response_id: str | None
    reasoning: dict[str, Any]
    safety_identifier: None = None
    service_tier: str
    store: bool
    """True: the response is stored, and other requests can refer to it."""
    temperature: float | None
    """The number of the request; null: the model's recommendation or, without one, 1."""
    text: dict[str, Any]
    tool_choice: Any
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float | None
    """The number of the request; null: the model's recommendation or, without one, 1."""
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The base of a stream's events."""

    type: str
    sequence_number: int = 0


class LifecycleEvent(ResponseEvent, kw_only=True):
    """`response.created`, `in_progress`, `completed`, `incomplete` or `failed`."""

    response: ResponseObject


class StreamError(msgspec.Struct, kw_only=True):
    """The reason why a stream ends early, with all keys of an error that is sent whole."""

    type: str
    code: str
    message: str
    param: None = None


class ErrorEvent(ResponseEvent, kw_only=True):
    """`error`, which comes before `response.failed`.

    Clients of `openai` raise an error if an event has the field `error`, as OpenAI's has. Many of them ignore
    `response.failed`, and would take what they have read for the whole answer.
    """

    type: str = "error"
    code: str
    message: str
    param: None = None
    error: StreamError


class ItemEvent(ResponseEvent, kw_only=True):
    """`response.output_item.added` or `done`."""

    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, kw_only=True):
    """`response.content_part.added` or `done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(ResponseEvent, kw_only=True):
    """`response.output_text.delta` or `done`, or those of `response.reasoning_text`."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ArgumentsEvent(ResponseEvent, kw_only=True):
    """`response.function_call_arguments.delta` or `done`."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputEvent(ResponseEvent, kw_only=True):
    """`response.custom_tool_call_input.delta` or `done`."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


def response_usage(usage: TokenCounts, thought_tokens: int) -> ResponseUsage:
    """Write the charged tokens as clients read them."""
    return ResponseUsage(
        input_tokens=usage.prompt,
        input_tokens_details=InputTokensDetails(usage.cached, image_tokens=usage.image or UNSET),
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
