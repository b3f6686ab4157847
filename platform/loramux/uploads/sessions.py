"""Upload sessions as their owners see them: announced, looked at, completed, given up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from loramux.records import Database, Principal
from loramux.records.identity import new_id
from loramux.records.uploads import EXPIRED, UPLOADING, VALIDATING, Outcome, Upload, UploadFile, UploadRepository
from loramux.registry import Intake
from loramux.registry.threads import finished
from loramux.settings import AdapterLimits, UploadSettings
from loramux.storage import CONFIG_FILE, FILES, WEIGHTS_FILE, BlobStore
from loramux.uploads.errors import (
    InvalidUpload,
    TooManyUploads,
    UploadClosed,
    UploadIncomplete,
    UploadNotFound,
)
from loramux.uploads.pieces import folder_of
from loramux.uploads.sources import Source, check_source, encode_source
from loramux.uploads.workshop import Workshop

MAX_CONFIG_BYTES = 1 << 20
SECOND = 1_000_000
"""Microseconds."""

_sha256 = re.compile("[0-9a-f]{64}")


class AnnouncedFile(msgspec.Struct, frozen=True):
    """How large a file is, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """What a caller wants to upload."""

    adapter: str
    """`adapter` or `tenant/adapter`."""
    files: Mapping[str, AnnouncedFile] | None
    """What the caller will send..."""
    source: Source | None = None
    """...or else from where the server is to fetch it."""
    promote: bool = True


class Sessions:
    """Upload sessions of every tenant, of which each caller sees its own."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        intake: Intake,
        workshop: Workshop,
        settings: UploadSettings,
        limits: AdapterLimits,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._intake = intake
        self._workshop = workshop
        self._settings = settings
        self._limits = limits

    async def open(self, principal: Principal, request: UploadRequest) -> Upload:
        """A new upload: a session that waits for its files, or an import that fetches them, and has begun to.

        Raises InvalidName, AdapterNotFound, TooManyAdapters, InvalidUpload, TooManyUploads.
        """
        adapter = await self._intake.demand_place(principal, request.adapter)
        source = self._checked_source(principal, request)
        now = self._database.now()
        upload = Upload(
            id=new_id("upload"),
            adapter=adapter,
            promote=request.promote,
            source=source,
            state=UPLOADING if source is None else VALIDATING,
            files=self._checked_files(request.files or {}) if source is None else (),
            outcome=Outcome(),
            created_at=now,
            expires_at=now + self._settings.session_seconds * SECOND,
        )
        async with self._database.begin() as session:
            uploads = UploadRepository(session, principal.tenant)
            await self._demand_room(uploads, sum(file.size for file in upload.files))
            await uploads.add(upload, None if source is None else self._workshop.server_id)
        self._workshop.wake()
        return upload

    async def get(self, principal: Principal, id: str) -> Upload:
        """One of the caller's. Raises UploadNotFound."""
        async with self._database.read() as session:
            return visible(principal, id, await UploadRepository(session, principal.tenant).get(id))

    async def before(self, principal: Principal, id: str | None, limit: int) -> list[Upload]:
        """At most `limit` of the caller's, newest first, from the one before `id` on."""
        async with self._database.read() as session:
            return await UploadRepository(session, principal.tenant).before(id, limit, _nameable(principal))

    async def complete(self, principal: Principal, id: str) -> Upload:
        """Begin to validate; again where that has begun changes nothing.

        Raises UploadNotFound, UploadIncomplete, or UploadClosed where it has expired.
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
            await uploads.begin_validating(id, self._workshop.server_id)
        self._workshop.wake()
        return msgspec.structs.replace(upload, state=VALIDATING)

    async def cancel(self, principal: Principal, id: str) -> Upload:
        """Give the upload up, or forget one that is over. Raises UploadNotFound; UploadClosed while it is validated."""
        async with self._database.begin() as session:
            uploads = UploadRepository(session, principal.tenant)
            upload = visible(principal, id, await uploads.locked(id))
            if upload.state == VALIDATING:
                raise UploadClosed(f"the upload {id} is being validated; wait until it is ready or rejected", "id")
            await uploads.remove(id)
        await finished(self._blobs.objects.delete_under, folder_of(id))
        return upload

    def _checked_source(self, principal: Principal, request: UploadRequest) -> str | None:
        if (request.files is None) == (request.source is None):
            raise InvalidUpload(
                "give either `files`, which you will send, or `source`, from where to fetch them", "files"
            )
        if request.source is None:
            return None
        return encode_source(check_source(request.source, principal, self._settings))

    def _checked_files(self, files: Mapping[str, AnnouncedFile]) -> tuple[UploadFile, ...]:
        unknown = sorted(files.keys() - set(FILES))
        if unknown:
            raise InvalidUpload(f"'{unknown[0][:80]}' is not taken: an adapter is {' and '.join(FILES)}", "files")
        most = most_bytes(self._limits)
        for name in FILES:
            if name not in files:
                raise InvalidUpload(f"'{name}' is missing: an adapter is {' and '.join(FILES)}", "files")
            file = files[name]
            if not 1 <= file.size <= most[name]:
                raise InvalidUpload(
                    f"'{name}' has {file.size} bytes; it may have 1 to {most[name]}", f"files.{name}.size"
                )
            if not _sha256.fullmatch(file.sha256.lower()):
                raise InvalidUpload(
                    f"the sha256 of '{name}' has 64 hexadecimal digits, as sha256sum prints", f"files.{name}.sha256"
                )
        return tuple(
            UploadFile(name=name, size=file.size, sha256=file.sha256.lower()) for name, file in sorted(files.items())
        )

    async def _demand_room(self, uploads: UploadRepository, size: int) -> None:
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


def most_bytes(limits: AdapterLimits) -> dict[str, int]:
    """How large each file of an adapter may be."""
    return {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: limits.max_bytes}


def visible(principal: Principal, id: str, upload: Upload | None) -> Upload:
    """The upload, where there is one and the caller may know of its adapter. Raises UploadNotFound."""
    if upload is None or not principal.may_use(f"{principal.tenant_name}/{upload.adapter}"):
        raise UploadNotFound(id)
    return upload


def _nameable(principal: Principal) -> list[str] | None:
    """The own names of the adapters that the caller is restricted to; None: all."""
    if principal.models is None:
        return None
    owned = f"{principal.tenant_name}/"
    return [model.removeprefix(owned) for model in principal.models if model.startswith(owned)]
