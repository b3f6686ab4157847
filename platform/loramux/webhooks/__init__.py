"""Tenants' webhooks: their endpoints, the events, and the delivery of the one to the other."""

from loramux.records.webhooks import Event, LoggedDelivery
from loramux.webhooks.dispatcher import Attempt, webhook_client
from loramux.webhooks.endpoints import (
    Endpoint,
    EndpointNotFound,
    Endpoints,
    InvalidEndpoint,
    TooManyEndpoints,
    TooManyTests,
    WebhookService,
)
from loramux.webhooks.messages import EventData, event_data

__all__ = [
    "Attempt",
    "Endpoint",
    "EndpointNotFound",
    "Endpoints",
    "Event",
    "EventData",
    "InvalidEndpoint",
    "LoggedDelivery",
    "TooManyEndpoints",
    "TooManyTests",
    "WebhookService",
    "event_data",
    "webhook_client",
]
