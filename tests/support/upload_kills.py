"""Run as a program: forks a server for each line that it reads, which uploads an adapter and is killed on its way.

What a server awaits of its database and its store is wrapped here, from outside: each call is a point before it and
one after it, and SIGKILL comes at the point of the line's number. Answers each line with the child's exit status; a
child that was not killed has written the number of its points into `points`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from upload_harness import CONFIG, Harness, upload_folder, upload_harness

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.uploads import parts
from loramux.data.records.database import Database
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, open_blobs

WEIGHTS = b"0123456789"
OBJECTS = ("put", "put_file", "read", "names", "delete", "delete_under")
BLOBS = ("seal", "publish", "is_stored", "adopt")


class Fuse:
    """Counts points and kills this process at one of them."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.passed = 0

    def point(self) -> None:
        self.passed += 1
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            self.point()
            made = function(*args)
            self.point()
            return made

        return wrapped

    def transaction(self, begin: Callable[[], Any]) -> Callable[[], Any]:
        @asynccontextmanager
        async def wrapped() -> AsyncIterator[Any]:
            self.point()
            async with begin() as session:
                yield session
                self.point()
            self.point()

        return wrapped


async def in_parts(harness: Harness, folder: Path) -> None:
    """A session in three parts, to its end."""
    del folder
    id = (await harness.open(WEIGHTS)).id
    await harness.send(id, CONFIG_FILE, CONFIG)
    await harness.send(id, WEIGHTS_FILE, WEIGHTS)
    await harness.uploads.complete(harness.principal, id)
    await harness.at_rest()


async def at_once(harness: Harness, folder: Path) -> None:
    """Both files in one request."""
    (folder / CONFIG_FILE).write_bytes(CONFIG)
    (folder / WEIGHTS_FILE).write_bytes(WEIGHTS)
    await upload_folder(harness.uploads, harness.principal, "upper", folder)
    await harness.at_rest()


WAYS = {way.__name__: way for way in (in_parts, at_once)}


async def run(folder: Path, url: str, way: str, kill_at: int) -> None:
    database = Database(url)
    blobs = open_blobs(str(folder / "blobs"), str(folder / "cache"), {})
    principal = await Tenants(database, b"p" * 32).system_principal("acme")
    fuse = Fuse(kill_at)
    for thing, names in ((blobs.objects, OBJECTS), (blobs, BLOBS)):
        for name in names:
            setattr(thing, name, fuse.around(getattr(thing, name)))
    database.begin = fuse.transaction(database.begin)
    database.read = fuse.transaction(database.read)
    parts.PART_BYTES = 4
    async with upload_harness(database, blobs, principal, server_id=f"server_{os.getpid()}") as harness:
        await WAYS[way](harness, folder)
    (folder / "points").write_text(str(fuse.passed))


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            asyncio.run(run(Path(order["folder"]), order["url"], order["way"], order["kill_at"]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
