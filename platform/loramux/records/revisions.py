"""Statements about what revisions' storage is on the bill already. They are the operator's: over all tenants."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.bulk import among
from loramux.records.identity import TenantId
from loramux.records.models import AdapterRow, RevisionRow, TenantRow

FOREVER = 2**62
"""Later than any deletion."""


class StoredRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A revision whose storage is to be counted on."""

    id: str
    tenant_id: TenantId
    model: str
    """`tenant/adapter@3`."""
    digest: str
    size_bytes: int
    counted_until: int
    """From here on, in microseconds."""
    until: int
    """Its deletion, or FOREVER."""


class StoredRevisionRepository:
    """Revisions as things that take room."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def due(self, before: int, limit: int) -> list[StoredRevision]:
        """Some of those that were there before that moment and are not counted up to it, or up to their deletion."""
        counted = func.coalesce(RevisionRow.counted_until, RevisionRow.created_at)
        statement = (
            select(
                RevisionRow.id,
                RevisionRow.tenant_id,
                (TenantRow.name + "/" + AdapterRow.name).label("name"),
                RevisionRow.number,
                RevisionRow.digest,
                RevisionRow.size_bytes,
                counted.label("counted_until"),
                func.coalesce(RevisionRow.deleted_at, literal(FOREVER)).label("until"),
            )
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == RevisionRow.tenant_id)
            .where(counted < before, or_(RevisionRow.deleted_at.is_(None), counted < RevisionRow.deleted_at))
            .order_by(counted, RevisionRow.id)
            .limit(limit)
        )
        return [
            StoredRevision(
                id=row.id,
                tenant_id=row.tenant_id,
                model=f"{row.name}@{row.number}",
                digest=row.digest,
                size_bytes=row.size_bytes,
                counted_until=row.counted_until,
                until=row.until,
            )
            for row in await self._session.execute(statement)
        ]

    async def counted(self, until: Mapping[str, int]) -> None:
        """Note up to when these revisions are counted now."""
        for moment in sorted(set(until.values())):
            ids = [id for id, at in until.items() if at == moment]
            statement = (
                update(RevisionRow).where(among(self._session, RevisionRow.id, ids)).values(counted_until=moment)
            )
            await self._session.execute(statement, execution_options={"synchronize_session": False})
