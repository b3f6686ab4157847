"""What a server says about itself: probes and metrics without a key; its release, load and tokenizers as vLLM does."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import msgspec
from litestar import Controller, MediaType, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import FromQuery
from prometheus_client import CONTENT_TYPE_LATEST

from loramux.gateway import CompletionService, Platform
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.metrics import Metrics
from loramux_api.openapi import ApiController

Status = Literal["live", "ready", "draining", "engine_down", "database_unreachable"]


class Health(msgspec.Struct):
    """The state of the server."""

    status: Status


class HealthController(Controller):
    """Probes and metrics, without a key."""

    tags = ("Operations",)

    @get("/health/live", summary="Is the process alive?")
    async def live(self) -> Health:
        """Answer 200 as long as the process answers at all."""
        return Health("live")

    @get("/health", summary="Would a request be served?", media_type=MediaType.TEXT)
    async def health(self, platform: NamedDependency[Platform], state: State) -> Response[None]:
        """Answer as /health/ready does, with its status alone: the probe of vLLM's deployments."""
        status = await _readiness(platform, state)
        return Response(None, status_code=200 if status == "ready" else 503)

    @get("/health/ready", summary="Would a request be served?")
    async def ready(self, platform: NamedDependency[Platform], state: State) -> Response[Health]:
        """Answer 200 if a request would be served now.

        503 means: the server is stopping (`draining`), a base has no engine (`engine_down`), or its database does not
        answer (`database_unreachable`).
        """
        status = await _readiness(platform, state)
        return Response(Health(status), status_code=200 if status == "ready" else 503)

    @get("/metrics", summary="Prometheus metrics", media_type=MediaType.TEXT)
    async def metrics(self, metrics: NamedDependency[Metrics]) -> Response[bytes]:
        """Return counters, gauges and histograms. No label contains anything that a tenant wrote."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _readiness(platform: Platform, state: State) -> Status:
    """Return `ready`, or why a request would not be served now."""
    if state.stopping or platform.completions.draining:
        return "draining"
    if not platform.are_engines_alive:
        return "engine_down"
    return "ready" if await platform.is_database_reachable() else "database_unreachable"


class Version(msgspec.Struct):
    """The server's release."""

    version: str


class Load(msgspec.Struct):
    """Requests that this server works on."""

    server_load: int


class VllmInformationController(ApiController):
    """What scripts of vLLM's users read."""

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
        model: FromQuery[str | None] = None,
    ) -> dict[str, Any]:
        """Return the class, the special tokens and the chat template of a model's tokenizer; of the first base without
        `model`."""
        return await completions.describe_tokenizer(principal, model)
