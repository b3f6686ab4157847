"""Uploads over a database and a store, with a validator that finds everything sound that says so."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.entities import AdapterInfo
from loramux.catalog.registry.registry import Registry, open_registry
from loramux.catalog.registry.resolver import BaseModel, BaseModels
from loramux.catalog.uploads.imports import Importer
from loramux.catalog.uploads.ingest import Ingest, UploadWorker
from loramux.catalog.uploads.sessions import AnnouncedFile, UploadRequest, UploadSessions, max_bytes
from loramux.catalog.validation.jobs import AdapterSummary, ValidationReport
from loramux.common.errors import Rejection
from loramux.common.identity import Principal
from loramux.common.settings.serving import AdapterLimits, UploadSettings
from loramux.data.entities import Upload
from loramux.data.records.database import Database
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, BlobStore

PEPPER = b"p" * 32
CONFIG = b"{}"
FOUND = AdapterSummary(
    peft_type="LORA",
    peft_version=None,
    base_model_name_or_path=None,
    architecture="tiny",
    rank=4,
    ranks={},
    targets={},
    layers=1,
    tensors=1,
    parameters=1,
    dtypes={},
    weights_bytes=1,
    tokens=97,
    ignored_fields={},
)


class Reader:
    """Stands in for the validator: what begins with `bad` is refused."""

    def examine(self, folder: Path, limits: object) -> ValidationReport:
        del limits
        with (folder / WEIGHTS_FILE).open("rb") as file:
            if file.read(3) == b"bad":
                refusal = Rejection(code="weights_invalid", field=WEIGHTS_FILE, message="it is bad")
                return ValidationReport(checks=(), refusal=refusal)
        return ValidationReport(checks=(), found=FOUND)


@dataclass
class Harness:
    database: Database
    blobs: BlobStore
    registry: Registry
    uploads: UploadSessions
    principal: Principal

    async def open(self, weights: bytes = b"weights", **more: Any) -> Upload:
        files = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: weights}
        announced = {name: AnnouncedFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        return await self.uploads.open(self.principal, UploadRequest("upper", announced, **more))

    async def send(self, id: str, name: str, data: bytes, offset: int = 0, cut: int = 1 << 30) -> int:
        async def body() -> AsyncIterator[bytes]:
            for start in range(0, len(data), cut):
                yield data[start : start + cut]

        return (await self.uploads.parts.receive(self.principal, id, name, offset, body())).received

    async def upload(self, weights: bytes = b"weights") -> str:
        id = (await self.open(weights)).id
        await self.send(id, CONFIG_FILE, CONFIG)
        await self.send(id, WEIGHTS_FILE, weights)
        await self.uploads.complete(self.principal, id)
        return id

    async def at_rest(self) -> None:
        """Wait until the worker is idle, whether it has succeeded or not."""
        await until_idle(self.uploads)

    async def end_of(self, id: str, seconds: float = 120) -> Upload:
        """The upload, once it is over and its pieces are gone."""
        async with asyncio.timeout(seconds):
            while True:
                upload = await self.uploads.get(self.principal, id)
                names = await asyncio.to_thread(self.blobs.objects.names, f"uploads/{id}")
                if upload.state not in ("uploading", "validating") and not names:
                    return upload
                await asyncio.sleep(0.01)


@asynccontextmanager
async def upload_harness(
    database: Database,
    blobs: BlobStore,
    principal: Principal,
    server_id: str = "server_1",
    settings: UploadSettings | None = None,
    examine: Callable[[Path, object], ValidationReport] | None = None,
) -> AsyncIterator[Harness]:
    """One server's uploads, its worker running until the block ends."""
    check = examine or Reader().examine

    def examine_for_base(folder: Path, limits: object, base_model: str | None) -> ValidationReport:
        return msgspec.structs.replace(check(folder, limits), base_model=base_model or "base")

    validators: Any = SimpleNamespace(examine=examine_for_base)
    registry, uploads = upload_services(
        database, blobs, validators=validators, settings=settings or UploadSettings(), server_id=server_id
    )
    try:
        yield Harness(database, blobs, registry, uploads, principal)
    finally:
        await uploads.worker.jobs.stop()


def upload_services(
    database: Database,
    blobs: BlobStore,
    *,
    validators: Any,
    base: Any = SimpleNamespace(fingerprint="base"),  # noqa: B008 - it is not changed
    served_model_name: str = "base",
    limits: AdapterLimits = AdapterLimits(),  # noqa: B008 - it is frozen
    settings: UploadSettings = UploadSettings(),  # noqa: B008 - it is frozen
    server_id: str = "server_1",
) -> tuple[Registry, UploadSessions]:
    """The registry and the uploads of one server, as `open_platform` builds them."""
    bases = BaseModels([BaseModel(served_model_name, base)])
    registry = open_registry(database, blobs, bases, limits)
    ingest = Ingest(database, blobs, registry.blob_gc, bases, limits, validators)
    importer = Importer(settings, max_bytes(limits), limits.local_root)
    worker = UploadWorker(database, blobs, ingest, importer, Tenants(database, PEPPER), server_id)
    return registry, UploadSessions(database, blobs, ingest, worker, settings, limits)


async def upload_folder(uploads: UploadSessions, principal: Principal, name: str, folder: Path) -> AdapterInfo:
    """Upload a copy of the folder's files, as `POST /v1/adapters` does with those of a form."""
    async with uploads.parts.receiving(principal) as staged:
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if (folder / file).exists():
                shutil.copyfile(folder / file, staged / file)
        try:
            return await uploads.upload(principal, name, staged)
        finally:
            await until_idle(uploads)


async def until_idle(uploads: UploadSessions) -> None:
    """Wait until the worker has nothing to do, parts of finished uploads included."""
    async with asyncio.timeout(120):
        while not uploads.worker.jobs.is_idle:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.01)
