"""The tables of limits and budgets, what counts against them now, and what open requests hold of them.

A *subject* is what a limit is on: the id of a tenant, a project, a key or a member, or `tier:NAME`. Money is in
nano-units of the tenant's currency.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base

UNDELIVERED = text("delivered_at IS NULL")


class LimitRow(Base):
    """The most that a subject may have or do; `tenant_id` is null for a tier's."""

    __tablename__ = "limits"
    __table_args__ = (CheckConstraint("value >= 0", name="value"),)

    subject: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId | None] = mapped_column(ForeignKey("tenants.id"))
    value: Mapped[int]


class CounterRow(Base):
    """What a subject has left of its limits by the minute (`limits.bucket`), and how many requests it runs."""

    __tablename__ = "limit_counters"
    __table_args__ = (CheckConstraint("running >= 0", name="running"),)

    subject: Mapped[str] = mapped_column(primary_key=True)
    requests_free: Mapped[int]
    requests_at: Mapped[int]
    tokens_free: Mapped[int]
    tokens_at: Mapped[int]
    running: Mapped[int]


class HoldRow(Base):
    """What an open request holds of a subject: one of its places, and so many tokens of the minute."""

    __tablename__ = "limit_holds"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int]


class BudgetRow(Base):
    """The most money that a subject may spend in a period."""

    __tablename__ = "budgets"
    __table_args__ = (
        UniqueConstraint("subject", "period"),
        CheckConstraint("period IN ('day', 'month', 'total')", name="period"),
        CheckConstraint("amount >= 0", name="amount"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    subject: Mapped[str]
    period: Mapped[str]
    amount: Mapped[int]
    thresholds: Mapped[str]
    """Percents at which to tell, ascending, separated by spaces."""


class SpendingRow(Base):
    """What was spent of a budget in one period, and what open requests may still come to."""

    __tablename__ = "budget_spendings"
    __table_args__ = (CheckConstraint("spent >= 0 AND held >= 0", name="quantities"),)

    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Of the period, in microseconds."""
    spent: Mapped[int]
    held: Mapped[int]


class BudgetHoldRow(Base):
    """What an open request may come to cost, held of a budget."""

    __tablename__ = "budget_holds"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int]
    amount: Mapped[int]
    tier: Mapped[str]
    """At which it will be charged."""


class AlertRow(Base):
    """A budget has passed a threshold: written with the settlement that did it, once, for a sink to deliver."""

    __tablename__ = "budget_alerts"
    __table_args__ = (
        Index("ix_budget_alerts_undelivered", "created_at", sqlite_where=UNDELIVERED, postgresql_where=UNDELIVERED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """`BUDGET:START:PERCENT`: the same alert is never written twice."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    budget_id: Mapped[str]
    subject: Mapped[str]
    period: Mapped[str]
    start: Mapped[int]
    percent: Mapped[int]
    amount: Mapped[int]
    spent: Mapped[int]
    created_at: Mapped[int]
    delivered_at: Mapped[int | None]
