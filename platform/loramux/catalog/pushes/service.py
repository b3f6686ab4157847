"""Pushes: a trainer's weights become the next version of a training adapter, within a second.

A push goes the way of an upload, without what a trainer cannot wait for or does not need. The files stage checks the
header, the shapes and the values before anything is installed. The comparison with PEFT runs afterwards, on a sample
of the versions, and marks them. There are no parts, aliases, events or audit entries. A version that falls out of the
window is deleted with its row; its files follow as soon as no open request uses them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from loramux.catalog.pushes.errors import AlreadyLoaded, TooManyPushes, TooManySeries
from loramux.catalog.pushes.places import Places
from loramux.catalog.registry.deletion import BlobCollector
from loramux.catalog.registry.errors import AdapterNotFound, ChangeConflict
from loramux.catalog.registry.resolver import BaseModels, check_adapter_name, own_adapter
from loramux.catalog.uploads.errors import UploadRejected
from loramux.catalog.uploads.ingest import Ingest
from loramux.catalog.uploads.sessions import max_bytes
from loramux.catalog.validation.jobs import ValidationReport
from loramux.common.identity import Principal, TenantId
from loramux.common.jobs import SERVER, TenantSlots, ThreadPool
from loramux.common.sandbox.sandbox import SandboxDied
from loramux.common.settings.serving import AdapterLimits, PushSettings
from loramux.common.units import SECOND
from loramux.data.records.adapters import AdapterRepository, RevisionContent, Stamp
from loramux.data.records.base import to_struct
from loramux.data.records.database import CONTENTS, Database, advisory_lock
from loramux.data.records.training_versions import (
    ExpiredVersions,
    TrainingVersionRepository,
    TrainingVersionRow,
    series_of,
)
from loramux.data.storage.blobs import BlobStore, files_of
from loramux.data.storage.errors import StorageError
from loramux.money.limits.definitions import AdapterQuota

PUSHES, PUSHES_PER_TENANT = 2, 1
"""Maximum number of pushes that are checked and registered at a time."""
WAITING_PER_TENANT = 4
"""Maximum number of a tenant's pushes that are being checked or wait for their turn."""
THREADS, THREADS_PER_TENANT = 4, 1

ParityOutcome = Literal["passed", "failed", "not_run"]

logger = logging.getLogger(__name__)


class TrainingVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A live version of a training adapter. Times in microseconds since the epoch."""

    adapter: str
    """The adapter: `tenant/policy`."""
    number: int
    series: str
    digest: str
    base_model: str
    rank: int
    size_bytes: int
    created_at: int
    parity: str | None
    """`passed`, `failed` or `not_run`; None if the version was not sampled, or is not compared yet."""
    parity_detail: str | None

    @property
    def name(self) -> str:
        """Return the version's name: `tenant/policy@12`."""
        return f"{self.adapter}@{self.number}"


class PushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's request for a push."""

    name: str
    """The adapter's name: `adapter` or `tenant/adapter`."""
    replace: bool = False
    """True: a name that exists gets a new version."""
    base_model: str | None = None
    """The adapter's base; None: the files decide the base."""


