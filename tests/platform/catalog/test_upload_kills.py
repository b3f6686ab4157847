"""kill -9 at every call to database and store on an upload's way: nothing half is left, nothing told is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import make_url
from upload_harness import CONFIG, Harness, upload_harness
from upload_kills import WEIGHTS

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.errors import ModelNotFound
from loramux.data.records.database import Database
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, open_blobs

PROGRAM = Path(__file__).parents[2] / "support" / "upload_kills.py"
Fresh = Callable[[], AbstractContextManager[tuple[Path, str]]]
RECEIVED = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: WEIGHTS}


class Killer:
    """Runs uploads, and kills them at the requested point."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, url: str, way: str, kill_at: int) -> int:
        """How it ended; 0: it was not killed."""
        order = {"folder": str(folder), "url": url, "way": way, "kill_at": kill_at}
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(order) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline())

    def close(self) -> None:
        self._program.communicate()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    killer.close()


@pytest.fixture
def fresh(url: str, backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    """Make databases that have a tenant already, and folders to go with them."""

    async def enrol() -> None:
        database = Database(url)
        await Tenants(database, b"p" * 32).create("acme")
        await database.close()

    asyncio.run(enrol())
    numbers = count()

    @contextmanager
    def fresh() -> Iterator[tuple[Path, str]]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        if backend == "sqlite":
            file = Path(make_url(url).database or "")
            yield folder, f"sqlite:///{shutil.copy(file, folder / 'records.sqlite3')}"
        else:
            with request.getfixturevalue("postgres").database(make_url(url).database) as copied:
                yield folder, copied
        shutil.rmtree(folder)

    return fresh


@pytest.mark.parametrize("way", ["in_parts", "at_once"])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_kill_at_any_point_leaves_nothing_half(killer: Killer, fresh: Fresh, way: str, step: int) -> None:
    with fresh() as (folder, url):
        assert killer.run(folder, url, way, 0) == 0
        points = int((folder / "points").read_text())
        assert points > 20
    for kill_at in range(step, points + 1, step):
        with fresh() as (folder, url):
            ended = killer.run(folder, url, way, kill_at)
            assert ended in (-9, 0), "what is done at the same time may come a point earlier or later"
            asyncio.run(after_the_restart(folder, url))


async def after_the_restart(folder: Path, url: str) -> None:
    database = Database(url)
    blobs = open_blobs(str(folder / "blobs"), str(folder / "cache"), {})
    principal = await Tenants(database, b"p" * 32).system_principal("acme")
    async with upload_harness(database, blobs, principal, "the next one") as harness:
        await harness.registry.blob_gc.sweep()
        await harness.uploads.worker.tend()
        await harness.at_rest()
        await harness.uploads.worker.sweep()
        assert blobs.digests() == await served(harness), "what is stored is what a revision has"
        assert left_in(folder) == []
        await go_on(harness)
        assert blobs.digests() == await served(harness) != []
        assert blobs.objects.names("uploads") == []
        assert (await harness.registry.resolver.resolve(principal, "acme/upper")).name == "acme/upper@1"
    blobs.close()
    await database.close()


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("*/incoming/*/*"))


async def served(harness: Harness) -> list[str]:
    """The digest of the adapter, whose files can be loaded; nothing if there is no adapter."""
    try:
        revision = (await harness.registry.resolver.resolve(harness.principal, "acme/upper")).revision
    except ModelNotFound:
        return []
    assert {name: (revision.directory / name).read_bytes() for name in RECEIVED} == RECEIVED
    return [revision.digest]


async def go_on(harness: Harness) -> None:
    """Upload as a client does: send the missing bytes, or everything if the server does not know the upload."""
    found = await harness.uploads.before(harness.principal, None, 10)
    upload = found[0] if found else await harness.open(WEIGHTS)
    if upload.state == "uploading":
        for file in upload.files:
            rest = RECEIVED[file.name][file.received :]
            assert await harness.send(upload.id, file.name, rest, file.received) == file.size
        await harness.uploads.complete(harness.principal, upload.id)
    assert (await harness.end_of(upload.id)).state == "ready"
