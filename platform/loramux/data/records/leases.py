"""Locks that are held during the life of a process, and leases: a server's hold on a row of unfinished work.

A server is alive as long as its process runs, so a lease needs no clock. Other servers adopt the rows of a dead server.
A job checks in each transaction that it commits that this server still holds the job's row.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Executable, func, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Mapped

from loramux.data.records.database import Database, first_line, is_postgresql, sqlite_file
from loramux.data.records.errors import RecordsUnavailable

SERVERS = 7_401_003
"""The first part of the two-part PostgreSQL locks of living servers; the second part is the hash of the server's id."""

LOCK_SECONDS = 1.0
"""Seconds between two looks at the connection that shows other processes that this one lives."""

FROZEN_SECONDS = 10.0
"""Seconds after which a database that does not answer on the connection of a lock is frozen."""

TRAINERS = 7_401_008
"""The first part of the two-part PostgreSQL locks of living trainers; the second is the hash of the trainer's id."""


@asynccontextmanager
async def server_liveness(database: Database, server_id: str) -> AsyncIterator[None]:
    """Mark this server as alive while the block runs: `dead_servers` names it only after its process has ended."""
    async with _process_lock(database, SERVERS, server_id):
        yield


async def dead_servers(session: AsyncSession, server_ids: Sequence[str]) -> list[str]:
    """Return those of the servers that have ended."""
    return await _without_lock(session, SERVERS, server_ids)


@asynccontextmanager
async def trainer_liveness(database: Database, trainer_id: str) -> AsyncIterator[None]:
    """While the block runs, `dead_trainers` does not name this trainer. After the process has ended, it does."""
    async with _process_lock(database, TRAINERS, trainer_id):
        yield


async def dead_trainers(session: AsyncSession, trainer_ids: Sequence[str]) -> list[str]:
    """Return those of the trainers that have ended."""
    return await _without_lock(session, TRAINERS, trainer_ids)


@asynccontextmanager
async def _process_lock(database: Database, kind: int, id: str) -> AsyncIterator[None]:
    """Hold a lock that ends with the process: on SQLite of a file next to the database, or else an advisory lock of
    PostgreSQL on a separate connection.

    The end of the connection, as when the database is started again, releases the advisory lock. It is then taken
    again.
    """
    if (file := sqlite_file(database.url)) is not None:
        with _locked_file(_lock_file(file, id)):
            yield
        return
    ended = asyncio.Event()
    held = asyncio.get_running_loop().create_future()
    keeper = asyncio.create_task(_keep_locked(database, (kind, func.hashtext(id)), held, ended))
    try:
        await asyncio.wait({keeper, held}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.done():
            keeper.result()  # the first connection has failed
        yield
    finally:
        ended.set()
        await keeper


@contextmanager
def _locked_file(lock: Path) -> Iterator[None]:
    """Hold a lock of the file, which the kernel releases when the process has ended."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock_file(database: Path, id: str) -> Path:
    return database.with_name(f"{database.name}-{id}.lock")


def _is_unlocked(lock: Path) -> bool:
    """Return whether no process holds the file, and remove a file that a dead process has left."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


async def _keep_locked(
    database: Database, key: tuple[object, ...], held: asyncio.Future[None], ended: asyncio.Event
) -> None:
    """Hold an advisory lock until `ended`, and set `held` when it is held. Raises RecordsUnavailable if this fails the
    first time.
    """
    while not ended.is_set():
        try:
            async with database.connect() as connection:
                await _execute(connection, select(func.pg_advisory_lock(*key)))
                if not held.done():
                    held.set_result(None)
                while not await _is_set_within(ended, LOCK_SECONDS):
                    await _execute(connection, select(1))
                await _execute(connection, select(func.pg_advisory_unlock(*key)))
        except (DBAPIError, PoolTimeout, OSError) as error:
            if not held.done():
                reason = first_line(error) if isinstance(error, SQLAlchemyError) else error
                raise RecordsUnavailable(f"the database does not answer: {reason}") from error
            await _is_set_within(ended, LOCK_SECONDS)


async def _execute(connection: AsyncConnection, statement: Executable) -> None:
    """Execute a statement that takes no time. Raises TimeoutError if the database is frozen: it would never answer, and
    the start or the end of the server would wait for it.
    """
    try:
        async with asyncio.timeout(FROZEN_SECONDS):
            await connection.execute(statement)
            await connection.commit()
    except TimeoutError:
        raise TimeoutError(f"it did not answer within {FROZEN_SECONDS:g} s") from None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _without_lock(session: AsyncSession, kind: int, ids: Sequence[str]) -> list[str]:
    """Return the ids whose process does not hold its lock."""
    if is_postgresql(session):
        free = func.pg_try_advisory_xact_lock
        return [id for id in ids if await session.scalar(select(free(kind, func.hashtext(id))))]
    file = session.get_bind().engine.url.database
    assert file is not None, "an embedded database is a file"
    return [id for id in ids if _is_unlocked(_lock_file(Path(file), id))]


class LeasedRow:
    """The columns of a row that a server holds by a lease."""

    server_id: Mapped[str | None]
    """The server that works on the row. If this server dies, another server adopts the row."""
    attempts: Mapped[int]
    """The number of servers that have started the work."""


async def adopt_abandoned(
    session: AsyncSession, row: type[LeasedRow], unfinished: ColumnElement[bool], server_id: str
) -> bool:
    """Move the unfinished rows of dead servers to this server; return whether any server is dead."""
    others = select(row.server_id).where(unfinished, row.server_id != server_id).distinct()
    dead = await dead_servers(session, [server for server in await session.scalars(others) if server is not None])
    if dead:
        values: dict[Any, Any] = {row.server_id: server_id, row.attempts: row.attempts + 1}
        await session.execute(update(row).where(unfinished, row.server_id.in_(dead)).values(values))
    return bool(dead)
