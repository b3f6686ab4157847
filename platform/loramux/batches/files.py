"""Tenants' files, which are received, listed, read, deleted, and removed when they expire.

The bytes of a file are one object in the store, which is complete before a row names it. When a file is deleted, its
row is deleted first; `sweep` removes objects that no row names. All files count against a storage quota. Output files
of batches are stored even if they exceed the quota.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.batches.errors import FileInUse, FileNotFound, FileTooLarge, InvalidFile, StorageQuotaReached
from loramux.catalog.uploads.parts import read_off_loop
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, TenantId, new_id
from loramux.common.jobs import SERVER, TenantSlots, ThreadPool
from loramux.common.settings.server import BatchSettings
from loramux.common.units import SECOND
from loramux.data.entities import StoredFile
from loramux.data.records.base import Viewpoint
from loramux.data.records.batches import (
    BatchJobs,
    BatchRepository,
    FileRepository,
    expired_files,
    known_files,
)
from loramux.data.records.database import Database
from loramux.data.records.tenants import TenantRepository
from loramux.data.records.training import TrainingJobs, TrainingRepository
from loramux.data.storage.blobs import BlobStore
from loramux.money.limits.definitions import tenant_limits
from loramux.serving.checks import ensure_storage_allowed, storage_refused

FOLDER = "files"
FINE_TUNE = "fine-tune"
"""The purpose of training files."""
VISION = "vision"
"""The purpose of images for prompts."""
PURPOSES = ("batch", "evals", FINE_TUNE, VISION)
"""Purposes for which a client may send a file."""
OUTPUT, SHADOW_OUTPUT = "batch_output", "shadow_output"
REQUESTS = "batch_requests"
"""Purpose of a file that this server makes of a batch's requests."""
TRANSFERS, TRANSFERS_PER_TENANT = 64, 8
THREADS, THREADS_PER_TENANT = 8, 2
READ_BYTES = 256 << 10
"""Bytes of a file that are read at a time for a download."""
UNREAD_BYTES = 4 * READ_BYTES
"""Maximum bytes of a download in memory: one part that is being read, and parts that wait to be sent."""
SWEEP = 1000
"""Maximum number of files that expire in one transaction."""
MIN_RETENTION = 3600
"""Minimum retention of a file in seconds, as defined by OpenAI."""


