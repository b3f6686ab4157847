"""Complete uploads become revisions in the background. Uploads are checked in a sandbox, stored, and registered in one
transaction.

`Ingest` makes a revision from files. The stored and digested bytes are exactly the bytes that the engine reads later. A
crash between storing and registering leaves blobs without a row, which `BlobCollector.sweep` removes.

`UploadWorker` runs one server's jobs. Every upload in the state `validating` belongs to one server. If a server dies,
other servers adopt its uploads. An upload is rejected if MAX_ATTEMPTS servers have died while they checked it.
Temporary failures (of the database, the store, the sandbox) do not change the upload, and `tend` starts its checks
again until CHECK_SECONDS are over. Fetching and checking have separate slots, and each tenant has a share of them. So
imports from a slow place delay neither checks nor other tenants.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.authority import actor_of
from loramux.accounts.tenants.entities import Change
from loramux.accounts.tenants.errors import TenantsError
from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.deletion import BlobCollector
from loramux.catalog.registry.entities import AdapterInfo, adapter_info, revision_info
from loramux.catalog.registry.errors import (
    SHOWN,
    AdapterNotFound,
    BaseRetired,
    InvalidName,
    RegistryError,
    RevisionUnavailable,
    TooManyAdapters,
    ValidationUnavailable,
)
from loramux.catalog.registry.resolver import BaseModels, check_adapter_name
from loramux.catalog.uploads.errors import InvalidUpload, UploadNotFound, UploadRejected, UploadSuperseded, rejected
from loramux.catalog.uploads.imports import Importer, decode_source
from loramux.catalog.uploads.parts import FOLDER, assemble, folder_of
from loramux.catalog.validation.jobs import ReportWarning, ValidationReport
from loramux.catalog.validation.validator import BaseValidators
from loramux.common.bundle import BUNDLE_FILE
from loramux.common.errors import Rejection
from loramux.common.identity import Principal, TenantId
from loramux.common.jobs import SERVER, JobRunner, TenantSlots, ThreadPool
from loramux.common.sandbox.sandbox import SandboxDied
from loramux.common.settings.serving import AdapterLimits
from loramux.common.units import DAY
from loramux.data.entities import EventDetail, Upload, UploadOutcome
from loramux.data.records.adapters import AdapterRepository, RevisionContent, RevisionRow, Stamp
from loramux.data.records.aliases import AliasRepository
from loramux.data.records.contents import register_revision
from loramux.data.records.database import CONTENTS, Database, advisory_lock
from loramux.data.records.errors import RecordsError
from loramux.data.records.training_versions import TrainingVersionRepository
from loramux.data.records.uploads import VALIDATING, UploadJob, UploadJobs, UploadPart, UploadRepository
from loramux.data.records.webhooks import REJECTED, EventRepository, stored
from loramux.data.storage.blobs import BlobStore, files_of
from loramux.data.storage.errors import StorageError
from loramux.money.limits.definitions import AdapterQuota, adapter_quota

if TYPE_CHECKING:
    from loramux_adapters.plan import PlanLimits

THREADS, THREADS_PER_TENANT = 8, 2
OnRegistered = Callable[[AsyncSession, RevisionRow], Awaitable[None]]
"""A function that runs in the transaction that registers the revision. The function may raise UploadSuperseded to roll
back.
"""
CHECKS, CHECKS_PER_TENANT = 2, 1
"""Maximum number of uploads that are checked and registered at a time. The number is limited because a sandbox needs a
core and much memory.
"""
FETCHES, FETCHES_PER_TENANT = 16, 2
"""Maximum number of imports that are fetched, or wait in the staging folder for their check."""
MAX_ATTEMPTS = 3
MAX_UNAVAILABLE = 5
"""Number of times that the checks may be unavailable on one server before it refuses the upload."""
KEEP_FINISHED = 30 * DAY
"""The time for which a finished upload is listed."""
TRANSIENT = (RecordsError, StorageError, ValidationUnavailable)
"""Temporary failures: the same upload may succeed later."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """Checked files of an upload, in a staging folder that belongs to the upload."""

    adapter: str
    """The adapter's own name."""
    promote: bool
    """True: the default alias moves to a new revision."""
    folder: Path
    report: ValidationReport
    quota: AdapterQuota
    """The tenant's limits, read once for the check and the registration."""


