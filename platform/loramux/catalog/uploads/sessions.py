"""Upload sessions, which are opened, filled, completed, awaited or cancelled. Every adapter enters the system through a
session.

A client announces its files, sends them in parts (`parts`), completes the upload, and reads its state while the worker
checks and registers it (`ingest`). With a `source` the server fetches the files instead (`imports`). `POST
/v1/adapters` and the local folders of operators use the same steps through `UploadSessions.run`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loramux.catalog.registry.entities import AdapterInfo
from loramux.catalog.registry.errors import ValidationUnavailable
from loramux.catalog.uploads.errors import InvalidUpload, TooManyUploads, UploadClosed, UploadIncomplete
from loramux.catalog.uploads.imports import Source, check_source, encode_source
from loramux.catalog.uploads.ingest import Ingest, UploadWorker
from loramux.catalog.uploads.parts import PartReceiver, folder_of, visible
from loramux.common.bundle import SOURCES, explain_absence, is_ignored, is_pickled, misplaced
from loramux.common.identity import Principal, new_id
from loramux.common.settings.serving import AdapterLimits, UploadSettings
from loramux.common.units import SECOND
from loramux.data.entities import Submitter, Upload, UploadFile, UploadOutcome
from loramux.data.records.database import Database
from loramux.data.records.uploads import EXPIRED, OPEN, UPLOADING, VALIDATING, UploadRepository
from loramux.data.storage.blobs import CONFIG_FILE, FILES, WEIGHTS_FILE, BlobStore

MAX_CONFIG_BYTES = 1 << 20
MAX_FILES = 1000
"""Maximum number of files that an upload may announce, including ignored files."""
CHECK_SECONDS = 7200
"""Maximum time in seconds from the completion of an upload, or the start of an import, to its end."""
WAIT_SECONDS = 900.0
"""Maximum time in seconds until a request that uploads and waits is answered."""

logger = logging.getLogger(__name__)
_sha256 = re.compile("[0-9a-f]{64}")


class AnnouncedFile(msgspec.Struct, frozen=True):
    """The size of a file, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """A caller's request for an upload: either `files` that it will send, or a `source` to fetch them from."""

    adapter: str
    """The adapter's name: `adapter` or `tenant/adapter`."""
    files: Mapping[str, AnnouncedFile] | None
    source: Source | None = None
    promote: bool = True
    base_model: str | None = None
    """The adapter's base; None: the files decide the base."""
    ignored: tuple[str, ...] = ()
    """Names of files that were sent with the others but are not stored."""


