"""Plans, prices, subscriptions, closed periods, invoices and billing profiles: the operator's tables.

Triggers make all tables except the profiles append-only. A subscription may be deleted while its month is not closed.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, delete, func, select
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.data.records.base import Base, Repository
from loramux.data.records.ledger import GENESIS, LedgerRow

CHUNK = 500
"""The maximum number of values in one statement."""


class PlanRow(Base):
    """A price list in one currency."""

    __tablename__ = "plans"
    __table_args__ = (CheckConstraint("minimum >= 0", name="minimum"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    currency: Mapped[str]
    """The currency's code in ISO 4217."""
    minimum: Mapped[int]
    """Minimum price of a period, in minor units."""
    created_at: Mapped[int]


class PriceRow(Base):
    """One price of a plan. Another price for the same meter with a later `valid_from` replaces this price from that
    time on.
    """

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
    """The steps of the price as JSON: [[above, nanos], ...]."""
    created_at: Mapped[int]


class SubscriptionRow(Base):
    """The plan that a tenant has from a point in time on."""

    __tablename__ = "subscriptions"

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    valid_from: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id"))
    created_at: Mapped[int]


class PeriodRow(Base):
    """A closed period. The period permanently contains the ledger's entries from first_sequence to last_sequence, with
    any date.
    """

    __tablename__ = "periods"
    __table_args__ = (
        UniqueConstraint("first_sequence", "ends_at"),
        CheckConstraint("last_sequence >= first_sequence - 1", name="range"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """The month, such as `2026-11`."""
    starts_at: Mapped[int]
    ends_at: Mapped[int]
    first_sequence: Mapped[int]
    last_sequence: Mapped[int]
    """The last entry of the period; first_sequence - 1 if the period has no entries."""
    digest: Mapped[str]
    """The hash of the last entry, which covers all entries before it."""
    closed_at: Mapped[int]


class InvoiceRow(Base):
    """An invoice in the form in which it was sent."""

    __tablename__ = "invoices"
    __table_args__ = (Index("ix_invoices_period_id", "period_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """The invoice's id, such as `INV-2026-11-acme`."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    period_id: Mapped[str] = mapped_column(ForeignKey("periods.id"))
    currency: Mapped[str]
    total: Mapped[int]
    """The total in minor units of the currency."""
    document: Mapped[str]
    """The invoice as JSON, from which all other forms are made."""
    digest: Mapped[str]
    """The SHA-256 of the document."""
    created_at: Mapped[int]


class BillingProfileRow(Base):
    """A tenant's name, address and tax id on invoices."""

    __tablename__ = "billing_profiles"

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    name: Mapped[str]
    address: Mapped[str]
    """The postal address, whose lines are separated by newlines."""
    tax_id: Mapped[str | None]
    tax_exempt: Mapped[bool]
    updated_at: Mapped[int]


class PriceRepository(Repository):
    """Plans, prices and subscriptions."""

    async def plans(self) -> Sequence[PlanRow]:
        """List every plan by name."""
        return (await self._session.scalars(select(PlanRow).order_by(PlanRow.name))).all()

    async def plan_named(self, name: str) -> PlanRow | None:
        """Return the plan of that name."""
        return await self._session.scalar(select(PlanRow).where(PlanRow.name == name))

    async def prices(self, plan_ids: Sequence[str]) -> Sequence[PriceRow]:
        """List all prices that these plans ever had, oldest first."""
        statement = select(PriceRow).where(PriceRow.plan_id.in_(plan_ids))
        return (await self._session.scalars(statement.order_by(PriceRow.valid_from, PriceRow.id))).all()

    async def subscriptions(self, tenant: TenantId) -> Sequence[SubscriptionRow]:
        """List a tenant's subscriptions, oldest first."""
        statement = select(SubscriptionRow).where(SubscriptionRow.tenant_id == tenant)
        return (await self._session.scalars(statement.order_by(SubscriptionRow.valid_from))).all()

    async def remove_subscription(self, tenant: TenantId, valid_from: int) -> None:
        """Delete a subscription; a trigger refuses this if the month is closed."""
        statement = delete(SubscriptionRow).where(
            SubscriptionRow.tenant_id == tenant, SubscriptionRow.valid_from == valid_from
        )
        await self._session.execute(statement)

    async def add(self, row: PlanRow | PriceRow | SubscriptionRow) -> None:
        """Insert a row immediately, so that a violated constraint raises its error here."""
        await self._insert(row)


class ProfileRepository(Repository):
    """Billing profiles."""

    async def get(self, tenant: TenantId) -> BillingProfileRow | None:
        """Return a tenant's profile."""
        return await self._session.get(BillingProfileRow, tenant)

    async def put(self, row: BillingProfileRow) -> None:
        """Insert or replace a tenant's profile."""
        await self._put(row)


class PeriodRepository(Repository):
    """Closed periods and their invoices."""

    async def all(self) -> Sequence[PeriodRow]:
        """List every closed period, oldest first."""
        return (await self._session.scalars(select(PeriodRow).order_by(PeriodRow.starts_at))).all()

    async def latest(self) -> PeriodRow | None:
        """Return the period that was closed last."""
        return await self._session.scalar(select(PeriodRow).order_by(PeriodRow.starts_at.desc()).limit(1))

    async def last_before(self, at: int) -> int:
        """Return the sequence of the last entry that was written before `at`; 0 if there is no such entry."""
        statement = select(func.max(LedgerRow.sequence)).where(LedgerRow.created_at < at)
        return await self._session.scalar(statement) or 0

    async def hash_at(self, sequence: int) -> str:
        """Return the hash of that entry; for 0, the hash of the ledger's beginning."""
        statement = select(LedgerRow.hash).where(LedgerRow.sequence == sequence)
        return await self._session.scalar(statement) or GENESIS

    async def hashes_at(self, sequences: Sequence[int]) -> dict[int, str]:
        """Return the hashes of the existing entries among these."""
        found: dict[int, str] = {}
        for start in range(0, len(sequences), CHUNK):
            statement = select(LedgerRow.sequence, LedgerRow.hash)
            rows = statement.where(LedgerRow.sequence.in_(sequences[start : start + CHUNK]))
            found |= {sequence: hash for sequence, hash in await self._session.execute(rows)}
        return found

    async def add(self, row: PeriodRow | InvoiceRow) -> None:
        """Insert a row."""
        await self._insert(row)

    async def invoices(self) -> Sequence[InvoiceRow]:
        """List every frozen invoice, in the order of their ids."""
        return (await self._session.scalars(select(InvoiceRow).order_by(InvoiceRow.id))).all()

    async def invoice(self, tenant: TenantId, period_id: str) -> InvoiceRow | None:
        """Return a tenant's invoice for a closed period."""
        statement = select(InvoiceRow).where(InvoiceRow.tenant_id == tenant, InvoiceRow.period_id == period_id)
        return await self._session.scalar(statement)
