"""vLLM's routes for tokens and information: /tokenize and /detokenize, /version, /load and /tokenizer_info.

Tokenizing is not charged. The server processes at most one text of a tenant at a time. `controllers.trainers` has the
routes that load adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, ClassVar

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import Meta

from loramux.common.identity import Principal
from loramux.engine.messages import SamplingParams
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import GenerationRequest
from loramux.serving.service import CompletionService
from loramux_api.auth import requires
from loramux_api.bodies import InferenceBody, InferenceRequest, Unsupported
from loramux_api.openapi import ApiController
from loramux_api.parameters import OptionalText
from loramux_api.schemas.bounds import Fields, ModelName, Text, TokenIds
from loramux_api.schemas.chat import ChatBody, ChatMessage, to_request
from loramux_api.schemas.conversation import MAX_MESSAGES
from loramux_api.schemas.tools import MAX_TOOLS, ToolDefinition


class TokenizeBody(InferenceBody, kw_only=True):
    """A text, or a conversation for the model's chat template."""

    model: ModelName | None = None
    """Name of the model. Without it, the first base is used, as in vLLM."""
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own special tokens around it. The default is to do so for a text, but not for a
    conversation.
    """
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Fields | None = None
    return_token_strs: bool | None = None
    """Also return the tokens as the vocabulary writes them."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        name: ChatBody.unsupported[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
    }


class DetokenizeBody(InferenceBody, kw_only=True):
    """Tokens of a model, to be turned into text."""

    model: ModelName | None = None
    """Name of the model. Without it, the first base is used, as in vLLM."""
    tokens: TokenIds


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
    """Return the request of the serving layer. Raises InvalidRequest."""
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


class TokenController(ApiController):
    """Conversion of texts to tokens, and back."""

    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post("/tokenize", status_code=200, summary="Tokenize a text or a conversation")
    async def tokenize(
        self,
        data: JSONBody[TokenizeBody],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
    ) -> Tokens:
        """Return the tokens that the model would read, of any number. An adapter's own template and tokens apply."""
        found, pieces = await completions.tokenize(principal, to_tokenize(data)), None
        if data.return_token_strs:
            pieces = await found.tokenizer.all_pieces(found.token_ids, principal.tenant)
        return Tokens(
            count=len(found.token_ids),
            max_model_len=found.context,
            tokens=found.token_ids,
            token_strs=pieces,
        )

    @post("/detokenize", status_code=200, summary="Turn tokens into text")
    async def detokenize(
        self,
        data: JSONBody[DetokenizeBody],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
    ) -> Detokenized:
        """Return the text of a model's tokens, including special ones."""
        return Detokenized(await completions.detokenize(principal, data.model or "", data.tokens))


class Version(msgspec.Struct):
    """The server's release."""

    version: str


class Load(msgspec.Struct):
    """Number of requests that this server works on."""

    server_load: int


class VllmInformationController(ApiController):
    """Information that vLLM users' scripts read."""

    tags = ("Operations",)

    @get("/version", summary="The release", guards=[requires("read")])
    async def release(self) -> Version:
        """Return the release of loramux."""
        return Version(version("loramux"))

    @get("/load", summary="Requests that run", guards=[requires("operator")])
    async def load(self, completions: NamedDependency[CompletionService]) -> Load:
        """Return the number of requests of all tenants that wait or run on this server."""
        return Load(completions.running)

    @get("/tokenizer_info", summary="A model's tokenizer", guards=[requires("inference")])
    async def tokenizer_info(
        self,
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        model: OptionalText = None,
    ) -> dict[str, Any]:
        """Return the class, the special tokens and the chat template of a model's tokenizer; without `model`, of the
        first base.
        """
        return await completions.describe_tokenizer(principal, model)
