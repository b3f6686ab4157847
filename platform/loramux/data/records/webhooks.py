"""Adapter events and their webhooks: the events, the endpoints, and the deliveries of events to endpoints.

An event and its deliveries are written in the transaction of the event itself (an outbox), so no event loses its
deliveries. After a delivery, these rows remain as the log of sent messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    delete,
    func,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.errors import Rejection
from loramux.common.identity import ProjectId, TenantId, new_id
from loramux.data.entities import Event, EventDetail, LoggedDelivery, Refusal
from loramux.data.records.base import Base, Repository, TenantScoped, newest_first, to_struct
from loramux.data.records.tenants import TenantRow, lock_tenant

READY = "adapter.revision.ready"
REJECTED = "adapter.revision.rejected"
RETIRED = "adapter.revision.retired"
RESTORED = "adapter.revision.restored"
PROMOTED, CANARY_STARTED, ROLLED_BACK = "adapter.alias.promoted", "adapter.canary.started", "adapter.alias.rolled_back"
"""Changes of an alias by a caller. CANARY_ROLLED_BACK is a change by a guard."""
CANARY_ROLLED_BACK = "adapter.canary.rolled_back"
SHADOW_STARTED, SHADOW_ENDED = "adapter.shadow.started", "adapter.shadow.ended"
BATCH_KINDS = tuple(f"batch.{end}" for end in ("completed", "failed", "expired", "cancelled"))
TRAINING_KINDS = tuple(f"fine_tuning.job.{end}" for end in ("succeeded", "failed", "cancelled"))
OF_PROJECTS = (*BATCH_KINDS, *TRAINING_KINDS)
"""Events of batches and jobs, which belong to a project."""
KINDS = (
    *(READY, REJECTED, RETIRED, RESTORED, PROMOTED, CANARY_STARTED, ROLLED_BACK, CANARY_ROLLED_BACK),
    *(SHADOW_STARTED, SHADOW_ENDED, *OF_PROJECTS),
)

PENDING = text("state = 'pending'")

PER_ENDPOINT = 16
AT_ONCE = 256


class DeliveryKey(NamedTuple):
    """A delivery's primary key, and the tenant that it belongs to."""

    endpoint: str
    event: str
    tenant_id: str


class EventRow(Base):
    """An event of an adapter, written in the transaction in which it happened."""

    __tablename__ = "adapter_events"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        Index("ix_adapter_events_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_adapter_events_created_at", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str]
    adapter: Mapped[str]
    """The adapter's own name; empty for a batch's event. After a rejected upload the adapter need not exist."""
    detail: Mapped[str]
    """A `data.entities.EventDetail` as JSON."""
    created_at: Mapped[int]
    project_id: Mapped[ProjectId | None]
    """Project of the batch or the fine-tuning job; None for an event of an adapter, which no project owns."""


class EndpointRow(Base):
    """A tenant's webhook address. The secret of a webhook is derived from its id and is not stored."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (UniqueConstraint("tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str]
    events: Mapped[str]
    """The subscribed kinds of events, sorted, separated by spaces."""
    created_at: Mapped[int]
    failures: Mapped[int]
    """Failed attempts in a row, since the last success."""
    failing_since: Mapped[int | None]
    quiet_until: Mapped[int]
    """The time of the next attempt after a failure, at the earliest."""
    disabled_at: Mapped[int | None]
    disabled_because: Mapped[str | None]
    project_id: Mapped[ProjectId | None]
    """Project of the key that made the endpoint, if the key is bound to one: no batch and no job of another project is
    sent to the endpoint.
    """


class DeliveryRow(Base):
    """The delivery of one event to one endpoint. After the delivery, the row is its log entry."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "endpoint_id"], ["webhook_endpoints.tenant_id", "webhook_endpoints.id"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(
            ["tenant_id", "event_id"], ["adapter_events.tenant_id", "adapter_events.id"], ondelete="CASCADE"
        ),
        CheckConstraint("state IN ('pending', 'delivered', 'failed')", name="state"),
        Index("ix_webhook_deliveries_due", "next_attempt_at", sqlite_where=PENDING, postgresql_where=PENDING),
        Index("ix_webhook_deliveries_event_id", "event_id"),
    )

    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    state: Mapped[str]
    attempts: Mapped[int]
    next_attempt_at: Mapped[int]
    lease_until: Mapped[int]
    """The end of the delivering server's lease."""
    status: Mapped[int | None]
    """The last answer's HTTP status."""
    error: Mapped[str | None]
    """The reason why the last attempt failed."""
    updated_at: Mapped[int]


def stored(rejection: Rejection) -> Refusal:
    """Convert a rejection for the records."""
    return Refusal(rejection.code, rejection.message, rejection.field)


