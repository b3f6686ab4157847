"""What happened to adapters, who wants to hear of it, and what became of telling them. Units as in `records.models`."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base

PENDING = text("state = 'pending'")


class EventRow(Base):
    """Something that happened to an adapter: written in the transaction in which it happened."""

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
    """The adapter's own name; one that was rejected need not exist."""
    detail: Mapped[str]
    """JSON: a `records.events.Detail`."""
    created_at: Mapped[int]


class EndpointRow(Base):
    """An address of a tenant's that is told what happens. Its secret is derived from its id, and stored nowhere."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (UniqueConstraint("tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str]
    events: Mapped[str]
    """The kinds that it wants to hear of, sorted, separated by spaces."""
    created_at: Mapped[int]
    failures: Mapped[int]
    """In a row, since it last took a message."""
    failing_since: Mapped[int | None]
    quiet_until: Mapped[int]
    """Until then it is left alone, since it has just failed."""
    disabled_at: Mapped[int | None]
    disabled_because: Mapped[str | None]


class DeliveryRow(Base):
    """One event on its way to one endpoint; afterwards, the log of it."""

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
    """Until then one server is at it."""
    status: Mapped[int | None]
    """The last answer's HTTP status."""
    error: Mapped[str | None]
    """Why the last attempt failed."""
    updated_at: Mapped[int]
