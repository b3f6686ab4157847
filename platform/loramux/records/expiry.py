"""Statements about what deletes itself, over all tenants."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.adapters import READY
from loramux.records.identity import TenantId
from loramux.records.models import AdapterRow, RevisionRow, TenantRow


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, or one of its revisions, whose time is over."""

    tenant: TenantId
    tenant_name: str
    adapter: str
    number: int | None = None
    """Of the revision; None: the whole adapter."""


class ExpiryRepository:
    """What has expired and is not deleted yet."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def overdue(self, now: int, limit: int) -> list[Overdue]:
        """At most `limit` adapters, and as many revisions of others."""
        names = (TenantRow.id.label("tenant"), TenantRow.name.label("tenant_name"), AdapterRow.name.label("adapter"))
        adapters = (
            select(*names)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(AdapterRow.deleted_at.is_(None), AdapterRow.expires_at <= now)
            .limit(limit)
        )
        revisions = (
            select(*names, RevisionRow.number)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(RevisionRow.state == READY, RevisionRow.expires_at <= now)
            .limit(limit)
        )
        found = [Overdue(**row._mapping) for row in await self._session.execute(adapters)]
        return found + [Overdue(**row._mapping) for row in await self._session.execute(revisions)]
