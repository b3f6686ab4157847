"""The migrations make exactly the tables that the models describe, once, and say so when they have not run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from loramux.records import (
    RecordsUnavailable,
    SchemaOutOfDate,
    SchemaTooNew,
    UnsupportedUrl,
    check,
    current_revision,
    head_revision,
    is_current,
    migrate,
)
from loramux.records.database import parse_url
from loramux.records.metadata import METADATA
from loramux.records.schema import migrations_folder


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def test_from_empty_to_head_and_again(empty_url: str) -> None:
    assert current_revision(empty_url) is None
    assert not is_current(empty_url)
    assert migrate(empty_url) == head_revision()
    assert migrate(empty_url) == head_revision()
    assert is_current(empty_url)
    check(empty_url)


def test_the_tables_are_the_models(url: str) -> None:
    with connected(url) as connection:
        options = {"compare_type": True, "compare_server_default": True}
        drift = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)
    assert drift == []


def test_constraints_are_the_models(url: str) -> None:
    """Autogenerate does not look at check constraints; their names are compared here."""
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        for table in METADATA.sorted_tables:
            wanted = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
            assert {c["name"] for c in inspector.get_check_constraints(table.name)} == wanted


def test_an_empty_database_is_refused_with_the_command(empty_url: str) -> None:
    with pytest.raises(SchemaOutOfDate, match=r"no tables yet .* loramux migrate"):
        check(empty_url)


def test_asking_creates_nothing(tmp_path: Path) -> None:
    file = tmp_path / "absent.sqlite3"
    assert not is_current(f"sqlite:///{file}")
    assert not file.exists()


def test_a_newer_database_is_refused(url: str) -> None:
    with connected(url) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    for ask in (check, migrate):
        with pytest.raises(SchemaTooNew, match="9999"):
            ask(url)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(UnsupportedUrl) as refusal:
        parse_url("mysql://someone:hunter2@host/db")
    assert "hunter2" not in str(refusal.value)
    assert "sqlite:///PATH or postgresql://" in str(refusal.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "not a url", ""])
def test_databases_that_nobody_else_can_reach_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedUrl, match="sqlite:///PATH"):
        parse_url(url)


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is a text, and not a database at all, however long it may be")
    for ask in (check, migrate):
        with pytest.raises(RecordsUnavailable, match="not a database"):
            ask(f"sqlite:///{tmp_path / 'text'}")
        with pytest.raises(RecordsUnavailable, match="cannot be used"):
            ask("postgresql://nobody@127.0.0.1:9/none")


def test_two_processes_migrate_at_once(empty_url: str) -> None:
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
    assert is_current(empty_url)


def test_the_folder_travels_with_the_package() -> None:
    assert (migrations_folder() / "env.py").is_file()
