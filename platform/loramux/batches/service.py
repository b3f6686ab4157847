"""Batches, which callers create, read and cancel, and which this server's worker runs in the background.

`Batches` writes a row and wakes `BatchWorker`, which runs the batches that this server holds (`run`), adopts batches of
dead servers, and removes their leftover objects.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import msgspec

from loramux.batches.errors import BatchNotFound, BatchUnfinished, FileNotFound, InvalidBatch, TooManyBatches
from loramux.batches.files import OUTPUT, REQUESTS, Files
from loramux.batches.lines import BatchEndpoints, BatchLine, write_lines
from loramux.batches.run import BatchRun, BatchServer, LeaseLost, chunk_folder
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, new_id
from loramux.common.jobs import SERVER, JobRunner
from loramux.common.settings.server import BatchSettings
from loramux.common.units import DAY, SECOND
from loramux.data.entities import Batch, LineError, StoredFile
from loramux.data.records.base import Viewpoint
from loramux.data.records.batches import (
    CANCELLING,
    IN_PROGRESS,
    UNFINISHED,
    VALIDATING,
    BatchJobs,
    BatchRepository,
    FileRepository,
)
from loramux.data.records.database import Database
from loramux.money.usage.service import UsageService
from loramux.serving.checks import canonical_tags, ensure_storage_allowed, service_class_of

INPUTS = ("batch", REQUESTS)
"""Purposes of files that a batch may read."""
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
        lines: int = 0,
    ) -> Batch:
        """Create a batch. Its lines are checked immediately, in the background.

        `output_seconds`: the time for which its output and error files are kept. `lines`: their number, if it is known.
        Raises InvalidBatch, InvalidFile, FileNotFound, TooManyBatches, NotAllowed, InvalidRequest.
        """
        ensure_storage_allowed(principal, "input_file_id")
        self._files.check_expiry(output_seconds, "output_expires_after")
        service_class_of(principal, "batch")
        if endpoint not in self._endpoints.by_path:
            raise InvalidBatch(f"'endpoint' is one of {', '.join(self._endpoints.by_path)}.", "endpoint")
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
            lines=lines,
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
            if file is None or file.purpose not in INPUTS:
                raise FileNotFound(input_file_id, "input_file_id")
            await batches.add(batch)
        self.worker.jobs.look()
        return batch

    async def create_of(self, principal: Principal, endpoint: str, requests: Sequence[BatchLine]) -> Batch:
        """Create a batch of requests, which become its input file. Raises the errors of `create`."""
        if len(requests) > self._settings.max_lines:
            most = self._settings.max_lines
            raise InvalidBatch(
                f"A batch has at most {most} requests; this one {len(requests)}. Divide them.", "requests"
            )
        async with self._files.receiving(principal, None) as folder:
            path = folder / "requests"
            size = await self._files.threads.run(principal.tenant, write_lines, path, requests)
            file = await self._files.store(principal, path, size, filename="requests.jsonl", purpose=REQUESTS)
        try:
            return await self.create(
                principal,
                endpoint=endpoint,
                input_file_id=file.id,
                completion_window="24h",
                metadata=None,
                lines=len(requests),
            )
        except LoramuxError:
            await self._files.delete(principal, file.id)
            raise

    async def get(self, principal: Principal, id: str, endpoint: str | None = None) -> Batch:
        """Return a batch; with `endpoint`, only one of it. Raises BatchNotFound."""
        async with self._database.read() as session:
            return await _found(BatchRepository(session, principal.tenant), principal, id, endpoint)

    async def before(
        self, principal: Principal, id: str | None, limit: int, endpoint: str | None = None
    ) -> list[Batch]:
        """List at most `limit` batches older than that one, newest first; with `endpoint`, only those of it."""
        async with self._database.read() as session:
            batches = BatchRepository(session, principal.tenant)
            return await batches.before(Viewpoint.of(principal), id, limit, endpoint)

    async def following(self, principal: Principal, id: str, limit: int, endpoint: str | None = None) -> list[Batch]:
        """List the `limit` batches that were created next after that one, newest first."""
        async with self._database.read() as session:
            batches = BatchRepository(session, principal.tenant)
            return await batches.following(Viewpoint.of(principal), id, limit, endpoint)

    async def outputs(self, principal: Principal, batch: Batch) -> list[StoredFile]:
        """Return the files with the outcomes of a batch's lines. Raises BatchUnfinished, FileNotFound."""
        if batch.state in UNFINISHED:
            raise BatchUnfinished(batch.id, batch.state)
        ids = [id for id in (batch.output_file_id, batch.error_file_id) if id is not None]
        return [await self._files.get(principal, id) for id in ids]

    async def delete(self, principal: Principal, id: str, endpoint: str | None = None) -> None:
        """Delete a batch that has ended, with its outputs and the input that this server made of its requests.

        Raises BatchNotFound, BatchUnfinished.
        """
        async with self._database.begin() as session:
            batches, files = BatchRepository(session, principal.tenant), FileRepository(session, principal.tenant)
            await files.total_size()  # locks the tenant: a batch that reads the input is created before or after
            batch = await _found(batches, principal, id, endpoint, lock=True)
            if batch.state in UNFINISHED:
                raise BatchUnfinished(id, batch.state)
            await batches.remove(id)
            named = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            found = [await files.get(one, Viewpoint.of(principal)) for one in named if one is not None]
            ours = [file.id for file in found if file is not None and file.purpose in (REQUESTS, OUTPUT)]
            gone = [one for one in ours if await batches.user_of(one) is None]
            for one in gone:
                await files.remove(one)
        await self._files.remove_objects(principal.tenant, gone)

    async def cancel(self, principal: Principal, id: str, endpoint: str | None = None) -> Batch:
        """Begin no further line; running lines finish. A batch that has ended does not change. Raises BatchNotFound."""
        async with self._database.begin() as session:
            batches = BatchRepository(session, principal.tenant)
            batch = await _found(batches, principal, id, endpoint, lock=True)
            if batch.state in (VALIDATING, IN_PROGRESS):
                at = self._database.now()
                await batches.change(id, state=CANCELLING, cancelling_at=at)
                batch = msgspec.structs.replace(batch, state=CANCELLING, cancelling_at=at)
        return batch


async def _found(
    batches: BatchRepository, principal: Principal, id: str, endpoint: str | None, *, lock: bool = False
) -> Batch:
    batch = await batches.get(id, Viewpoint.of(principal), lock=lock)
    if batch is None or endpoint not in (None, batch.endpoint):
        raise BatchNotFound(id)
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
