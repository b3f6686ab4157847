"""Webhooks, and what happened to adapters, on the wire. Times in Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.webhooks import Endpoint, Event, EventData, Logged, Outcome, event_data
from loramux_api.schemas.strict import Body
from loramux_api.schemas.tenancy import SECOND, seconds


class WebhookBody(Body, forbid_unknown_fields=True):
    """A new webhook."""

    url: Annotated[str, Meta(max_length=2048)]
    events: list[str] | None = None
    """The kinds that it wants to hear of; null: all."""


class WebhookChange(Body, forbid_unknown_fields=True):
    """Whether it is told anything."""

    enabled: bool


class WebhookObject(msgspec.Struct, kw_only=True):
    """A webhook; `secret` is what its messages are signed with, which only the answer that made it has."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str
    events: list[str]
    enabled: bool
    disabled_because: str | None
    created_at: int
    failing_since: int | None
    """Nothing was taken since then."""
    secret: str | UnsetType = UNSET


class WebhookDeleted(msgspec.Struct, kw_only=True):
    """What is no more."""

    id: str
    object: Literal["webhook.deleted"] = "webhook.deleted"
    deleted: bool = True


class WebhookTest(msgspec.Struct, kw_only=True):
    """How telling it that it can be told went."""

    object: Literal["webhook.test"] = "webhook.test"
    delivered: bool
    status: int | None
    """Of its answer, where there was one."""
    error: str | None
    milliseconds: int


class EventObject(msgspec.Struct, kw_only=True):
    """Something that happened to an adapter."""

    id: str
    object: Literal["event"] = "event"
    type: str
    created_at: int
    data: EventData


class DeliveryObject(msgspec.Struct, kw_only=True):
    """What became of telling a webhook of an event."""

    object: Literal["webhook.delivery"] = "webhook.delivery"
    event: EventObject
    state: str
    """pending, delivered, or failed: it is not tried again."""
    attempts: int
    """Those that failed."""
    status: int | None
    """The last answer's."""
    error: str | None
    next_attempt_at: int | None
    updated_at: int


def webhook_object(endpoint: Endpoint, secret: str | UnsetType = UNSET) -> WebhookObject:
    """The endpoint, as callers see it."""
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


def outcome_object(outcome: Outcome) -> WebhookTest:
    """The outcome, as callers see it."""
    return WebhookTest(
        delivered=outcome.delivered, status=outcome.status, error=outcome.error, milliseconds=outcome.milliseconds
    )


def event_object(event: Event, tenant_name: str) -> EventObject:
    """The event, as callers see it."""
    data = event_data(event, tenant_name)
    return EventObject(id=event.id, type=event.kind, created_at=event.created_at // SECOND, data=data)


def delivery_object(logged: Logged, tenant_name: str) -> DeliveryObject:
    """The log's entry, as callers see it."""
    return DeliveryObject(
        event=event_object(logged.event, tenant_name),
        state=logged.state,
        attempts=logged.attempts,
        status=logged.status,
        error=logged.error,
        next_attempt_at=seconds(logged.next_attempt_at),
        updated_at=logged.updated_at // SECOND,
    )
