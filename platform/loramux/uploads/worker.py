"""The upload worker: complete uploads become revisions in the background.

Every upload in the state `validating` belongs to one server. A server that dies leaves its uploads to the others, which
adopt them; one under which MAX_ATTEMPTS servers have died is rejected. Failures that may pass (the database, the store,
the sandbox) leave the upload as it is, and `tend` starts it again until CHECK_SECONDS are over.

Fetching and checking have slots of their own, and each tenant has a share of them: imports from a slow place delay
neither checks nor other tenants.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.errors import Rejection
from loramux.jobs import JobRunner
from loramux.records import Database, Principal, RecordsError
from loramux.records.adapters import RevisionRow
from loramux.records.uploads import VALIDATING, Outcome, Part, Upload, UploadJob, UploadJobs, UploadRepository
from loramux.records.webhooks import REJECTED, EventDetail, EventRepository, stored
from loramux.registry import AdapterInfo, RegistryError, ValidationUnavailable
from loramux.storage import BlobStore, StorageError
from loramux.tenants import Tenants, TenantsError
from loramux.threads import TenantSlots, ThreadPool
from loramux.units import DAY
from loramux.uploads.errors import UploadNotFound, UploadSuperseded, rejected
from loramux.uploads.imports import Importer, decode_source
from loramux.uploads.ingest import Ingest, StagedUpload
from loramux.uploads.parts import FOLDER, assemble, folder_of
from loramux.validation import ValidationReport

CHECKS, CHECKS_PER_TENANT = 2, 1
"""Uploads that are assembled, checked and registered at a time: a sandbox takes a core and much memory."""
FETCHES, FETCHES_PER_TENANT = 16, 2
"""Imports that are fetched, or wait in the staging folder for their check."""
THREADS = 8
MAX_ATTEMPTS = 3
KEEP_FINISHED = 30 * DAY
"""The time for which a finished upload is listed."""

TRANSIENT = (RecordsError, StorageError, ValidationUnavailable)
"""Failures that may pass: the same upload may succeed later."""

logger = logging.getLogger(__name__)


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
        """`server_id` counts as alive for as long as the process is (`records.locks.server_liveness`)."""
        self.server_id = server_id
        self._database = database
        self._blobs = blobs
        self._ingest = ingest
        self._importer = importer
        self._tenants = tenants
        self._checks = TenantSlots(CHECKS, CHECKS_PER_TENANT)
        self._fetches = TenantSlots(FETCHES, FETCHES_PER_TENANT)
        self._threads = ThreadPool("uploads", THREADS)
        self.jobs = JobRunner("upload", self._find, self._run)
        self._awaited: dict[str, asyncio.Future[AdapterInfo]] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or is being looked for."""
        return self.jobs.is_idle

    @contextmanager
    def awaiting(self, id: str) -> Iterator[asyncio.Future[AdapterInfo]]:
        """Yield a future of the upload's end: the adapter as registered, or the error that ended this attempt."""
        ended = self._awaited[id] = asyncio.get_running_loop().create_future()
        try:
            yield ended
        finally:
            del self._awaited[id]
            ended.cancel()

    def cancel(self, id: str) -> None:
        """Stop work on an upload that was removed."""
        self.jobs.cancel(id)

    def look(self) -> None:
        """Start work on uploads that this server has taken on."""
        self.jobs.look()

    async def tend(self) -> None:
        """Adopt uploads of dead servers, start failed jobs again, and expire abandoned sessions."""
        async with self._database.begin() as session:
            jobs = UploadJobs(session)
            await jobs.adopt_abandoned(self.server_id)
            expired = await jobs.expire(self._database.now())
        self.jobs.look()
        for id in expired:
            await self._threads.run(self._blobs.objects.delete_under, folder_of(id))

    async def sweep(self) -> int:
        """Remove parts of closed uploads, and forget old ones; return how many uploads had parts left."""
        async with self._database.begin() as session:
            await UploadJobs(session).forget(self._database.now() - KEEP_FINISHED)
        names = await self._threads.run(self._blobs.objects.names, FOLDER)
        stored = {name.split("/")[1] for name in names}
        async with self._database.read() as session:
            closed = await UploadJobs(session).closed(stored)
        for id in closed:
            await self._threads.run(self._blobs.objects.delete_under, folder_of(id))
        return len(closed)

    async def stop(self) -> None:
        """Cancel the running jobs; this server's next life, or another server, starts them again."""
        await self.jobs.stop()

    async def _find(self) -> list[UploadJob]:
        try:
            async with self._database.read() as session:
                return await UploadJobs(session).of(self.server_id)
        except RecordsError as error:
            logger.error("uploads wait: %s", error)
            return []

    async def _run(self, job: UploadJob) -> None:
        try:
            info = await self._process(job)
            self._end(job.id, info)
            await self._threads.run(self._blobs.objects.delete_under, folder_of(job.id))
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
        """Pass the outcome to the caller that awaits the upload, if there is one."""
        ended = self._awaited.get(id)
        if ended is None or ended.done():
            return
        if isinstance(outcome, Exception):
            ended.set_exception(outcome)
        else:
            ended.set_result(outcome)

    async def _process(self, job: UploadJob) -> AdapterInfo | Exception:
        """Make the upload a revision, or write the reason why not and return it."""
        report: ValidationReport | None = None
        try:
            if job.attempts > MAX_ATTEMPTS:
                raise rejected("validation_failed", None, "The checks did not survive these files.")
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
                    await assemble(self._threads, self._blobs.objects, file, own, folder)
                report, quota = await self._ingest.check_files(principal, folder, upload.base_model, upload.ignored)
                staged = StagedUpload(upload.adapter, upload.promote, folder, report, quota)
                return await self._ingest.register(principal, staged, partial(self._accept, job, report))
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
        """Return the platform as it acts for the upload's submitter, whichever server that one called."""
        system = await self._tenants.system_principal(job.tenant_name)
        if upload.submitter is None:
            return system
        return msgspec.structs.replace(system, key_id=upload.submitter.actor, origin=upload.submitter.origin)

    async def _read(self, job: UploadJob) -> tuple[Upload, list[Part]]:
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
        outcome = Outcome(revision=revision.number, digest=revision.digest, report=msgspec.json.encode(report).decode())
        await self._finish(UploadRepository(session, job.tenant), job.id, outcome)

    async def _reject(self, job: UploadJob, refusal: Rejection, report: ValidationReport | None) -> None:
        encoded = None if report is None else msgspec.json.encode(report).decode()
        async with self._database.begin() as session:
            uploads = UploadRepository(session, job.tenant)
            upload = await self._finish(uploads, job.id, Outcome(error=stored(refusal), report=encoded))
            detail = EventDetail(upload=job.id, error=stored(refusal))
            await EventRepository(session, job.tenant).add(REJECTED, upload.adapter, detail, self._database.now())

    async def _finish(self, uploads: UploadRepository, id: str, outcome: Outcome) -> Upload:
        upload = await uploads.locked(id)
        if upload is None or upload.state != VALIDATING:
            raise UploadSuperseded(f"upload {id} is owned by another server or already finished")
        await uploads.finish(id, outcome, self._database.now())
        return upload
