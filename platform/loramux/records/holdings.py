"""Statements about what takes room for a while: what of it is on the bill already. The operator's: over all tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from loramux.records.bulk import among
from loramux.records.identity import TenantId
from loramux.records.lifecycle_models import PinRow
from loramux.records.models import AdapterRow, RevisionRow, TenantRow

FOREVER = 2**62
"""Later than any end."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Rows that hold a revision's bytes from one moment to another."""

    row: type[RevisionRow | PinRow]
    revision_id: InstrumentedAttribute[str]
    began: InstrumentedAttribute[int]
    ended: InstrumentedAttribute[int | None]


STORED = Holdings(RevisionRow, RevisionRow.id, RevisionRow.created_at, RevisionRow.deleted_at)
"""Revisions, from their upload to their deletion."""
PINNED = Holdings(PinRow, PinRow.revision_id, PinRow.since, PinRow.until)
"""Pins, while they stand."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Something whose time is to be counted on."""

    id: str
    tenant_id: TenantId
    model: str
    """`tenant/adapter@3`."""
    digest: str
    size_bytes: int
    counted_until: int
    """From here on, in microseconds."""
    until: int
    """Its end, or FOREVER."""


class HoldingRepository:
    """Holdings of one kind."""

    def __init__(self, session: AsyncSession, holdings: Holdings) -> None:
        self._session = session
        self._holdings = holdings

    async def due(self, before: int, limit: int) -> list[Holding]:
        """Some of those that were there before that moment and are not counted up to it, or up to their end."""
        row, ended, numbered = self._holdings.row, self._holdings.ended, aliased(RevisionRow)
        counted = func.coalesce(row.counted_until, self._holdings.began)
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
            .join(numbered, numbered.id == self._holdings.revision_id)
            .join(AdapterRow, AdapterRow.id == row.adapter_id)
            .join(TenantRow, TenantRow.id == row.tenant_id)
            .where(counted < before, or_(ended.is_(None), counted < ended))
            .order_by(counted, row.id)
            .limit(limit)
        )
        return [
            Holding(
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
        """Note up to when these are counted now."""
        row = self._holdings.row
        for moment in sorted(set(until.values())):
            ids = [id for id, at in until.items() if at == moment]
            statement = update(row).where(among(self._session, row.id, ids)).values(counted_until=moment)
            await self._session.execute(statement, execution_options={"synchronize_session": False})
