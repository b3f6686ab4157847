"""The start of a server while its database does not answer."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from loramux.common.settings.file import Settings
from loramux.data.records.database import Database, parse_url
from loramux.data.records.errors import RecordsUnavailable, SchemaOutOfDate
from loramux.data.records.leases import server_liveness
from loramux.server import records as records_module
from loramux.server.records import StartWait, open_database

pytestmark = pytest.mark.anyio

ADDRESS = "postgresql://127.0.0.1:{port}/records"


@pytest.fixture
def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings_for(url: str, start_seconds: float) -> Settings:
    table = {
        "model": {"path": "/model", "served_model_name": "base"},
        "records": {"url": url, "start_seconds": start_seconds},
    }
    return msgspec.convert(table, Settings)


def failing(times: int, result: str = "opened") -> Callable[[], Awaitable[str]]:
    """A step that finds no database so many times."""
    left = [times]

    async def step() -> str:
        if left[0]:
            left[0] -= 1
            raise RecordsUnavailable("the database does not answer: starting up")
        return result

    return step


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> StartWait:
    monkeypatch.setattr(records_module, "RETRY_SECONDS", 0.0)
    url = "postgresql://admin:hunter2@db.example:6432/records?password=hunter3"
    return StartWait(settings_for(url, 3600.0).records)


async def test_start_waits_for_the_database_and_says_so_once(wait: StartWait, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, records_module.__name__):
        assert await wait(failing(40)) == "opened"
    (line,) = caplog.messages
    assert "postgresql://db.example:6432/records: the database does not answer: starting up" in line
    assert "3600 s more" in line
    assert "admin" not in line
    assert "hunter" not in line


async def test_start_says_again_what_it_waits_for(
    wait: StartWait, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records_module, "PROGRESS_SECONDS", 0.0)
    await wait(failing(3))
    assert len(caplog.messages) == 3


async def test_each_step_of_a_start_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage that begins while the model loads is waited for, too."""
    wait = StartWait(settings_for("postgresql://db/records", 0.0).records)
    assert await wait(failing(0)) == "opened"
    with pytest.raises(RecordsUnavailable, match="did not answer for 0 s"):
        await wait(failing(1))


async def test_error_that_is_no_outage_ends_the_start_at_once(wait: StartWait) -> None:
    async def step() -> None:
        raise SchemaOutOfDate("run: loramux migrate")

    with pytest.raises(SchemaOutOfDate):
        await wait(step)


@pytest.mark.parametrize("start_seconds", [0.0, 0.2])
async def test_database_that_does_not_come_is_named_in_one_sentence_without_credentials(
    closed_port: int, start_seconds: float
) -> None:
    address = ADDRESS.format(port=closed_port)
    settings = settings_for(address.replace("//", "//admin:hunter2@") + "?sslkey=hunter3", start_seconds)
    with pytest.raises(RecordsUnavailable) as refusal:
        async with open_database(settings, StartWait(settings.records)):
            pass
    message = str(refusal.value)
    assert message.startswith(f"the database {address} did not answer for {start_seconds:g} s (records.start_seconds)")
    assert "\n" not in message
    assert "hunter" not in message


async def test_command_that_finds_no_database_does_not_wait(closed_port: int) -> None:
    settings = settings_for(ADDRESS.format(port=closed_port), 3600.0)
    with pytest.raises(RecordsUnavailable, match="cannot be used"):
        async with open_database(settings):
            pass


async def test_embedded_database_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is a text, and not a database at all, however long it may be")
    settings = settings_for(f"sqlite:///{tmp_path / 'text'}", 3600.0)
    with pytest.raises(RecordsUnavailable, match="not a database"):
        async with open_database(settings, StartWait(settings.records)):
            pass


async def test_sign_of_life_without_a_database_is_an_outage(closed_port: int) -> None:
    """So the start waits for it, as for every other step."""
    database = Database(ADDRESS.format(port=closed_port))
    with pytest.raises(RecordsUnavailable):
        async with server_liveness(database, "server"):
            pass
    await database.close()


@pytest.mark.postgres
async def test_server_that_starts_before_its_database_opens_it_when_it_answers(
    postgres: object, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address answers only after the second try."""
    monkeypatch.setattr(records_module, "RETRY_SECONDS", 0.0)
    with postgres.database() as url:  # type: ignore[attr-defined]
        there, tries = sa.make_url(url), []
        check = records_module.schema.check

        def check_late(_: str) -> None:
            tries.append(len(tries))
            check(url if len(tries) > 2 else ADDRESS.format(port=closed_port))

        monkeypatch.setattr(records_module.schema, "check", check_late)
        settings = settings_for(there.render_as_string(hide_password=False), 60.0)
        async with open_database(settings, StartWait(settings.records)) as database:
            assert database.url == parse_url(url)
            assert await database.is_reachable()
    assert tries == [0, 1, 2]
