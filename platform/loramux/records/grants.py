"""Statements about who else may call an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.aliases import Stamp
from loramux.records.identity import TenantId
from loramux.records.lifecycle_models import GrantRow


class GrantRepository:
    """The grants that one tenant has given."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def all(self, adapter_id: str) -> Sequence[GrantRow]:
        """The adapter's, by grantee."""
        statement = select(GrantRow).where(GrantRow.tenant_id == self._tenant, GrantRow.adapter_id == adapter_id)
        return (await self._session.scalars(statement.order_by(GrantRow.grantee))).all()

    async def add(self, adapter_id: str, grantee: str, stamp: Stamp) -> GrantRow:
        """Let `grantee` call the adapter, which it may not yet."""
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
        """Take it back."""
        await self._session.delete(row)
        await self._session.flush()
