"""/v1/webhooks."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta

from loramux.gateway import Platform
from loramux.tenants import Principal
from loramux.webhooks import Endpoints
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing
from loramux_api.schemas.webhooks import (
    DeliveryObject,
    WebhookBody,
    WebhookChange,
    WebhookDeleted,
    WebhookObject,
    WebhookTest,
    delivery_object,
    outcome_object,
    webhook_object,
)


class WebhookController(Controller):
    """Addresses that are told what happens to the tenant's adapters, signed as standardwebhooks.com has it."""

    path = "/v1/webhooks"
    tags = ("Webhooks",)
    guards = (requires("webhooks"),)

    @post(dto=StrictJSON[WebhookBody], return_dto=None, summary="Make a webhook", responses=REFUSALS)
    async def create(
        self,
        data: JSONBody[WebhookBody],
        endpoints: NamedDependency[Endpoints],
        platform: NamedDependency[Platform],
    ) -> WebhookObject:
        """It is told of what happens from now on. Its `secret` is in this answer only."""
        made = await (endpoints.create(data.url) if data.events is None else endpoints.create(data.url, data.events))
        return webhook_object(made, platform.webhooks.secret(made))

    @get(summary="List webhooks", responses=REFUSALS)
    async def list_webhooks(self, endpoints: NamedDependency[Endpoints]) -> Listing[WebhookObject]:
        """All of the tenant's, oldest first."""
        return Listing(data=[webhook_object(endpoint) for endpoint in await endpoints.all()])

    @get("/{webhook_id:str}", summary="Describe a webhook", responses=REFUSALS)
    async def get_webhook(self, webhook_id: FromPath[str], endpoints: NamedDependency[Endpoints]) -> WebhookObject:
        """One of the tenant's."""
        return webhook_object(await endpoints.get(webhook_id))

    @patch(
        "/{webhook_id:str}",
        dto=StrictJSON[WebhookChange],
        return_dto=None,
        summary="Switch a webhook off or on",
        responses=REFUSALS,
    )
    async def change(
        self, webhook_id: FromPath[str], data: JSONBody[WebhookChange], endpoints: NamedDependency[Endpoints]
    ) -> WebhookObject:
        """One that is switched on again is told first what was on its way before."""
        changed = await (endpoints.enable(webhook_id) if data.enabled else endpoints.disable(webhook_id))
        return webhook_object(changed)

    @delete("/{webhook_id:str}", status_code=200, summary="Delete a webhook", responses=REFUSALS)
    async def remove(self, webhook_id: FromPath[str], endpoints: NamedDependency[Endpoints]) -> WebhookDeleted:
        """It is told nothing more, not even what is on its way."""
        return WebhookDeleted(id=(await endpoints.remove(webhook_id)).id)

    @post("/{webhook_id:str}/test", status_code=200, summary="Test a webhook", responses=REFUSALS)
    async def test(
        self, webhook_id: FromPath[str], endpoints: NamedDependency[Endpoints], platform: NamedDependency[Platform]
    ) -> WebhookTest:
        """Send it a signed `webhook.test` now, once, and say how it went."""
        return outcome_object(await platform.webhooks.test(await endpoints.get(webhook_id)))

    @get("/{webhook_id:str}/deliveries", summary="Read a webhook's log", responses=REFUSALS)
    async def deliveries(
        self,
        webhook_id: FromPath[str],
        endpoints: NamedDependency[Endpoints],
        principal: NamedDependency[Principal],
        limit: FromQuery[Annotated[int, Meta(ge=1, le=500)]] = 100,
    ) -> Listing[DeliveryObject]:
        """What it was told last, newest first, and what became of it."""
        found = await endpoints.log(webhook_id, limit)
        return Listing(data=[delivery_object(logged, principal.tenant_name) for logged in found])
