"""Statements about what happened to adapters: the outbox that webhooks are told from, and a tenant's log."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId, new_id
from loramux.records.webhook_models import DeliveryRow, EndpointRow, EventRow

READY = "adapter.revision.ready"
REJECTED = "adapter.revision.rejected"
RETIRED = "adapter.revision.retired"
KINDS = (READY, REJECTED, RETIRED)


class Refusal(msgspec.Struct, frozen=True):
    """Why an upload was rejected."""

    code: str
    message: str
    param: str | None = None


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened, beside its kind, its adapter and its time."""

    revision: int | None = None
    digest: str | None = None
    upload: str | None = None
    """The upload session's id."""
    error: Refusal | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to an adapter. `created_at` in microseconds since the epoch."""

    id: str
    kind: str
    adapter: str
    """The adapter's own name."""
    detail: Detail
    created_at: int


class EventRepository:
    """One tenant's events."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, kind: str, adapter: str, detail: Detail, at: int) -> None:
        """Append an event, and a delivery to every endpoint that wants to hear of it, to the caller's transaction.

        `adapter` is the adapter's own name.
        """
        event = EventRow(
            id=new_id("event"),
            tenant_id=self._tenant,
            kind=kind,
            adapter=adapter,
            detail=msgspec.json.encode(detail).decode(),
            created_at=at,
        )
        self._session.add(event)
        await self._session.flush()
        self._session.add_all([_delivery(event, endpoint) for endpoint in await self._listeners(kind)])
        await self._session.flush()

    async def before(self, event_id: str | None, limit: int, adapters: Collection[str] | None = None) -> list[Event]:
        """At most `limit` events older than that one, newest first; of these adapters, or of all."""
        statement = select(EventRow).where(EventRow.tenant_id == self._tenant)
        if adapters is not None:
            statement = statement.where(EventRow.adapter.in_(adapters))
        if event_id is not None:
            last = select(EventRow.created_at, EventRow.id).where(
                EventRow.tenant_id == self._tenant, EventRow.id == event_id
            )
            statement = statement.where(tuple_(EventRow.created_at, EventRow.id) < last.scalar_subquery())
        newest = statement.order_by(EventRow.created_at.desc(), EventRow.id.desc()).limit(limit)
        return [event_of(row) for row in await self._session.scalars(newest)]

    async def _listeners(self, kind: str) -> Sequence[str]:
        """Endpoints, held until this transaction ends, so that none is deleted between now and its delivery's row."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant, EndpointRow.disabled_at.is_(None))
        endpoints = await self._session.scalars(
            statement.order_by(EndpointRow.id).with_for_update(read=True, key_share=True)
        )
        return [endpoint.id for endpoint in endpoints if kind in endpoint.events.split()]


async def forget_events(session: AsyncSession, before: int) -> None:
    """Delete every tenant's events from before that time, and the log of their deliveries."""
    await session.execute(delete(EventRow).where(EventRow.created_at < before))


def event_of(row: EventRow) -> Event:
    """The row, as it is shown."""
    detail = msgspec.json.decode(row.detail, type=Detail)
    return Event(id=row.id, kind=row.kind, adapter=row.adapter, detail=detail, created_at=row.created_at)


def _delivery(event: EventRow, endpoint_id: str) -> DeliveryRow:
    return DeliveryRow(
        endpoint_id=endpoint_id,
        event_id=event.id,
        tenant_id=event.tenant_id,
        state="pending",
        attempts=0,
        next_attempt_at=event.created_at,
        lease_until=0,
        updated_at=event.created_at,
    )
