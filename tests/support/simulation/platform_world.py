"""The whole platform as a server opens it: uploads, registry, background jobs and requests.

Opened by the product's own `open_platform`, with its database, object store, validator and engine simulated. It checks
the invariants of `world`, and these of uploads: every upload ends; its client learns of its revision and no other; the
revision serves exactly the weights that were sent; at quiescence no upload hangs between two states, and neither parts
nor contents are left that no row needs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from sqlalchemy import text

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.resolver import engine_key
from loramux.catalog.uploads.sessions import CHECK_SECONDS, AnnouncedFile, UploadRequest
from loramux.common.bundle import Bundle
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.data.records.database import Database
from loramux.data.storage.blobs import CONFIG_FILE, FILES, WEIGHTS_FILE, BlobStore, place_of
from loramux.data.storage.errors import StorageFaults
from loramux.server import platform as platform_module
from loramux.serving import lifecycle as lifecycle_module
from simulation.database import PEPPER
from simulation.loop import current_loop
from simulation.plan import Call, UploadCall
from simulation.storage import SimulatedObjects, SimulatedValidator
from simulation.world import END_SECONDS, TOKENIZER, Outcome, Violation, World

CONFIG = b"{}"


class PlatformWorld(World):
    """A server with everything that `open_platform` opens."""

    @asynccontextmanager
    async def _server(self, database: Database) -> AsyncIterator[None]:
        self.database = database
        self.objects = SimulatedObjects(self.plan)
        self.tenants = Tenants(database, PEPPER)
        self.digests: dict[str, str] = {}
        """Weights by the digest that they were registered under."""
        blobs = BlobStore(self.objects, self.folder / "cache", StorageFaults())

        @asynccontextmanager
        async def open_database(settings: Settings, wait: object) -> AsyncIterator[Database]:
            yield database

        async def open_tenants(settings: Settings, database: Database) -> Tenants:
            return self.tenants

        async def describe(folder: object) -> tuple[Any, Any, Bundle]:
            return SimpleNamespace(fingerprint="base"), TOKENIZER, Bundle()

        base = {"name": "tiny", "path": "/model", "engines": {"min": self.plan.num_engines}}
        model = {"path": "/model", "served_model_name": "tiny"}
        settings = msgspec.convert({"model": model, "bases": [base]}, Settings)
        with (
            mock.patch.multiple(
                platform_module,
                open_database=open_database,
                _open_tenants=open_tenants,
                open_store=lambda _: blobs,
            ),
            mock.patch.multiple(
                lifecycle_module,
                describe=describe,
                BaseValidators=lambda *_: SimulatedValidator(self.plan, self.rng),
                Validator=lambda *_: None,
            ),
        ):
            async with platform_module.open_platform(settings, self._launch) as platform:
                self.platform, self.usage, self.service = platform, platform.usage, platform.completions
                self.engines = platform.bases["tiny"].engines
                yield

    @property
    def may_log_errors(self) -> bool:
        plan = self.plan
        return bool(super().may_log_errors or plan.storage_outages or plan.validator_dies)

    def _model_of(self, call: Call) -> str:
        return "tiny"

    def _actors(self) -> list[Coroutine[Any, Any, None]]:
        for outcome in self.outcomes:
            outcome.call = replace(outcome.call, adapter=None)
        return [*super()._actors(), *(self._uploader(call) for call in self.plan.uploads)]

    async def _uploader(self, call: UploadCall) -> None:
        await asyncio.sleep(call.at)
        principal = self.template.principals[call.tenant]
        try:
            async with asyncio.timeout(END_SECONDS):
                end = await self._upload(principal, call)
        except TimeoutError:
            raise Violation(f"the upload has not ended after {END_SECONDS} s: {call}") from None
        except LoramuxError as error:
            end = error.code
            self._check_refusal(call, error)
        self.trace.append(f"{current_loop().time():.6f} {call.name} {call.content} {end}")

    async def _upload(self, principal: Principal, call: UploadCall) -> str:
        files = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: call.content.encode()}
        announced = {name: AnnouncedFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        request = UploadRequest(call.name, announced, promote=call.promote)
        if call.at_once:
            digest, model = await self._upload_at_once(principal, call, request, files)
        else:
            digest, model = await self._upload_in_parts(principal, call, request, files)
        if digest is None:
            return model
        if self.digests.setdefault(digest, call.content) != call.content:
            raise Violation(f"{call} was told of {digest}, which holds {self.digests[digest]}")
        if call.asks:
            await self._ask_for(principal, call, model, digest)
        if call.deletes:
            await self.platform.adapters.delete(principal, call.name)
        return model

    async def _upload_at_once(
        self, principal: Principal, call: UploadCall, request: UploadRequest, files: dict[str, bytes]
    ) -> tuple[str | None, str]:
        folder = self.folder / call.content
        folder.mkdir()
        for name in FILES:
            (folder / name).write_bytes(files[name])
        uploading = asyncio.create_task(self.platform.uploads.run(principal, request, folder))
        if call.leaves:
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            uploading.cancel()
        try:
            info = await uploading
        except asyncio.CancelledError:
            return None, "left"
        return (info.digest, f"{info.name}@{info.revision}") if call.promote else (None, "kept back")

    async def _upload_in_parts(
        self, principal: Principal, call: UploadCall, request: UploadRequest, files: dict[str, bytes]
    ) -> tuple[str | None, str]:
        uploads = self.platform.uploads
        upload = await uploads.open(principal, request)
        for name, data in files.items():
            size = -(-len(data) // call.parts)
            for start in range(0, len(data), size):
                await uploads.parts.receive(principal, upload.id, name, start, _body(data[start : start + size]))
                await asyncio.sleep(self.rng.uniform(0, 0.2))
            if call.leaves:
                return None, "left"
        await uploads.complete(principal, upload.id)
        while upload.state not in ("ready", "rejected", "expired"):
            await asyncio.sleep(0.3)
            upload = await uploads.get(principal, upload.id)
        if (upload.state == "rejected") != call.content.startswith("bad") and not self.plan.validator_dies:
            raise Violation(f"{call} ended {upload.state}: {upload.outcome}")
        if upload.state != "ready":
            return None, upload.state
        return upload.outcome.digest, f"tenant{call.tenant}/{call.name}@{upload.outcome.revision}"

    async def _ask_for(self, principal: Principal, call: UploadCall, model: str, digest: str) -> None:
        """Send a request to the revision; its tokens are those of its weights."""
        asked = Call(at=0.0, tenant=call.tenant, adapter=None, prompt=(prompt := [98, 99, 100]), max_tokens=4)
        outcome = Outcome(asked)
        try:
            generation = await self.service.begin(principal, self._request(asked, model))
            async for delta in generation:
                outcome.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        except LoramuxError as error:
            self.trace.append(f"{model}: {error.code}")
        self._check_tokens(outcome, engine_key(principal.tenant, digest), prompt)

    def _check_refusal(self, call: UploadCall, error: LoramuxError) -> None:
        bad = call.content.startswith("bad") and error.code == "weights_invalid"
        unwell = self.plan.faults or self.plan.storage_outages or self.plan.validator_dies
        gone = error.code in ("adapter_not_found", "model_not_found")  # deleted by another upload's client
        # An upload's end is a time of the clock that all servers share: one that jumps over it has ended the upload.
        late = error.code == "validation_unavailable" and any(by >= CHECK_SECONDS for _, by in self.plan.clock_jumps)
        if not (bad or gone or unwell or late):
            raise Violation(f"{call} was refused with {error.code}: {error}")

    async def _settle_down(self) -> None:
        """Wait for the ends of uploads too: one whose client has left is tried again until its checks were unavailable
        MAX_UNAVAILABLE times, UPLOAD_SECONDS apart.
        """
        await super()._settle_down()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while await self._validating():  # noqa: ASYNC110 (nothing tells that an upload has ended)
                    await asyncio.sleep(1.0)

    async def _validating(self) -> list[str]:
        async with self.database.read() as session:
            return list((await session.scalars(text("SELECT id FROM uploads WHERE state = 'validating'"))).all())

    async def _check_records(self, database: Database) -> None:
        await super()._check_records(database)
        if hanging := await self._validating():
            raise Violation(f"uploads hang in `validating`: {hanging}")
        async with database.read() as session:
            states = (await session.execute(text("SELECT id, state FROM uploads"))).all()
            ready = (await session.execute(text("SELECT digest FROM revisions WHERE state = 'ready'"))).scalars().all()
        opened = {row.id for row in states if row.state == "uploading"}
        parts = {name.split("/")[1] for name in self.objects.data if name.startswith("uploads/")}
        if parts - opened and not (self.plan.storage_outages or self.plan.database_outages):
            raise Violation(f"parts are left of {parts - opened}")
        for digest in ready:
            if not {f"{place_of(digest)}/{name}" for name in FILES} <= self.objects.data.keys():
                raise Violation(f"{digest} is ready and its files are not stored")


async def _body(data: bytes) -> AsyncIterator[bytes]:
    yield data
