"""The audit log: its row and its statements."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ForeignKey, Index, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.identity import TenantId


class AuditRow(Base):
    """One change: its actor, where it came from, before, after. Triggers refuse every UPDATE and DELETE."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index("ix_audit_entries_tenant_id_sequence", "tenant_id", "sequence"),)

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[int]
    tenant_id: Mapped[TenantId | None] = mapped_column(ForeignKey("tenants.id"))
    """The tenant that was changed; null for what belongs to none, such as a tier."""
    actor: Mapped[str]
    """A key's or a member's id, or `local:USER`."""
    source: Mapped[str]
    request_id: Mapped[str]
    action: Mapped[str]
    object_id: Mapped[str]
    before: Mapped[str | None]
    """JSON."""
    after: Mapped[str | None]


class AuditRepository:
    """The audit log, read newest first."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: AuditRow) -> None:
        """Append the row."""
        self._session.add(row)
        await self._session.flush()

    async def before(self, sequence: int | None, limit: int, tenant: TenantId | None) -> Sequence[AuditRow]:
        """Return at most `limit` entries older than `sequence`; of one tenant, or of all."""
        statement = select(AuditRow).order_by(AuditRow.sequence.desc()).limit(limit)
        if sequence is not None:
            statement = statement.where(AuditRow.sequence < sequence)
        if tenant is not None:
            statement = statement.where(AuditRow.tenant_id == tenant)
        return (await self._session.scalars(statement)).all()
