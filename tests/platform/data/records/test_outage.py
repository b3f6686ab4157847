"""A PostgreSQL that stops, hangs or comes back: every transaction ends in bounded time, as RecordsUnavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import sqlalchemy as sa

from loramux.data.records import bounded_connection as connection_module
from loramux.data.records import database as database_module
from loramux.data.records import leases as leases_module
from loramux.data.records.database import Database, parse_url
from loramux.data.records.errors import RecordsError, RecordsUnavailable
from loramux.data.records.leases import server_liveness

pytestmark = pytest.mark.anyio


class Proxy:
    """Passes bytes between a TCP port and PostgreSQL's socket until it is told to break or to hang."""

    def __init__(self, target: sa.URL) -> None:
        self._target = target
        self._answers = asyncio.Event()
        self._answers.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        url = self._target.set(host="127.0.0.1", port=self.port, query={"sslmode": "disable", "gssencmode": "disable"})
        return url.set(drivername="postgresql").render_as_string(hide_password=False)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hang(self) -> None:
        """Keep connections, accept new ones, and pass nothing on."""
        self._answers.clear()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        host, port = self._target.query.get("host", self._target.host), self._target.port or 5432
        opened = (
            asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            if str(host).startswith("/")
            else asyncio.open_connection(host, port)
        )
        server_reader, server_writer = await opened
        try:
            await asyncio.gather(self._copy(reader, server_writer), self._copy(server_reader, writer))
        finally:
            for each in (writer, server_writer):
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._answers.wait()
            writer.write(data)
        writer.close()


class FreezingFunctions:
    """SQL's functions; the server freezes before it gets the first of them as a statement."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def __getattr__(self, name: str) -> object:
        if name == "pg_advisory_lock":
            self._proxy.hang()
        return getattr(sa.func, name)


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.getfixturevalue("postgres").database() as url:
        yield url


@pytest.fixture
async def proxy(postgres_url: str, anyio_backend: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(parse_url(postgres_url))
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def database(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    monkeypatch.setattr(database_module, "CONNECT_SECONDS", 1)
    monkeypatch.setitem(database_module.POSTGRESQL, "connect_timeout", 2)
    monkeypatch.setattr(database_module, "REACHABLE_SECONDS", 2.0)
    database = Database(proxy.url)
    yield database
    await database.close()


async def ask(database: Database) -> None:
    async with database.begin() as session:
        await session.execute(sa.text("SELECT count(*) FROM tenants"))


async def test_stopped_database_is_unavailable_and_comes_back(database: Database, proxy: Proxy) -> None:
    await ask(database)
    assert await database.is_reachable()
    await proxy.stop()
    outcomes = await asyncio.wait_for(asyncio.gather(*(ask(database) for _ in range(60)), return_exceptions=True), 60)
    assert {type(outcome) for outcome in outcomes} == {RecordsUnavailable}
    assert not await database.is_reachable()
    await proxy.start()
    await ask(database)
    assert await database.is_reachable()


async def test_connection_that_breaks_in_a_transaction_is_unavailable(database: Database, proxy: Proxy) -> None:
    async def break_off() -> None:
        async with database.begin() as session:
            await session.execute(sa.text("SELECT 1"))
            await proxy.stop()
            await session.execute(sa.text("SELECT 1"))

    with pytest.raises(RecordsUnavailable):
        await break_off()


async def test_connection_that_breaks_in_the_commit_is_unavailable(database: Database, proxy: Proxy) -> None:
    async def break_off() -> None:
        async with database.begin() as session:
            await session.execute(sa.text("UPDATE tiers SET weight = 2"))
            await proxy.stop()

    with pytest.raises(RecordsUnavailable):
        await break_off()


async def test_silent_database_is_unavailable_in_bounded_time(database: Database, proxy: Proxy) -> None:
    """The safety net is generous; what counts is that none waits for the network's own minutes."""
    await asyncio.gather(*(ask(database) for _ in range(5)))
    proxy.hang()
    outcomes = await asyncio.wait_for(asyncio.gather(*(ask(database) for _ in range(40)), return_exceptions=True), 60)
    assert {type(outcome) for outcome in outcomes} == {RecordsUnavailable}
    assert not await database.is_reachable()


async def test_statement_that_hangs_in_a_transaction_is_unavailable_in_bounded_time(
    database: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 0.5)

    async def hang() -> None:
        async with database.begin() as session:
            await session.execute(sa.text("SELECT 1"))
            proxy.hang()
            await session.execute(sa.text("SELECT 2"))

    with pytest.raises(RecordsUnavailable, match=r"did not answer within 0\.5 s"):
        await asyncio.wait_for(hang(), 60)


@pytest.mark.parametrize("begins_frozen", [True, False])
async def test_sign_of_life_ends_if_the_database_is_frozen(
    database: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, *, begins_frozen: bool
) -> None:
    """So neither the start of a server hangs without a line, nor its end."""
    monkeypatch.setattr(leases_module, "FROZEN_SECONDS", 2.0)
    monkeypatch.setattr(leases_module, "LOCK_SECONDS", 0.1)
    await ask(database)  # the pool has a connection

    async def live() -> None:
        if begins_frozen:
            monkeypatch.setattr(leases_module, "func", FreezingFunctions(proxy))
        async with server_liveness(database, "server"):
            proxy.hang()

    living = asyncio.create_task(live())
    await asyncio.wait({living}, timeout=60)
    assert living.done()
    error = living.exception()
    if begins_frozen:
        assert isinstance(error, RecordsUnavailable)
        assert "did not answer within 2 s" in str(error)
    else:
        assert error is None


async def test_outage_is_told_in_one_line(database: Database, proxy: Proxy) -> None:
    await proxy.stop()
    with pytest.raises(RecordsError) as refusal:
        await ask(database)
    assert "\n" not in str(refusal.value)
    assert refusal.value.status == 503
    assert refusal.value.retry_after


async def test_waiting_for_a_connection_is_load_where_the_database_answers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many transactions as the pool has connections, each as long as two waits for one."""
    monkeypatch.setattr(database_module, "CONNECT_SECONDS", 3)
    database = Database(postgres_url)
    started, leave = asyncio.Semaphore(0), asyncio.Event()

    async def occupy() -> None:
        async with database.begin() as session:
            await session.execute(sa.select(1))
            started.release()
            await leave.wait()

    async def follow() -> None:
        async with database.read() as session:
            await session.execute(sa.select(1))

    try:
        holders = []
        async with asyncio.timeout(60):
            for _ in range(20):  # one after the other, so that each connects in time on a busy machine
                holders.append(asyncio.create_task(occupy()))
                await started.acquire()
        others = [asyncio.create_task(follow()) for _ in range(20)]
        done, _ = await asyncio.wait(others, timeout=7.5)
        assert done == set()
        leave.set()
        await asyncio.gather(*holders, *others)
    finally:
        await database.close()
