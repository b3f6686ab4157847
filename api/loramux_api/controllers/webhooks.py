"""/v1/webhooks, and GET /v1/events."""

from __future__ import annotations

from litestar import delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.accounts.webhooks.endpoints import WebhookEndpoints, WebhookService
from loramux.common.identity import Principal
from loramux_api.auth import requires
from loramux_api.openapi import ApiController
from loramux_api.parameters import OptionalText, PageLimit, PathName
from loramux_api.schemas.tenancy import Listing
from loramux_api.schemas.webhooks import (
    DeliveryObject,
    EventObject,
    WebhookBody,
    WebhookChange,
    WebhookDeleted,
    WebhookObject,
    WebhookTest,
    delivery_object,
    event_object,
    outcome_object,
    webhook_object,
)


class WebhookController(ApiController):
    """Endpoints that receive events of the tenant's adapters, signed as in standardwebhooks.com."""

    path = "/v1/webhooks"
    tags = ("Webhooks",)
    guards = (requires("webhooks"),)

    @post(summary="Create a webhook")
    async def create(
        self,
        data: JSONBody[WebhookBody],
        endpoints: NamedDependency[WebhookEndpoints],
        webhooks: NamedDependency[WebhookService],
    ) -> WebhookObject:
        """Create a webhook for events that happen from now on. Only this answer has its `secret`."""
        made = await (endpoints.create(data.url) if data.events is None else endpoints.create(data.url, data.events))
        return webhook_object(made, webhooks.secret(made))

    @get(summary="List webhooks")
    async def list_webhooks(self, endpoints: NamedDependency[WebhookEndpoints]) -> Listing[WebhookObject]:
        """List the tenant's webhooks, oldest first."""
        return Listing(data=[webhook_object(endpoint) for endpoint in await endpoints.all()])

    @get("/{webhook_id:str}", summary="Describe a webhook")
    async def get_webhook(self, webhook_id: PathName, endpoints: NamedDependency[WebhookEndpoints]) -> WebhookObject:
        """Return one webhook."""
        return webhook_object(await endpoints.get(webhook_id))

    @patch("/{webhook_id:str}", summary="Disable or enable a webhook")
    async def change(
        self, webhook_id: PathName, data: JSONBody[WebhookChange], endpoints: NamedDependency[WebhookEndpoints]
    ) -> WebhookObject:
        """Disable or enable a webhook. A webhook that is enabled again first receives the events that were pending."""
        changed = await (endpoints.enable(webhook_id) if data.enabled else endpoints.disable(webhook_id))
        return webhook_object(changed)

    @delete("/{webhook_id:str}", status_code=200, summary="Delete a webhook")
    async def remove(self, webhook_id: PathName, endpoints: NamedDependency[WebhookEndpoints]) -> WebhookDeleted:
        """Delete a webhook and its pending deliveries."""
        return WebhookDeleted(id=(await endpoints.remove(webhook_id)).id)

    @post("/{webhook_id:str}/test", status_code=200, summary="Test a webhook")
    async def test(
        self,
        webhook_id: PathName,
        endpoints: NamedDependency[WebhookEndpoints],
        principal: NamedDependency[Principal],
        webhooks: NamedDependency[WebhookService],
    ) -> WebhookTest:
        """Send one signed `webhook.test` event now, and return the result."""
        return outcome_object(await webhooks.test(await endpoints.get(webhook_id), principal))

    @get("/{webhook_id:str}/deliveries", summary="List a webhook's deliveries")
    async def deliveries(
        self,
        webhook_id: PathName,
        endpoints: NamedDependency[WebhookEndpoints],
        principal: NamedDependency[Principal],
        limit: PageLimit = 100,
    ) -> Listing[DeliveryObject]:
        """List the latest deliveries of a webhook, newest first."""
        found = await endpoints.log(webhook_id, limit)
        return Listing(data=[delivery_object(logged, principal.tenant_name) for logged in found])


class EventController(ApiController):
    """Events of the tenant's adapters."""

    path = "/v1/events"
    tags = ("Adapters",)
    guards = (requires("read"),)

    @get(summary="List events")
    async def list_events(
        self,
        principal: NamedDependency[Principal],
        webhooks: NamedDependency[WebhookService],
        adapter: OptionalText = None,
        before: OptionalText = None,
        limit: PageLimit = 100,
    ) -> Listing[EventObject]:
        """List events of one `adapter` or of all, newest first. Events are kept for 90 days.

        `before` is the id of the last event on the previous page.
        """
        found = await webhooks.events(principal, adapter, before, limit)
        return Listing(data=[event_object(event, principal.tenant_name) for event in found])
