"""GET /version, /load and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from loramux.gateway import CompletionService
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS


class Version(msgspec.Struct):
    """The server's release."""

    version: str


class Load(msgspec.Struct):
    """Requests that this server works on."""

    server_load: int


class VllmInformationController(Controller):
    """What scripts of vLLM's users read."""

    tags = ("Operations",)

    @get("/version", summary="The release", guards=[requires("read")], responses=REFUSALS)
    async def release(self) -> Version:
        """Return the release of loramux."""
        return Version(version("loramux"))

    @get("/load", summary="Requests that run", guards=[requires("operator")], responses=REFUSALS)
    async def load(self, completions: NamedDependency[CompletionService]) -> Load:
        """Return the number of requests of all tenants that wait or run on this server."""
        return Load(completions.running)

    @get("/tokenizer_info", summary="A model's tokenizer", guards=[requires("inference")], responses=REFUSALS)
    async def tokenizer_info(
        self,
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        model: FromQuery[str | None] = None,
    ) -> dict[str, Any]:
        """Return the class, the special tokens and the chat template of a model's tokenizer; of the first base without
        `model`."""
        return await completions.describe_tokenizer(principal, model)
