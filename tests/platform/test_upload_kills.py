"""kill -9 at every call to database and store on an upload's way: nothing half is left, nothing told is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from upload_house import CONFIG, House, upload_house
from upload_kills import WEIGHTS

from loramux.records import Database
from loramux.registry import ModelNotFound
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE, open_blobs
from loramux.tenants import Tenants

PROGRAM = Path(__file__).parents[1] / "support" / "upload_kills.py"
RECEIVED = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: WEIGHTS}


class Killer:
    """Has uploads run, and killed at the point that is asked for."""

    def __init__(self, template: Path, folder: Path) -> None:
        self._template = template
        self._folder = folder
        self._program = subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, way: str, kill_at: int) -> tuple[Path, int]:
        """A new server's folder, and how it ended."""
        folder = self._folder / f"{way}-{kill_at}"
        folder.mkdir()
        shutil.copy(self._template, folder / "records.sqlite3")
        order = {"folder": str(folder), "url": url_of(folder), "way": way, "kill_at": kill_at}
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(order) + "\n")
        self._program.stdin.flush()
        return folder, int(self._program.stdout.readline())

    def close(self) -> None:
        self._program.communicate()


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/records.sqlite3"


@pytest.fixture(scope="module")
def killer(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    folder = tmp_path_factory.mktemp("kills")
    shutil.copy(sqlite_template, folder / "records.sqlite3")

    async def enrol() -> None:
        database = Database(url_of(folder))
        await Tenants(database, b"p" * 32).create("acme")
        await database.close()

    asyncio.run(enrol())
    killer = Killer(folder / "records.sqlite3", folder)
    yield killer
    killer.close()


@pytest.mark.parametrize("way", ["in_pieces", "at_once"])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_kill_at_any_point_leaves_nothing_half(killer: Killer, way: str, step: int) -> None:
    folder, ended = killer.run(way, 0)
    points = int((folder / "points").read_text())
    shutil.rmtree(folder)
    assert (ended, points > 20) == (0, True)
    for kill_at in range(step, points + 1, step):
        folder, ended = killer.run(way, kill_at)
        if ended != 0:  # the end of one's waiting may come a point earlier
            assert ended == -9
            asyncio.run(after_the_restart(folder))
        shutil.rmtree(folder)


async def after_the_restart(folder: Path) -> None:
    database = Database(url_of(folder))
    blobs = open_blobs(str(folder / "blobs"), str(folder / "cache"), {})
    principal = await Tenants(database, b"p" * 32).representing("acme")
    async with upload_house(database, blobs, principal, "the next one") as house:
        await house.registry.contents.sweep()
        await house.uploads.workshop.tend()
        await house.at_rest()
        await house.uploads.workshop.sweep()
        assert blobs.digests() == await served(house), "what is stored is what a revision has"
        assert left_in(folder) == []
        await go_on(house)
        assert blobs.digests() == await served(house) != []
        assert blobs.objects.names("uploads") == []
        assert (await house.registry.resolve(principal, "acme/upper")).name == "acme/upper@1"
    blobs.close()
    await database.close()


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("*/incoming/*/*"))


async def served(house: House) -> list[str]:
    """The digest of the adapter, whose files can be loaded; nothing where there is no adapter."""
    try:
        revision = (await house.registry.resolve(house.principal, "acme/upper")).revision
    except ModelNotFound:
        return []
    assert {name: (revision.directory / name).read_bytes() for name in RECEIVED} == RECEIVED
    return [revision.digest]


async def go_on(house: House) -> None:
    """As a client does: send what is not there yet, or everything where nothing is known of it."""
    sessions = house.uploads.sessions
    found = await sessions.before(house.principal, None, 10)
    upload = found[0] if found else await house.open(WEIGHTS)
    if upload.state == "uploading":
        for file in upload.files:
            rest = RECEIVED[file.name][file.received :]
            assert await house.send(upload.id, file.name, rest, file.received) == file.size
        await sessions.complete(house.principal, upload.id)
    assert (await house.end_of(upload.id)).state == "ready"
