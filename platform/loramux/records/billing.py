"""Statements about plans, prices, periods and invoices. These are the operator's, but for a tenant's own invoices."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.billing_models import InvoiceRow, PeriodRow, PlanRow, PriceRow, SubscriptionRow
from loramux.records.identity import TenantId
from loramux.records.ledger import GENESIS
from loramux.records.ledger_models import LedgerRow


class PriceRepository:
    """Plans, their prices, and who has which."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def plans(self) -> Sequence[PlanRow]:
        """Every plan, by name."""
        return (await self._session.scalars(select(PlanRow).order_by(PlanRow.name))).all()

    async def plan_named(self, name: str) -> PlanRow | None:
        """The plan of that name."""
        return await self._session.scalar(select(PlanRow).where(PlanRow.name == name))

    async def prices(self, plan_ids: Sequence[str]) -> Sequence[PriceRow]:
        """All prices that these plans ever had, oldest first."""
        statement = select(PriceRow).where(PriceRow.plan_id.in_(plan_ids))
        return (await self._session.scalars(statement.order_by(PriceRow.valid_from, PriceRow.id))).all()

    async def subscriptions(self, tenant: TenantId) -> Sequence[SubscriptionRow]:
        """The plans that a tenant had, oldest first."""
        statement = select(SubscriptionRow).where(SubscriptionRow.tenant_id == tenant)
        return (await self._session.scalars(statement.order_by(SubscriptionRow.valid_from))).all()

    async def add(self, row: PlanRow | PriceRow | SubscriptionRow) -> None:
        """Insert a row; a broken rule is raised here."""
        self._session.add(row)
        await self._session.flush()


class PeriodRepository:
    """Closed periods and their invoices."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def all(self) -> Sequence[PeriodRow]:
        """Every closed period, oldest first."""
        return (await self._session.scalars(select(PeriodRow).order_by(PeriodRow.starts_at))).all()

    async def latest(self) -> PeriodRow | None:
        """The period that was closed last."""
        return await self._session.scalar(select(PeriodRow).order_by(PeriodRow.starts_at.desc()).limit(1))

    async def last_before(self, at: int) -> int:
        """The last sequence whose entry was written before `at`; 0 when there is none."""
        statement = select(func.max(LedgerRow.sequence)).where(LedgerRow.created_at < at)
        return await self._session.scalar(statement) or 0

    async def hash_at(self, sequence: int) -> str:
        """The hash of that entry; of the ledger's beginning for 0."""
        statement = select(LedgerRow.hash).where(LedgerRow.sequence == sequence)
        return await self._session.scalar(statement) or GENESIS

    async def add(self, row: PeriodRow | InvoiceRow) -> None:
        """Insert a row."""
        self._session.add(row)
        await self._session.flush()

    async def invoice(self, tenant: TenantId, period_id: str) -> InvoiceRow | None:
        """A tenant's invoice for a closed period."""
        statement = select(InvoiceRow).where(InvoiceRow.tenant_id == tenant, InvoiceRow.period_id == period_id)
        return await self._session.scalar(statement)
