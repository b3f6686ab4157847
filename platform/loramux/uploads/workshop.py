"""Complete uploads become revisions, in the background; whatever a dead server had begun, another one ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import Database, Principal, RecordsError
from loramux.records.adapters import Listed
from loramux.records.events import REJECTED, Detail, EventRepository, Refusal
from loramux.records.locks import gone
from loramux.records.upload_work import UploadJob, UploadWork
from loramux.records.uploads import VALIDATING, Outcome, Upload, UploadRepository
from loramux.registry import Arrival, Intake, RegistryError, ValidationUnavailable, Withdrawn
from loramux.registry.threads import finished
from loramux.storage import BlobStore, StorageError
from loramux.tenants import Tenants, TenantsError
from loramux.uploads.importing import Importer
from loramux.uploads.pieces import FOLDER, assemble, folder_of
from loramux.uploads.refusals import UploadRejected
from loramux.uploads.sources import decode_source
from loramux.validation import Report

AT_ONCE = 2
MOST_ATTEMPTS = 3
"""An upload under which so many servers have died is at fault itself."""
KEEP = 30 * 86_400_000_000
"""Microseconds for which an upload that is over is shown."""

logger = logging.getLogger(__name__)


class Workshop:
    """One server's share of the work; `tend` is to be called again and again."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        intake: Intake,
        importer: Importer,
        tenants: Tenants,
        server_id: str,
    ) -> None:
        """`server_id` is known to be alive for as long as the process is (`records.locks.alive`)."""
        self.server_id = server_id
        self._database = database
        self._blobs = blobs
        self._intake = intake
        self._importer = importer
        self._tenants = tenants
        self._places = asyncio.Semaphore(AT_ONCE)
        self._working: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Drop what is being done; this server's next life, or another server, begins it again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def idle(self) -> bool:
        """Whether nothing is being done."""
        return not self._tasks

    def wake(self) -> None:
        """There may be something new to do."""
        self._begin(self._look())

    async def tend(self) -> None:
        """Adopt what dead servers left, do again what failed for a passing reason, and give up what was abandoned."""
        async with self._database.begin() as session:
            work = UploadWork(session)
            dead = await gone(session, await work.servers(besides=self.server_id))
            if dead:
                await work.adopt(dead, self.server_id)
            expired = await work.expire(self._database.now())
        self.wake()
        for id in expired:
            await finished(self._blobs.objects.delete_under, folder_of(id))

    async def sweep(self) -> int:
        """Remove the pieces that nobody needs, and forget uploads that were over long ago; how many had pieces left."""
        async with self._database.begin() as session:
            await UploadWork(session).forget(self._database.now() - KEEP)
        names = await finished(self._blobs.objects.names, FOLDER)
        stored = {name.split("/")[1] for name in names}
        async with self._database.read() as session:
            closed = await UploadWork(session).closed(stored)
        for id in closed:
            await finished(self._blobs.objects.delete_under, folder_of(id))
        return len(closed)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self) -> None:
        try:
            async with self._database.read() as session:
                jobs = await UploadWork(session).jobs(self.server_id)
        except RecordsError:
            logger.exception("uploads wait: the records do not answer")
            return
        for job in jobs:
            if job.id not in self._working:
                self._working.add(job.id)
                self._begin(self._do(job))

    async def _do(self, job: UploadJob) -> None:
        try:
            async with self._places:
                await self._validate(job)
            await finished(self._blobs.objects.delete_under, folder_of(job.id))
        except (RecordsError, StorageError, ValidationUnavailable):
            logger.exception("the upload %s is tried again", job.id)
        except Withdrawn as why:
            logger.info("%s", why)
        finally:
            self._working.discard(job.id)

    async def _validate(self, job: UploadJob) -> None:
        """Make the upload a revision, or write why not."""
        report: Report | None = None
        try:
            if job.attempts > MOST_ATTEMPTS:
                raise UploadRejected("validation_failed", None, "The checks did not survive these files.")
            principal = await self._tenants.representing(job.tenant_name)
            with self._blobs.staging() as folder:
                upload = await self._gather(job, folder)
                report = await self._intake.examine(principal, folder)
                if report.refusal is not None:
                    raise UploadRejected(report.refusal.code, report.refusal.field, report.refusal.message)
                await self._keep(principal, upload, folder, report)
        except UploadRejected as why:
            await self._reject(job, Refusal(why.code, why.message, why.field), report)
        except ValidationUnavailable:
            raise
        except (RegistryError, TenantsError) as why:
            await self._reject(job, Refusal(why.code, why.message, why.field), report)
        except (RecordsError, StorageError, Withdrawn):
            raise
        except Exception:
            logger.exception("the upload %s could not be validated", job.id)
            await self._reject(job, Refusal("internal_error", "The server failed; please report it.", None), report)

    async def _gather(self, job: UploadJob, folder: Path) -> Upload:
        """Put the upload's files into `folder`."""
        async with self._database.read() as session:
            uploads = UploadRepository(session, job.tenant)
            upload, pieces = await uploads.get(job.id), await uploads.pieces(job.id)
        if upload is None:
            raise Withdrawn(f"the upload {job.id} is gone")
        if upload.source is not None:
            await self._importer.fetch(decode_source(upload.source), job.tenant_name, folder)
        for file in upload.files:
            own = [piece for piece in pieces if piece.file == file.name]
            await assemble(self._blobs.objects, file, own, folder)
        return upload

    async def _keep(self, principal: Principal, upload: Upload, folder: Path, report: Report) -> None:
        async def settle(session: AsyncSession, listed: Listed) -> None:
            _, revision = listed
            told = msgspec.json.encode(report).decode()
            outcome = Outcome(revision=revision.number, digest=revision.digest, report=told)
            await self._finish(UploadRepository(session, principal.tenant), upload.id, outcome)

        await self._intake.keep(principal, Arrival(upload.adapter, folder, upload.promote, settle), report)

    async def _reject(self, job: UploadJob, why: Refusal, report: Report | None) -> None:
        told = None if report is None else msgspec.json.encode(report).decode()
        async with self._database.begin() as session:
            uploads = UploadRepository(session, job.tenant)
            upload = await self._finish(uploads, job.id, Outcome(error=why, report=told))
            detail = Detail(upload=job.id, error=why)
            await EventRepository(session, job.tenant).add(REJECTED, upload.adapter, detail, self._database.now())

    async def _finish(self, uploads: UploadRepository, id: str, outcome: Outcome) -> Upload:
        upload = await uploads.locked(id)
        if upload is None or upload.state != VALIDATING:
            raise Withdrawn(f"the upload {id} is another server's, or over")
        await uploads.finish(id, outcome, self._database.now())
        return upload
