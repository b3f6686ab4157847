"""Stored contents that are still needed, over all tenants; the answers are digests only."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loramux.records.adapters import KEPT, READY, RevisionRow
from loramux.records.identity import TenantId
from loramux.records.requests import RequestRow
from loramux.records.statements import among


class ContentRepository:
    """Contents of adapters, by digest."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def expire(self, now: int, limit: int) -> frozenset[str]:
        """End the undeletion period of at most `limit` revisions that are due; return their digests."""
        due = select(RevisionRow.id).where(RevisionRow.purge_at <= now).order_by(RevisionRow.purge_at).limit(limit)
        ids = (await self._session.scalars(due)).all()
        statement = (
            update(RevisionRow)
            .where(among(self._session, RevisionRow.id, ids), RevisionRow.purge_at <= now)
            .values(purge_at=None)
            .returning(RevisionRow.digest)
            .execution_options(synchronize_session=False)
        )
        return frozenset(await self._session.scalars(statement))

    async def unused(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` that no revision keeps and no open request runs with."""
        return await self.unkept(digests) - await self.running(digests)

    async def running(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` that an open request runs with."""
        running = select(RequestRow.adapter_digest).where(RequestRow.status == "open").distinct()
        return frozenset(digests) & frozenset(await self._session.scalars(running))

    async def unkept(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` that no revision keeps."""
        kept = select(RevisionRow.digest).where(among(self._session, RevisionRow.digest, digests), KEPT)
        return frozenset(digests) - frozenset(await self._session.scalars(kept))

    async def uncallable(self, tenant: TenantId, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` that no callable revision of the tenant has."""
        callable_ = select(RevisionRow.digest).where(
            RevisionRow.tenant_id == tenant,
            among(self._session, RevisionRow.digest, digests),
            RevisionRow.state == READY,
        )
        return frozenset(digests) - frozenset(await self._session.scalars(callable_))

    async def uncallable_since(self, moment: int) -> frozenset[tuple[TenantId, str]]:
        """Return tenants and digests of revisions deleted since then, where the tenant has no callable one."""
        other = aliased(RevisionRow)
        callable_ = exists().where(
            other.tenant_id == RevisionRow.tenant_id, other.digest == RevisionRow.digest, other.state == READY
        )
        statement = select(RevisionRow.tenant_id, RevisionRow.digest).where(
            RevisionRow.deleted_at >= moment, ~callable_
        )
        return frozenset((tenant, digest) for tenant, digest in await self._session.execute(statement))
