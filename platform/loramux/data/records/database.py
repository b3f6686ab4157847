"""One database, either embedded SQLite or PostgreSQL: its transactions, its locks, and the leases of rows.

A transaction either reads one snapshot or writes. A lock is held during a transaction (`advisory_lock`) or during the
life of a server's process (`server_liveness`). A lease is a server's hold on a row of unfinished work. A server is
alive as long as its process runs, so a lease needs no clock. Other servers adopt the rows of a dead server. A job
checks in each transaction that it commits that this server still holds the job's row.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sqlalchemy import URL, ColumnElement, Engine, event, func, make_url, select, update
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
from sqlalchemy.orm import Mapped

from loramux.common.jobs import SERVER, TenantSlots, tenant_of_work
from loramux.data.records.errors import RecordsUnavailable, RowRefused, UnsupportedUrl, ValueRefused

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

SERVERS = 7_401_003
"""The first part of the two-part PostgreSQL locks of living servers; the second part is the hash of the server's id."""

LOCK_SECONDS = 1.0
"""Seconds between two looks at the connection that shows other processes that this one lives."""

TRAINERS = 7_401_008
"""The first part of the two-part PostgreSQL locks of living trainers; the second is the hash of the trainer's id."""


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
    raise UnsupportedUrl(f"records url {parsed!r} is not supported; write sqlite:///PATH or postgresql://...")


def sqlite_file(url: URL) -> Path | None:
    """Return the path of an embedded database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def is_postgresql(session: AsyncSession) -> bool:
    """Return whether the session's database is PostgreSQL; otherwise it is SQLite."""
    return session.get_bind().dialect.name == "postgresql"


