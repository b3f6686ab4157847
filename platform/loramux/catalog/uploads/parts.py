"""Parts of files: each part is an object in the store, so that any server can append the next part or assemble all
parts.

Files are written and hashed while their bytes arrive: memory holds SPOOL_BYTES and one chunk from the network, even for
large files. A part is durable when its client gets the answer. A body that stalls is ended, and each tenant has a
limited number of bodies at a time, so that one tenant cannot use up all connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from loramux.catalog.uploads.errors import (
    InvalidUpload,
    TooManyTransfers,
    UploadClosed,
    UploadError,
    UploadNotFound,
    UploadTooSlow,
    WrongOffset,
    rejected,
)
from loramux.common.identity import Principal
from loramux.common.jobs import TenantSlots, ThreadPool, Threads
from loramux.common.settings.serving import UploadSettings
from loramux.common.units import SECOND
from loramux.data.entities import Upload, UploadFile
from loramux.data.records.database import Database
from loramux.data.records.uploads import UPLOADING, UploadPart, UploadRepository
from loramux.data.storage.blobs import BlobStore
from loramux.data.storage.objects import Objects

PART_BYTES = 8 << 20
"""Maximum number of bytes of a request's body that are lost if the server dies."""
SPOOL_BYTES = 1 << 18
"""Bytes of a request's body that are kept in memory."""
TRANSFERS = 512
"""Maximum number of bodies that are received at a time."""
TRANSFERS_PER_TENANT = 32
THREADS, THREADS_PER_TENANT = 16, 4
MIN_BYTES_PER_SECOND = 1024
"""Minimum rate of a body in bytes per second. This rate is far below that of real connections, and ends idle
connections.
"""
WINDOW_SECONDS = 60.0
SPARE_PARTS = 1000
"""Maximum number of additional parts of a file, because clients may be interrupted or send few bytes at a time."""
FOLDER = "uploads"


class PartReceiver:
    """Appends bytes to the files of open uploads."""

    def __init__(self, database: Database, blobs: BlobStore, settings: UploadSettings) -> None:
        self._database = database
        self._blobs = blobs
        self._objects = blobs.objects
        self._settings = settings
        self._slots = TenantSlots(TRANSFERS, TRANSFERS_PER_TENANT)
        self.threads = ThreadPool("parts", THREADS, THREADS_PER_TENANT)

    @asynccontextmanager
    async def receiving(self, principal: Principal) -> AsyncIterator[Path]:
        """Yield an empty folder to receive a body in, removed when the block ends. Raises TooManyTransfers."""
        if not self._slots.is_free(principal.tenant):
            raise TooManyTransfers(
                f"you send files in more than {TRANSFERS_PER_TENANT} requests at a time, or the server receives more "
                f"than {TRANSFERS}; send them one after the other"
            )
        async with self._slots.slot(principal.tenant):
            with self._blobs.staging() as folder:
                yield folder

    async def receive(
        self, principal: Principal, id: str, name: str, offset: int, body: AsyncIterator[bytes]
    ) -> UploadFile:
        """Store the body as the bytes of a file from `offset` on; return the file with its new size.

        If a body ends early or is too slow, the bytes that have arrived are kept. Raises UploadNotFound, UploadClosed,
        InvalidUpload, WrongOffset, TooManyTransfers or UploadTooSlow, and keeps parts that are already stored.
        """
        async with self._database.read() as session:
            upload = await UploadRepository(session, principal.tenant).get(id)
        file = _file_at(visible(principal, id, upload), name, offset)
        async with self.receiving(principal) as folder:
            spool = Spool(folder, self.threads.of(principal.tenant))
            try:
                async for chunk in paced(body):
                    if file.received + spool.size + len(chunk) > file.size:
                        raise InvalidUpload(
                            f"'{name}' was announced with {file.size} bytes, and more than that was sent; "
                            f"it has {file.received}",
                            name,
                        )
                    await spool.write(chunk)
                    if spool.size >= PART_BYTES:
                        file = await self._append(principal, id, file, spool)
            except UploadTooSlow:
                if spool.size:
                    await self._append(principal, id, file, spool)
                raise
            return await self._append(principal, id, file, spool) if spool.size else file

    async def append_file(self, principal: Principal, upload: Upload, path: Path) -> None:
        """Store a whole local file as the only part of the upload's file of that name."""
        file = _file_at(upload, path.name, 0)
        part = UploadPart(file=file.name, start=0, size=file.size, object=object_name(upload.id))
        await self.threads.run(principal.tenant, self._objects.put_file, part.object, path)
        await self._record(principal, upload.id, part)

    async def _append(self, principal: Principal, id: str, file: UploadFile, spool: Spool) -> UploadFile:
        path, size = await spool.take()
        part = UploadPart(file=file.name, start=file.received, size=size, object=object_name(id))
        await self.threads.run(principal.tenant, self._objects.put_file, part.object, path)
        await self.threads.run(principal.tenant, path.unlink)
        await self._record(principal, id, part)
        return UploadFile(name=file.name, size=file.size, sha256=file.sha256, received=part.start + part.size)

    async def _record(self, principal: Principal, id: str, part: UploadPart) -> None:
        try:
            async with self._database.begin() as session:
                uploads = UploadRepository(session, principal.tenant)
                file = _file_at(visible(principal, id, await uploads.locked(id)), part.file, part.start)
                if await uploads.part_count(id, file.name) >= max_parts(file.size):
                    raise InvalidUpload(
                        f"'{file.name}' came in too many parts; send at least {PART_BYTES} bytes in a request",
                        file.name,
                    )
                await uploads.add_part(id, part, self._database.now() + self._settings.session_seconds * SECOND)
        except UploadError:  # after any other error the row may exist all the same
            await self.threads.run(principal.tenant, self._objects.delete, [part.object])
            raise


