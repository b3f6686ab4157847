"""One database, either embedded SQLite or PostgreSQL: its transactions and its locks.

A transaction either reads one snapshot or writes; a look-up reads without one. Locks that are held longer than a
transaction are in `leases`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import aiosqlite
from sqlalchemy import URL, Engine, event, func, make_url, select
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from loramux.common.jobs import SERVER, TenantSlots, tenant_of_work
from loramux.data.records.errors import RecordsUnavailable, RowRefused, UnsupportedUrl, ValueRefused

T = TypeVar("T")
Clock = Callable[[], int]
"""A clock of microseconds since the epoch (UTC), the unit of every time in the records."""

BUSY_SECONDS = 30
"""Seconds that a transaction waits for a lock: on SQLite that of the only writer, on PostgreSQL that of a row."""

READERS = 4
SHARES = {"sqlite": (READERS, READERS // 2), "postgresql": (16, 8)}
"""Connections that the transactions of requests may hold: of all tenants together, and of one. The server's own work
has the remaining ones. SQLite's only writer is not shared out: its transactions are short, and queue in order."""

CONNECT_SECONDS = 5
"""Seconds that a connection to PostgreSQL may take, and that a transaction waits for a free connection.

The wait ends only if no other transaction gets a connection during this time. So if the database does not answer, every
transaction ends within about ten seconds."""
REACHABLE_SECONDS = 2.0
POSTGRESQL = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""TCP settings with which a peer that has disappeared silently is noticed after 20 to 25 seconds."""

_holds_share: ContextVar[bool] = ContextVar("holds_share", default=False)

MIGRATIONS = 7_401_001
CONTENTS = 7_401_002
"""Lock for changes of stored contents and their rows: while the lock is held, no content is removed for which a row is
being added.
"""

PRICES = 7_401_004
"""Lock that is held while prices are added, and while a period is closed."""

PEPPER = 7_401_005
"""Lock that is held while a server compares or replaces the pepper: so servers that start at the same time agree on one
pepper.
"""

BASES = 7_401_006
"""Lock that is held while the set of bases is compared and changed."""

DAILY_USAGE = 7_401_007
"""Lock that is held while entries are added to the daily sums, so that each entry is added once."""


def unix_microseconds() -> int:
    """Return the wall clock in the unit of the records."""
    return time.time_ns() // 1000


def parse_url(url: str) -> URL:
    """Return `url` with the driver that loramux uses for this database.

    Raises UnsupportedUrl for another database, or for SQLite in memory (the migrations could not reach it).
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is not a number
        raise UnsupportedUrl("the records url cannot be parsed; write sqlite:///PATH or postgresql://...") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UnsupportedUrl(f"records url {address_of(parsed)} is not supported; write sqlite:///PATH or postgresql://...")


def address_of(url: URL) -> str:
    """Return `url` without credentials and options, as messages may show it."""
    return URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database).render_as_string()


def sqlite_file(url: URL) -> Path | None:
    """Return the path of an embedded database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def is_postgresql(session: AsyncSession) -> bool:
    """Return whether the session's database is PostgreSQL; otherwise it is SQLite."""
    return session.get_bind().dialect.name == "postgresql"


def set_pragmas(engine: Engine, **pragmas: str) -> None:
    """Make every connection of `engine` durable and strict. `pragmas` replace those that are always set, or add."""
    chosen = {"journal_mode": "WAL", "synchronous": "FULL", "foreign_keys": "ON", "recursive_triggers": "ON"} | pragmas

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver must not start transactions itself
        cursor = connection.cursor()
        for pragma, value in chosen.items():
            cursor.execute(f"PRAGMA {pragma}={value}")
        cursor.close()


