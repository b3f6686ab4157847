"""Statements about which stored contents are still needed, over all tenants; they answer digests only."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.adapters import KEPT, READY
from loramux.records.bulk import among
from loramux.records.ledger_models import RequestRow
from loramux.records.models import RevisionRow


class ContentRepository:
    """Contents of adapters, by digest."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def expire(self, now: int, limit: int) -> frozenset[str]:
        """Give up the contents of revisions that can no longer be undeleted: at most `limit`, for good."""
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
        """Those of `digests` that no revision keeps and no open request runs with."""
        return await self.unkept(digests) - await self.running(digests)

    async def running(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that an open request runs with."""
        running = select(RequestRow.adapter_digest).where(RequestRow.status == "open").distinct()
        return frozenset(digests) & frozenset(await self._session.scalars(running))

    async def unkept(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that no revision keeps."""
        kept = select(RevisionRow.digest).where(among(self._session, RevisionRow.digest, digests), KEPT)
        return frozenset(digests) - frozenset(await self._session.scalars(kept))

    async def uncallable(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that no revision has which can be called."""
        callable_ = select(RevisionRow.digest).where(
            among(self._session, RevisionRow.digest, digests), RevisionRow.state == READY
        )
        return frozenset(digests) - frozenset(await self._session.scalars(callable_))

    async def deleted_since(self, moment: int) -> frozenset[str]:
        """The contents of revisions that were deleted at that moment or later."""
        statement = select(RevisionRow.digest).where(RevisionRow.deleted_at >= moment)
        return frozenset(await self._session.scalars(statement))
