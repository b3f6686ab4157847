"""Run as a program: one server takes one upload of a given size, and prints how far its memory rose for it.

Arguments: folder, bytes, the store of the contents, its options as JSON. Prints JSON: MiB before and at the peak.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from upload_harness import CONFIG, upload_harness

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.uploads.sessions import AnnouncedFile, UploadRequest
from loramux.data.records.database import Database
from loramux.data.records.schema import migrate
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, open_blobs

CHUNK = 1 << 16


def chunks(size: int) -> Iterator[bytes]:
    """Bytes of which no two megabytes are the same."""
    for start in range(0, size, CHUNK):
        yield start.to_bytes(8, "big") * (min(CHUNK, size - start) // 8)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def main(folder: Path, size: int, where: str, options: dict[str, str]) -> None:
    url = f"sqlite:///{folder}/records.sqlite3"
    migrate(url)
    running = hashlib.sha256()
    for chunk in chunks(size):
        running.update(chunk)
    database = Database(url)
    await Tenants(database, b"p" * 32).create("acme")
    principal = await Tenants(database, b"p" * 32).system_principal("acme")
    blobs = open_blobs(where, str(folder / "cache"), options)

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks(size):
            yield chunk

    async with upload_harness(database, blobs, principal) as harness:
        await harness.end_of(await harness.upload())  # everything is imported and open
        before = peak_mib()
        files = {
            CONFIG_FILE: AnnouncedFile(len(CONFIG), hashlib.sha256(CONFIG).hexdigest()),
            WEIGHTS_FILE: AnnouncedFile(size, running.hexdigest()),
        }
        id = (await harness.uploads.open(principal, UploadRequest("large", files))).id
        await harness.send(id, CONFIG_FILE, CONFIG)
        await harness.uploads.parts.receive(principal, id, WEIGHTS_FILE, 0, body())
        await harness.uploads.complete(principal, id)
        upload = await harness.end_of(id, seconds=1200)
        resolved = await harness.registry.resolver.resolve(principal, "acme/large")
        assert resolved.revision is not None
        stored = resolved.revision.directory.joinpath(WEIGHTS_FILE).stat().st_size
        print(json.dumps({"state": upload.state, "stored": stored, "before": before, "peak": peak_mib()}))
    blobs.close()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])))
