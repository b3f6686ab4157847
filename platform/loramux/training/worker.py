"""The server's part of fine-tuning jobs: the hold of the cost, the revision of the result, and the bill.

A job's tokens are the prompt tokens of one request of the service tier `training`. The request is opened, and its cost
held, when a trainer has counted the tokens. It is settled when the training has ended, with the tokens up to the last
checkpoint: all of them for a job that succeeded or was cancelled, none for one that failed.

A server that dies leaves an open request, which the sweep of requests closes without a bill. The server that adopts the
job opens another one. Only the transaction of `FINISHING` decides which request is settled, and a request is settled
once, so the tokens are billed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec

from loramux.accounts.tenants.errors import InvalidKey, TenantSuspended
from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.uploads.sessions import UploadRequest, UploadSessions, announce
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, new_id
from loramux.common.jobs import SERVER, JobRunner, run_blocking
from loramux.common.settings.server import TrainingSettings
from loramux.common.units import SECOND, TokenCounts
from loramux.data.entities import EventDetail, Refusal, TrainingCard, TrainingCheckpoint, TrainingJob
from loramux.data.records.adapters import AdapterRepository
from loramux.data.records.batches import FileRepository
from loramux.data.records.database import Database
from loramux.data.records.requests import TRAINING, OpenedRequest, charged_tier
from loramux.data.records.tenants import TenantRepository
from loramux.data.records.training import (
    CANCELLED,
    FAILED,
    FINISHING,
    PAUSED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TRAINABLE,
    TrainingJobs,
)
from loramux.data.records.webhooks import EventRepository
from loramux.data.storage.blobs import BlobStore
from loramux.money.limits.errors import LimitsError
from loramux.money.usage.errors import UnknownRequest
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import EndedBy, Settlement, unused
from loramux.training.local import LocalTrainer
from loramux.training.protocol import ADAPTER_FILES
from loramux.training.trainer import checkpoint_object, training_folder

ENDED_BY: dict[str, EndedBy] = {SUCCEEDED: "completion", CANCELLED: "caller", FAILED: "platform"}
MESSAGES = {
    SUCCEEDED: "The job has successfully completed",
    CANCELLED: "The job was cancelled",
    FAILED: "The job failed",
}
OVERDUE = Refusal("overdue", "The job did not end in time (training.unfinished_seconds). Its last checkpoint is kept.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingServer:
    """The parts of a server that its fine-tuning jobs use."""

    server_id: str
    database: Database
    blobs: BlobStore
    tenants: Tenants
    uploads: UploadSessions
    usage: UsageService
    settings: TrainingSettings
    keep_seconds: int
    """Seconds for which ended jobs are kept."""


class TrainingWorker:
    """Looks after this server's jobs. `tend` and `sweep` must be called periodically."""

    def __init__(
        self,
        server: TrainingServer,
        local: LocalTrainer | None,
        local_bases: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        """`local_bases` returns the names of the bases whose weights are on this machine."""
        self.server = server
        self._database = server.database
        self.local = local
        """The trainer that this server starts on its own machine; None: it starts none."""
        self._local_bases = local_bases
        self._tending = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.jobs = JobRunner("training", self._find, self._run)

    async def tend(self) -> None:
        """Adopt jobs of dead servers, follow orders that no trainer follows, and start what waits."""
        async with self._database.read() as session:
            if not await TrainingJobs(session).inputs():
                return
        async with self._tending, self._database.begin() as session:
            jobs = TrainingJobs(session)
            await jobs.adopt_abandoned(self.server.server_id)
            await jobs.release_dead()
            for job in await jobs.of(self.server.server_id):
                if job.trainer_id is None and job.wanted is not None and job.state != FINISHING:
                    await self._follow(jobs, job.id)
            waiting = {job.base_model for job in await jobs.waiting()}
        self.jobs.look()
        # a trainer that has no base of a waiting job would end, and be started again, all the time
        if self.local is not None and waiting and not waiting.isdisjoint(await self._local_bases()):
            await self.local.ensure_runs()

    def look(self) -> None:
        """Tend the jobs soon, because one has changed."""
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            await self.tend()
        except LoramuxError as error:  # the periodic look follows
            logger.warning("the training jobs wait: %s", error)

    async def sweep(self) -> None:
        """End the jobs that have been unfinished for too long. Delete the objects and rows of jobs that have ended."""
        objects = self.server.blobs.objects
        names = await run_blocking(SERVER, objects.names, "training")
        stored = sorted({name.split("/")[1] for name in names})
        async with self._database.read() as session:
            unfinished = await TrainingJobs(session).unfinished(stored)
        for id in stored:
            if id not in unfinished:
                await run_blocking(SERVER, objects.delete_under, training_folder(id))
        async with self._database.begin() as session:
            overdue = self._database.now() - self.server.settings.unfinished_seconds * SECOND
            await TrainingJobs(session).cancel_overdue(overdue, OVERDUE)
            await TrainingJobs(session).forget(self._database.now() - self.server.keep_seconds * SECOND)

    async def stop(self) -> None:
        """Stop the work of this server, and its trainer."""
        await self.jobs.stop()
        if self.local is not None:
            await self.local.stop()

    async def _follow(self, jobs: TrainingJobs, id: str) -> None:
        """Follow an order for a job that no trainer has."""
        job = await jobs.held(id, server_id=self.server.server_id)
        if job is None or job.trainer_id is not None:
            return  # a trainer has taken it since
        if job.wanted == "cancel":
            await jobs.change(id, state=FINISHING, outcome=CANCELLED)
        elif job.state in TRAINABLE:
            await jobs.change(id, state=PAUSED, wanted=None)

    async def _find(self) -> Sequence[TrainingJob]:
        async with self._database.read() as session:
            mine = await TrainingJobs(session).of(self.server.server_id)
        return [job for job in mine if job.state == FINISHING or _needs_hold(job)]

    async def _run(self, job: TrainingJob) -> None:
        try:
            if job.state == FINISHING:
                await self._finish(job)
            else:
                await self._admit(job)
        except LoramuxError as error:
            logger.warning("the training job %s goes on later: %s", job.id, error)
        except Exception:
            logger.exception("the training job %s is tried again", job.id)

    async def _admit(self, job: TrainingJob) -> None:
        """Hold the most that the job can cost, and let it run; if a budget does not allow it, end the job."""
        assert job.plan is not None
        request_id = _request_id(job)
        if job.request_id not in (None, request_id) and not await self.server.usage.interrupt(job.request_id):
            return  # the hold of the job's earlier server would count a second time; the next look tries again
        try:
            principal = await self._principal(job)
            await self.server.usage.open(
                OpenedRequest(
                    id=request_id,
                    tenant_id=job.tenant_id,
                    key_id=principal.key_id,
                    project_id=job.project_id,
                    model=job.model,
                    adapter_digest=job.adapter_digest,
                    base_model=job.base_model,
                    tier=charged_tier(principal.tier, TRAINING),
                    tags=job.tags,
                    prompt_tokens=job.plan.total_tokens,
                    max_tokens=0,
                    lineage=principal.lineage,
                )
            )
        except (LimitsError, InvalidKey) as error:
            await self._stop(job, Refusal(error.code, error.message, error.field))
            return
        async with self._database.begin() as session:
            jobs = TrainingJobs(session)
            held = await jobs.held(job.id, server_id=self.server.server_id)
            may_run = held is not None and held.state in (QUEUED, RUNNING)
            if may_run:
                await jobs.change(job.id, request_id=request_id)
            if held is not None and held.state == QUEUED:
                now = self._database.now()
                await jobs.change(job.id, state=RUNNING, started_at=held.started_at or now)
                await jobs.log(job.id, "Fine-tuning job started", now)
        if not may_run and (held is None or held.request_id != request_id):
            await self.server.usage.settle(unused(request_id, "platform"))  # ended or paused at the same time

    async def _stop(self, job: TrainingJob, error: Refusal) -> None:
        """End a job that may not go on: before its first token at once, later as if it was cancelled."""
        async with self._database.begin() as session:
            jobs = TrainingJobs(session)
            held = await jobs.held(job.id, server_id=self.server.server_id)
            if held is None or held.state == FINISHING:
                return
            if held.trained_tokens:
                await jobs.change(job.id, wanted="cancel", error=error)
            else:
                await jobs.change(job.id, state=FINISHING, outcome=FAILED, error=error, trainer_id=None)

    async def _finish(self, job: TrainingJob) -> None:
        """Register the result, bill the tokens, and end the job."""
        outcome, error, result = job.outcome or FAILED, job.error, None
        async with self._database.read() as session:
            checkpoints = await TrainingJobs(session).checkpoints(job.id)
        if outcome != FAILED and checkpoints:
            try:
                result = await self._register_all(job, checkpoints, outcome)
            except TenantSuspended:
                raise  # it waits until the tenant is resumed
            except LoramuxError as refused:
                if refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR or refused.retry_after is not None:
                    raise
                outcome, error = FAILED, Refusal(refused.code, refused.message, refused.field)
        await self._settle(job, outcome)
        async with self._database.begin() as session:
            jobs = TrainingJobs(session)
            if await jobs.held(job.id, server_id=self.server.server_id) is None:
                return
            now = self._database.now()
            await jobs.change(
                job.id,
                state=outcome,
                wanted=None,
                error=error,
                result=result if outcome == SUCCEEDED else None,
                finished_at=now,
                estimated_finish=None,
            )
            if result is not None and outcome == SUCCEEDED:
                await jobs.log(job.id, f"New fine-tuned model created: {result}", now)
            level = "error" if outcome == FAILED else "info"
            why = f": {error.message}" if error is not None else ""
            await jobs.log(job.id, MESSAGES[outcome] + why, now, level=level)
            if await TenantRepository(session).has_zero_retention(job.tenant_id):
                inputs = [id for id in (job.training_file_id, job.validation_file_id) if id is not None]
                await FileRepository(session, job.tenant_id).expire(inputs, now)
            detail = EventDetail(job=job.id, error=error)
            events = EventRepository(session, job.tenant_id)
            await events.add(f"fine_tuning.job.{outcome}", job.adapter, detail, now, job.project_id)
        await run_blocking(job.tenant_id, self.server.blobs.objects.delete_under, training_folder(job.id))

    async def _register_all(self, job: TrainingJob, checkpoints: list[TrainingCheckpoint], outcome: str) -> str | None:
        """Make the last checkpoint a revision, then those of earlier epochs; return the first one's name."""
        principal = await self._principal(job)
        epochs = [one for one in checkpoints[1:] if one.is_epoch] if outcome == SUCCEEDED else []
        result = None
        for checkpoint in (checkpoints[0], *epochs[: self.server.settings.max_checkpoints - 1]):
            name = checkpoint.result or await self._register(principal, job, checkpoint)
            result = result or name
        return result

    async def _register(self, principal: Principal, job: TrainingJob, checkpoint: TrainingCheckpoint) -> str:
        """Upload a checkpoint as any adapter is uploaded. A repeated upload of the same bytes is the same revision."""
        server, id = self.server, new_id("upload")
        with server.blobs.staging() as folder:
            await run_blocking(job.tenant_id, self._fetch, job.id, checkpoint, folder)
            announced = await run_blocking(job.tenant_id, announce, folder, ADAPTER_FILES)
            request = UploadRequest(job.adapter, announced, promote=False, base_model=job.base_model)
            info = await server.uploads.run(principal, request, folder, id)
        upload = await server.uploads.get(principal, id)
        assert upload.outcome.revision is not None, "its run has ended with a revision"
        name = f"{info.name}@{upload.outcome.revision}"
        card = msgspec.json.encode(_card(job, checkpoint)).decode()
        async with self._database.begin() as session:
            await AdapterRepository(session, job.tenant_id).note_training(job.adapter, upload.outcome.revision, card)
            await TrainingJobs(session).note_result(job.id, checkpoint.step, name)
        return name

    def _fetch(self, job_id: str, checkpoint: TrainingCheckpoint, folder: Path) -> None:
        for name in ADAPTER_FILES:
            self.server.blobs.objects.fetch(checkpoint_object(job_id, checkpoint.step, name), folder / name)

    async def _settle(self, job: TrainingJob, outcome: str) -> None:
        """Bill the tokens up to the last checkpoint; nothing for a job that failed."""
        if job.request_id is None:
            return  # it never ran
        tokens = TokenCounts(prompt=job.trained_tokens)
        settlement = Settlement(
            request_id=job.request_id,
            ended_by=ENDED_BY[outcome],
            finish_reason=None,
            delivered=tokens,
            engine_count=tokens,
        )
        try:
            await self.server.usage.settle(settlement, patient=True)
        except UnknownRequest:
            logger.error("the training job %s has no request in the records, and is not billed", job.id)

    async def _principal(self, job: TrainingJob) -> Principal:
        return await self.server.tenants.authenticator.principal_behind(job.tenant_id, job.owner, job.project_id)


def _card(job: TrainingJob, checkpoint: TrainingCheckpoint) -> TrainingCard:
    assert job.plan is not None, "a checkpoint follows the plan"
    plan = job.plan
    return TrainingCard(
        job=job.id,
        model=job.model,
        chat_template=job.template_digest,
        digests=plan.digests,
        method=job.options.method,
        n_epochs=plan.n_epochs,
        batch_size=plan.batch_size,
        learning_rate_multiplier=plan.learning_rate_multiplier,
        beta=plan.beta,
        seed=job.options.seed,
        lora=job.lora,
        step=checkpoint.step,
        trained_tokens=checkpoint.trained_tokens,
        metrics=msgspec.json.decode(checkpoint.metrics, type=dict[str, float]),
    )


def _request_id(job: TrainingJob) -> str:
    """Return the id of the request that this server opens for the job; `attempts` counts the job's servers."""
    return f"{job.id}.{job.attempts}"


def _needs_hold(job: TrainingJob) -> bool:
    """Return whether the job's cost is not held by this server, or the job waits for the word to run."""
    if job.plan is None or job.state not in (QUEUED, RUNNING) or job.wanted is not None:
        return False
    return job.state == QUEUED or job.request_id != _request_id(job)