class Files:
    """Files of every tenant; each caller sees the files of its project."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        settings: BatchSettings,
        retention_seconds: int,
        memory: TenantSlots,
        checks: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """`retention_seconds` is the time after which a file is deleted. `memory` limits the waiting bytes of each
        tenant. `checks` has the check of a received file by purpose: it runs on a thread and raises InvalidFile.
        """
        self._memory = memory
        self._checks = checks
        self.retention_seconds = retention_seconds
        self.threads = ThreadPool("files", THREADS, THREADS_PER_TENANT)
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._slots = TenantSlots(TRANSFERS, TRANSFERS_PER_TENANT)
        self._unknown: frozenset[str] = frozenset()
        """Objects that had no row at the last sweep."""

    @asynccontextmanager
    async def receiving(self, principal: Principal, announced: int | None) -> AsyncIterator[Path]:
        """Yield an empty folder to receive a body in. Raises FileTooLarge, StorageQuotaReached.

        `announced` is the number of bytes of the body, if the client announces it.
        """
        if announced is not None and announced > self._settings.max_body_bytes:
            raise FileTooLarge(self._settings.max_file_bytes)
        async with self._database.begin() as session:
            await self._check_room(session, principal, 0)
        async with self._slots.slot(principal.tenant):
            with self._blobs.staging() as folder:
                yield folder

    async def add(
        self,
        principal: Principal,
        path: Path,
        size: int,
        *,
        filename: str,
        purpose: str,
        expires_after: int | None = None,
    ) -> StoredFile:
        """Store a received file. Raises InvalidFile, FileTooLarge, StorageQuotaReached, NotAllowed.

        `size` is in bytes, and `expires_after` in seconds, at most the server's retention.
        """
        if purpose not in PURPOSES:
            raise InvalidFile(f"'purpose' is one of {', '.join(PURPOSES)}; got '{purpose[:40]}'.", "purpose")
        if purpose != FINE_TUNE:
            ensure_storage_allowed(principal, "file")
        if (check := self._checks.get(purpose)) is not None and 0 < size <= self._settings.max_file_bytes:
            await self.threads.run(principal.tenant, check, path)
        return await self.store(principal, path, size, filename=filename, purpose=purpose, expires_after=expires_after)

    async def store(
        self,
        principal: Principal,
        path: Path,
        size: int,
        *,
        filename: str,
        purpose: str,
        expires_after: int | None = None,
    ) -> StoredFile:
        """Store a file for any purpose. Raises the same errors as `add`.

        Under zero retention only training files are stored, and as briefly as possible: the end of a job that reads a
        file deletes it.
        """
        retention = self.retention_seconds
        self.check_expiry(expires_after, "expires_after")
        if size > self._settings.max_file_bytes:
            raise FileTooLarge(self._settings.max_file_bytes)
        if not size:
            raise InvalidFile("The file is empty; send a file with at least one byte.", "file")
        now = self._database.now()
        file = StoredFile(
            id=new_file_id(),
            project_id=principal.project,
            owner=principal.owner,
            purpose=purpose,
            filename=filename,
            size=size,
            created_at=now,
            expires_at=now + (expires_after or retention) * SECOND,
        )
        await self.threads.run(principal.tenant, self._blobs.objects.put_file, object_name(file.id), path)
        try:
            async with self._database.begin() as session:
                await self._check_room(session, principal, size)
                if await TenantRepository(session).has_zero_retention(principal.tenant):
                    if purpose != FINE_TUNE:
                        raise storage_refused("file")
                    file = msgspec.structs.replace(file, expires_at=now + MIN_RETENTION * SECOND)
                await FileRepository(session, principal.tenant).add(file)
        except LoramuxError:
            await self.threads.run(principal.tenant, self._blobs.objects.delete, [object_name(file.id)])
            raise
        return file

    def check_expiry(self, seconds: int | None, field: str) -> None:
        """Raise InvalidFile if the server does not keep files for so many seconds."""
        if seconds is not None and not MIN_RETENTION <= seconds <= self.retention_seconds:
            raise InvalidFile(
                f"'{field}.seconds' is {MIN_RETENTION} to {self.retention_seconds}, for which this server keeps files.",
                field,
            )

    async def get(self, principal: Principal, id: str) -> StoredFile:
        """Return a file. Raises FileNotFound."""
        async with self._database.read() as session:
            file = await FileRepository(session, principal.tenant).get(id, Viewpoint.of(principal))
        if file is None:
            raise FileNotFound(id)
        return file

    async def listed(
        self, principal: Principal, after: str | None, limit: int, purpose: str | None, *, oldest_first: bool
    ) -> list[StoredFile]:
        """List at most `limit` files that follow the file `after`."""
        async with self._database.read() as session:
            files = FileRepository(session, principal.tenant)
            return await files.listed(Viewpoint.of(principal), after, limit, purpose, oldest_first=oldest_first)

    async def fetch(self, tenant: TenantId, file: StoredFile, folder: Path) -> Path:
        """Copy a file into `folder`. Raises FileNotFound if the file was deleted in between."""
        try:
            await self.threads.run(tenant, self._blobs.objects.fetch, object_name(file.id), folder / file.id)
        except FileNotFoundError:
            raise FileNotFound(file.id) from None
        return folder / file.id

    async def content(self, tenant: TenantId, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the file's bytes when the tenant's memory has room for unread bytes.

        Raises FileNotFound if the file was deleted in between.
        """
        async with self._memory.slot(tenant, UNREAD_BYTES):
            chunks = self._blobs.objects.read(object_name(file.id), READ_BYTES)
            try:
                async for data in read_off_loop(self.threads.of(tenant), chunks):
                    yield data
            except FileNotFoundError:
                raise FileNotFound(file.id) from None

    async def read_image(self, principal: Principal, id: str, max_bytes: int) -> bytes:
        """Return the bytes of an image. Raises FileNotFound, and InvalidFile if the file is none of that size."""
        file = await self.get(principal, id)
        if file.purpose != VISION or file.size > max_bytes:
            raise InvalidFile(
                f"The file '{id}' has the purpose '{file.purpose}' and {file.size} bytes. Send an image of at most "
                f"{max_bytes} bytes with the purpose '{VISION}'.",
                "file_id",
            )
        return b"".join([data async for data in self.content(principal.tenant, file)])

    async def delete(self, principal: Principal, id: str) -> StoredFile:
        """Delete a file and its bytes. Raises FileNotFound, FileInUse."""
        async with self._database.begin() as session:
            files = FileRepository(session, principal.tenant)
            await (
                files.total_size()
            )  # locks the tenant, so that a batch that reads the file is created either before or after
            file = await files.get(id, Viewpoint.of(principal))
            if file is None:
                raise FileNotFound(id)
            for kind, readers in (
                ("batch", BatchRepository(session, principal.tenant)),
                ("fine-tuning job", TrainingRepository(session, principal.tenant)),
            ):
                if (user := await readers.user_of(id)) is not None:
                    raise FileInUse(f"The {kind} '{user}' reads the file '{id}'; cancel it first.", "file_id")
            await files.remove(id)
        await self.remove_objects(principal.tenant, [id])
        return file

    async def remove_objects(self, tenant: TenantId, ids: Sequence[str]) -> None:
        """Delete the bytes of files whose rows are deleted."""
        await self.threads.run(tenant, self._blobs.objects.delete, [object_name(id) for id in ids])

    async def expire(self) -> int:
        """Delete files past their expiry that no unfinished batch or training job reads; return their number."""
        count = 0
        while True:
            async with self._database.begin() as session:
                needed = await BatchJobs(session).inputs() + await TrainingJobs(session).inputs()
                ids = await expired_files(session, self._database.now(), needed, SWEEP)
            await self.threads.run(SERVER, self._blobs.objects.delete, [object_name(id) for id in ids])
            count += len(ids)
            if len(ids) < SWEEP:
                return count

    async def sweep(self) -> int:
        """Remove objects that a crash left: objects that had no row at the last sweep and still have none. Return their
        number.

        A file that is being received has an object and no row yet. Receiving a file takes far less time than the
        interval between two sweeps.
        """
        names = await self.threads.run(SERVER, self._blobs.objects.names, FOLDER)
        stored = [name.rpartition("/")[2] for name in names]
        async with self._database.read() as session:
            known = await known_files(session, stored)
        unknown = frozenset(stored) - known
        left, self._unknown = [object_name(id) for id in unknown & self._unknown], unknown
        await self.threads.run(SERVER, self._blobs.objects.delete, left)
        return len(left)

    async def _check_room(self, session: AsyncSession, principal: Principal, size: int) -> None:
        used = await FileRepository(session, principal.tenant).total_size()
        limit = (await tenant_limits(session, principal)).get("file_bytes", self._settings.bytes_per_tenant)
        if used + size > limit or used >= limit:
            this = f" and this one {size}" if size else ""
            raise StorageQuotaReached(
                f"Your files have {used} bytes{this}; together they may have {limit} (file_bytes). "
                "Delete some: outputs of batches count too.",
                "file",
            )


def new_file_id() -> str:
    """Make a file's id, as OpenAI writes it."""
    return new_id("file").replace("_", "-")


def object_name(file_id: str) -> str:
    """Return the name of a file's object in the store."""
    return f"{FOLDER}/{file_id}"
