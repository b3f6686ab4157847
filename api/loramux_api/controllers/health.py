"""Health and metrics, without a key."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Controller, MediaType, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from prometheus_client import CONTENT_TYPE_LATEST

from loramux.gateway import Platform
from loramux_api.metrics import Metrics


class Health(msgspec.Struct):
    """The state of the server."""

    status: Literal["live", "ready", "draining", "engine_down", "database_unreachable"]


class HealthController(Controller):
    """Probes and metrics, without a key."""

    tags = ("Operations",)

    @get("/health/live", summary="Is the process alive?")
    async def live(self) -> Health:
        """Answer 200 as long as the process answers at all."""
        return Health("live")

    @get("/health/ready", summary="Would a request be served?")
    async def ready(self, platform: NamedDependency[Platform], state: State) -> Response[Health]:
        """Answer 200 if a request would be served now.

        503 means: the server is stopping (`draining`), a base has no engine (`engine_down`), or its database does not
        answer (`database_unreachable`).
        """
        if state.stopping or platform.completions.draining:
            return Response(Health("draining"), status_code=503)
        if not platform.are_engines_alive:
            return Response(Health("engine_down"), status_code=503)
        if not await platform.is_database_reachable():
            return Response(Health("database_unreachable"), status_code=503)
        return Response(Health("ready"))

    @get("/metrics", summary="Prometheus metrics", media_type=MediaType.TEXT)
    async def metrics(self, metrics: NamedDependency[Metrics]) -> Response[bytes]:
        """Return counters, gauges and histograms. No label contains anything that a tenant wrote."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
