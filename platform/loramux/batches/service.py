"""Batches, which callers create, read and cancel, and which this server's worker runs in the background.

`Batches` writes a row and wakes `BatchWorker`, which runs the batches that this server holds (`run`), adopts batches of
dead servers, and removes their leftover objects.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import msgspec

from loramux.batches.errors import BatchNotFound, FileNotFound, InvalidBatch, TooManyBatches
from loramux.batches.files import Files
from loramux.batches.lines import BatchEndpoints
from loramux.batches.run import BatchRun, BatchServer, LeaseLost, chunk_folder
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, new_id
from loramux.common.jobs import SERVER, JobRunner
from loramux.common.settings.server import BatchSettings
from loramux.common.units import DAY, SECOND
from loramux.data.entities import Batch, LineError
from loramux.data.records.base import Viewpoint
from loramux.data.records.batches import CANCELLING, IN_PROGRESS, VALIDATING, BatchJobs, BatchRepository, FileRepository
from loramux.data.records.database import Database
from loramux.money.usage.service import UsageService
from loramux.serving.checks import canonical_tags, ensure_storage_allowed
from loramux.serving.service import service_class_of

MAX_HOURS = 168
MAX_ATTEMPTS = 10
"""Maximum number of servers that die one after the other while they run a batch, without writing a new chunk of it."""
OVERDUE = DAY
"""Maximum microseconds between the end of a batch's window and the end of the batch."""

_window = re.compile(r"([1-9]\d{0,2})h")
logger = logging.getLogger(__name__)


class Batches:
    """Batches of every tenant; each caller sees the batches of its project."""

    def __init__(
        self,
        database: Database,
        worker: BatchWorker,
        files: Files,
        endpoints: BatchEndpoints,
        settings: BatchSettings,
    ) -> None:
        self.worker = worker
        self._files = files
        self._database = database
        self._endpoints = endpoints
        self._settings = settings

    async def create(
        self,
        principal: Principal,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        output_seconds: int | None = None,
    ) -> Batch:
        """Create a batch. Its lines are checked immediately, in the background.

        `output_seconds` is the time for which its output and error files are kept. Raises InvalidBatch, InvalidFile,
        FileNotFound, TooManyBatches, NotAllowed, InvalidRequest.
        """
        ensure_storage_allowed(principal, "input_file_id")
        self._files.check_expiry(output_seconds, "output_expires_after")
        service_class_of(principal, "batch")
        if endpoint not in self._endpoints.parsers:
            raise InvalidBatch(f"'endpoint' is one of {', '.join(self._endpoints.parsers)}.", "endpoint")
        window = _window.fullmatch(completion_window)
        if window is None or int(window[1]) > MAX_HOURS:
            raise InvalidBatch(f"'completion_window' is 24h, or 1h to {MAX_HOURS}h.", "completion_window")
        now = self._database.now()
        batch = Batch(
            id=new_id("batch"),
            tenant_id=principal.tenant,
            project_id=principal.project,
            owner=principal.owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            tags=canonical_tags(metadata),
            state=VALIDATING,
            server_id=self.worker.server_id,
            attempts=1,
            created_at=now,
            expires_at=now + int(window[1]) * 3600 * SECOND,
            output_seconds=output_seconds,
        )
        async with self._database.begin() as session:
            batches = BatchRepository(session, principal.tenant)
            unfinished = await batches.count_unfinished()
            if unfinished >= self._settings.unfinished_per_tenant:
                raise TooManyBatches(
                    f"You have {unfinished} unfinished batches, the most that is allowed; wait for one to end.",
                    "input_file_id",
                )
            file = await FileRepository(session, principal.tenant).get(input_file_id, Viewpoint.of(principal))
            if file is None or file.purpose != "batch":
                raise FileNotFound(input_file_id, "input_file_id")
            await batches.add(batch)
        self.worker.jobs.look()
        return batch

    async def get(self, principal: Principal, id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        async with self._database.read() as session:
            batch = await BatchRepository(session, principal.tenant).get(id, Viewpoint.of(principal))
        if batch is None:
            raise BatchNotFound(id)
        return batch

    async def before(self, principal: Principal, id: str | None, limit: int) -> list[Batch]:
        """List at most `limit` batches older than that one, newest first."""
        async with self._database.read() as session:
            return await BatchRepository(session, principal.tenant).before(Viewpoint.of(principal), id, limit)

    async def cancel(self, principal: Principal, id: str) -> Batch:
        """Begin no further line; running lines finish. A batch that has ended does not change. Raises BatchNotFound."""
        async with self._database.begin() as session:
            batches = BatchRepository(session, principal.tenant)
            batch = await batches.get(id, Viewpoint.of(principal), lock=True)
            if batch is None:
                raise BatchNotFound(id)
            if batch.state in (VALIDATING, IN_PROGRESS):
                at = self._database.now()
                await batches.change(id, state=CANCELLING, cancelling_at=at)
                batch = msgspec.structs.replace(batch, state=CANCELLING, cancelling_at=at)
        return batch


class BatchWorker:
    """Runs this server's batches. `tend` and `sweep` must be called periodically."""

    def __init__(self, server: BatchServer, usage: UsageService) -> None:
        self._server = server
        self._database = server.database
        self._usage = usage
        self.jobs = JobRunner("batch", self._find, self._run)

    @property
    def server_id(self) -> str:
        """The holder of this server's batches."""
        return self._server.server_id

    async def tend(self) -> None:
        """Adopt batches of dead servers, whose open requests are closed first, and restart batches that failed with a
        temporary error.
        """
        await self._usage.sweep()
        async with self._database.begin() as session:
            await BatchJobs(session).adopt_abandoned(self.server_id)
        self.jobs.look()

    async def sweep(self) -> None:
        """Delete expired files, and the objects and rows that finished batches and crashes have left."""
        files, objects = self._server.files, self._server.blobs.objects
        await files.expire()
        await files.sweep()
        names = await files.threads.run(SERVER, objects.names, "batches")
        stored = sorted({name.split("/")[1] for name in names})
        async with self._database.read() as session:
            unfinished = await BatchJobs(session).unfinished(stored)
        for id in stored:
            if id not in unfinished:
                await files.threads.run(SERVER, objects.delete_under, chunk_folder(id))
        kept = files.retention_seconds * SECOND
        async with self._database.begin() as session:
            await BatchJobs(session).forget(self._database.now() - kept)

    async def _find(self) -> Sequence[Batch]:
        async with self._database.read() as session:
            return await BatchJobs(session).of(self.server_id)

    async def _run(self, batch: Batch) -> None:
        run = BatchRun(batch, self._server)
        try:
            if batch.attempts > MAX_ATTEMPTS or self._database.now() > batch.expires_at + OVERDUE:
                await run.fail(LineError(code="server_failed", message="The servers failed while they ran this batch."))
            else:
                await run.run()
        except LeaseLost:
            logger.info("the batch %s is another server's now", batch.id)
        except LoramuxError as error:
            logger.warning("the batch %s goes on later: %s", batch.id, error)
        except Exception:
            logger.exception("the batch %s is tried again", batch.id)