class Ingest:
    """Turns files into revisions."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        blob_gc: BlobCollector,
        bases: BaseModels,
        limits: AdapterLimits,
        validators: BaseValidators,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._blob_gc = blob_gc
        self._bases = bases
        self._limits = limits
        self._validators = validators
        self._threads = ThreadPool("ingest", THREADS, THREADS_PER_TENANT)

    async def check_name(self, principal: Principal, name: str) -> str:
        """Return the adapter's own name if the caller may upload under `name` and has room for a revision.

        Raises InvalidName, AdapterNotFound or TooManyAdapters.
        """
        adapter = check_adapter_name(principal.tenant_name, name, self._bases.names)
        if not principal.may_use(f"{principal.tenant_name}/{adapter}"):
            raise AdapterNotFound(name)
        async with self._database.read() as session:
            quota = await adapter_quota(session, principal, self._limits)
            await self._check_counts(AdapterRepository(session, principal.tenant), adapter, quota)
            if await TrainingVersionRepository(session, principal.tenant).of_name(adapter):
                raise InvalidName(
                    f"`{principal.tenant_name}/{adapter}` is a training adapter; unload it first, or choose another "
                    "name",
                    "name",
                )
        return adapter

    def check_base(self, name: str | None) -> None:
        """Raise InvalidUpload if this server does not serve the named base, or BaseRetired if the base is retired."""
        if name is None or self._bases.named(name) is not None:
            return
        absent = self._bases.absent(name)
        if absent is not None and absent.is_retired:
            raise BaseRetired(
                f"the base model `{name}` is retired and takes no more adapters; train and upload one for "
                f"{self._bases.way_out(absent)}",
                "base_model",
            )
        if absent is not None:
            raise RevisionUnavailable(
                f"the base model `{name}` is being loaded, or cannot be at present; try again later", "base_model"
            )
        raise InvalidUpload(
            f"'{name[:SHOWN]}' is no base model of this server: it serves {', '.join(self._bases.names)}", "base_model"
        )

    async def check_files(
        self,
        principal: Principal,
        folder: Path,
        base_model: str | None,
        ignored: Sequence[str] = (),
        *,
        compare: bool = True,
    ) -> tuple[ValidationReport, AdapterQuota]:
        """Check files against a base and the tenant's limits. Raises the errors of `check_base`, and
        ValidationUnavailable.

        `base_model` is the base that the caller has named; None: the files decide. The report names the `ignored`
        files, which were announced but not stored. With `compare`, outputs are compared with PEFT's.
        """
        self.check_base(base_model)
        async with self._database.read() as session:
            quota = await adapter_quota(session, principal, self._limits)
        limits = self._plan_limits(quota.rank, quota.file_bytes)
        if quota.modules is not None:
            limits = replace(limits, max_modules=quota.modules)
        try:
            examine = self._validators.examine if compare else self._validators.check
            report = await self._threads.run(principal.tenant, examine, folder, limits, base_model)
        except SandboxDied as error:
            raise ValidationUnavailable("uploads cannot be checked at present; try again in a minute") from error
        return report.followed_by(ValidationReport(checks=(), warnings=_notes(ignored))), quota

    async def compare(self, folder: Path, base_model: str) -> ValidationReport | None:
        """Compare the outputs of an adapter that passed `check_files` with PEFT's; None if the settings say not to.

        Raises SandboxDied.
        """
        limits = self._plan_limits(self._limits.max_rank, self._limits.max_bytes)
        return await self._threads.run(SERVER, self._validators.compare, folder, limits, base_model)

    def _plan_limits(self, max_rank: int, max_bytes: int) -> PlanLimits:
        from loramux_adapters.plan import PlanLimits

        return PlanLimits(max_rank, max_bytes, self._limits.max_vocabulary_bytes)

    async def register(self, principal: Principal, staged: StagedUpload, on_registered: OnRegistered) -> AdapterInfo:
        """Store and register checked files; return the adapter in the state of the registering transaction.

        Raises UploadRejected, TooManyAdapters, UploadSuperseded or StorageUnavailable; in these cases no revision is
        registered.
        """
        if staged.report.refusal is not None:
            raise UploadRejected(staged.report.refusal)
        content = await self.seal(principal.tenant, staged.folder, staged.report)
        info = None
        try:
            while info is None:  # repeat this if a concurrent deletion has removed the same content
                await self._threads.run(principal.tenant, self._blobs.publish, staged.folder, content.digest)
                info = await self._register(principal, staged, content, on_registered)
        except (RegistryError, UploadSuperseded):
            await self._blob_gc.remove_unused(frozenset({content.digest}))
            raise
        except BaseException:  # it is unknown whether the registration was committed, so the collector reads the rows
            self._blob_gc.remove_later(content.digest)
            raise
        await self._threads.run(principal.tenant, self._blobs.adopt, staged.folder, content.digest)
        return info

    async def seal(self, tenant: TenantId, folder: Path, report: ValidationReport) -> RevisionContent:
        """Make checked files read-only, and return the facts of their content. Raises ValidationUnavailable."""
        return await self._threads.run(tenant, self._seal, folder, report)

    def _seal(self, folder: Path, report: ValidationReport) -> RevisionContent:
        assert report.found is not None, "only sound files are registered"
        base = self._bases.named(report.base_model or "")
        if base is None:
            raise ValidationUnavailable("the base model was unloaded while the upload was checked; try again later")
        return RevisionContent(
            digest=self._blobs.seal(folder),
            rank=report.found.rank,
            size_bytes=sum((folder / name).stat().st_size for name in files_of(folder)),
            base=base.description.fingerprint,
            base_model=base.name,
            bundle=bundle.read_text() if (bundle := folder / BUNDLE_FILE).exists() else None,
        )

    async def _register(
        self, principal: Principal, staged: StagedUpload, content: RevisionContent, on_registered: OnRegistered
    ) -> AdapterInfo | None:
        """Register the content; None if the store does not have it any more."""
        async with self._database.begin() as session:
            await advisory_lock(session, CONTENTS)
            adapters = AdapterRepository(session, principal.tenant)
            await self._check_counts(adapters, staged.adapter, staged.quota)
            await self.check_bytes(session, principal.tenant, staged.quota, content)
            # all tenants wait for this lock, so this code never waits for the tenant's turn under it
            if not await self._threads.run(SERVER, self._blobs.is_stored, content.digest):
                return None
            version, stamp = await adapters.version(staged.adapter), Stamp(self._database.now(), principal.key_id)
            adapter, revision = await register_revision(
                session, principal.tenant, staged.adapter, content, stamp, promote=staged.promote
            )
            if adapter.version != version:
                info = revision_info(f"{principal.tenant_name}/{adapter.name}", revision)
                audit = Change(session, actor_of(principal), stamp.at)
                await audit.note("adapter.upload", info.name, tenant=principal.tenant, after=info)
            await on_registered(session, revision)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
            return adapter_info(principal.tenant_name, adapter, aliases[adapter.id])

    async def _check_counts(self, adapters: AdapterRepository, name: str, quota: AdapterQuota) -> None:
        if await adapters.count() >= quota.adapters and not await adapters.exists(name):
            raise TooManyAdapters(
                f"you have {quota.adapters} adapters, the most that is allowed; delete one first, or ask for more",
                "name",
            )
        if await adapters.count_revisions(name) >= self._limits.max_revisions:
            raise TooManyAdapters(
                f"`{name}` has {self._limits.max_revisions} revisions, the most that an adapter may have "
                "(adapters.max_revisions); delete some first, or let them expire (ttl_s)",
                "name",
                "revisions",
            )

    async def check_bytes(
        self, session: AsyncSession, tenant: TenantId, quota: AdapterQuota, content: RevisionContent
    ) -> None:
        """Raise TooManyAdapters if the tenant's adapters and this content have more bytes than its quota."""
        if quota.total_bytes is None:
            return
        have = await AdapterRepository(session, tenant).bytes_besides(content.digest)
        have += await TrainingVersionRepository(session, tenant).bytes_besides(content.digest)
        if have + content.size_bytes > quota.total_bytes:
            raise TooManyAdapters(
                f"your adapters have {have} bytes and this one {content.size_bytes}; together they may have "
                f"{quota.total_bytes} (adapter_bytes). Delete one first, or ask for more",
                "name",
            )


