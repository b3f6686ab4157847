"""JSON objects of webhooks, events and deliveries. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.accounts.webhooks.dispatcher import Attempt
from loramux.accounts.webhooks.endpoints import Endpoint
from loramux.accounts.webhooks.messages import EventData, event_data
from loramux.common.units import SECOND
from loramux.data.entities import Event, LoggedDelivery
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name, Url
from loramux_api.schemas.tenancy import seconds

MAX_EVENTS = 64
"""Maximum number of types of events that a webhook names, counting repetitions."""


class WebhookBody(Body, forbid_unknown_fields=True):
    """A webhook to create."""

    url: Url
    events: Annotated[list[Name], Meta(max_length=MAX_EVENTS)] | None = None
    """The types of events that the webhook receives; null: all types."""


class WebhookChange(Body, forbid_unknown_fields=True):
    """A change of a webhook."""

    enabled: bool


class WebhookObject(msgspec.Struct, kw_only=True):
    """A webhook. Only the answer that creates it has its `secret`, the key of the signatures."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str
    events: list[str]
    enabled: bool
    disabled_because: str | None
    created_at: int
    failing_since: int | None
    """Time since which every delivery has failed."""
    secret: str | UnsetType = UNSET


class WebhookDeleted(msgspec.Struct, kw_only=True):
    """The confirmation of a deletion."""

    id: str
    object: Literal["webhook.deleted"] = "webhook.deleted"
    deleted: bool = True


class WebhookTest(msgspec.Struct, kw_only=True):
    """The result of a test delivery."""

    object: Literal["webhook.test"] = "webhook.test"
    delivered: bool
    status: int | None
    """HTTP status of the endpoint's answer; null if there was no answer."""
    error: str | None
    milliseconds: int


class EventObject(msgspec.Struct, kw_only=True):
    """A change of an adapter or an upload."""

    id: str
    object: Literal["event"] = "event"
    type: str
    created_at: int
    data: EventData


class DeliveryObject(msgspec.Struct, kw_only=True):
    """The delivery of one event to one webhook."""

    object: Literal["webhook.delivery"] = "webhook.delivery"
    event: EventObject
    state: str
    """State of the delivery: pending, delivered, or failed (no more attempts)."""
    attempts: int
    """Number of failed attempts."""
    status: int | None
    """HTTP status of the last answer."""
    error: str | None
    next_attempt_at: int | None
    updated_at: int


def webhook_object(endpoint: Endpoint, secret: str | UnsetType = UNSET) -> WebhookObject:
    """Return the endpoint as a JSON object."""
    return WebhookObject(
        id=endpoint.id,
        url=endpoint.url,
        events=list(endpoint.events),
        enabled=endpoint.disabled_at is None,
        disabled_because=endpoint.disabled_because,
        created_at=endpoint.created_at // SECOND,
        failing_since=seconds(endpoint.failing_since),
        secret=secret,
    )


def outcome_object(outcome: Attempt) -> WebhookTest:
    """Return the outcome as a JSON object."""
    return WebhookTest(
        delivered=outcome.delivered, status=outcome.status, error=outcome.error, milliseconds=outcome.milliseconds
    )


def event_object(event: Event, tenant_name: str) -> EventObject:
    """Return the event as a JSON object."""
    data = event_data(event, tenant_name)
    return EventObject(id=event.id, type=event.kind, created_at=event.created_at // SECOND, data=data)


def delivery_object(logged: LoggedDelivery, tenant_name: str) -> DeliveryObject:
    """Return the delivery as a JSON object."""
    return DeliveryObject(
        event=event_object(logged.event, tenant_name),
        state=logged.state,
        attempts=logged.attempts,
        status=logged.status,
        error=logged.error,
        next_attempt_at=seconds(logged.next_attempt_at),
        updated_at=logged.updated_at // SECOND,
    )
