"""vLLM's own routes: /tokenize and /detokenize, /version, /load and /tokenizer_info, /v1/load_lora_adapter and
/v1/unload_lora_adapter, and what trainers such as TRL's call around a load: /server_info, /get_world_size, /pause and
/resume.

Tokenizing is not charged. The server processes at most one text of a tenant at a time. Only operators can load adapters
at run time, from folders below `adapters.local_root`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from litestar import Controller, MediaType, Response, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta

from loramux.accounts.tenants.errors import NotFound, NotPermitted
from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.errors import RegistryError
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.engine.messages import SamplingParams
from loramux.serving.adapters import LocalFolders
from loramux.serving.errors import EngineDown, FolderNotFound, InvalidRequest
from loramux.serving.messages import GenerationRequest
from loramux.serving.service import CompletionService
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest, Body, InferenceBody, InferenceRequest, Unsupported
from loramux_api.openapi import REFUSALS, ApiController, ResponseSpec
from loramux_api.parameters import OptionalText
from loramux_api.problems import ErrorAnswer, problem_of
from loramux_api.schemas.bounds import Fields, ModelName, Name, Path, Text, TokenIds
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


class LoadLoraBody(Body):
    """vLLM's `LoadLoRAAdapterRequest`."""

    lora_name: Name = ""
    """`adapter` of the key's own tenant, or `tenant/adapter` of any."""
    lora_path: Path = ""
    """A folder below `adapters.local_root`, absolute or from there."""
    load_inplace: bool = False

    ignored: ClassVar[frozenset[str]] = frozenset({"base_model_name"})
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "is_3d_lora_weight": Unsupported("the adapter's own configuration says what its weights are.", (None, False))
    }


class UnloadLoraBody(Body):
    """vLLM's `UnloadLoRAAdapterRequest`."""

    lora_name: Name = ""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})


