"""Statements about revisions that are kept in the pool, and who keeps them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.aliases import Stamp
from loramux.records.bulk import among
from loramux.records.identity import TenantId, new_id
from loramux.records.lifecycle_models import PinRow
from loramux.records.models import AdapterRow, RevisionRow, TenantRow

UNPINNED, BY_DELETION, IDLE = "unpinned", "deleted", "idle"
"""Why a pin ended."""


class PinRepository:
    """One tenant's standing pins."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def count(self) -> int:
        """How many it has."""
        statement = select(func.count()).select_from(PinRow)
        return (
            await self._session.scalar(statement.where(PinRow.tenant_id == self._tenant, PinRow.until.is_(None))) or 0
        )

    async def of(self, adapter_id: str) -> dict[str, PinRow]:
        """The adapter's, by revision id."""
        statement = select(PinRow).where(
            PinRow.tenant_id == self._tenant, PinRow.adapter_id == adapter_id, PinRow.until.is_(None)
        )
        return {row.revision_id: row for row in await self._session.scalars(statement)}

    async def add(self, revision: RevisionRow, stamp: Stamp) -> PinRow:
        """Keep the revision, which has no pin."""
        row = PinRow(
            id=new_id("pin"),
            tenant_id=self._tenant,
            adapter_id=revision.adapter_id,
            revision_id=revision.id,
            digest=revision.digest,
            size_bytes=revision.size_bytes,
            pinned_by=stamp.by,
            since=stamp.at,
            used_at=stamp.at,
        )
        self._session.add(row)
        await self._session.flush()
        return row

    async def end(self, revision_ids: Collection[str], why: str, at: int) -> None:
        """Let go of these revisions."""
        await self._session.execute(
            update(PinRow)
            .where(
                PinRow.tenant_id == self._tenant,
                among(self._session, PinRow.revision_id, revision_ids),
                PinRow.until.is_(None),
            )
            .values(until=at, ended_by=why)
        )


class StandingPin(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that is to be in the pool."""

    tenant: TenantId
    tenant_name: str
    adapter: str
    number: int
    digest: str
    used_at: int


class StandingPinRepository:
    """Every tenant's standing pins, for the house."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def all(self) -> list[StandingPin]:
        """All of them, oldest first."""
        statement = (
            select(
                PinRow.tenant_id.label("tenant"),
                TenantRow.name.label("tenant_name"),
                AdapterRow.name.label("adapter"),
                RevisionRow.number,
                PinRow.digest,
                PinRow.used_at,
            )
            .join(TenantRow, TenantRow.id == PinRow.tenant_id)
            .join(AdapterRow, AdapterRow.id == PinRow.adapter_id)
            .join(RevisionRow, RevisionRow.id == PinRow.revision_id)
            .where(PinRow.until.is_(None))
            .order_by(PinRow.since, PinRow.id)
        )
        return [StandingPin(**row._mapping) for row in await self._session.execute(statement)]

    async def touch(self, digests: Collection[str], at: int) -> None:
        """Requests have run with these contents."""
        await self._session.execute(
            update(PinRow)
            .where(among(self._session, PinRow.digest, digests), PinRow.until.is_(None), PinRow.used_at < at)
            .values(used_at=at)
        )
