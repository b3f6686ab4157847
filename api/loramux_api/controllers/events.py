"""GET /v1/events."""

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
from loramux_api.schemas.tenancy import Listing
from loramux_api.schemas.webhooks import EventObject, event_object


class EventController(Controller):
    """What happened to the tenant's adapters."""

    path = "/v1/events"
    tags = ("Adapters",)
    guards = (requires("read"),)

    @get(summary="List events", responses=REFUSALS)
    async def list_events(
        self,
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
        adapter: FromQuery[str | None] = None,
        before: FromQuery[str | None] = None,
        limit: FromQuery[Annotated[int, Meta(ge=1, le=500)]] = 100,
    ) -> Listing[EventObject]:
        """What webhooks are told, newest first, for 90 days: of one `adapter`, or of all.

        `before` is the last page's last event.
        """
        found = await platform.webhooks.events(principal, adapter, before, limit)
        return Listing(data=[event_object(event, principal.tenant_name) for event in found])
