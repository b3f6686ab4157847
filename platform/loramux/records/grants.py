"""Grants: other tenants that may call an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ForeignKeyConstraint, Index, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.adapters import Stamp
from loramux.records.base import Base
from loramux.records.identity import TenantId


class GrantRow(Base):
    """A tenant that may call another tenant's adapter."""

    __tablename__ = "adapter_grants"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        Index("ix_adapter_grants_grantee", "grantee"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    grantee: Mapped[str] = mapped_column(primary_key=True)
    """A tenant's name, which never changes. It need not exist: a grant does not reveal the names of customers."""
    tenant_id: Mapped[TenantId]
    """The owner."""
    granted_by: Mapped[str]
    granted_at: Mapped[int]


class GrantRepository:
    """The grants of one tenant's adapters."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def all(self, adapter_id: str) -> Sequence[GrantRow]:
        """List the adapter's grants by grantee."""
        statement = select(GrantRow).where(GrantRow.tenant_id == self._tenant, GrantRow.adapter_id == adapter_id)
        return (await self._session.scalars(statement.order_by(GrantRow.grantee))).all()

    async def add(self, adapter_id: str, grantee: str, stamp: Stamp) -> GrantRow:
        """Insert a grant that does not exist yet."""
        row = GrantRow(
            adapter_id=adapter_id,
            grantee=grantee,
            tenant_id=self._tenant,
            granted_by=stamp.by,
            granted_at=stamp.at,
        )
        self._session.add(row)
        await self._session.flush()
        return row

    async def remove(self, row: GrantRow) -> None:
        """Delete a grant."""
        await self._session.delete(row)
        await self._session.flush()
