"""Statements about webhook endpoints and what is on its way to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.events import Event, event_of
from loramux.records.identity import TenantId
from loramux.records.models import TenantRow
from loramux.records.webhook_models import DeliveryRow, EndpointRow, EventRow

PER_ENDPOINT = 16
AT_ONCE = 256

Key = tuple[str, str]
"""An endpoint and an event."""


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is to be told to an endpoint now."""

    endpoint: str
    url: str
    tenant_name: str
    event: Event
    attempts: int
    """Those that have failed."""
    failures: int
    """Of the endpoint, in a row."""
    failing_since: int | None


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """What became of telling an endpoint of an event."""

    event: Event
    state: str
    attempts: int
    status: int | None
    error: str | None
    next_attempt_at: int | None
    updated_at: int


class EndpointRepository:
    """One tenant's endpoints."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, row: EndpointRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def count(self) -> int:
        """How many there are."""
        statement = select(func.count()).select_from(EndpointRow).where(EndpointRow.tenant_id == self._tenant)
        return await self._session.scalar(statement) or 0

    async def all(self) -> Sequence[EndpointRow]:
        """Every endpoint, oldest first."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant)
        return (await self._session.scalars(statement.order_by(EndpointRow.created_at, EndpointRow.id))).all()

    async def get(self, id: str) -> EndpointRow | None:
        """The endpoint of that id."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant, EndpointRow.id == id)
        return await self._session.scalar(statement)

    async def remove(self, row: EndpointRow) -> None:
        """Delete the row, and what was on its way to it."""
        await self._session.delete(row)
        await self._session.flush()

    async def log(self, id: str, limit: int) -> list[Logged]:
        """What it was told last, newest first."""
        statement = (
            select(DeliveryRow, EventRow)
            .join(EventRow, EventRow.id == DeliveryRow.event_id)
            .where(DeliveryRow.tenant_id == self._tenant, DeliveryRow.endpoint_id == id)
            .order_by(EventRow.created_at.desc(), EventRow.id.desc())
            .limit(limit)
        )
        return [_logged(delivery, event) for delivery, event in await self._session.execute(statement)]


class DeliveryRepository:
    """What is on its way, over all tenants."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def due(self, now: int) -> list[Key]:
        """What is to be told now: of each endpoint PER_ENDPOINT at most."""
        return [(endpoint, event) for endpoint, event in await self._session.execute(_due(now))]

    async def lease(self, keys: Sequence[Key], now: int, until: int) -> list[Due]:
        """Have those of `keys` to oneself until then that nobody else has, or has told, meanwhile."""
        leased = update(DeliveryRow).where(
            tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_(keys),
            DeliveryRow.state == "pending",
            DeliveryRow.next_attempt_at <= now,
            DeliveryRow.lease_until <= now,
        )
        returning = leased.values(lease_until=until).returning(DeliveryRow.endpoint_id, DeliveryRow.event_id)
        mine = await self._session.execute(returning)
        return await self._described([(endpoint, event) for endpoint, event in mine])

    async def note(self, due: Due, delivery: Mapping[str, Any], endpoint: Mapping[str, Any]) -> None:
        """Write how an attempt ended, in the delivery and in its endpoint."""
        mine = DeliveryRow.endpoint_id == due.endpoint, DeliveryRow.event_id == due.event.id
        await self._session.execute(update(DeliveryRow).where(*mine).values(lease_until=0, **delivery))
        await self._session.execute(update(EndpointRow).where(EndpointRow.id == due.endpoint).values(**endpoint))

    async def release(self, dues: Sequence[Due]) -> None:
        """Let others have what was leased and not tried."""
        keys = [(due.endpoint, due.event.id) for due in dues]
        mine = tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_(keys)
        await self._session.execute(update(DeliveryRow).where(mine).values(lease_until=0))

    async def _described(self, keys: Sequence[Key]) -> list[Due]:
        statement = (
            select(DeliveryRow, EventRow, EndpointRow, TenantRow.name)
            .join(EventRow, EventRow.id == DeliveryRow.event_id)
            .join(EndpointRow, EndpointRow.id == DeliveryRow.endpoint_id)
            .join(TenantRow, TenantRow.id == DeliveryRow.tenant_id)
            .where(tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_(keys))
            .order_by(EventRow.created_at, EventRow.id)
        )
        return [
            Due(
                endpoint=endpoint.id,
                url=endpoint.url,
                tenant_name=tenant,
                event=event_of(event),
                attempts=delivery.attempts,
                failures=endpoint.failures,
                failing_since=endpoint.failing_since,
            )
            for delivery, event, endpoint, tenant in await self._session.execute(statement)
        ]


def _due(now: int) -> Any:
    """Keys of what may be tried now, so that no endpoint's backlog stands before another's."""
    order = func.row_number().over(
        partition_by=DeliveryRow.endpoint_id,
        order_by=(DeliveryRow.attempts, DeliveryRow.next_attempt_at, DeliveryRow.event_id),
    )
    waiting = (
        select(DeliveryRow.endpoint_id, DeliveryRow.event_id, DeliveryRow.next_attempt_at, order.label("place"))
        .join(EndpointRow, EndpointRow.id == DeliveryRow.endpoint_id)
        .where(
            DeliveryRow.state == "pending",
            DeliveryRow.next_attempt_at <= now,
            DeliveryRow.lease_until <= now,
            EndpointRow.quiet_until <= now,
            EndpointRow.disabled_at.is_(None),
        )
        .subquery()
    )
    first = select(waiting.c.endpoint_id, waiting.c.event_id).where(waiting.c.place <= PER_ENDPOINT)
    return first.order_by(waiting.c.place, waiting.c.next_attempt_at).limit(AT_ONCE)


def _logged(delivery: DeliveryRow, event: EventRow) -> Logged:
    return Logged(
        event=event_of(event),
        state=delivery.state,
        attempts=delivery.attempts,
        status=delivery.status,
        error=delivery.error,
        next_attempt_at=delivery.next_attempt_at if delivery.state == "pending" else None,
        updated_at=delivery.updated_at,
    )
