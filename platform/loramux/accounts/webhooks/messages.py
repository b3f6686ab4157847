"""Webhook messages: events in the API's form, signed according to standardwebhooks.com.

A message has an id, a time, and an HMAC-SHA256 over the id, the time and the body. The receiver recognises repetitions
by the id.
"""

from __future__ import annotations

import base64
import hmac
from datetime import UTC, datetime
from typing import Any

import msgspec

from loramux.common.units import SECOND
from loramux.data.entities import AliasMove, CanaryNumbers, Event, Refusal, ShadowNumbers

PREFIX = "whsec_"


class EventData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The event's data; fields that do not apply are absent."""

    adapter: str | None = None
    """The adapter: `tenant/adapter`."""
    revision: int | None = None
    model: str | None = None
    """The revision's name in a request: `tenant/adapter@3`."""
    digest: str | None = None
    upload: str | None = None
    id: str | None = None
    """The id of the batch or of the fine-tuning job, under the name that OpenAI's events use."""
    alias: AliasMove | None = None
    """The alias that was moved, with the weights of its revisions before and after the move."""
    canary: CanaryNumbers | None = None
    shadow: ShadowNumbers | None = None
    error: Refusal | None = None


class EventMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a message to a webhook."""

    type: str
    timestamp: str
    """The time of the event, as in RFC 3339."""
    data: EventData | dict[str, str]


class SignedMessage(msgspec.Struct, frozen=True):
    """A body and the headers that sign it."""

    body: bytes
    headers: dict[str, str]


def event_data(event: Event, tenant_name: str) -> EventData:
    """Return the event's data, with the names that the tenant's callers use."""
    detail = event.detail
    adapter = f"{tenant_name}/{event.adapter}" if event.adapter else None
    return EventData(
        adapter=adapter,
        revision=detail.revision,
        model=None if detail.revision is None else f"{adapter}@{detail.revision}",
        digest=detail.digest,
        upload=detail.upload,
        id=detail.batch or detail.job,
        alias=detail.alias,
        canary=detail.canary,
        shadow=detail.shadow,
        error=detail.error,
    )


def event_message(event: Event, tenant_name: str) -> EventMessage:
    """Return the body of the event's message."""
    return EventMessage(type=event.kind, timestamp=rfc3339(event.created_at), data=event_data(event, tenant_name))


def rfc3339(microseconds: int) -> str:
    """Format a time in UTC."""
    return datetime.fromtimestamp(microseconds / SECOND, UTC).isoformat().replace("+00:00", "Z")


def sign(secret: bytes, id: str, content: Any, now: int) -> SignedMessage:
    """Encode `content` as JSON and sign it. `now` is in microseconds since the epoch."""
    body, timestamp = msgspec.json.encode(content), now // SECOND
    digest = hmac.digest(secret, f"{id}.{timestamp}.".encode() + body, "sha256")
    headers = {
        "Content-Type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }
    return SignedMessage(body, headers)


def read_secret(text: str) -> bytes:
    """Decode `whsec_...`. Raises ValueError."""
    return base64.b64decode(text.removeprefix(PREFIX), validate=True)


def write_secret(secret: bytes) -> str:
    """Encode as `whsec_...`, which every library of Standard Webhooks reads."""
    return PREFIX + base64.b64encode(secret).decode()


def endpoint_secret(pepper: bytes, endpoint_id: str) -> bytes:
    """Derive an endpoint's secret: 256 bits that the database alone does not reveal."""
    return hmac.digest(pepper, f"webhook endpoint {endpoint_id}".encode(), "sha256")
