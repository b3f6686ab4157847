"""POST /tokenize and /detokenize: vLLM's requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from loramux.engine.request import SamplingParams
from loramux.gateway import GenerationRequest, InvalidRequest
from loramux_api.schemas.chat import ChatBody, ChatMessage, to_request
from loramux_api.schemas.conversation import MAX_MESSAGES
from loramux_api.schemas.strict import Body, Unsupported
from loramux_api.schemas.tools import MAX_TOOLS, ToolDefinition


class TokenizeBody(Body, kw_only=True):
    """A text, or a conversation for the model's chat template."""

    model: str | None = None
    """The first base where it is left out, as in vLLM."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own special tokens around it: by default around a text, and not around a conversation."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    """Answer with the tokens as the vocabulary writes them, too."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        name: ChatBody.unsupported[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
    }


class DetokenizeBody(Body, kw_only=True):
    """Tokens of a model."""

    model: str | None = None
    """The first base where it is left out, as in vLLM."""
    tokens: list[int]


class Tokens(msgspec.Struct, kw_only=True):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


def to_tokenize(body: TokenizeBody) -> GenerationRequest:
    """Return the request as the gateway takes it. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either a 'prompt' or 'messages'.", field="prompt")
    if body.messages is None:
        return GenerationRequest(
            kind="tokens-",
            model=body.model or "",
            is_streamed=False,
            prompts=(body.prompt or "",),
            sampling=SamplingParams(max_tokens=1),
            add_special_tokens=body.add_special_tokens is not False,
        )
    chat = ChatBody(
        model=body.model or "",
        messages=body.messages,
        tools=body.tools,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return replace(to_request(chat), kind="tokens-")
