"""An event in the words of the API: the body of its message, and what `/v1/events` lists."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from loramux.records.events import Event, Refusal
from loramux.webhooks.signing import SECOND


class EventData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened, and to which adapter; what does not apply is absent."""

    adapter: str
    """`tenant/adapter`."""
    revision: int | None = None
    model: str | None = None
    """The revision's name in a request: `tenant/adapter@3`."""
    digest: str | None = None
    upload: str | None = None
    error: Refusal | None = None


class EventMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a message to a webhook."""

    type: str
    timestamp: str
    """RFC 3339, when it happened."""
    data: EventData | dict[str, str]


def event_data(event: Event, tenant_name: str) -> EventData:
    """The event's data, with the names that its tenant's callers use."""
    adapter, detail = f"{tenant_name}/{event.adapter}", event.detail
    return EventData(
        adapter=adapter,
        revision=detail.revision,
        model=None if detail.revision is None else f"{adapter}@{detail.revision}",
        digest=detail.digest,
        upload=detail.upload,
        error=detail.error,
    )


def event_message(event: Event, tenant_name: str) -> EventMessage:
    """The event as its webhooks are told."""
    return EventMessage(type=event.kind, timestamp=rfc3339(event.created_at), data=event_data(event, tenant_name))


def rfc3339(microseconds: int) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(microseconds / SECOND, UTC).isoformat().replace("+00:00", "Z")