def prepare_sqlite(engine: Engine, *, begin: str, **pragmas: str) -> None:
    """Make every connection of `engine` durable and strict, and let SQLAlchemy start transactions with `begin`.

    `pragmas` add to the pragmas that are always set, or replace them.
    """
    chosen = {"journal_mode": "WAL", "synchronous": "FULL", "foreign_keys": "ON", "recursive_triggers": "ON"} | pragmas

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver must not start transactions itself
        cursor = connection.cursor()
        for pragma, value in chosen.items():
            cursor.execute(f"PRAGMA {pragma}={value}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def start(connection: Any) -> None:
        connection.exec_driver_sql(begin)


class Database:
    """Transactions over one database: `begin()` writes, `read()` sees one snapshot and cannot write.

    `begin` and `read` raise RowRefused for a broken constraint, ValueRefused for a value that no column can hold, and
    RecordsUnavailable for a database that does not answer.

    SQLite allows one writer at a time, so writers of this process share one connection and queue for it in order. They
    wait up to BUSY_SECONDS for a writer in another process, such as another worker of the server.

    The requests of one tenant hold a share of the connections at a time (SHARES), so that its slow statements leave
    connections to others. A request waits up to BUSY_SECONDS for its turn.
    """

    def __init__(self, url: str, *, clock: Clock = unix_microseconds) -> None:
        self.url = parse_url(url)
        self.now = clock
        self._writer, self._reader = _engines(self.url)
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
    async def _share(self) -> AsyncIterator[None]:
        """Hold a connection of the tenant's share, once for nested transactions: they would wait for each other."""
        tenant = tenant_of_work()
        if tenant == SERVER or _holds_share.get():
            yield
            return
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                await self._shares.acquire(tenant)
        except TimeoutError:
            raise RecordsUnavailable(
                f"the organization's other requests have held its share of the database for {BUSY_SECONDS} s"
            ) from None
        _holds_share.set(True)
        try:
            yield
        finally:
            _holds_share.set(False)
            self._shares.release(tenant)

    def connect(self) -> AsyncConnection:
        """Return a connection for state that outlives a transaction (`server_liveness`); a context manager."""
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
    try:
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            if pool_wait is not None and is_postgresql(session):
                await pool_wait.connect(session)
            yield session
    except IntegrityError as error:
        raise RowRefused(str(error.orig)) from error
    except DataError as error:
        raise ValueRefused(str(error.orig)) from error
    except (OperationalError, PoolTimeout) as error:
        raise RecordsUnavailable(f"the database does not answer: {_first_line(error)}") from error
    except DBAPIError as error:
        if error.connection_invalidated or isinstance(error, InterfaceError):
            raise RecordsUnavailable(f"the connection to the database broke: {_first_line(error)}") from error
        raise


def _first_line(error: SQLAlchemyError) -> str:
    """Return the driver's own sentence, without the statement and the hints that follow it."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _probe_engine(url: URL) -> AsyncEngine:
    if sqlite_file(url) is None:
        return create_async_engine(
            url, pool_pre_ping=True, pool_size=1, max_overflow=0, connect_args=_connect_args(url)
        )
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite"), pool_size=1, max_overflow=0)
    _prepare_aiosqlite(engine.sync_engine, begin="BEGIN", query_only="ON")
    return engine


def _prepare_aiosqlite(engine: Engine, *, begin: str, **pragmas: str) -> None:
    """Prepare an engine of aiosqlite, whose connections SQLAlchemy closes if a task is cancelled while it uses a
    connection.
    """
    prepare_sqlite(engine, begin=begin, **pragmas)

    @event.listens_for(engine, "invalidate")
    def roll_back(connection: Any, _record: object, _error: object) -> None:
        """End the cancelled task's transaction before the connection is closed.

        SQLite keeps a closed connection and its write lock as long as one of its cursors exists (sqlite3_close_v2). The
        cancelled task's traceback holds a cursor. aiosqlite's own stop() enters its queue in the same way.
        """
        driver = connection.driver_connection

        def on_its_thread() -> None:  # on that thread, a lost connection is not an error of this task
            driver._conn.rollback()

        driver._tx.put_nowait((None, on_its_thread))


def _connect_args(url: URL) -> dict[str, int]:
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


def _engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    if sqlite_file(url) is None:
        engine = create_async_engine(
            url,
            pool_pre_ping=True,
            pool_size=10,
            max_overflow=10,
            pool_timeout=CONNECT_SECONDS,
            connect_args=_connect_args(url),
        )
        _bound_lock_waits(engine.sync_engine)
        return engine, engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    aiosqlite = url.set(drivername="sqlite+aiosqlite")
    timeout = {"timeout": BUSY_SECONDS}
    writer = create_async_engine(aiosqlite, connect_args=timeout, pool_size=1, max_overflow=0, pool_timeout=60)
    reader = create_async_engine(aiosqlite, connect_args=timeout, pool_size=READERS, max_overflow=0, pool_timeout=60)
    _prepare_aiosqlite(writer.sync_engine, begin="BEGIN IMMEDIATE")
    _prepare_aiosqlite(reader.sync_engine, begin="BEGIN", query_only="ON")
    return writer, reader


async def advisory_lock(session: AsyncSession, lock: int) -> None:
    """Hold `lock` until this transaction ends; other transactions with the same number wait here.

    SQLite needs no lock, because only one transaction writes at a time.
    """
    if is_postgresql(session):
        await session.execute(select(func.pg_advisory_xact_lock(lock)))


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
    """Hold an advisory lock until `ended`, and set `held` when it is held. Raises DBAPIError if this fails at first."""
    while not ended.is_set():
        try:
            async with database.connect() as connection:
                await connection.execute(select(func.pg_advisory_lock(*key)))
                await connection.commit()
                if not held.done():
                    held.set_result(None)
                while not await _is_set_within(ended, LOCK_SECONDS):
                    await connection.execute(select(1))
                    await connection.commit()
                await connection.execute(select(func.pg_advisory_unlock(*key)))
                await connection.commit()
        except (DBAPIError, PoolTimeout, OSError):
            if not held.done():
                raise
            await _is_set_within(ended, LOCK_SECONDS)


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
