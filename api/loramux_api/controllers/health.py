"""Health and metrics: for whoever runs the server, without a key."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Controller, MediaType, Response, get
from litestar.di import NamedDependency
from prometheus_client import CONTENT_TYPE_LATEST

from loramux.gateway import Platform
from loramux_api.metrics import Metrics


class Health(msgspec.Struct):
    """One word."""

    status: Literal["live", "ready", "draining", "engine_down"]


class HealthController(Controller):
    """Probes."""

    tags = ("Operations",)

    @get("/health/live", summary="Is the process alive?")
    async def live(self) -> Health:
        """200 as long as the server answers at all."""
        return Health("live")

    @get("/health/ready", summary="Would a request be served?")
    async def ready(self, platform: NamedDependency[Platform]) -> Response[Health]:
        """200, or 503 while the server is being stopped and when its engine is gone."""
        if platform.completions.serving:
            return Response(Health("ready"))
        return Response(Health("draining" if platform.completions.draining else "engine_down"), status_code=503)

    @get("/metrics", summary="Prometheus metrics", media_type=MediaType.TEXT)
    async def metrics(self, metrics: NamedDependency[Metrics]) -> Response[bytes]:
        """Counters and gauges; no label holds anything that a tenant wrote."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