class UploadSessions:
    """Upload sessions of every tenant; each caller sees its own."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        ingest: Ingest,
        worker: UploadWorker,
        settings: UploadSettings,
        limits: AdapterLimits,
    ) -> None:
        self.worker = worker
        self.parts = PartReceiver(database, blobs, settings)
        self._database = database
        self._blobs = blobs
        self._ingest = ingest
        self._settings = settings
        self._limits = limits

    async def open(self, principal: Principal, request: UploadRequest) -> Upload:
        """Open a session that waits for its files, or an import that starts immediately.

        Raises InvalidName, AdapterNotFound, TooManyAdapters, InvalidUpload, TooManyUploads.
        """
        return await self._open(principal, request, new_id("upload"))

    async def upload(
        self,
        principal: Principal,
        name: str,
        folder: Path,
        base_model: str | None = None,
        ignored: tuple[str, ...] = (),
    ) -> AdapterInfo:
        """Upload the files of a staging folder as the next revision of `name`, and wait for the end.

        `ignored` are names of files that were sent with them but are not stored. Raises UploadRejected for files that
        cannot be served, and the errors of `open`.
        """
        names = [file for file in (*FILES, *SOURCES) if (folder / file).is_file()]
        files = await self.parts.threads.of(principal.tenant).run(announce, folder, names)
        return await self.run(principal, UploadRequest(name, files, base_model=base_model, ignored=ignored), folder)

    async def run(
        self, principal: Principal, request: UploadRequest, folder: Path | None = None, id: str | None = None
    ) -> AdapterInfo:
        """Open an upload, append the files of `folder`, complete it, and wait for its end. Imports have no folder.

        `id`: a new id of an upload, by which the caller will look at it. Any failure ends the upload, so that the
        caller may try again. Raises UploadRejected, and the errors of `open`.
        """
        id = id or new_id("upload")
        with self.worker.awaiting(id) as ended:
            upload = await self._open(principal, request, id)
            try:
                if folder is not None:
                    for file in upload.files:
                        await self.parts.append_file(principal, upload, folder / file.name)
                    await self.complete(principal, id)
                async with asyncio.timeout(WAIT_SECONDS):
                    return await ended
            except TimeoutError:
                await asyncio.shield(self._abandon(principal, id))
                raise ValidationUnavailable("the upload could not be checked in time; try again later") from None
            except BaseException:
                await asyncio.shield(self._abandon(principal, id))
                raise

    async def get(self, principal: Principal, id: str) -> Upload:
        """Return one of the caller's uploads. Raises UploadNotFound."""
        async with self._database.read() as session:
            return visible(principal, id, await UploadRepository(session, principal.tenant).get(id))

    async def before(self, principal: Principal, id: str | None, limit: int) -> list[Upload]:
        """List at most `limit` of the caller's uploads, newest first, beginning after `id`."""
        async with self._database.read() as session:
            return await UploadRepository(session, principal.tenant).before(id, limit, principal.own_adapters())

    async def complete(self, principal: Principal, id: str) -> Upload:
        """Start the checks; a repeated call changes nothing.

        Raises UploadNotFound, UploadIncomplete, or UploadClosed if it has expired.
        """
        async with self._database.begin() as session:
            uploads = UploadRepository(session, principal.tenant)
            upload = visible(principal, id, await uploads.locked(id))
            if upload.state == EXPIRED:
                raise UploadClosed(f"the upload {id} has expired; open another one", "id")
            if upload.state != UPLOADING:
                return upload
            for file in upload.files:
                if file.received < file.size:
                    raise UploadIncomplete(
                        f"'{file.name}' has {file.received} of {file.size} bytes; send the rest from "
                        f"offset={file.received} on",
                        file.name,
                    )
            expires_at = self._database.now() + CHECK_SECONDS * SECOND
            await uploads.begin_validating(id, self.worker.server_id, _submitter(principal), expires_at)
        self.worker.jobs.look()
        return msgspec.structs.replace(upload, state=VALIDATING, expires_at=expires_at)

    async def cancel(self, principal: Principal, id: str) -> Upload:
        """Cancel the upload, or delete a finished one.

        Raises UploadNotFound, and UploadClosed while sent files are checked. An import can be cancelled at any time.
        """
        async with self._database.begin() as session:
            uploads = UploadRepository(session, principal.tenant)
            upload = visible(principal, id, await uploads.locked(id))
            if upload.state == VALIDATING and upload.source is None:
                raise UploadClosed(f"the upload {id} is being validated; wait until it is ready or rejected", "id")
            await uploads.remove(id)
        await self._forget(principal, id)
        return upload

    async def _open(self, principal: Principal, request: UploadRequest, id: str) -> Upload:
        adapter = await self._ingest.check_name(principal, request.adapter)
        self._ingest.check_base(request.base_model)
        source = self._checked_source(principal, request)
        taken, ignored = _sorted_out(request.files or {})
        now = self._database.now()
        upload = Upload(
            id=id,
            adapter=adapter,
            promote=request.promote,
            source=source,
            base_model=request.base_model,
            state=UPLOADING if source is None else VALIDATING,
            files=self._checked_files(taken, ignored) if source is None else (),
            submitter=None if source is None else _submitter(principal),
            ignored=(*ignored, *request.ignored),
            outcome=UploadOutcome(),
            created_at=now,
            expires_at=now + (self._settings.session_seconds if source is None else CHECK_SECONDS) * SECOND,
        )
        async with self._database.begin() as session:
            uploads = UploadRepository(session, principal.tenant)
            await self._check_room(uploads, sum(file.size for file in upload.files))
            await uploads.add(upload, None if source is None else self.worker.server_id)
        if source is not None:
            self.worker.jobs.look()
        return upload

    async def _abandon(self, principal: Principal, id: str) -> None:
        """Remove an unfinished upload after its caller got an error, so that it does not take effect later."""
        try:
            async with self._database.begin() as session:
                uploads = UploadRepository(session, principal.tenant)
                upload = await uploads.locked(id)
                if upload is None or upload.state not in OPEN:
                    return
                await uploads.remove(id)
            await self._forget(principal, id)
        except Exception as error:  # the worker tries the upload again, and expires it at last
            logger.warning("the upload %s could not be abandoned: %s", id, error)

    async def _forget(self, principal: Principal, id: str) -> None:
        """Stop the work on an upload whose row was deleted, and delete its parts."""
        self.worker.jobs.cancel(id)
        await self.parts.threads.run(principal.tenant, self._blobs.objects.delete_under, folder_of(id))

    def _checked_source(self, principal: Principal, request: UploadRequest) -> str | None:
        if (request.files is None) == (request.source is None):
            raise InvalidUpload(
                "give either `files`, which you will send, or `source`, from where to fetch them", "files"
            )
        if request.source is None:
            return None
        return encode_source(check_source(request.source, principal, self._settings))

    def _checked_files(self, files: Mapping[str, AnnouncedFile], ignored: Iterable[str]) -> tuple[UploadFile, ...]:
        if (reason := misplaced(files)) is not None:
            raise InvalidUpload(reason, "files")
        for name in FILES:
            if name not in files:
                way_out = explain_absence((*files, *ignored), "announce its files by their names without the folder")
                raise InvalidUpload(f"'{name}' is missing. {way_out}", "files")
        limits = max_bytes(self._limits)
        for name, file in files.items():
            if name not in limits:
                raise refused_file(name)
            if not 1 <= file.size <= limits[name]:
                raise InvalidUpload(
                    f"'{name}' has {file.size} bytes; it may have 1 to {limits[name]}", f"files.{name}.size"
                )
            if not _sha256.fullmatch(file.sha256.lower()):
                raise InvalidUpload(
                    f"the sha256 of '{name}' has 64 hexadecimal digits, as sha256sum prints", f"files.{name}.sha256"
                )
        return tuple(
            UploadFile(name=name, size=file.size, sha256=file.sha256.lower()) for name, file in sorted(files.items())
        )

    async def _check_room(self, uploads: UploadRepository, size: int) -> None:
        count, announced = await uploads.open_now()
        if count >= self._settings.open_per_tenant:
            raise TooManyUploads(
                f"you have {count} uploads open, the most that is allowed; complete or delete one first", "adapter"
            )
        if announced + size > self._settings.open_bytes_per_tenant:
            raise TooManyUploads(
                f"your open uploads have {announced} bytes and this one {size}; together they may have "
                f"{self._settings.open_bytes_per_tenant}. Complete or delete one first",
                "files",
            )


