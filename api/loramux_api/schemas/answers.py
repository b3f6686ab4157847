"""Answers of both endpoints, field for field as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loramux.gateway import FinishReason
from loramux.units import TokenCounts
from loramux_api.schemas.tools import ToolCall, ToolCallDelta

ChatFinishReason = FinishReason | Literal["tool_calls"]
"""`tool_calls`: the answer ends with calls that the model chose to make."""


class PromptTokensDetails(msgspec.Struct):
    """Part of the prompt's tokens."""

    cached_tokens: int
    """Tokens whose KV was reused."""


class CompletionTokensDetails(msgspec.Struct):
    """Part of the answer's tokens."""

    reasoning_tokens: int
    """Tokens of the thought before the answer's text."""


class PromptLogprobEntry(msgspec.Struct):
    """A token at a place of the prompt, in vLLM's words."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprobEntry] | None]
"""For each token of the prompt the token itself and the likeliest ones, by id; null for the first."""


class UsageObject(msgspec.Struct):
    """The charged tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token that was likely at this position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The thought before the text, where the model thinks."""
    reasoning: str | UnsetType = UNSET
    """The same, under vLLM's name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str
    service_tier: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """The news in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same, under vLLM's name."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The news of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    choices: list[ChatChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Null for the first token of a repeated prompt."""
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """One continuation of one prompt, or its news in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """Both null in a whole answer, and absent in chunks, where they are not asked for."""
    prompt_logprobs: PromptLogprobList | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    service_tier: str
    usage: UsageObject | UnsetType | None = UNSET


def usage_object(usage: TokenCounts) -> UsageObject:
    """Write the charged tokens as clients read them."""
    return UsageObject(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        total_tokens=usage.total,
        prompt_tokens_details=PromptTokensDetails(usage.cached),
    )
