"""The schema: its tables, the revision that the code needs, the revision of a database, and the migration between them.

All functions here are synchronous and open their own connection; inside an event loop, call them on a thread. Functions
that take a URL also raise UnsupportedUrl and RecordsUnavailable.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Column, Connection, Table, Text, create_engine, event, inspect, select, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

import loramux
from loramux.data.records import (  # noqa: F401 - each declares tables
    access,
    adapters,
    aliases,
    bases,
    batches,
    billing,
    comparisons,
    credentials,
    ledger,
    limits,
    pins,
    requests,
    responses,
    revision_metrics,
    sinks,
    tenants,
    training,
    training_versions,
    uploads,
    usage,
    webhooks,
)
from loramux.data.records.base import Base
from loramux.data.records.database import (
    BUSY_SECONDS,
    MIGRATIONS,
    address_of,
    connect_args,
    first_line,
    parse_url,
    set_pragmas,
    sqlite_file,
)
from loramux.data.records.errors import RecordsError, RecordsUnavailable, SchemaOutOfDate, SchemaTooNew

METADATA = Base.metadata
"""The metadata of every table. All modules that declare tables are imported above, so that their tables are included.
"""
FLOOR = Table("schema_floor", METADATA, Column("revision", Text, primary_key=True, nullable=False))
"""A table with one row: the oldest revision whose release may use this database. A migration that older releases cannot
use raises it.
"""


def migrations_folder() -> Path:
    """Return `loramux/migrations` of an installed wheel, or `migrations` of the repository."""
    package = Path(loramux.__file__).parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parents[1] / "migrations"


def head_revision() -> str:
    """Return the revision that this release works with."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None, "the migration history is empty"
    return head


def current_revision(url: str) -> str | None:
    """Return the revision of the database; None for an empty or absent database. The function creates no file."""
    parsed = parse_url(url)
    file = sqlite_file(parsed)
    if file is not None and not file.exists():
        return None
    with _connect(parsed) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def check(url: str) -> None:
    """Raise unless the database is at this release's revision, or at a newer one that this release may use.

    Raises SchemaOutOfDate (with the command to run) or SchemaTooNew.
    """
    current, head = current_revision(url), head_revision()
    if current == head:
        return
    if current is not None and not _known(current):
        with _connect(parse_url(url)) as connection:
            _ensure_floor(connection, current)
        return
    has = "has no tables yet" if current is None else f"is at schema {current}"
    raise SchemaOutOfDate(
        f"the database {address_of(parse_url(url))} {has} and this release needs {head}; "
        "run: loramux migrate --config FILE"
    )


def migrate(url: str) -> str:
    """Bring the database to this release's revision and return the one it has then.

    If the database already has this revision, or a newer revision that this release may use, it is not changed. A
    missing SQLite file and its folder are created. All steps run in one transaction. Raises SchemaTooNew.
    """
    parsed = parse_url(url)
    file = sqlite_file(parsed)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordsUnavailable(f"the database {address_of(parsed)} cannot be used: {error.strerror}") from None
        _make_private(file)
    if current_revision(url) == (head := head_revision()):
        return head  # the only writer is not locked: other workers of the server write
    with _connect(parsed) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATIONS})
        config = _config()
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError:
            current = MigrationContext.configure(connection).get_current_revision()
            if current is None or _known(current):
                raise
            _ensure_floor(connection, current)
            return current
        if file is not None:
            broken = connection.execute(text("PRAGMA foreign_key_check")).all()
            assert not broken, f"the migration broke foreign keys: {broken}"
    return head


def _make_private(file: Path) -> None:
    """Create a missing database file with mode 0600, and remove other users' access to an existing one.

    SQLite gives the files `-wal` and `-shm` next to it the same mode. If the mode cannot be changed, it is left
    unchanged.
    """
    with suppress(OSError):  # the connection reports the error of the path
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    for each in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))):
        with suppress(OSError):
            mode = each.stat().st_mode
            if mode & 0o077:
                each.chmod(mode & 0o700)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    return config


def _known(revision: str) -> bool:
    return any(script.revision == revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _ensure_floor(connection: Connection, revision: str) -> None:
    """Raise SchemaTooNew if this release is too old to use the newer `revision`."""
    floor = connection.scalar(select(FLOOR.c.revision)) if inspect(connection).has_table(FLOOR.name) else None
    if floor is None or floor > head_revision():  # revisions are numbers of four digits
        raise SchemaTooNew(
            f"the database {address_of(connection.engine.url)} is at schema {revision}, which this release does not "
            "know; run a loramux at least as new as the one that migrated it"
        )


@contextmanager
def _connect(url: URL) -> Iterator[Connection]:
    is_sqlite = sqlite_file(url) is not None
    engine = create_engine(
        url, poolclass=NullPool, connect_args={"timeout": BUSY_SECONDS} if is_sqlite else connect_args(url)
    )
    if is_sqlite:
        event.listen(engine, "connect", _switch_to_wal)
        # a rebuilt table is dropped while other tables refer to it, so `migrate` checks the foreign keys at its end
        set_pragmas(engine, foreign_keys="OFF")
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        with engine.connect() as connection:
            yield connection
    except DBAPIError as error:
        # A server of databases may come back; a file that is no database, or a right that is missing, stays so.
        is_outage = is_sqlite or isinstance(error, OperationalError | InterfaceError)
        kind = RecordsUnavailable if is_outage else RecordsError
        reason = first_line(error) if is_outage else error.orig  # a step of a migration that fails names the rows
        raise kind(f"the database {address_of(url)} cannot be used: {reason}") from error
    finally:
        engine.dispose()


def _switch_to_wal(connection: sqlite3.Connection, _record: object) -> None:
    """Change a new file's journal, and wait for others that do so, such as other workers at their first start.

    SQLite does not wait for them: it raises "database is locked" at once, whatever the timeout of the connection.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.01)
