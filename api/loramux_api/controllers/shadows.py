"""Shadow traffic: a share of an adapter's requests also runs on a candidate revision."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import Meta

from loramux.registry import Preconditions, RevisionNumber
from loramux.releases import ShadowReport, Shadows
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.managing import CHANGING, NAMED, at
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import Body, StrictJSON
from loramux_api.schemas.tenancy import Listing


class ShadowBody(Body, forbid_unknown_fields=True):
    """A shadow to start."""

    revision: RevisionNumber
    """The candidate: any revision that does not have all requests."""
    share: Annotated[float, Meta(gt=0, le=1)]
    """Of the requests of your own tenant to the alias `default`; by `user`, where a request names one."""
    max_tokens_per_day: Annotated[int, Meta(ge=1, le=10**12)] = 1_000_000
    """Prompt and answer tokens on the candidate in a day, UTC, on all servers."""
    keep_outputs: bool = False
    """Keep both answers of each request in files of the purpose `shadow_output`, of the request's project."""


class ShadowController(Controller):
    """Candidates that run beside an adapter's requests, unseen by their callers."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED

    @post(
        at("/shadow"),
        dto=StrictJSON[ShadowBody],
        return_dto=None,
        status_code=201,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Start a shadow",
        responses=REFUSALS,
    )
    async def start(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[ShadowBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        shadows: NamedDependency[Shadows],
    ) -> ShadowReport:
        """Repeat a share of the requests on the candidate when there is room, waived, and compare the answers."""
        return await shadows.start(
            principal,
            adapter,
            data.revision,
            data.share,
            data.max_tokens_per_day,
            preconditions,
            keep_outputs=data.keep_outputs,
        )

    @get(at("/shadow"), guards=[requires("read")], summary="Describe a shadow", responses=REFUSALS)
    async def describe(
        self, adapter: NamedDependency[str], principal: NamedDependency[Principal], shadows: NamedDependency[Shadows]
    ) -> ShadowReport:
        """Describe the newest shadow: what became of its requests, and how alike the answers are."""
        return await shadows.get(principal, adapter)

    @get(at("/shadow/history"), guards=[requires("read")], summary="List an adapter's shadows", responses=REFUSALS)
    async def history(
        self, adapter: NamedDependency[str], principal: NamedDependency[Principal], shadows: NamedDependency[Shadows]
    ) -> Listing[ShadowReport]:
        """List the last twenty shadows, newest first."""
        return Listing(data=await shadows.history(principal, adapter))

    @delete(
        at("/shadow"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="End a shadow",
        responses=REFUSALS,
    )
    async def stop(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        shadows: NamedDependency[Shadows],
    ) -> ShadowReport:
        """End the shadow; its figures stay."""
        return await shadows.stop(principal, adapter, preconditions)
