"""Statements of the storage meter: stored and pinned revisions, and the time up to which each is billed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from loramux.records.adapters import AdapterRow, RevisionRow
from loramux.records.identity import TenantId
from loramux.records.pins import PinRow
from loramux.records.statements import among
from loramux.records.tenants import TenantRow

FOREVER = 2**62
"""Later than any end."""


@dataclass(frozen=True, slots=True)
class MeteredRows:
    """A table whose rows keep a revision's bytes from one moment to another."""

    row: type[RevisionRow | PinRow]
    revision_id: InstrumentedAttribute[str]
    began: InstrumentedAttribute[int]
    ended: InstrumentedAttribute[int | None]


STORED = MeteredRows(RevisionRow, RevisionRow.id, RevisionRow.created_at, RevisionRow.deleted_at)
"""Revisions, from their upload to their deletion."""
PINNED = MeteredRows(PinRow, PinRow.revision_id, PinRow.since, PinRow.until)
"""Pins, from their creation to their end."""


class UnbilledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stored or pinned revision, from the time up to which it is billed."""

    id: str
    tenant_id: TenantId
    model: str
    """`tenant/adapter@3`."""
    digest: str
    size_bytes: int
    counted_until: int
    """Billed up to here, in microseconds."""
    until: int
    """Its end, or FOREVER."""


class StorageMeterRepository:
    """MeteredRows of one kind."""

    def __init__(self, session: AsyncSession, rows: MeteredRows) -> None:
        self._session = session
        self._rows = rows

    async def due(self, before: int, limit: int) -> list[UnbilledSpan]:
        """List spans that began before that moment and are not billed up to it, or up to their end."""
        row, ended, numbered = self._rows.row, self._rows.ended, aliased(RevisionRow)
        counted = func.coalesce(row.counted_until, self._rows.began)
        statement = (
            select(
                row.id,
                row.tenant_id,
                (TenantRow.name + "/" + AdapterRow.name).label("name"),
                numbered.number,
                row.digest,
                row.size_bytes,
                counted.label("counted_until"),
                func.coalesce(ended, literal(FOREVER)).label("until"),
            )
            .join(numbered, numbered.id == self._rows.revision_id)
            .join(AdapterRow, AdapterRow.id == row.adapter_id)
            .join(TenantRow, TenantRow.id == row.tenant_id)
            .where(counted < before, or_(ended.is_(None), counted < ended))
            .order_by(counted, row.id)
            .limit(limit)
        )
        return [
            UnbilledSpan(
                id=found.id,
                tenant_id=found.tenant_id,
                model=f"{found.name}@{found.number}",
                digest=found.digest,
                size_bytes=found.size_bytes,
                counted_until=found.counted_until,
                until=found.until,
            )
            for found in await self._session.execute(statement)
        ]

    async def counted(self, until: Mapping[str, int]) -> None:
        """Record the time up to which these are billed."""
        row = self._rows.row
        for moment in sorted(set(until.values())):
            ids = [id for id, at in until.items() if at == moment]
            statement = update(row).where(among(self._session, row.id, ids)).values(counted_until=moment)
            await self._session.execute(statement, execution_options={"synchronize_session": False})
