"""vLLM's routes for adapters at run time: for operators, and folders below `adapters.local_root`."""

from __future__ import annotations

from typing import Any

from litestar import Controller, MediaType, Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody

from loramux.errors import LoramuxError
from loramux.gateway import FolderNotFound, InvalidRequest, Platform
from loramux.registry import RegistryError
from loramux.tenants import NotFound, NotPermitted, Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.problems import problem_of
from loramux_api.schemas.problems import ErrorAnswer
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.vllm import LoadLoraBody, UnloadLoraBody, VllmError, VllmErrorAnswer

LOAD_REFUSALS = {
    status: ResponseSpec(VllmErrorAnswer | ErrorAnswer, description=spec.description)  # type: ignore[arg-type]  # a union
    for status, spec in REFUSALS.items()
}
"""vLLM's shape, and ours where the caller lacks a key or a scope."""

AnyRequest = Request[Any, Any, Any]
REFUSALS_OF_LOADS = (FolderNotFound, InvalidRequest, RegistryError, NotFound, NotPermitted)
TYPES = {400: "InvalidUserInput", 403: "PermissionDeniedError", 404: "NotFoundError"}


def refused(request: AnyRequest, error: LoramuxError) -> Response[Any]:
    """Return the refusal in vLLM's shape."""
    problem = problem_of(request, error)
    kind = TYPES.get(problem.status, "InternalServerError")
    body = VllmError(message=problem.error.message, type=kind, param=problem.error.param, code=problem.status)
    return Response(VllmErrorAnswer(body), status_code=problem.status, media_type=MediaType.JSON)


class VllmController(Controller):
    """Adapters loaded here are checked, versioned and stored like uploads, and survive a restart."""

    path = "/v1"
    tags = ("Adapters",)
    guards = (requires("operator"),)
    exception_handlers = {kind: refused for kind in REFUSALS_OF_LOADS}  # noqa: RUF012  Litestar's

    @post(
        "/load_lora_adapter",
        dto=StrictJSON[LoadLoraBody],
        return_dto=None,
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Load an adapter, as vLLM does",
        responses=LOAD_REFUSALS,
    )
    async def load(
        self,
        data: JSONBody[LoadLoraBody],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> str:
        """Make the folder `lora_path` of the server's machine what `lora_name` means."""
        if not data.lora_name or not data.lora_path:
            raise InvalidRequest(
                "Both 'lora_name' and 'lora_path' must be provided.",
                field="lora_path" if data.lora_name else "lora_name",
            )
        owner = await _owner(platform, principal, data.lora_name)
        await platform.local_folders.load(owner, data.lora_name, data.lora_path, data.load_inplace)
        return f"Success: LoRA adapter '{data.lora_name}' added successfully."

    @post(
        "/unload_lora_adapter",
        dto=StrictJSON[UnloadLoraBody],
        return_dto=None,
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Unload an adapter, as vLLM does",
        responses=LOAD_REFUSALS,
    )
    async def unload(
        self,
        data: JSONBody[UnloadLoraBody],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> str:
        """Delete `lora_name`; requests that run finish."""
        if not data.lora_name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        owner = await _owner(platform, principal, data.lora_name)
        await platform.local_folders.unload(owner, data.lora_name)
        return f"Success: LoRA adapter '{data.lora_name}' removed successfully."


async def _owner(platform: Platform, principal: Principal, lora_name: str) -> Principal:
    """Return the owner: the operator's own tenant, or the one that the name begins with. Raises TenantNotFound."""
    tenant, slash, _ = lora_name.partition("/")
    if not slash or tenant == principal.tenant_name:
        return principal
    return await platform.tenants.system_principal(tenant)
