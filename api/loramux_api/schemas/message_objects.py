"""POST /v1/messages: the answer, the events of its stream and errors, as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loramux.units import TokenCounts

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """The answer's text."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The thought before the text, where the model thinks."""

    thinking: str
    signature: str = ""
    """Thoughts are not signed: they may be sent back, or left out."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the answer makes."""

    id: str
    name: str
    input: dict[str, Any]
    """The arguments: an object. Empty for a call that was cut off."""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """The charged tokens."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int = 0
    """Nothing is charged for keeping KV."""
    cache_read_input_tokens: int
    """Tokens of the prompt whose KV was reused."""
    output_tokens: int
    service_tier: str | UnsetType = UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    """An answer, or as much of one as there is."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    content: list[Block]
    stop_reason: StopReason | None = None
    """Null: a fault of its length or its adapter ended the answer early."""
    stop_sequence: str | None = None
    """The stop sequence that ended it."""
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The tokens of a prompt."""

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
    """The news of a block: one of the texts."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(msgspec.Struct, kw_only=True):
    """The news of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockNews


class BlockStop(msgspec.Struct, kw_only=True):
    """The end of a block."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(msgspec.Struct):
    """How a message ended."""

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
    """An error; `param` and `code` as at the other endpoints."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class MessageError(msgspec.Struct, kw_only=True):
    """The body of an error, and the event of one in the middle of a stream."""

    type: Literal["error"] = "error"
    error: MessageErrorObject
    request_id: str | None = None


def message_usage(usage: TokenCounts, service_tier: str | UnsetType = UNSET) -> MessageUsage:
    """Write the charged tokens as clients read them."""
    return MessageUsage(
        input_tokens=usage.prompt - usage.cached,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.output,
        service_tier="standard" if service_tier == "default" else service_tier,
    )
