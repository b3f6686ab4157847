"""The batches of one server: started, adopted from dead servers, and tidied up behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from loramux.batches.run import BatchRun, BatchServer, LeaseLost, chunk_folder
from loramux.errors import LoramuxError
from loramux.jobs import JobRunner
from loramux.records import RecordsError
from loramux.records.batches import Batch, BatchJobs, LineError
from loramux.storage import StorageError
from loramux.units import DAY, SECOND
from loramux.usage import UsageService

MAX_ATTEMPTS = 10
"""Servers that may die under a batch, one after the other, without one more chunk of it written."""
OVERDUE = DAY
"""Microseconds after its window in which a batch must end, whatever fails."""

logger = logging.getLogger(__name__)


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

    def look(self) -> None:
        """Start the batches that this server holds and does not run yet."""
        self.jobs.look()

    async def tend(self) -> None:
        """Adopt batches of dead servers, whose open requests are closed first, and start those that failed again."""
        await self._usage.sweep()
        async with self._database.begin() as session:
            await BatchJobs(session).adopt_abandoned(self.server_id)
        self.look()

    async def sweep(self) -> None:
        """Delete expired files, and what finished batches and crashes have left."""
        files, objects = self._server.files, self._server.blobs.objects
        await files.expire()
        await files.sweep()
        names = await files.threads.run(objects.names, "batches")
        stored = sorted({name.split("/")[1] for name in names})
        async with self._database.read() as session:
            unfinished = await BatchJobs(session).unfinished(stored)
        for id in stored:
            if id not in unfinished:
                await files.threads.run(objects.delete_under, chunk_folder(id))
        kept = files.retention_seconds * SECOND
        async with self._database.begin() as session:
            await BatchJobs(session).forget(self._database.now() - kept)

    async def stop(self) -> None:
        """Begin no further line; another server, or this one's next life, goes on."""
        await self.jobs.stop()

    async def _find(self) -> Sequence[Batch]:
        try:
            async with self._database.read() as session:
                return await BatchJobs(session).of(self.server_id)
        except RecordsError as error:
            logger.error("batches wait: %s", error)
            return ()

    async def _run(self, batch: Batch) -> None:
        run = BatchRun(batch, self._server)
        try:
            if batch.attempts > MAX_ATTEMPTS or self._database.now() > batch.expires_at + OVERDUE:
                await run.fail(LineError(code="server_failed", message="The servers failed while they ran this batch."))
            else:
                await run.run()
        except LeaseLost:
            logger.info("the batch %s is another server's now", batch.id)
        except (RecordsError, StorageError, LoramuxError) as error:
            logger.warning("the batch %s goes on later: %s", batch.id, error)
        except Exception:
            logger.exception("the batch %s is tried again", batch.id)