class SqliteConnection(aiosqlite.Connection):
    """A connection that calls its thread once for each statement, and once to end a transaction.

    A call costs 50 to 100 us of processor time, more than most statements. With aiosqlite's own connection, SQLAlchemy
    makes four calls for a statement, three to begin a transaction, and two to end it.
    """

    def __init__(self, *arguments: Any, is_reader: bool, **options: Any) -> None:
        """The arguments are those of `sqlite3.connect`."""
        super().__init__(partial(sqlite3.connect, *arguments, **options), iter_chunk_size=64)
        self._is_reader = is_reader
        self._begin = ""
        self._transaction: Literal["none", "due", "open"] = "none"
        """`due`: the transaction begins with the next statement."""

    def begin(self, statement: str) -> None:
        """Let `statement` begin a transaction, together with the transaction's first statement."""
        self._begin, self._transaction = statement, "due"

    def cursor(self) -> SqliteCursor:  # type: ignore[override]  # SQLAlchemy needs less
        """Return a cursor for one statement."""
        return SqliteCursor(self)

    async def run(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of a statement, which is called on the connection's thread."""
        begins = self._transaction == "due"
        if begins:
            self._transaction = "open"
        connection = self._conn

        def execute() -> T:
            if begins and not connection.in_transaction:
                connection.execute(self._begin)
            return statement(connection)

        return cast(T, await self._execute(execute))

    async def commit(self) -> None:
        """Commit the transaction."""
        await self._end(self._conn.commit)

    async def rollback(self) -> None:
        """Roll the transaction back if one is open."""
        await self._end(self._conn.rollback)

    async def _end(self, end: Callable[[], None]) -> None:
        is_open = self._transaction == "open"
        if is_open and self._is_reader:  # it can neither fail nor be waited for
            self._tx.put_nowait((None, end))
        elif is_open:
            await self._execute(end)
        self._transaction = "none"


class SqliteCursor:
    """A cursor whose statement is executed, read and closed by one call to the connection's thread."""

    arraysize = 1

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> SqliteCursor:
        """Return itself."""
        return self

    async def execute(self, statement: str, parameters: Any = ()) -> None:
        """Execute a statement."""
        await self._connection.run(lambda one: self._read(one.execute(statement, parameters)))

    async def executemany(self, statement: str, parameters: Any) -> None:
        """Execute a statement once for each of the parameters."""
        await self._connection.run(lambda one: self._read(one.executemany(statement, parameters)))

    async def fetchall(self) -> list[Any]:
        """Return the rows of the statement."""
        return self._rows

    async def close(self) -> None:
        """Do nothing: the statement is closed."""

    def _read(self, cursor: sqlite3.Cursor) -> None:
        with closing(cursor):
            self.description = cursor.description
            self._rows = cursor.fetchall()
            self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid


class Database:
    """Transactions over one database: `begin()` writes, `read()` sees one snapshot and cannot write. `look_up()` reads
    without a snapshot.

    All three raise RowRefused for a broken constraint, ValueRefused for a value that no column can hold, and
    RecordsUnavailable for a database that does not answer.

    SQLite allows one writer at a time, so writers of this process share one connection and queue for it in order. They
    wait up to BUSY_SECONDS for a writer in another process, such as another worker of the server.

    The requests of one tenant hold a share of the connections at a time (SHARES), so that its slow statements leave
    connections to others. A request waits up to BUSY_SECONDS for its turn.
    """

    def __init__(self, url: str, *, clock: Clock = unix_microseconds) -> None:
        self.url = parse_url(url)
        self.now = clock
        self._writer, self._reader, self._finder = _engines(self.url)
        self._probe = _probe_engine(self.url)
        self._pool_wait = PoolWait(self.is_reachable)
        self._has_one_writer = sqlite_file(self.url) is not None
        self._shares = TenantSlots(*SHARES[self.url.get_backend_name()])

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """Open one transaction: committed when the block ends, rolled back when it raises."""
        async with (
            nullcontext() if self._has_one_writer else self._share(),
            _transaction(self._writer, self._pool_wait) as session,
        ):
            yield session

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open one read-only transaction over one snapshot."""
        async with self._share(), _transaction(self._reader, self._pool_wait) as session:
            yield session

    @asynccontextmanager
    async def look_up(self) -> AsyncIterator[AsyncSession]:
        """Open a session for statements that only read and need no common snapshot: usually there is one statement.

        On SQLite no transaction is begun and ended. On PostgreSQL the connection's isolation is not changed and
        restored, which takes as long as a round trip. Only SQLite refuses a statement that writes.
        """
        async with self._share(), _transaction(self._finder, self._pool_wait) as session:
            yield session

    @asynccontextmanager
    async def _share(self) -> AsyncIterator[None]:
        """Hold a connection of the tenant's share, once for nested transactions: they would wait for each other."""
        tenant = tenant_of_work()
        if tenant == SERVER or _holds_share.get():
            yield
            return
        if not (self._shares.is_free(tenant) and self._shares.try_acquire(tenant)):
            await self._wait_for_share(tenant)
        _holds_share.set(True)
        try:
            yield
        finally:
            _holds_share.set(False)
            self._shares.release(tenant)

    async def _wait_for_share(self, tenant: str) -> None:
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                await self._shares.acquire(tenant)
        except TimeoutError:
            raise RecordsUnavailable(
                f"the organization's other requests have held its share of the database for {BUSY_SECONDS} s"
            ) from None

    def connect(self) -> AsyncConnection:
        """Return a connection for state that outlives a transaction (`leases`); a context manager."""
        return self._writer.connect()

    async def is_reachable(self) -> bool:
        """Return whether the database answers now, within REACHABLE_SECONDS.

        The probe uses a separate connection, because a pool whose connections are all in use is load, not an outage.
        """
        try:
            async with asyncio.timeout(REACHABLE_SECONDS), _transaction(self._probe) as session:
                await session.execute(select(1))
        except (RecordsUnavailable, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Close every connection; the database can be used again afterwards."""
        await self._probe.dispose()
        await self._reader.dispose()
        await self._writer.dispose()


class PoolWait:
    """The wait for a connection from PostgreSQL's pool, which distinguishes load from an outage.

    A connection is tested when it is taken from the pool (`pool_pre_ping`). While a transaction waits, other
    transactions may get connections, or a probe on a separate connection may be answered. In these cases the database
    is busy. Otherwise the database does not answer.
    """

    def __init__(self, probe: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        self._probe = probe
        self._probing: asyncio.Task[bool] | None = None
        self._num_taken = 0

    async def connect(self, session: AsyncSession) -> None:
        """Take the session's connection. Raises RecordsUnavailable, or PoolTimeout after BUSY_SECONDS of load."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + BUSY_SECONDS
        while True:
            taken_before = self._num_taken
            try:
                async with asyncio.timeout(2 * CONNECT_SECONDS):
                    await session.connection()
            except PoolTimeout:
                is_load = self._num_taken != taken_before or await self._is_answered()
                if not is_load or loop.time() >= ends:
                    raise
            except TimeoutError:  # a server that is paused keeps its connections open and never answers on them
                raise RecordsUnavailable(f"the database did not answer within {2 * CONNECT_SECONDS} s") from None
            else:
                self._num_taken += 1
                return

    async def _is_answered(self) -> bool:
        """Probe the database, once for all waiting transactions."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)


@asynccontextmanager
async def _transaction(engine: AsyncEngine, pool_wait: PoolWait | None = None) -> AsyncIterator[AsyncSession]:
    session = AsyncSession(engine, expire_on_commit=False)
    try:
        try:
            if pool_wait is not None and is_postgresql(session):
                await pool_wait.connect(session)
            yield session
            if session.new or session.dirty or session.deleted:
                await session.flush()  # a row that is refused costs no connection, as a broken commit does
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(session.close()))  # it rolls back
            raise
        try:
            await session.commit()
        except BaseException:  # the connection may still be in its transaction
            await asyncio.shield(asyncio.ensure_future(session.invalidate()))
            raise
        session.sync_session.close()  # without a transaction it only forgets its rows
    except IntegrityError as error:
        raise RowRefused(str(error.orig)) from error
    except DataError as error:
        raise ValueRefused(str(error.orig)) from error
    except (OperationalError, PoolTimeout) as error:
        raise RecordsUnavailable(f"the database does not answer: {first_line(error)}") from error
    except DBAPIError as error:
        if error.connection_invalidated or isinstance(error, InterfaceError):
            raise RecordsUnavailable(f"the connection to the database broke: {first_line(error)}") from error
        raise


def first_line(error: SQLAlchemyError) -> str:
    """Return the driver's own sentence, without the statement and the hints that follow it."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _probe_engine(url: URL) -> AsyncEngine:
    if sqlite_file(url) is None:
        return _postgres_engine(url, pool_size=1, max_overflow=0)
    return _sqlite_engine(url, is_reader=True, pool_size=1)


def _sqlite_engine(url: URL, *, is_reader: bool, **options: Any) -> AsyncEngine:
    """Return an engine whose connections are SqliteConnections."""
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite"), max_overflow=0, **options)
    set_pragmas(engine.sync_engine, **({"query_only": "ON"} if is_reader else {}))

    @event.listens_for(engine.sync_engine, "do_connect")
    def connect(dialect: Any, _record: object, arguments: Any, options: Any) -> Any:
        creator = partial(SqliteConnection, is_reader=is_reader)
        return dialect.loaded_dbapi.connect(*arguments, async_creator_fn=creator, **options)

    @event.listens_for(engine.sync_engine, "begin")
    def start(connection: Any) -> None:
        if statement := connection.get_execution_options().get("begin"):
            connection.connection.driver_connection.begin(statement)

    return engine


def _postgres_engine(url: URL, **options: Any) -> AsyncEngine:
    """Return an engine whose connections are tested when they are taken from its pool, and are BoundedConnections."""
    from loramux.data.records.bounded_connection import BoundedConnection  # an embedded database needs no driver

    arguments = {**connect_args(url), "async_creator_fn": BoundedConnection.connect}
    return create_async_engine(url, pool_pre_ping=True, connect_args=arguments, **options)


def connect_args(url: URL) -> dict[str, int]:
    """Return the arguments of a connection to PostgreSQL that its URL does not have."""
    return {name: value for name, value in POSTGRESQL.items() if name not in url.query}


def _bound_lock_waits(engine: Engine) -> None:
    """Set lock_timeout on every connection, by a statement, because poolers such as PgBouncer refuse it among the
    parameters of the connection.
    """

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET lock_timeout = '{BUSY_SECONDS}s'")
        cursor.close()
        connection.commit()


def _engines(url: URL) -> tuple[AsyncEngine, AsyncEngine, AsyncEngine]:
    """Return the engines that write, that read one snapshot, and that look up without a snapshot."""
    if sqlite_file(url) is None:
        engine = _postgres_engine(url, pool_size=10, max_overflow=10, pool_timeout=CONNECT_SECONDS)
        _bound_lock_waits(engine.sync_engine)
        snapshots = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        return engine, snapshots, engine
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}, "pool_timeout": 60}
    writer = _sqlite_engine(url, is_reader=False, pool_size=1, **options)
    reader = _sqlite_engine(url, is_reader=True, pool_size=READERS, **options)
    return writer.execution_options(begin="BEGIN IMMEDIATE"), reader.execution_options(begin="BEGIN"), reader


async def advisory_lock(session: AsyncSession, lock: int) -> None:
    """Hold `lock` until this transaction ends; other transactions with the same number wait here.

    SQLite needs no lock, because only one transaction writes at a time.
    """
    if is_postgresql(session):
        await session.execute(select(func.pg_advisory_xact_lock(lock)))
