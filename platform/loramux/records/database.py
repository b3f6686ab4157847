"""One database, embedded SQLite or PostgreSQL, as transactions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from loramux.records.errors import RecordsUnavailable, RowRefused, UnsupportedUrl

Clock = Callable[[], int]
"""Microseconds since the epoch, UTC: the unit of every time in the records."""

BUSY_SECONDS = 30
"""How long a SQLite writer waits for another process's transaction."""

READERS = 4


def unix_microseconds() -> int:
    """The wall clock in the unit of the records."""
    return time.time_ns() // 1000


def parse_url(url: str) -> URL:
    """`url` with the driver that loramux uses for it.

    Raises UnsupportedUrl for another database, or for SQLite in memory (the migrations could not reach it).
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UnsupportedUrl("the records url cannot be parsed; write sqlite:///PATH or postgresql://...") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UnsupportedUrl(f"records url {parsed!r} is not supported; write sqlite:///PATH or postgresql://...")


def sqlite_file(url: URL) -> Path | None:
    """The file of an embedded database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def is_postgresql(session: AsyncSession) -> bool:
    """Whether the session's database is PostgreSQL; else it is SQLite."""
    return session.get_bind().dialect.name == "postgresql"


def prepare_sqlite(engine: Engine, *, begin: str, **pragmas: str) -> None:
    """Make every connection of `engine` durable and strict, and let SQLAlchemy start transactions with `begin`.

    `pragmas` add to those that are always set, or take their place.
    """
    chosen = {"journal_mode": "WAL", "synchronous": "FULL", "foreign_keys": "ON", "recursive_triggers": "ON"} | pragmas

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver starts no transactions of its own
        cursor = connection.cursor()
        for pragma, value in chosen.items():
            cursor.execute(f"PRAGMA {pragma}={value}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def start(connection: Any) -> None:
        connection.exec_driver_sql(begin)


class Database:
    """Transactions over one database: `begin()` writes, `read()` sees one snapshot and cannot write.

    Both raise RowRefused for a broken constraint and RecordsUnavailable for a database that does not answer.

    SQLite knows one writer at a time, so writers of this process share one connection and queue for it in
    order; another process's writer is waited for BUSY_SECONDS.
    """

    def __init__(self, url: str, *, clock: Clock = unix_microseconds) -> None:
        self.url = parse_url(url)
        self.now = clock
        self._writer, self._reader = _engines(self.url)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        async with _transaction(self._writer) as session:
            yield session

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """One read-only transaction over one snapshot."""
        async with _transaction(self._reader) as session:
            yield session

    def connect(self) -> AsyncConnection:
        """A connection of one's own, for what outlives a transaction (`records.locks`); use it as a context."""
        return self._writer.connect()

    async def close(self) -> None:
        """Close every connection; the database can be used again afterwards."""
        await self._reader.dispose()
        await self._writer.dispose()


@asynccontextmanager
async def _transaction(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    try:
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except IntegrityError as error:
        raise RowRefused(str(error.orig)) from error
    except (OperationalError, PoolTimeout) as error:
        raise RecordsUnavailable(f"the database does not answer: {error}") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise RecordsUnavailable(f"the connection to the database broke: {error.orig}") from error
        raise


def _engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    if sqlite_file(url) is None:
        engine = create_async_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=10)
        return engine, engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    aiosqlite = url.set(drivername="sqlite+aiosqlite")
    timeout = {"timeout": BUSY_SECONDS}
    writer = create_async_engine(aiosqlite, connect_args=timeout, pool_size=1, max_overflow=0, pool_timeout=60)
    reader = create_async_engine(aiosqlite, connect_args=timeout, pool_size=READERS, max_overflow=0, pool_timeout=60)
    prepare_sqlite(writer.sync_engine, begin="BEGIN IMMEDIATE")
    prepare_sqlite(reader.sync_engine, begin="BEGIN", query_only="ON")
    return writer, reader
