"""GET /v1/requests."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from msgspec import Meta

from loramux.gateway import Platform
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.requests import RequestObject, request_object
from loramux_api.schemas.tenancy import Listing


class RequestController(Controller):
    """What the tenant asked of adapters."""

    path = "/v1/requests"
    tags = ("Adapters",)
    guards = (requires("usage"),)

    @get(summary="List an adapter's requests", responses=REFUSALS)
    async def list_requests(
        self,
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
        adapter: FromQuery[str],
        before: FromQuery[str | None] = None,
        limit: FromQuery[Annotated[int, Meta(ge=1, le=500)]] = 100,
    ) -> Listing[RequestObject]:
        """Which revision of an adapter answered your requests, newest first: no prompts and no answers are kept.

        `before` is the id of the last page's last request.
        """
        found = await platform.usage.answered_by(principal, adapter, before, limit)
        return Listing(data=[request_object(request) for request in found])