class EventRepository(TenantScoped):
    """One tenant's events."""

    async def add(
        self, kind: str, adapter: str, detail: EventDetail, at: int, project: ProjectId | None = None
    ) -> None:
        """Append an event, and a delivery to every subscribed endpoint, to the caller's transaction.

        `adapter` is the adapter's own name, `project` that of a batch or a fine-tuning job.
        """
        event = EventRow(
            id=new_id("event"),
            tenant_id=self._tenant,
            kind=kind,
            adapter=adapter,
            detail=msgspec.json.encode(detail).decode(),
            created_at=at,
            project_id=project,
        )
        await self._insert(event)
        self._session.add_all([_delivery(event, endpoint) for endpoint in await self._listeners(kind, project)])
        await self._session.flush()

    async def before(
        self,
        event_id: str | None,
        limit: int,
        adapters: Collection[str] | None = None,
        project: ProjectId | None = None,
    ) -> list[Event]:
        """List at most `limit` events older than the event with this id, newest first, of these adapters or of all
        adapters; with `project`, without batches and jobs of other projects.
        """
        statement = select(EventRow)
        if adapters is not None:
            statement = statement.where(EventRow.adapter.in_(adapters))
        if project is not None:
            is_own = EventRow.project_id == project
            statement = statement.where(or_(is_own, EventRow.kind.not_in(OF_PROJECTS)))
        newest = newest_first(statement, EventRow, self._tenant, event_id, limit)
        return [event_of(row) for row in await self._session.scalars(newest)]

    async def _listeners(self, kind: str, project: ProjectId | None) -> Sequence[str]:
        """Lock the subscribed endpoints, so that none is deleted before its delivery's row is committed."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant, EndpointRow.disabled_at.is_(None))
        endpoints = await self._session.scalars(
            statement.order_by(EndpointRow.id).with_for_update(read=True, key_share=True)
        )
        return [
            one.id
            for one in endpoints
            if kind in one.events.split() and (kind not in OF_PROJECTS or one.project_id in (None, project))
        ]


async def forget_events(session: AsyncSession, before: int) -> None:
    """Delete every tenant's events from before that time, and the log of their deliveries."""
    await session.execute(delete(EventRow).where(EventRow.created_at < before))


def event_of(row: EventRow) -> Event:
    """Convert a row."""
    detail = msgspec.json.decode(row.detail, type=EventDetail)
    return to_struct(Event, row, detail=detail)


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


class DueDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that is due now."""

    endpoint: str
    url: str
    tenant_id: str
    tenant_name: str
    event_id: str
    kind: str
    adapter: str
    detail: str
    """An EventDetail as JSON. `event` decodes it, so a damaged row stops only its own delivery."""
    created_at: int
    attempts: int
    """Failed attempts of this delivery."""
    failures: int
    """Failed attempts of the endpoint in a row."""
    failing_since: int | None

    @property
    def event(self) -> Event:
        """Return the event. Raises msgspec.MsgspecError if its row is damaged."""
        detail = msgspec.json.decode(self.detail, type=EventDetail)
        return Event(id=self.event_id, kind=self.kind, adapter=self.adapter, detail=detail, created_at=self.created_at)


class EndpointRepository(TenantScoped):
    """One tenant's endpoints."""

    async def add(self, row: EndpointRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def count(self) -> int:
        """Return the number of endpoints. Until this transaction ends, no other transaction adds an endpoint."""
        await lock_tenant(self._session, self._tenant)
        statement = select(func.count()).select_from(EndpointRow).where(EndpointRow.tenant_id == self._tenant)
        return await self._session.scalar(statement) or 0

    async def all(self) -> Sequence[EndpointRow]:
        """List every endpoint, oldest first."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant)
        return (await self._session.scalars(statement.order_by(EndpointRow.created_at, EndpointRow.id))).all()

    async def get(self, id: str) -> EndpointRow | None:
        """Return the endpoint of that id."""
        statement = select(EndpointRow).where(EndpointRow.tenant_id == self._tenant, EndpointRow.id == id)
        return await self._session.scalar(statement)

    async def remove(self, row: EndpointRow) -> None:
        """Delete the row and its pending deliveries."""
        await self._delete(row)

    async def log(self, id: str, limit: int) -> list[LoggedDelivery]:
        """List the endpoint's last deliveries, newest first."""
        statement = (
            select(DeliveryRow, EventRow)
            .join(EventRow, EventRow.id == DeliveryRow.event_id)
            .where(DeliveryRow.tenant_id == self._tenant, DeliveryRow.endpoint_id == id)
            .order_by(EventRow.created_at.desc(), EventRow.id.desc())
            .limit(limit)
        )
        return [_logged(delivery, event) for delivery, event in await self._session.execute(statement)]


class DeliveryRepository(Repository):
    """Deliveries, over all tenants."""

    async def due(
        self, now: int, busy_endpoints: Collection[str] = (), full_tenants: Collection[str] = ()
    ) -> list[DeliveryKey]:
        """List due keys, at most PER_ENDPOINT of each endpoint, without busy endpoints and full tenants."""
        statement = _due(now, list(busy_endpoints), list(full_tenants))
        return [DeliveryKey(*row) for row in await self._session.execute(statement)]

    async def lease(self, keys: Sequence[DeliveryKey], now: int, until: int) -> list[DueDelivery]:
        """Lease the deliveries among `keys` that no other server has leased or delivered since they were read."""
        leased = update(DeliveryRow).where(
            tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_([key[:2] for key in keys]),
            DeliveryRow.state == "pending",
            DeliveryRow.next_attempt_at <= now,
            DeliveryRow.lease_until <= now,
        )
        returning = leased.values(lease_until=until).returning(DeliveryRow.endpoint_id, DeliveryRow.event_id)
        mine = await self._session.execute(returning)
        return await self._described([(endpoint, event) for endpoint, event in mine])

    async def note(self, due: DueDelivery, delivery: Mapping[str, Any], endpoint: Mapping[str, Any]) -> None:
        """Record an attempt's outcome in the delivery and its endpoint."""
        mine = DeliveryRow.endpoint_id == due.endpoint, DeliveryRow.event_id == due.event_id
        await self._session.execute(update(DeliveryRow).where(*mine).values(lease_until=0, **delivery))
        if endpoint:
            await self._session.execute(update(EndpointRow).where(EndpointRow.id == due.endpoint).values(**endpoint))

    async def release(self, dues: Sequence[DueDelivery]) -> None:
        """Give up the leases of deliveries that were not tried."""
        keys = [(due.endpoint, due.event_id) for due in dues]
        mine = tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_(keys)
        await self._session.execute(update(DeliveryRow).where(mine).values(lease_until=0))

    async def _described(self, keys: Sequence[tuple[str, str]]) -> list[DueDelivery]:
        statement = (
            select(DeliveryRow, EventRow, EndpointRow, TenantRow.name)
            .join(EventRow, EventRow.id == DeliveryRow.event_id)
            .join(EndpointRow, EndpointRow.id == DeliveryRow.endpoint_id)
            .join(TenantRow, TenantRow.id == DeliveryRow.tenant_id)
            .where(tuple_(DeliveryRow.endpoint_id, DeliveryRow.event_id).in_(keys))
            .order_by(EventRow.created_at, EventRow.id)
        )
        return [
            DueDelivery(
                endpoint=endpoint.id,
                url=endpoint.url,
                tenant_id=delivery.tenant_id,
                tenant_name=tenant,
                event_id=event.id,
                kind=event.kind,
                adapter=event.adapter,
                detail=event.detail,
                created_at=event.created_at,
                attempts=delivery.attempts,
                failures=endpoint.failures,
                failing_since=endpoint.failing_since,
            )
            for delivery, event, endpoint, tenant in await self._session.execute(statement)
        ]


def _due(now: int, busy_endpoints: list[str], full_tenants: list[str]) -> Any:
    """Select due keys, interleaved so that no endpoint's backlog comes before another's."""
    order = func.row_number().over(
        partition_by=DeliveryRow.endpoint_id,
        order_by=(DeliveryRow.attempts, DeliveryRow.next_attempt_at, DeliveryRow.event_id),
    )
    waiting = (
        select(
            DeliveryRow.endpoint_id,
            DeliveryRow.event_id,
            DeliveryRow.tenant_id,
            DeliveryRow.next_attempt_at,
            order.label("place"),
        )
        .join(EndpointRow, EndpointRow.id == DeliveryRow.endpoint_id)
        .where(
            DeliveryRow.state == "pending",
            DeliveryRow.next_attempt_at <= now,
            DeliveryRow.lease_until <= now,
            EndpointRow.quiet_until <= now,
            EndpointRow.disabled_at.is_(None),
            DeliveryRow.endpoint_id.not_in(busy_endpoints),
            DeliveryRow.tenant_id.not_in(full_tenants),
        )
        .subquery()
    )
    first = select(waiting.c.endpoint_id, waiting.c.event_id, waiting.c.tenant_id).where(
        waiting.c.place <= PER_ENDPOINT
    )
    return first.order_by(waiting.c.place, waiting.c.next_attempt_at).limit(AT_ONCE)


def _logged(delivery: DeliveryRow, event: EventRow) -> LoggedDelivery:
    next_attempt_at = delivery.next_attempt_at if delivery.state == "pending" else None
    return to_struct(LoggedDelivery, delivery, event=event_of(event), next_attempt_at=next_attempt_at)
