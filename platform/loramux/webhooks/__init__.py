"""Tenants' webhooks: who is told, and the telling."""

from loramux.records.events import Event
from loramux.records.webhooks import Logged
from loramux.webhooks.courier import Courier, Outcome, webhook_client
from loramux.webhooks.endpoints import Endpoint, Endpoints
from loramux.webhooks.errors import EndpointNotFound, InvalidEndpoint, TooManyEndpoints, WebhookError
from loramux.webhooks.messages import EventData, event_data
from loramux.webhooks.webhooks import Webhooks

__all__ = [
    "Courier",
    "Endpoint",
    "EndpointNotFound",
    "Endpoints",
    "Event",
    "EventData",
    "InvalidEndpoint",
    "Logged",
    "Outcome",
    "TooManyEndpoints",
    "WebhookError",
    "Webhooks",
    "event_data",
    "webhook_client",
]
