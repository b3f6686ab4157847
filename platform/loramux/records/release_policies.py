"""Release policies: what a revision must show before it takes most of an alias's requests. Row and statements."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint, delete
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.identity import TenantId


class ReleasePolicyRow(Base):
    """The policy of one alias, by its name: it outlives the alias."""

    __tablename__ = "release_policies"
    __table_args__ = (ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),)

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    policy: Mapped[str]
    """JSON."""
    changed_by: Mapped[str]
    changed_at: Mapped[int]


class ReleasePolicyRepository:
    """Policies of adapters that the caller has looked up."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, adapter_id: str, alias: str) -> ReleasePolicyRow | None:
        """Return the policy of an alias."""
        return await self._session.get(ReleasePolicyRow, (adapter_id, alias))

    async def put(self, row: ReleasePolicyRow) -> None:
        """Insert the row, or replace the one of its alias."""
        await self._session.merge(row)
        await self._session.flush()

    async def remove(self, adapter_id: str, alias: str) -> None:
        """Delete the policy of an alias, if there is one."""
        mine = (ReleasePolicyRow.adapter_id == adapter_id, ReleasePolicyRow.alias == alias)
        await self._session.execute(delete(ReleasePolicyRow).where(*mine))
