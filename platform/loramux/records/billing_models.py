"""The tables of prices, periods, invoices and exports. All but the sinks' are append-only, by trigger."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base


class PlanRow(Base):
    """A price list in one currency."""

    __tablename__ = "plans"
    __table_args__ = (CheckConstraint("minimum >= 0", name="minimum"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    currency: Mapped[str]
    """ISO 4217."""
    minimum: Mapped[int]
    """What a period costs at least, in minor units."""
    created_at: Mapped[int]


class PriceRow(Base):
    """One price of a plan; a later one for the same takes its place from its `valid_from` on."""

    __tablename__ = "prices"
    __table_args__ = (
        UniqueConstraint("plan_id", "meter", "base_model", "tier", "valid_from"),
        CheckConstraint("per >= 1", name="per"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id"))
    meter: Mapped[str]
    base_model: Mapped[str]
    tier: Mapped[str]
    valid_from: Mapped[int]
    valid_until: Mapped[int | None]
    per: Mapped[int]
    steps: Mapped[str]
    """JSON: [[above, nanos], ...]."""
    created_at: Mapped[int]


class SubscriptionRow(Base):
    """Which plan a tenant has from a moment on."""

    __tablename__ = "subscriptions"

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    valid_from: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id"))
    created_at: Mapped[int]


class PeriodRow(Base):
    """A closed period: the ledger's entries from first_sequence to last_sequence, whatever their date, for ever."""

    __tablename__ = "periods"
    __table_args__ = (
        UniqueConstraint("first_sequence", "ends_at"),
        CheckConstraint("last_sequence >= first_sequence - 1", name="range"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """`2026-11`."""
    starts_at: Mapped[int]
    ends_at: Mapped[int]
    first_sequence: Mapped[int]
    last_sequence: Mapped[int]
    """first_sequence - 1 for a period without entries."""
    digest: Mapped[str]
    """The hash of the last entry, and with it of every entry before."""
    closed_at: Mapped[int]


class InvoiceRow(Base):
    """An invoice as it was sent."""

    __tablename__ = "invoices"
    __table_args__ = (Index("ix_invoices_period_id", "period_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """`INV-2026-11-acme`."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    period_id: Mapped[str] = mapped_column(ForeignKey("periods.id"))
    currency: Mapped[str]
    total: Mapped[int]
    """Minor units."""
    document: Mapped[str]
    """The invoice as JSON, from which every other form is made."""
    digest: Mapped[str]
    """sha256 of the document."""
    created_at: Mapped[int]


class SinkRow(Base):
    """How far a sink has come, and who is at it."""

    __tablename__ = "sinks"

    name: Mapped[str] = mapped_column(primary_key=True)
    cursor: Mapped[int]
    """Every entry up to this sequence was delivered or parked."""
    trying_until: Mapped[int | None]
    """The last sequence of the batch that is under way; a batch is tried with the same entries until it is over."""
    trying_since: Mapped[int | None]
    """When it was first tried: after the sink's window, trying again could count it twice."""
    lease_holder: Mapped[str | None]
    lease_until: Mapped[int]


class ParkedRow(Base):
    """An event that a sink did not take, or that it may have taken without saying so."""

    __tablename__ = "parked_events"

    sink: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int]
    reason: Mapped[str]
    parked_at: Mapped[int]
