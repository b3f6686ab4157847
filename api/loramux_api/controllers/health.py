"""Probes and metrics, which need no key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from litestar import Controller, MediaType, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from prometheus_client import CONTENT_TYPE_LATEST

from loramux.serving.lifecycle import BaseHealth, BaseLifecycle
from loramux.serving.service import CompletionService
from loramux_api.metrics import Metrics
from loramux_api.peers import Peers

Status = Literal["live", "ready", "draining", "engine_down", "database_unreachable"]


class Health(msgspec.Struct, omit_defaults=True):
    """The state of the server."""

    status: Status
    bases: list[BaseHealth] = []
    """State of each configured base model; only in the answer of /health/ready."""


DatabaseProbe = Callable[[], Awaitable[bool]]


class HealthController(Controller):
    """Probes and metrics, without a key."""

    tags = ("Operations",)

    @get("/health/live", summary="Is the process alive?")
    async def live(self) -> Health:
        """Answer 200 as long as the process responds."""
        return Health("live")

    @get("/health", summary="Would a request be served?", media_type=MediaType.TEXT)
    async def health(
        self,
        completions: NamedDependency[CompletionService],
        lifecycle: NamedDependency[BaseLifecycle],
        database_is_reachable: NamedDependency[DatabaseProbe],
        state: State,
    ) -> Response[None]:
        """Answer with the status of /health/ready and no body: the probe of vLLM's deployments."""
        status = await _readiness(completions, lifecycle, database_is_reachable, state)
        return Response(None, status_code=200 if status == "ready" else 503)

    @get("/health/ready", summary="Would a request be served?")
    async def ready(
        self,
        completions: NamedDependency[CompletionService],
        database_is_reachable: NamedDependency[DatabaseProbe],
        lifecycle: NamedDependency[BaseLifecycle],
        state: State,
    ) -> Response[Health]:
        """Answer 200 if a request would be served now; `bases` has the state of each base model.

        503 means: the server is stopping (`draining`), no base has an engine that serves (`engine_down`), or its
        database does not answer (`database_unreachable`). With `server.ready_when = "all"`, one base without an engine
        is enough for `engine_down`.
        """
        status = await _readiness(completions, lifecycle, database_is_reachable, state)
        return Response(Health(status, lifecycle.health()), status_code=200 if status == "ready" else 503)

    @get("/metrics", summary="Prometheus metrics", media_type=MediaType.TEXT)
    async def metrics(self, metrics: NamedDependency[Metrics], peers: NamedDependency[Peers]) -> Response[bytes]:
        """Return counters, gauges and histograms. No label contains text from a tenant.

        With several workers, the answer has the metrics of all of them; the label `worker` names them.
        """
        return Response(await metrics.text(peers), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _readiness(
    completions: CompletionService, lifecycle: BaseLifecycle, database_is_reachable: DatabaseProbe, state: State
) -> Status:
    """Return `ready`, or the reason why a request would not be served now."""
    if state.stopping or completions.draining:
        return "draining"
    if not lifecycle.is_ready:
        return "engine_down"
    return "ready" if await database_is_reachable() else "database_unreachable"
