"""Locks in the database: for the length of a transaction, and for the length of a process's life."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.database import Database, is_postgresql, sqlite_file

MIGRATIONS = 7_401_001
CONTENTS = 7_401_002
"""Held while stored contents and the rows that need them change together, so that none goes while another comes."""

PRICES = 7_401_004
"""Held while prices are added, and while a period is closed that they would be in."""

PEPPER = 7_401_005
"""Held while a server compares or replaces the pepper, so that servers that start together agree on one."""

BASES = 7_401_006
"""Held while the set of bases is compared and changed."""

DAILY_USAGE = 7_401_007
"""Held while entries are added to the daily sums, so that servers add each once."""

SERVERS = 7_401_003
"""The class of PostgreSQL's two-part locks that living servers hold, each under the hash of its id."""


async def advisory_lock(session: AsyncSession, lock: int) -> None:
    """Hold `lock` until this transaction ends; other transactions with the same number wait here.

    SQLite needs nothing: a writing transaction is alone already.
    """
    if is_postgresql(session):
        await session.execute(select(func.pg_advisory_xact_lock(lock)))


@asynccontextmanager
async def server_liveness(database: Database, server_id: str) -> AsyncIterator[None]:
    """While the block runs, `dead_servers` does not name this server; however the process ends, it does afterwards."""
    if sqlite_file(database.url) is not None:
        yield
        return
    key = SERVERS, func.hashtext(server_id)
    async with database.connect() as connection:
        await connection.execute(select(func.pg_advisory_lock(*key)))
        await connection.commit()
        try:
            yield
        finally:
            with suppress(DBAPIError):  # a broken connection has let go already
                await connection.execute(select(func.pg_advisory_unlock(*key)))
                await connection.commit()


async def dead_servers(session: AsyncSession, server_ids: Sequence[str]) -> list[str]:
    """Return the other servers that have ended. On SQLite all of them: an embedded database has one server."""
    if not is_postgresql(session):
        return list(server_ids)
    free = func.pg_try_advisory_xact_lock
    return [id for id in server_ids if await session.scalar(select(free(SERVERS, func.hashtext(id))))]