def _sorted_out(files: Mapping[str, AnnouncedFile]) -> tuple[dict[str, AnnouncedFile], tuple[str, ...]]:
    """Return the files to store, and the names of the files that serving does not need. Raises InvalidUpload."""
    if len(files) > MAX_FILES:
        raise InvalidUpload(f"{len(files)} files were announced; at most {MAX_FILES} are looked at", "files")
    ignored = tuple(sorted(name for name in files if name not in SOURCES and is_ignored(name)))
    return {name: file for name, file in files.items() if name not in ignored}, ignored


def max_bytes(limits: AdapterLimits) -> dict[str, int]:
    """Return the largest size of each file of an adapter."""
    return {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: limits.max_bytes, **SOURCES}


def refused_file(name: str) -> InvalidUpload:
    """Return the refusal of a file that is neither stored nor ignored."""
    if is_pickled(name):
        return InvalidUpload(
            f"'{name[:80]}' is a pickle, which may run code and is never read; save the adapter with safetensors "
            "(save_pretrained does) and leave this file out",
            "files",
        )
    return InvalidUpload(
        f"'{name[:80]}' is not taken: an adapter is {' and '.join(FILES)}, and may bring {', '.join(SOURCES)}", "files"
    )


def announce(folder: Path, names: Iterable[str]) -> dict[str, AnnouncedFile]:
    """Return the announcement of files in a folder, by name."""
    files = {}
    for name in names:
        with (folder / name).open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        files[name] = AnnouncedFile((folder / name).stat().st_size, digest)
    return files


def _submitter(principal: Principal) -> Submitter:
    return Submitter(principal.key_id, principal.origin)
