"""Uploads over a database and a store, with a validator that finds everything sound that says so."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loramux.records import Database, Principal
from loramux.records.uploads import Upload
from loramux.registry import Registry
from loramux.settings import AdapterLimits, ModelSettings, Settings, UploadSettings
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE, BlobStore
from loramux.tenants import Tenants
from loramux.uploads import AnnouncedFile, UploadRequest, Uploads
from loramux.validation import Refusal, Report
from loramux.validation.report import Found

PEPPER = b"p" * 32
CONFIG = b"{}"
FOUND = Found(
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
    ignored_fields={},
)


class Reader:
    """Stands in for the validator: what begins with `bad` is refused."""

    def examine(self, folder: Path, limits: object) -> Report:
        del limits
        with (folder / WEIGHTS_FILE).open("rb") as file:
            if file.read(3) == b"bad":
                refusal = Refusal(code="weights_invalid", field=WEIGHTS_FILE, message="it is bad")
                return Report(checks=(), refusal=refusal)
        return Report(checks=(), found=FOUND)


@dataclass
class House:
    database: Database
    blobs: BlobStore
    registry: Registry
    uploads: Uploads
    principal: Principal

    async def open(self, weights: bytes = b"weights", **more: Any) -> Upload:
        files = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: weights}
        announced = {name: AnnouncedFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        return await self.uploads.sessions.open(self.principal, UploadRequest("upper", announced, **more))

    async def send(self, id: str, name: str, data: bytes, offset: int = 0, cut: int = 1 << 30) -> int:
        async def body() -> AsyncIterator[bytes]:
            for start in range(0, len(data), cut):
                yield data[start : start + cut]

        return (await self.uploads.reception.receive(self.principal, id, name, offset, body())).received

    async def upload(self, weights: bytes = b"weights") -> str:
        id = (await self.open(weights)).id
        await self.send(id, CONFIG_FILE, CONFIG)
        await self.send(id, WEIGHTS_FILE, weights)
        await self.uploads.sessions.complete(self.principal, id)
        return id

    async def at_rest(self) -> None:
        """Until the workshop does nothing, whether it has succeeded or not."""
        async with asyncio.timeout(30):
            while not self.uploads.workshop.idle:  # noqa: ASYNC110 - it has no event for that
                await asyncio.sleep(0.01)

    async def end_of(self, id: str, seconds: float = 30) -> Upload:
        """The upload, once it is over and its pieces are gone."""
        async with asyncio.timeout(seconds):
            while True:
                upload = await self.uploads.sessions.get(self.principal, id)
                names = await asyncio.to_thread(self.blobs.objects.names, f"uploads/{id}")
                if upload.state not in ("uploading", "validating") and not names:
                    return upload
                await asyncio.sleep(0.01)


@asynccontextmanager
async def upload_house(
    database: Database,
    blobs: BlobStore,
    principal: Principal,
    server_id: str = "server_1",
    settings: UploadSettings | None = None,
    examine: Callable[[Path, object], Report] | None = None,
) -> AsyncIterator[House]:
    """One server's uploads, its workshop at work until the block ends."""
    validator: Any = SimpleNamespace(examine=examine or Reader().examine)
    base: Any = SimpleNamespace(fingerprint="base")
    registry = Registry(database, blobs, base, "base", AdapterLimits(), validator)
    made = Settings(model=ModelSettings(path="", served_model_name="base"), uploads=settings or UploadSettings())
    uploads = Uploads(database, blobs, registry, Tenants(database, PEPPER), made, server_id)
    try:
        yield House(database, blobs, registry, uploads, principal)
    finally:
        await uploads.workshop.stop()
