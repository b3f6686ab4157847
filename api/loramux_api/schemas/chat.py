"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from loramux.gateway import Ask, Conversation, InvalidRequest, Message, canonical_tags
from loramux_api.schemas.sampling import MAX_TOP_LOGPROBS, Positive, SamplingBody, TopLogprobs, sampling_params
from loramux_api.schemas.strict import Unsupported

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles, and what chat templates call them."""
_NO_TOOLS = "this server calls no tools."
_TEXT_ONLY = "this server reads and writes text."


class ContentPart(msgspec.Struct):
    """A part of a message; only texts are read."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. The fields without which an assistant's turn would mean something else must be null or empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    """Accepted and without effect: chat templates know no names."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None


class ChatBody(SamplingBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for what OpenAI does not have."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    """The same as `max_tokens`, which it overrides."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "parallel_tool_calls",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **SamplingBody.unsupported,
        "audio": Unsupported(_TEXT_ONLY),
        "function_call": Unsupported(_NO_TOOLS, (None, "none")),
        "functions": Unsupported(_NO_TOOLS, (None, [])),
        "modalities": Unsupported(_TEXT_ONLY, (None, ["text"])),
        "moderation": Unsupported("answers are not moderated."),
        "reasoning_effort": Unsupported("the model decides how it reasons.", (None, "none")),
        "response_format": Unsupported("answers are not constrained to a format.", (None, {"type": "text"})),
        "service_tier": Unsupported("there is one tier.", (None, "auto", "default")),
        "store": Unsupported("answers are not stored.", (None, False)),
        "tool_choice": Unsupported(_NO_TOOLS, (None, "none", "auto")),
        "tools": Unsupported(_NO_TOOLS, (None, [])),
        "verbosity": Unsupported("the model decides how much it writes.", (None, "medium")),
        "web_search_options": Unsupported("this server does not search the web."),
    }


def to_ask(body: ChatBody) -> Ask:
    """The request as the gateway takes it. Raises InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            f"'top_logprobs' (0 to {MAX_TOP_LOGPROBS}) needs 'logprobs' to be true.", param="top_logprobs"
        )
    return Ask(
        kind="chatcmpl",
        model=body.model,
        prompts=(_conversation(body.messages),),
        sampling=sampling_params(body, (body.top_logprobs or 0) if body.logprobs else None),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n or 1,
        stop=body.stops,
        user=body.user or None,
        tags=canonical_tags(body.metadata),
    )


def _conversation(messages: list[ChatMessage]) -> Conversation:
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"Invalid value for '{where}.role': '{message.role[:40]}'. This server reads the roles {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise InvalidRequest(
                f"'{where}.{name}' is not supported: {_TEXT_ONLY if name == 'audio' else _NO_TOOLS}",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    return Message(ROLES[message.role], _content(message, f"{where}.content"))


def _content(message: ChatMessage, where: str) -> str:
    if message.content is None:
        raise InvalidRequest(f"'{where}' is missing; send a text, even if it is empty.", param=where)
    if isinstance(message.content, str):
        return message.content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(message.content))


def _part(part: ContentPart, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    raise InvalidRequest(
        f"Invalid value for '{where}': this server reads parts of type 'text' with a 'text'; got '{part.type[:40]}'.",
        param=where,
        code="invalid_value",
    )