def _notes(ignored: Sequence[str]) -> tuple[ReportWarning, ...]:
    if not ignored:
        return ()
    message = f"These files mean nothing for serving and were not taken: {', '.join(ignored)[:2000]}."
    return (ReportWarning(code="files_ignored", field="files", message=message),)


class UploadWorker:
    """One server's jobs. `tend` must be called periodically."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        ingest: Ingest,
        importer: Importer,
        tenants: Tenants,
        server_id: str,
    ) -> None:
        """`server_id` counts as alive as long as the process runs (`records.leases.server_liveness`)."""
        self.server_id = server_id
        self._database = database
        self._blobs = blobs
        self._ingest = ingest
        self._importer = importer
        self._tenants = tenants
        self._checks = TenantSlots(CHECKS, CHECKS_PER_TENANT)
        self._fetches = TenantSlots(FETCHES, FETCHES_PER_TENANT)
        self._threads = ThreadPool("uploads", THREADS, THREADS_PER_TENANT)
        self.jobs = JobRunner("upload", self._find, self._run)
        self._awaited: dict[str, asyncio.Future[AdapterInfo]] = {}
        self._unavailable: Counter[str] = Counter()
        """Attempts of uploads that failed because checks were unavailable, since this server started."""

    @contextmanager
    def awaiting(self, id: str) -> Iterator[asyncio.Future[AdapterInfo]]:
        """Yield a future of the upload's end: the registered adapter, or the error that ended this attempt."""
        ended = self._awaited[id] = asyncio.get_running_loop().create_future()
        try:
            yield ended
        finally:
            del self._awaited[id]
            ended.cancel()

    async def tend(self) -> None:
        """Adopt uploads of dead servers, start failed jobs again, and expire abandoned sessions."""
        async with self._database.begin() as session:
            jobs = UploadJobs(session)
            await jobs.adopt_abandoned(self.server_id)
            expired = await jobs.expire(self._database.now())
        self.jobs.look()
        for id in expired:
            await self._threads.run(SERVER, self._blobs.objects.delete_under, folder_of(id))

    async def sweep(self) -> int:
        """Remove parts of closed uploads, and delete old uploads; return the number of uploads whose parts were
        removed.
        """
        async with self._database.begin() as session:
            await UploadJobs(session).forget(self._database.now() - KEEP_FINISHED)
        names = await self._threads.run(SERVER, self._blobs.objects.names, FOLDER)
        stored = {name.split("/")[1] for name in names}
        async with self._database.read() as session:
            closed = await UploadJobs(session).closed(stored)
        for id in closed:
            await self._threads.run(SERVER, self._blobs.objects.delete_under, folder_of(id))
        return len(closed)

    async def _find(self) -> list[UploadJob]:
        async with self._database.read() as session:
            return await UploadJobs(session).of(self.server_id)

    async def _run(self, job: UploadJob) -> None:
        try:
            info = await self._process(job)
            self._unavailable.pop(job.id, None)
            self._end(job.id, info)
            await self._threads.run(job.tenant, self._blobs.objects.delete_under, folder_of(job.id))
        except TRANSIENT as error:
            logger.error("the upload %s is tried again: %s", job.id, error)
            self._end(job.id, error)
        except UploadSuperseded as error:
            logger.info("%s", error)
            self._end(job.id, UploadNotFound(job.id))
        except Exception as error:
            logger.exception("the upload %s is tried again", job.id)
            self._end(job.id, error)
        except asyncio.CancelledError:
            self._end(job.id, ValidationUnavailable("the upload was stopped; send it again"))
            raise

    def _end(self, id: str, outcome: AdapterInfo | Exception) -> None:
        """Pass the outcome to the caller that waits for the upload, if there is one."""
        ended = self._awaited.get(id)
        if ended is None or ended.done():
            return
        if isinstance(outcome, Exception):
            ended.set_exception(outcome)
        else:
            ended.set_result(outcome)

    async def _process(self, job: UploadJob) -> AdapterInfo | Exception:
        """Make the upload a revision, or write and return the reason why this is not possible."""
        report: ValidationReport | None = None
        try:
            if job.attempts > MAX_ATTEMPTS:
                raise rejected("validation_failed", None, "The checks did not survive these files.")
            if self._unavailable[job.id] >= MAX_UNAVAILABLE:
                raise rejected(
                    "validation_unavailable",
                    None,
                    f"The checks could not run in {MAX_UNAVAILABLE} attempts; the server's log has the reason. Report "
                    "it to the operator, and upload the files again later.",
                )
            if job.expires_at <= self._database.now():
                raise rejected("validation_unavailable", None, "The checks were not possible in time. Upload it again.")
            upload, parts = await self._read(job)
            principal = await self._author(job, upload)
            async with AsyncExitStack() as stack:
                folder = stack.enter_context(self._blobs.staging())
                if upload.source is not None:
                    await stack.enter_async_context(self._fetches.slot(job.tenant))
                    await self._importer.fetch(decode_source(upload.source), job.tenant_name, folder)
                await stack.enter_async_context(self._checks.slot(job.tenant))
                for file in upload.files:
                    own = [part for part in parts if part.file == file.name]
                    await assemble(self._threads.of(job.tenant), self._blobs.objects, file, own, folder)
                report, quota = await self._ingest.check_files(principal, folder, upload.base_model, upload.ignored)
                staged = StagedUpload(upload.adapter, upload.promote, folder, report, quota)
                return await self._ingest.register(principal, staged, partial(self._accept, job, report))
        except ValidationUnavailable:
            self._unavailable[job.id] += 1
            raise
        except (*TRANSIENT, UploadSuperseded):
            raise
        except (RegistryError, TenantsError) as error:
            await self._reject(job, Rejection(code=error.code, field=error.field, message=error.message), report)
            return error
        except Exception as error:
            logger.exception("the upload %s could not be checked", job.id)
            refusal = Rejection(code="internal_error", field=None, message="The server failed; please report it.")
            await self._reject(job, refusal, report)
            return error

    async def _author(self, job: UploadJob, upload: Upload) -> Principal:
        """Return the platform as a caller for the upload's submitter, whichever server the submitter has called."""
        system = await self._tenants.system_principal(job.tenant_name)
        if upload.submitter is None:
            return system
        return msgspec.structs.replace(system, key_id=upload.submitter.actor, origin=upload.submitter.origin)

    async def _read(self, job: UploadJob) -> tuple[Upload, list[UploadPart]]:
        async with self._database.read() as session:
            uploads = UploadRepository(session, job.tenant)
            upload, parts = await uploads.get(job.id), await uploads.parts(job.id)
        if upload is None:
            raise UploadSuperseded(f"upload {job.id} was cancelled")
        return upload, parts

    async def _accept(
        self, job: UploadJob, report: ValidationReport, session: AsyncSession, revision: RevisionRow
    ) -> None:
        """Write the upload's revision, in the transaction that registers it."""
        outcome = UploadOutcome(
            revision=revision.number, digest=revision.digest, report=msgspec.json.encode(report).decode()
        )
        await self._finish(UploadRepository(session, job.tenant), job.id, outcome)

    async def _reject(self, job: UploadJob, refusal: Rejection, report: ValidationReport | None) -> None:
        encoded = None if report is None else msgspec.json.encode(report).decode()
        async with self._database.begin() as session:
            uploads = UploadRepository(session, job.tenant)
            upload = await self._finish(uploads, job.id, UploadOutcome(error=stored(refusal), report=encoded))
            detail = EventDetail(upload=job.id, error=stored(refusal))
            await EventRepository(session, job.tenant).add(REJECTED, upload.adapter, detail, self._database.now())

    async def _finish(self, uploads: UploadRepository, id: str, outcome: UploadOutcome) -> Upload:
        upload = await uploads.locked(id)
        if upload is None or upload.state != VALIDATING:
            raise UploadSuperseded(f"upload {id} is owned by another server or already finished")
        await uploads.finish(id, outcome, self._database.now())
        return upload