class PushService:
    """The training adapters of every tenant."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        blob_gc: BlobCollector,
        bases: BaseModels,
        ingest: Ingest,
        settings: PushSettings,
        limits: AdapterLimits,
        retire: Callable[[Iterable[str]], None],
    ) -> None:
        """`retire` tells the engines which weights no name leads to any more."""
        self._database = database
        self._blobs = blobs
        self._blob_gc = blob_gc
        self._bases = bases
        self._ingest = ingest
        self._settings = settings
        self._retire = retire
        self._places = Places(settings, max_bytes(limits))
        self._threads = ThreadPool("pushes", THREADS, THREADS_PER_TENANT)
        self._slots = TenantSlots(PUSHES, PUSHES_PER_TENANT)
        self._waiting: Counter[TenantId] = Counter()
        self._latest: dict[tuple[TenantId, str], TrainingVersionRow] = {}
        """The latest version of each series that is not compared with PEFT yet."""
        self._compared: dict[tuple[TenantId, str], int] = {}
        """Times of the latest comparisons."""

    async def push_from(
        self, principal: Principal, request: PushRequest, place: str, config: bytes | None
    ) -> TrainingVersion:
        """Install the adapter at a place of this machine (`Places.copy`). Raises the errors of `push`, InvalidPlace,
        PlaceNotAllowed and PlaceNotFound.
        """
        async with self._turn(principal):
            self._check_name(principal, request.name)
            with self._blobs.staging() as folder:
                copy = self._places.copy
                await self._threads.run(principal.tenant, copy, principal.tenant_name, place, config, folder)
                return await self._install(principal, request, folder)

    async def push(self, principal: Principal, request: PushRequest, folder: Path) -> TrainingVersion:
        """Install the files of a staging folder as the next version of a name, and remove older versions.

        The same files again change nothing. Raises UploadRejected for files that cannot be served, InvalidName,
        AdapterNotFound, AlreadyLoaded, ChangeConflict, TooManySeries, TooManyAdapters, TooManyPushes or
        ValidationUnavailable.
        """
        async with self._turn(principal):
            self._check_name(principal, request.name)
            return await self._install(principal, request, folder)

    async def remove(self, principal: Principal, name: str) -> None:
        """Remove all versions of a name; running requests finish. Raises AdapterNotFound."""
        own = own_adapter(principal, name)
        async with self._database.begin() as session:
            removed = await TrainingVersionRepository(session, principal.tenant).remove(own)
        if not removed:
            raise AdapterNotFound(name)
        await self._drop(principal.tenant, {row.digest for row in removed})

    async def all(self, principal: Principal, search: str = "") -> list[TrainingVersion]:
        """List the versions of the tenant that the caller may use, the latest push first.

        `search` limits the list to names that contain this text.
        """
        async with self._database.read() as session:
            rows = await TrainingVersionRepository(session, principal.tenant).all()
        versions = [_version(principal, row) for row in rows if search in row.name]
        return [one for one in versions if principal.may_use(one.adapter)]

    async def expire(self) -> None:
        """Remove the series that had no push for the time of the settings."""
        before = self._database.now() - self._settings.idle_seconds * SECOND
        async with self._database.begin() as session:
            removed = await ExpiredVersions(session).remove_before(before)
        for tenant in {tenant for tenant, _ in removed}:
            await self._drop(tenant, {digest for owner, digest in removed if owner == tenant})

    async def compare_next(self) -> None:
        """Compare the outputs of one version with PEFT's, if a comparison is due, and mark the version."""
        now = self._database.now()
        since = now - round(self._settings.parity_interval_s * SECOND)
        self._compared = {series: at for series, at in self._compared.items() if at > since}
        due = next((series for series in self._latest if series not in self._compared), None)
        if due is None:
            return
        version, self._compared[due] = self._latest.pop(due), now
        report = await self._compared_with_peft(version)
        if report is None:
            return
        outcome, detail = _outcome(report)
        async with self._database.begin() as session:
            await ExpiredVersions(session).mark(version.id, outcome, detail)
        if outcome == "failed":
            logger.warning("the training adapter %s@%d differs from PEFT: %s", version.name, version.number, detail)

    @asynccontextmanager
    async def _turn(self, principal: Principal) -> AsyncIterator[None]:
        tenant = principal.tenant
        if self._waiting[tenant] >= WAITING_PER_TENANT:
            raise TooManyPushes(
                f"{WAITING_PER_TENANT} of your pushes are being checked or wait; push again when they are answered",
                "lora_name",
            )
        self._waiting[tenant] += 1
        try:
            async with self._slots.slot(tenant):
                yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _check_name(self, principal: Principal, name: str) -> str:
        adapter = check_adapter_name(principal.tenant_name, name, self._bases.names)
        if not principal.may_use(f"{principal.tenant_name}/{adapter}"):
            raise AdapterNotFound(name)
        return adapter

    async def _install(self, principal: Principal, request: PushRequest, folder: Path) -> TrainingVersion:
        base = request.base_model if request.base_model in self._bases.names else None
        report, quota = await self._ingest.check_files(principal, folder, base, compare=False)
        if report.refusal is not None:
            raise UploadRejected(report.refusal)
        content = await self._ingest.seal(principal.tenant, folder, report)
        publish = partial(self._blobs.publish, durable=False)
        try:
            registered = None
            while registered is None:  # repeat this if a concurrent removal has deleted the same content
                await self._threads.run(principal.tenant, publish, folder, content.digest)
                registered = await self._register(principal, request, content, quota)
        except BaseException:
            self._blob_gc.remove_later(content.digest)
            raise
        version, removed = registered
        await self._threads.run(principal.tenant, self._blobs.adopt, folder, content.digest)
        self._latest[principal.tenant, version.series] = version
        await self._drop(principal.tenant, {row.digest for row in removed})
        return _version(principal, version)

    async def _register(
        self, principal: Principal, request: PushRequest, content: RevisionContent, quota: AdapterQuota
    ) -> tuple[TrainingVersionRow, list[TrainingVersionRow]] | None:
        """Insert the version, and delete older ones; return both. None if the store does not have the content any
        more.
        """
        name = self._check_name(principal, request.name)
        async with self._database.begin() as session:
            await advisory_lock(session, CONTENTS)
            # all tenants wait for this lock, so this code never waits for the tenant's turn under it
            if not await self._threads.run(SERVER, self._blobs.is_stored, content.digest):
                return None
            versions = TrainingVersionRepository(session, principal.tenant)
            have = await versions.of_name(name)
            if have and (have[0].digest, have[0].base_model) == (content.digest, content.base_model):
                return have[0], []
            if have and not request.replace:
                raise AlreadyLoaded(request.name)
            if await AdapterRepository(session, principal.tenant).exists(name):
                raise ChangeConflict(
                    "adapter_is_permanent",
                    f"`{principal.tenant_name}/{name}` is an adapter that was uploaded; push under another name.",
                    "lora_name",
                )
            await self._check_series(versions, series_of(name))
            version = await versions.add(name, content, Stamp(self._database.now(), principal.key_id))
            removed = await versions.remove_older(version.series, self._settings.keep)
            await self._ingest.check_bytes(session, principal.tenant, quota, content)
            return version, removed

    async def _check_series(self, versions: TrainingVersionRepository, series: str) -> None:
        have, most = await versions.series(), self._settings.series_per_tenant
        if series not in have and len(have) >= most:
            raise TooManySeries(
                f"you have {len(have)} series of training adapters, the most that is allowed "
                "(pushes.series_per_tenant); unload one first, or wait until it expires",
                "lora_name",
            )

    async def _drop(self, tenant: TenantId, digests: Collection[str]) -> None:
        """Let the engines and the store forget contents whose rows were deleted."""
        if not digests:
            return
        self._retire(await self._blob_gc.uncallable(tenant, digests))
        for digest in digests:
            self._blob_gc.remove_later(digest)

    async def _compared_with_peft(self, version: TrainingVersionRow) -> ValidationReport | None:
        try:
            with self._blobs.staging() as folder:  # the version may be removed while it is compared
                await self._threads.run(SERVER, self._link, version.digest, folder)
                return await self._ingest.compare(folder, version.base_model)
        except (StorageError, SandboxDied, FileNotFoundError) as error:
            logger.info("the training adapter %s@%d was not compared: %s", version.name, version.number, error)
            return None

    def _link(self, digest: str, folder: Path) -> None:
        content = self._blobs.directory(digest)
        for name in files_of(content):
            os.link(content / name, folder / name)


def _version(principal: Principal, row: TrainingVersionRow) -> TrainingVersion:
    return to_struct(TrainingVersion, row, adapter=f"{principal.tenant_name}/{row.name}")


def _outcome(report: ValidationReport) -> tuple[ParityOutcome, str]:
    """Return the mark of a version, and its reason or its method."""
    if report.refusal is not None:
        return "failed", report.refusal.message
    passed = [check.detail for check in report.checks if check.outcome == "passed"]
    if passed:
        return "passed", "; ".join(passed)
    return "not_run", "; ".join(check.detail for check in report.checks)
