"""/v1/adapters."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from loramux.gateway import AdapterService
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS, UploadOperation
from loramux_api.schemas.resources import Adapter, AdapterList, Deleted, adapter_object
from loramux_api.uploads import receive_upload


class AdapterController(Controller):
    """The caller's adapters."""

    path = "/v1/adapters"
    tags = ("Adapters",)

    @post(
        guards=[requires("adapters")], summary="Upload an adapter", responses=REFUSALS, operation_class=UploadOperation
    )
    async def upload(
        self,
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
    ) -> Adapter:
        """Make PEFT files the next revision of an adapter.

        The form has the field `name` and the files `adapter_config.json` and `adapter_model.safetensors`, as
        `save_pretrained` writes them. The same files again change nothing.
        """
        with adapters.staging() as folder:
            name = await receive_upload(request, folder)
            info = await adapters.upload(principal, name, folder / CONFIG_FILE, folder / WEIGHTS_FILE)
        return adapter_object(info)

    @get(guards=[requires("read")], summary="List adapters", responses=REFUSALS)
    async def list_adapters(
        self, principal: NamedDependency[Principal], adapters: NamedDependency[AdapterService]
    ) -> AdapterList:
        """Your adapters at their current revisions."""
        return AdapterList(data=[adapter_object(info) for info in await adapters.all(principal)])

    @get("/{name:path}", guards=[requires("read")], summary="Describe an adapter", responses=REFUSALS)
    async def get_adapter(
        self, name: FromPath[str], principal: NamedDependency[Principal], adapters: NamedDependency[AdapterService]
    ) -> Adapter:
        """One of your adapters, as `adapter` or `tenant/adapter`."""
        return adapter_object(await adapters.get(principal, name.removeprefix("/")))

    @delete(
        "/{name:path}", guards=[requires("adapters")], status_code=200, summary="Delete an adapter", responses=REFUSALS
    )
    async def delete_adapter(
        self, name: FromPath[str], principal: NamedDependency[Principal], adapters: NamedDependency[AdapterService]
    ) -> Deleted:
        """Forget an adapter and all its revisions; requests that run finish."""
        info = await adapters.delete(principal, name.removeprefix("/"))
        return Deleted(id=info.id, name=info.name)