class Spool:
    """Bytes of the next part before they are stored. The bytes are in a file, so that an open connection holds no
    memory.
    """

    def __init__(self, folder: Path, threads: Threads) -> None:
        self.size = 0
        self._folder = folder
        self._threads = threads
        self._path = folder / secrets.token_hex(8)
        self._buffer = bytearray()

    async def write(self, chunk: bytes) -> None:
        """Append a chunk."""
        self._buffer += chunk
        self.size += len(chunk)
        if len(self._buffer) >= SPOOL_BYTES:
            await self._flush()

    async def take(self) -> tuple[Path, int]:
        """Return the file and its size, and begin another file, because a stored file is never written again."""
        await self._flush()
        taken = self._path, self.size
        self._path, self.size = self._folder / secrets.token_hex(8), 0
        return taken

    async def _flush(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        await self._threads.run(_append_to, self._path, data)


def _append_to(path: Path, data: bytearray) -> None:
    with path.open("ab") as file:
        file.write(data)


async def paced(
    chunks: AsyncIterator[bytes], bytes_per_second: int | None = None, window_s: float | None = None
) -> AsyncIterator[bytes]:
    """Yield the same chunks; raise UploadTooSlow if a window of waiting brings less than the minimum rate.

    Only the time spent waiting for the sender counts, not the time for storing a chunk.
    """
    bytes_per_second = MIN_BYTES_PER_SECOND if bytes_per_second is None else bytes_per_second
    window_s = WINDOW_SECONDS if window_s is None else window_s
    clock = asyncio.get_running_loop().time
    iterator = aiter(chunks)
    waited, received = 0.0, 0
    while True:
        started = clock()
        try:
            async with asyncio.timeout(window_s - waited):
                data = await anext(iterator, None)
        except TimeoutError:
            raise UploadTooSlow(
                f"fewer than {bytes_per_second * window_s:g} bytes came in {window_s:g} s of waiting; send the rest in "
                "another request",
            ) from None
        if data is None:
            return
        waited += clock() - started
        received += len(data)
        if received >= bytes_per_second * window_s:
            waited, received = 0.0, 0
        yield data


def folder_of(upload_id: str) -> str:
    """Return the folder of an upload's parts in the store."""
    return f"{FOLDER}/{upload_id}"


def object_name(upload_id: str) -> str:
    """Return a name that no other part has: two requests with the same bytes must not share an object."""
    return f"{folder_of(upload_id)}/{secrets.token_hex(8)}"


def max_parts(size: int) -> int:
    """Return the number of parts that a file of that size may have."""
    return size // PART_BYTES + SPARE_PARTS


def visible(principal: Principal, id: str, upload: Upload | None) -> Upload:
    """Return the upload if it exists and the caller may use its adapter. Raises UploadNotFound."""
    if upload is None or not principal.may_use(f"{principal.tenant_name}/{upload.adapter}"):
        raise UploadNotFound(id)
    return upload


async def assemble(
    threads: Threads, objects: Objects, file: UploadFile, parts: Sequence[UploadPart], folder: Path
) -> None:
    """Write the file into `folder`. Raises UploadRejected if the file differs from the announcement."""
    try:
        written = await write_file(threads, folder / file.name, _read_parts(threads, objects, parts), file.size)
    except FileNotFoundError:
        raise rejected(
            "bytes_lost", file.name, f"bytes of '{file.name}' have been lost from the store. Upload it again."
        ) from None
    if written != (file.size, file.sha256):
        raise rejected(
            "hash_mismatch",
            file.name,
            f"'{file.name}' was announced with {file.size} bytes and the SHA-256 {file.sha256}; what was received has "
            f"{written.size} and {written.sha256}. Upload it again.",
        )


class WrittenFile(NamedTuple):
    """The size of a file, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class UploadFileTooLarge(Exception):
    """More bytes arrived than are allowed."""


async def write_file(threads: Threads, target: Path, chunks: AsyncIterator[bytes], limit: int) -> WrittenFile:
    """Write a new file while hashing it. Raises FileTooLarge beyond `limit` bytes."""
    running, size = hashlib.sha256(), 0

    def append(file: BinaryIO, data: bytes) -> None:
        running.update(data)
        file.write(data)

    target.parent.mkdir(exist_ok=True)
    with target.open("xb") as file:
        async for data in chunks:
            size += len(data)
            if size > limit:
                raise UploadFileTooLarge
            await threads.run(append, file, data)
    return WrittenFile(size, running.hexdigest())


async def read_off_loop(threads: Threads, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same chunks, each read on a thread."""
    while (data := await threads.run(next, chunks, None)) is not None:
        yield data


async def _read_parts(threads: Threads, objects: Objects, parts: Sequence[UploadPart]) -> AsyncIterator[bytes]:
    for part in parts:
        async for data in read_off_loop(threads, objects.read(part.object)):
            yield data


def _file_at(upload: Upload, name: str, offset: int) -> UploadFile:
    """Return the upload's file. The file's next bytes must begin at `offset`."""
    if upload.state != UPLOADING:
        raise UploadClosed(f"the upload {upload.id} is {upload.state}: it takes no more bytes", "id")
    file = next((file for file in upload.files if file.name == name), None)
    if file is None:
        announced = " and ".join(f"'{file.name}'" for file in upload.files)
        raise InvalidUpload(f"the upload has {announced}, and no '{name[:80]}'", "name")
    if offset != file.received:
        raise WrongOffset(name, offset, file.received)
    return file