class VllmError(msgspec.Struct, kw_only=True):
    """vLLM's `ErrorInfo`: `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class VllmErrorAnswer(msgspec.Struct):
    """vLLM's `ErrorResponse`."""

    error: VllmError


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
        found = await completions.tokenize(principal, to_tokenize(data))
        return Tokens(
            count=len(found.token_ids),
            max_model_len=found.context,
            tokens=found.token_ids,
            token_strs=found.pieces if data.return_token_strs else None,
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


class ModelInfo(msgspec.Struct):
    """The part of vLLM's `ModelConfig` that trainers read."""

    model: str
    max_model_len: int
    logprobs_mode: Literal["raw_logprobs"] = "raw_logprobs"
    """Log probabilities are the model's own, before temperature, penalties and formats."""


class ParallelInfo(msgspec.Struct):
    """The part of vLLM's `ParallelConfig` that trainers read: a load reaches every engine, as if there were one."""

    world_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1


class LoraInfo(msgspec.Struct):
    """The part of vLLM's `LoRAConfig` that trainers read."""

    max_lora_rank: int
    max_loras: int
    """The largest number of adapters of a tenant: adapters have no slots."""


class ServerConfig(msgspec.Struct, kw_only=True):
    """The parts of vLLM's configuration that trainers read."""

    model_config: ModelInfo
    parallel_config: ParallelInfo
    lora_config: LoraInfo | None
    """None if `adapters.local_root` is not set, so that no adapter can be loaded from a folder."""
    weight_transfer_config: None = None
    """None: the weights of a base are never replaced."""


class ServerInfo(msgspec.Struct):
    """vLLM's `/server_info`; the configuration is a text if the format is `text`."""

    vllm_config: ServerConfig | str


class WorldSize(msgspec.Struct):
    """Number of workers that a trainer must reach."""

    world_size: int


class PauseStatus(msgspec.Struct):
    """vLLM's answer to `/pause` and `/resume`."""

    status: Literal["paused", "resumed"]


class TrainerController(ApiController):
    """Routes that trainers call around the load of an adapter.

    A load is a new immutable revision, so that no running request can be answered with it: there is nothing to pause.
    """

    tags = ("Operations",)
    guards = (requires("operator"),)

    @get("/server_info", summary="The server's configuration, for trainers")
    async def server_info(
        self,
        completions: NamedDependency[CompletionService],
        settings: NamedDependency[Settings],
        config_format: Annotated[Literal["text", "json"], QueryParameter()] = "text",
    ) -> ServerInfo:
        """Return the parts of the configuration that TRL's trainers read, of the first base."""
        base = next(iter(completions.bases.values()), None)
        if base is None:
            raise EngineDown
        adapters = settings.adapters
        config = ServerConfig(
            model_config=ModelInfo(base.name, base.context),
            parallel_config=ParallelInfo(),
            lora_config=LoraInfo(adapters.max_rank, adapters.max_adapters_per_tenant) if adapters.local_root else None,
        )
        return ServerInfo(config if config_format == "json" else msgspec.json.encode(config).decode())

    @get("/get_world_size", summary="The number of workers, for trainers")
    async def world_size(self) -> WorldSize:
        """Return 1: a load reaches every engine of the server."""
        return WorldSize(ParallelInfo().world_size)

    @post("/pause", status_code=200, summary="Pause before a load, for trainers: no effect")
    async def pause(self, mode: Annotated[Literal["abort", "wait", "keep"], QueryParameter()] = "abort") -> PauseStatus:
        """Accept `mode=keep`. Running requests go on, with the revision that they began with."""
        if mode != "keep":
            raise InvalidRequest(
                f"'mode' is '{mode}', and this server never ends or delays its tenants' requests for a load: send "
                "mode=keep, or load the adapter without a pause. Running requests keep their revision.",
                field="mode",
                code="unsupported_parameter",
            )
        return PauseStatus("paused")

    @post("/resume", status_code=200, summary="Resume after a load, for trainers: no effect")
    async def resume(self) -> PauseStatus:
        """Accept the end of a pause, which has had no effect."""
        return PauseStatus("resumed")


LOAD_REFUSALS = {
    status: ResponseSpec(VllmErrorAnswer | ErrorAnswer, description=spec.description)  # type: ignore[arg-type]  # a union
    for status, spec in REFUSALS.items()
}
"""Errors in vLLM's shape, and in ours if the caller lacks a key or a scope."""

REFUSALS_OF_LOADS = (FolderNotFound, InvalidRequest, RegistryError, NotFound, NotPermitted)
TYPES = {400: "InvalidUserInput", 403: "PermissionDeniedError", 404: "NotFoundError"}


def refused(request: AnyRequest, error: LoramuxError) -> Response[Any]:
    """Return the error in vLLM's shape."""
    problem = problem_of(request, error)
    kind = TYPES.get(problem.status, "InternalServerError")
    body = VllmError(message=problem.error.message, type=kind, param=problem.error.param, code=problem.status)
    return Response(VllmErrorAnswer(body), status_code=problem.status, media_type=MediaType.JSON)


class VllmController(Controller):
    """Loading and unloading of adapters at run time. Adapters loaded in this way are checked, versioned and stored like
    uploads, and remain after a restart.
    """

    path = "/v1"
    tags = ("Adapters",)
    guards = (requires("operator"),)
    exception_handlers = {kind: refused for kind in REFUSALS_OF_LOADS}  # noqa: RUF012  Litestar's

    @post(
        "/load_lora_adapter",
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Load an adapter, as vLLM does",
        responses=LOAD_REFUSALS,
    )
    async def load(
        self,
        data: JSONBody[LoadLoraBody],
        principal: NamedDependency[Principal],
        tenants: NamedDependency[Tenants],
        local_folders: NamedDependency[LocalFolders],
    ) -> str:
        """Load the folder `lora_path` of the server's machine as the adapter `lora_name`."""
        if not data.lora_name or not data.lora_path:
            raise InvalidRequest(
                "Both 'lora_name' and 'lora_path' must be provided.",
                field="lora_path" if data.lora_name else "lora_name",
            )
        owner = await _owner(tenants, principal, data.lora_name)
        await local_folders.load(owner, data.lora_name, data.lora_path, data.load_inplace)
        return f"Success: LoRA adapter '{data.lora_name}' added successfully."

    @post(
        "/unload_lora_adapter",
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Unload an adapter, as vLLM does",
        responses=LOAD_REFUSALS,
    )
    async def unload(
        self,
        data: JSONBody[UnloadLoraBody],
        principal: NamedDependency[Principal],
        tenants: NamedDependency[Tenants],
        local_folders: NamedDependency[LocalFolders],
    ) -> str:
        """Delete the adapter `lora_name`; running requests finish."""
        if not data.lora_name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        owner = await _owner(tenants, principal, data.lora_name)
        await local_folders.unload(owner, data.lora_name)
        return f"Success: LoRA adapter '{data.lora_name}' removed successfully."


async def _owner(tenants: Tenants, principal: Principal, lora_name: str) -> Principal:
    """Return the owner: the operator's own tenant, or the tenant at the beginning of the name. Raises
    TenantNotFound.
    """
    tenant, slash, _ = lora_name.partition("/")
    if not slash or tenant == principal.tenant_name:
        return principal
    return await tenants.system_principal(tenant)
