"""Statements about requests: opened before the engine sees them, closed with the ledger entry that bills them.

They go by request id, which only the server makes; the tenant of a settlement is read from the row, never given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.models import RequestRow

OPEN = "open"
SETTLED = "settled"
INTERRUPTED = "interrupted"


class RequestRepository:
    """Requests."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, given as columns."""
        await self._session.execute(insert(RequestRow), rows)

    async def by_id(self, ids: Collection[str]) -> dict[str, RequestRow]:
        """The requests with these ids, those that exist."""
        found = await self._session.scalars(select(RequestRow).where(RequestRow.id.in_(ids)))
        return {row.id: row for row in found}

    async def servers_with_open(self, *, besides: str) -> list[str]:
        """The other servers that have requests open."""
        statement = select(RequestRow.server_id).where(RequestRow.status == OPEN, RequestRow.server_id != besides)
        return list(await self._session.scalars(statement.distinct()))

    async def left_open(self, servers: Collection[str], limit: int) -> Sequence[RequestRow]:
        """Some of the requests that these servers have open."""
        statement = select(RequestRow).where(RequestRow.status == OPEN, RequestRow.server_id.in_(servers))
        return (await self._session.scalars(statement.order_by(RequestRow.id).limit(limit))).all()

    async def close(self, ids: Sequence[str], status: str, at: int) -> None:
        """Write the end of these requests."""
        statement = update(RequestRow).where(RequestRow.id.in_(ids)).values(status=status, settled_at=at)
        await self._session.execute(statement, execution_options={"synchronize_session": False})
