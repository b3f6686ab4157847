"""What both endpoints answer with, field for field as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loramux.gateway import FinishReason


class PromptTokensDetails(msgspec.Struct):
    """Part of the prompt's tokens."""

    cached_tokens: int
    """Their KV was reused."""


class UsageObject(msgspec.Struct):
    """What the request is charged."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    """As resolved: `tenant/adapter@3`, or the base model's name."""
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """One continuation of one prompt, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: UsageObject | UnsetType | None = UNSET
