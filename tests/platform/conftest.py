"""Both databases, migrated: every test that touches SQL runs on each."""

import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from postgres_server import start_postgres
from s3_server import S3, s3_server

from loramux.accounts.tenants.authority import CUSTOMER_SCOPES
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.data.records.database import Clock, Database, parse_url, unix_microseconds
from loramux.data.records.schema import migrate

PEPPER = b"p" * 32
TEMPLATE = "loramux_template"

Enrol = Callable[[str], Awaitable[Principal]]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class PostgresServer:
    """A real PostgreSQL from pip, with a migrated database to copy."""

    def __init__(self, folder: Path) -> None:
        self._server = start_postgres(folder / "pg")
        self._names = (f"loramux_{number}" for number in count())
        self._admin = sa.create_engine(parse_url(self._server.get_uri()), isolation_level="AUTOCOMMIT")
        self._forget_durability()
        self._create(TEMPLATE, "template0")
        migrate(self._url(TEMPLATE))

    def _forget_durability(self) -> None:
        """Tests kill processes, not machines: without syncs they take a third of the time."""
        with self._admin.connect() as connection:
            connection.execute(sa.text("ALTER SYSTEM SET fsync = off"))
            connection.execute(sa.text("SELECT pg_reload_conf()"))

    def _create(self, name: str, template: str) -> None:
        with self._admin.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template}"))

    def _url(self, name: str) -> str:
        return sa.make_url(self._server.get_uri()).set(database=name).render_as_string(hide_password=False)

    @contextmanager
    def database(self, template: str = TEMPLATE) -> Iterator[str]:
        name = next(self._names)
        self._create(name, template)
        yield self._url(name)
        with self._admin.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))

    def close(self) -> None:
        """At once, as nothing is kept: an orderly stop would first write every test's database out."""
        self._admin.dispose()
        postmaster = psutil.Process(self._server.get_pid())
        postmaster.send_signal(signal.SIGQUIT)
        postmaster.wait()
        self._server.cleanup()


def memory_disk() -> str | None:
    """Return a disk in memory, if there is one with room, because the tests make a hundred databases."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 1 << 30 else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="lm", dir=memory_disk()) as folder:  # a socket's path has 107 characters
        server = PostgresServer(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    folder = tmp_path_factory.mktemp("s3") / "buckets"
    folder.mkdir()
    with s3_server(folder) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated SQLite file of the test's own."""
    return f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'records.sqlite3')}"


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database of the test's own."""
    if backend == "sqlite":
        yield request.getfixturevalue("sqlite_url")
    else:
        with request.getfixturevalue("postgres").database() as url:
            yield url


@pytest.fixture
def empty_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables; on SQLite, not even a folder."""
    if backend == "sqlite":
        yield f"sqlite:///{tmp_path / 'not' / 'yet' / 'empty.sqlite3'}"
    else:
        with request.getfixturevalue("postgres").database("template0") as url:
            yield url


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the database's times; tests of longer spans replace it."""
    return unix_microseconds


@pytest.fixture
async def database(url: str, clock: Clock, anyio_backend: str) -> AsyncIterator[Database]:
    database = Database(url, clock=clock)
    yield database
    await database.close()


@pytest.fixture
def tenants(database: Database) -> Tenants:
    return Tenants(database, PEPPER)


@pytest.fixture
def enrol(tenants: Tenants) -> Enrol:
    """Make a tenant with a key that sees all of it, and authenticate it."""

    async def enrol(name: str) -> Principal:
        await tenants.create(name)
        _, secret = await tenants.create_key(name, scopes=CUSTOMER_SCOPES | {"projects"})
        return await tenants.authenticator.authenticate(secret)

    return enrol


@pytest.fixture
def sql(url: str) -> Iterator[Callable[[str], None]]:
    """Run a statement outside the product, committed at once, as an administrator could."""
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)

    def run(statement: str) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text(statement))

    yield run
    engine.dispose()
