"""The migrations make exactly the tables that the models describe, once, and say so when they have not run."""

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from loramux.data.records.database import Database, parse_url
from loramux.data.records.errors import RecordsUnavailable, SchemaOutOfDate, SchemaTooNew, UnsupportedUrl
from loramux.data.records.schema import METADATA, check, current_revision, head_revision, migrate, migrations_folder


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def test_migrate_brings_an_empty_database_to_head_once(empty_url: str) -> None:
    assert current_revision(empty_url) is None
    assert migrate(empty_url) == head_revision()
    assert migrate(empty_url) == head_revision()
    assert current_revision(empty_url) == head_revision()
    check(empty_url)


def test_migrated_tables_equal_the_models(url: str) -> None:
    with connected(url) as connection:
        options = {"compare_type": True, "compare_server_default": True}
        drift = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)
    assert drift == []


def test_migrated_check_constraints_equal_the_models(url: str) -> None:
    """Autogenerate does not look at check constraints; their names are compared here."""
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        for table in METADATA.sorted_tables:
            wanted = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
            assert {c["name"] for c in inspector.get_check_constraints(table.name)} == wanted


def test_check_refuses_an_empty_database_with_the_command(empty_url: str) -> None:
    with pytest.raises(SchemaOutOfDate, match=r"no tables yet .* loramux migrate"):
        check(empty_url)


def test_current_revision_creates_no_file(tmp_path: Path) -> None:
    file = tmp_path / "absent.sqlite3"
    assert current_revision(f"sqlite:///{file}") is None
    assert not file.exists()


@pytest.mark.anyio
async def test_sqlite_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "var" / "rows.sqlite3"
    before = os.umask(0o022)
    try:
        migrate(f"sqlite:///{file}")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)
        migrate(f"sqlite:///{file}")
        database = Database(f"sqlite:///{file}")
        async with database.begin() as session:
            await session.execute(sa.text("UPDATE tiers SET weight = 2"))
            modes = {stat.S_IMODE(each.stat().st_mode) for each in file.parent.iterdir()}
        await database.close()
    finally:
        os.umask(before)
    assert modes == {0o600}, "the database, its write-ahead log and the log's index"


@pytest.mark.parametrize("floor", ["UPDATE schema_floor SET revision = '9998'", "DROP TABLE schema_floor"])
def test_newer_database_is_refused_where_its_floor_is_newer_or_unknown(empty_url: str, floor: str) -> None:
    migrate(empty_url)
    newer(empty_url, floor)
    for ask in (check, migrate):
        with pytest.raises(SchemaTooNew, match="9999"):
            ask(empty_url)


def test_newer_database_whose_floor_this_release_knows_is_used_and_left_as_it_is(empty_url: str) -> None:
    migrate(empty_url)
    newer(empty_url, "CREATE TABLE of_the_next_release (id INTEGER)")
    check(empty_url)
    assert migrate(empty_url) == "9999"
    assert current_revision(empty_url) == "9999"


def newer(url: str, statement: str) -> None:
    """Do the same as a migration of a later release."""
    with connected(url) as connection:
        connection.execute(sa.text(statement))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))


def test_refused_url_hides_its_password() -> None:
    with pytest.raises(UnsupportedUrl) as refusal:
        parse_url("mysql://someone:hunter2@host/db")
    assert "hunter2" not in str(refusal.value)
    assert "sqlite:///PATH or postgresql://" in str(refusal.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "not a url", ""])
def test_in_memory_and_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedUrl, match="sqlite:///PATH"):
        parse_url(url)


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is a text, and not a database at all, however long it may be")
    for ask in (check, migrate):
        with pytest.raises(RecordsUnavailable, match="not a database"):
            ask(f"sqlite:///{tmp_path / 'text'}")
        with pytest.raises(RecordsUnavailable, match="cannot be used"):
            ask("postgresql://nobody@127.0.0.1:9/none")


def test_concurrent_migrations_run_once(empty_url: str) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            migrate(empty_url)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert current_revision(empty_url) == head_revision()


def test_new_file_in_use_by_another_process_is_waited_for(tmp_path: Path) -> None:
    """Wait for a file that another worker uses at its first start: SQLite itself would not wait."""
    file = tmp_path / "new.sqlite3"
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        migration = threading.Thread(target=migrate, args=[f"sqlite:///{file}"])
        migration.start()
        migration.join(0.3)
        assert migration.is_alive()
        other.execute("COMMIT")
    migration.join()
    assert current_revision(f"sqlite:///{file}") == head_revision()


def test_migrations_folder_is_part_of_the_package() -> None:
    assert (migrations_folder() / "env.py").is_file()
