"""Leases: rows of unfinished work, each held by one server; one that dies leaves its rows to the others.

A server is alive for as long as its process is (`records.locks.server_liveness`), so a lease needs no clock. Work that
commits checks in the same transaction that its row is still this server's.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped

from loramux.records.locks import dead_servers


class LeasedRow:
    """The columns of a row that servers hold."""

    server_id: Mapped[str | None]
    """The server that works on it; when that server dies, another one adopts the row."""
    attempts: Mapped[int]
    """Servers that have started the work."""


async def adopt_abandoned(
    session: AsyncSession, row: type[LeasedRow], unfinished: ColumnElement[bool], server_id: str
) -> bool:
    """Move the unfinished rows of dead servers to this one; return whether some server is dead."""
    others = select(row.server_id).where(unfinished, row.server_id != server_id).distinct()
    dead = await dead_servers(session, [server for server in await session.scalars(others) if server is not None])
    if dead:
        values: dict[Any, Any] = {row.server_id: server_id, row.attempts: row.attempts + 1}
        await session.execute(update(row).where(unfinished, row.server_id.in_(dead)).values(values))
    return bool(dead)
