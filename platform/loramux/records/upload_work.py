"""Statements about all tenants' uploads, as what servers have to do: ids, never contents."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId
from loramux.records.models import TenantRow
from loramux.records.upload_models import UploadRow
from loramux.records.uploads import EXPIRED, OPEN, UPLOADING, VALIDATING


class UploadJob(msgspec.Struct, frozen=True, kw_only=True):
    """An upload that is to be validated."""

    id: str
    tenant: TenantId
    tenant_name: str
    attempts: int


class UploadWork:
    """Uploads that are to be validated, given up or forgotten."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def servers(self, besides: str) -> list[str]:
        """The other servers that have taken uploads on and not finished them."""
        statement = select(UploadRow.server_id).where(UploadRow.state == VALIDATING, UploadRow.server_id != besides)
        return [server for server in await self._session.scalars(statement.distinct()) if server is not None]

    async def adopt(self, servers: Collection[str], server_id: str) -> None:
        """Take on what these servers had taken on."""
        await self._session.execute(
            update(UploadRow)
            .where(UploadRow.state == VALIDATING, UploadRow.server_id.in_(servers))
            .values(server_id=server_id, attempts=UploadRow.attempts + 1)
        )

    async def jobs(self, server_id: str) -> list[UploadJob]:
        """What the server has taken on and not finished, oldest first."""
        statement = (
            select(UploadRow.id, UploadRow.tenant_id, TenantRow.name, UploadRow.attempts)
            .join(TenantRow, TenantRow.id == UploadRow.tenant_id)
            .where(UploadRow.state == VALIDATING, UploadRow.server_id == server_id)
            .order_by(UploadRow.created_at, UploadRow.id)
        )
        return [
            UploadJob(id=row.id, tenant=row.tenant_id, tenant_name=row.name, attempts=row.attempts)
            for row in await self._session.execute(statement)
        ]

    async def expire(self, now: int) -> list[str]:
        """Give up the uploads that nobody has sent anything for in time; their ids."""
        statement = (
            update(UploadRow)
            .where(UploadRow.state == UPLOADING, UploadRow.expires_at <= now)
            .values(state=EXPIRED, finished_at=now)
            .returning(UploadRow.id)
        )
        return list(await self._session.scalars(statement))

    async def closed(self, ids: Collection[str]) -> frozenset[str]:
        """Those of `ids` whose pieces nobody needs."""
        statement = select(UploadRow.id).where(UploadRow.id.in_(ids), UploadRow.state.in_(OPEN))
        return frozenset(ids) - frozenset(await self._session.scalars(statement))

    async def forget(self, before: int) -> None:
        """Remove what was finished before that time."""
        await self._session.execute(delete(UploadRow).where(UploadRow.finished_at < before))
