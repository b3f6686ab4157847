"""Routes of trainers: /v1/load_lora_adapter and /v1/unload_lora_adapter, and what trainers such as TRL's call around a
load: /server_info, /get_world_size, /pause, /resume and /reset_prefix_cache. prime-rl, SkyRL and AReaL add routes
to vLLM's servers; those that a LoRA needs are here too.

A key with the scope `push` loads *training adapters* of its tenant: from a folder, from shared memory, or from the
body. An operator loads permanent adapters of any tenant from folders below `adapters.local_root`, if it is set.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from litestar import Controller, MediaType, Response, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody, QueryParameter

from loramux.accounts.tenants.errors import NotFound, NotPermitted
from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.pushes.service import PushRequest, PushService, TrainingVersion
from loramux.catalog.registry.errors import AdapterNotFound, RegistryError
from loramux.catalog.uploads.sessions import UploadSessions
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.common.units import SECOND
from loramux.serving.adapters import LocalFolders
from loramux.serving.errors import EngineDown, FolderNotFound, InvalidRequest
from loramux.serving.service import CompletionService
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest, Body, LoadRequest, decode_body
from loramux_api.forms import LoadForm
from loramux_api.openapi import REFUSALS, ApiController, LoadOperation, ResponseSpec
from loramux_api.problems import ErrorAnswer, problem_of
from loramux_api.schemas.bounds import Fields, ModelName, Name, Path
from loramux_api.schemas.tenancy import Listing

VERSION_HEADER = "x-loramux-version"
"""Header with the version that a load has made."""


class LoadLoraBody(Body):
    """vLLM's `LoadLoRAAdapterRequest`."""

    lora_name: Name = ""
    """`adapter` of the key's own tenant; for operators also `tenant/adapter` of any."""
    lora_path: Path = ""
    """A folder of the server's machine: the tenant's folder below `pushes.root`, or for operators one below
    `adapters.local_root`; absolute or from there. `shm:TENANT:NAME`: a segment of shared memory.
    """
    load_inplace: bool = False
    base_model_name: ModelName | None = None
    """The adapter's base, if it is a base of this server; another name has no effect."""
    adapter_config: Fields | None = None
    """The contents of adapter_config.json, if the place is a segment of shared memory."""

    ignored: ClassVar[frozenset[str]] = frozenset({"is_3d_lora_weight"})


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


class ModelInfo(msgspec.Struct):
    """The part of vLLM's `ModelConfig` that trainers read."""

    model: str
    max_model_len: int
    dtype: str
    """Type of the base's weights, as torch writes it."""
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
    """Versions that a trainer may hold at the same time: older ones are removed."""


class ServerConfig(msgspec.Struct, kw_only=True):
    """The parts of vLLM's configuration that trainers read."""

    model_config: ModelInfo
    parallel_config: ParallelInfo
    lora_config: LoraInfo | None
    """None if no adapter can be loaded from a folder, because neither `pushes.root` nor `adapters.local_root` is
    set.
    """
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


class ArealStatus(msgspec.Struct):
    """AReaL's answer to its own routes around an update."""

    message: str
    success: Literal[True] = True


class InPlaceLoad(msgspec.Struct):
    """The answer to a load that replaces a name, as prime-rl's and SkyRL's servers give it."""

    lora_name: str
    status: Literal["ok"] = "ok"


class CacheReset(msgspec.Struct):
    """vLLM's answer to `/reset_prefix_cache`."""

    success: Literal[True] = True


class TrainingAdapter(msgspec.Struct, kw_only=True):
    """A live version of a training adapter."""

    id: str
    """The version, as requests may name it: `tenant/policy@12`."""
    object: Literal["training_adapter"] = "training_adapter"
    series: str
    digest: str
    base_model: str
    rank: int
    size_bytes: int
    created_at: int
    parity: str | None
    """`passed`, `failed` or `not_run`; null if the version was not sampled, or is not compared with PEFT yet."""
    parity_detail: str | None


class TrainerController(ApiController):
    """Routes that trainers call around the load of an adapter.

    A load is a new immutable revision, so that no running request can be answered with it: there is nothing to pause.
    """

    tags = ("Operations",)
    guards = (requires("operator", "push"),)

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
        adapters, pushes = settings.adapters, settings.pushes
        config = ServerConfig(
            model_config=ModelInfo(base.name, base.context, f"torch.{base.facts.dtype}"),
            parallel_config=ParallelInfo(),
            lora_config=LoraInfo(adapters.max_rank, pushes.keep) if pushes.root or adapters.local_root else None,
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

    @post("/areal_pause_generation", status_code=200, summary="Pause before a load, for AReaL: no effect")
    async def pause_areal(self) -> ArealStatus:
        """Accept it. Running requests go on with the version that they name, and none is aborted."""
        return ArealStatus("No request needs to pause: each keeps the version that it began with.")

    @post("/areal_continue_generation", status_code=200, summary="Resume after a load, for AReaL: no effect")
    async def resume_areal(self) -> ArealStatus:
        """Accept the end of a pause, which has had no effect."""
        return ArealStatus("Generation continued")

    @post("/reset_prefix_cache", status_code=200, summary="Reset the prefix cache, for trainers: no effect")
    async def reset_prefix_cache(self) -> CacheReset:
        """Accept it: cached KV belongs to the weights that computed it, so that new weights never find it."""
        return CacheReset()

    @post(
        [
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            *("/init_broadcaster", "/areal_init_weights_update_group", "/areal_update_weights"),
            *("/areal_set_update_weight_meta", "/areal_update_weights_xccl"),
            *("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl"),
        ],
        status_code=200,
        summary="Weights of the whole model, for trainers: refused",
    )
    async def transfer_weights(self, request: AnyRequest) -> None:
        """Refuse to replace the base's weights, which other tenants use too."""
        raise InvalidRequest(
            f"POST {request.url.path} is not supported: this server never replaces the weights of a base model, by "
            "NCCL or otherwise, because other tenants use it. Train a LoRA adapter, and push it with POST "
            "/v1/load_lora_adapter.",
            code="unsupported_operation",
        )


class TrainingAdapterController(ApiController):
    """The versions that trainers have pushed."""

    path = "/v1/training_adapters"
    tags = ("Adapters",)
    guards = (requires("read"),)

    @get(summary="List training adapters")
    async def list_versions(
        self, principal: NamedDependency[Principal], pushes: NamedDependency[PushService]
    ) -> Listing[TrainingAdapter]:
        """List the live versions of your training adapters, the latest push first, with the outcome of their comparison
        with PEFT.
        """
        return Listing(data=[training_adapter(version) for version in await pushes.all(principal)])


def training_adapter(version: TrainingVersion) -> TrainingAdapter:
    """Return a version as the API shows it."""
    return TrainingAdapter(
        id=version.name,
        series=version.series,
        digest=version.digest,
        base_model=version.base_model,
        rank=version.rank,
        size_bytes=version.size_bytes,
        created_at=version.created_at // SECOND,
        parity=version.parity,
        parity_detail=version.parity_detail,
    )


LOAD_REFUSALS = {
    status: ResponseSpec(VllmErrorAnswer | ErrorAnswer, description=spec.description)  # type: ignore[arg-type]  # a union
    for status, spec in REFUSALS.items()
}
"""Errors in vLLM's shape, and in ours if the caller lacks a key or a scope."""

REFUSALS_OF_LOADS = (FolderNotFound, InvalidRequest, RegistryError, NotFound, NotPermitted)
TYPES = {400: "InvalidUserInput", 403: "PermissionDeniedError", 404: "NotFoundError", 429: "RateLimitError"}


def refused(request: AnyRequest, error: LoramuxError) -> Response[Any]:
    """Return the error in vLLM's shape."""
    problem = problem_of(request, error)
    kind = TYPES.get(problem.status, "InternalServerError")
    body = VllmError(message=problem.error.message, type=kind, param=problem.error.param, code=problem.status)
    return Response(VllmErrorAnswer(body), status_code=problem.status, media_type=MediaType.JSON)


class LoadController(Controller):
    """Loading and unloading of adapters at run time."""

    tags = ("Adapters",)
    guards = (requires("operator", "push"),)
    exception_handlers = {kind: refused for kind in REFUSALS_OF_LOADS}  # noqa: RUF012  Litestar's

    @post(
        "/v1/load_lora_adapter",
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Load an adapter, as vLLM does",
        responses=LOAD_REFUSALS,
        operation_class=LoadOperation,
        request_class=LoadRequest,
    )
    async def load(
        self,
        request: AnyRequest,
        principal: NamedDependency[Principal],
        tenants: NamedDependency[Tenants],
        local_folders: NamedDependency[LocalFolders],
        pushes: NamedDependency[PushService],
        uploads: NamedDependency[UploadSessions],
    ) -> Response[str]:
        """Load an adapter as `lora_name`.

        The body is vLLM's JSON object, whose `lora_path` is a folder of the server's machine, or a form with the same
        fields and the files `adapter_config.json` and `adapter_model.safetensors`. With a key of the scope `push` the
        adapter is a training adapter: the header x-loramux-version names its new version, and older versions are
        removed. An operator's adapters are permanent: they are checked, versioned and stored like uploads.
        """
        assert isinstance(request, LoadRequest)
        if request.is_form:
            _ensure_push(principal)
            async with uploads.parts.receiving(principal) as folder:
                form = LoadForm(folder, uploads.parts.threads.of(principal.tenant))
                await form.receive(request.headers.get("content-type"), request.stream())
                asked = PushRequest(name=form.name, replace=form.load_inplace, base_model=form.base_model)
                return _loaded(form.name, await pushes.push(principal, asked, folder))
        data = decode_body(await request.body(), LoadLoraBody)
        _ensure_complete(data)
        if "operator" in principal.scopes and local_folders.is_open:
            owner = await _owner(tenants, principal, data.lora_name)
            await local_folders.load(owner, data.lora_name, data.lora_path, data.load_inplace)
            return _loaded(data.lora_name)
        return _loaded(data.lora_name, await _push(pushes, principal, data, replace=data.load_inplace))

    @post(
        ["/load_lora_adapter", "/skyrl/v1/load_lora_adapter"],
        status_code=200,
        summary="Load a training adapter in place, as prime-rl and SkyRL do",
        responses=LOAD_REFUSALS,
    )
    async def load_in_place(
        self,
        data: JSONBody[LoadLoraBody],
        principal: NamedDependency[Principal],
        pushes: NamedDependency[PushService],
    ) -> Response[InPlaceLoad]:
        """Make the folder `lora_path` the next version of the training adapter `lora_name`."""
        _ensure_complete(data)
        version = await _push(pushes, principal, data, replace=True)
        return Response(InPlaceLoad(data.lora_name), headers={VERSION_HEADER: version.name})

    @post(
        "/v1/unload_lora_adapter",
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
        pushes: NamedDependency[PushService],
    ) -> str:
        """Delete the adapter `lora_name`; running requests finish. Only an operator may delete a permanent adapter."""
        if not data.lora_name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        is_operator = "operator" in principal.scopes
        try:
            await pushes.remove(principal, data.lora_name)
        except AdapterNotFound:
            if not is_operator:
                raise
            owner = await _owner(tenants, principal, data.lora_name)
            await local_folders.unload(owner, data.lora_name)
        return f"Success: LoRA adapter '{data.lora_name}' removed successfully."


def _ensure_complete(data: LoadLoraBody) -> None:
    if not data.lora_name or not data.lora_path:
        raise InvalidRequest(
            "Both 'lora_name' and 'lora_path' must be provided.",
            field="lora_path" if data.lora_name else "lora_name",
        )


async def _push(pushes: PushService, principal: Principal, data: LoadLoraBody, *, replace: bool) -> TrainingVersion:
    """Push the adapter at a place of this machine."""
    _ensure_push(principal)
    asked = PushRequest(name=data.lora_name, replace=replace, base_model=data.base_model_name)
    config = None if data.adapter_config is None else msgspec.json.encode(data.adapter_config)
    return await pushes.push_from(principal, asked, data.lora_path, config)


def _ensure_push(principal: Principal) -> None:
    if "push" not in principal.scopes:
        raise NotPermitted(
            "A training adapter is pushed with a key of its tenant's that has the scope 'push'; an operator loads "
            "permanent adapters from folders below adapters.local_root, if it is set.",
            "lora_name",
        )


def _loaded(name: str, version: TrainingVersion | None = None) -> Response[str]:
    headers = {} if version is None else {VERSION_HEADER: version.name}
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type=MediaType.TEXT, headers=headers)


async def _owner(tenants: Tenants, principal: Principal, lora_name: str) -> Principal:
    """Return the owner: the operator's own tenant, or the tenant at the beginning of the name. Raises
    TenantNotFound.
    """
    tenant, slash, _ = lora_name.partition("/")
    if not slash or tenant == principal.tenant_name:
        return principal
    return await tenants.system_principal(tenant)
