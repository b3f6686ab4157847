"""Fine-tuning jobs as their owners see them: created, looked at, cancelled, paused and resumed.

A job is made for a base or for a revision of one of the caller's adapters. It remembers the digest of the chat template
with which that model is served, and a trainer refuses to train with another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import msgspec

from loramux.batches.errors import FileNotFound
from loramux.batches.files import FINE_TUNE
from loramux.catalog.registry.resolver import ResolvedModel
from loramux.catalog.uploads.ingest import Ingest
from loramux.common.bundle import BUNDLE_FILE
from loramux.common.identity import Principal, new_id
from loramux.common.settings.serving import AdapterLimits
from loramux.data.entities import TrainingCheckpoint, TrainingEvent, TrainingJob, TrainingOptions
from loramux.data.records.base import Viewpoint
from loramux.data.records.batches import FileRepository
from loramux.data.records.training import (
    FINISHING,
    PAUSED,
    QUEUED,
    TRAINABLE,
    VALIDATING_FILES,
    TrainingJobs,
    TrainingRepository,
)
from loramux.money.limits.definitions import adapter_quota
from loramux.serving.checks import canonical_tags
from loramux.serving.service import CompletionService
from loramux.training.errors import InvalidJob, JobConflict, JobNotFound, TooManyJobs, TrainingDisabled
from loramux.training.worker import TrainingServer

PAUSE, CANCEL = "pause", "cancel"
_TRAINED = (
    "A fine-tuning job trains a model to answer. Train an adapter for vectors or classes with PEFT or "
    "sentence-transformers, and upload it."
)


class FineTuningJobs:
    """Fine-tuning jobs of every tenant; each caller sees those of its project."""

    def __init__(
        self,
        server: TrainingServer,
        ingest: Ingest,
        completions: CompletionService,
        limits: AdapterLimits,
        wake: Callable[[], None],
    ) -> None:
        """`wake` lets this server look for work at once."""
        self._server = server
        self._database = server.database
        self._settings = server.settings
        self._ingest = ingest
        self._completions = completions
        self._limits = limits
        self._wake = wake

    async def create(
        self,
        principal: Principal,
        *,
        model: str,
        training_file_id: str,
        validation_file_id: str | None,
        suffix: str | None,
        options: TrainingOptions,
        metadata: Mapping[str, str] | None,
    ) -> TrainingJob:
        """Create a job. Raises TrainingDisabled, InvalidJob, FileNotFound, TooManyJobs, and errors of names and models.

        `suffix`: the name of the adapter that the result becomes a revision of; None: a new name.
        """
        self._ensure_enabled()
        start = await self._completions.resolve(principal, model)
        await self._completions.ensure_generates(principal, start.name, "model", _TRAINED)
        base = self._completions.bases.get(start.base_model)
        if base is None or not base.tokenizer.chat_template:
            raise InvalidJob(f"The base model `{start.base_model}` has no chat template to train with.", "model")
        self._check_start(principal, start, options)
        id = new_id("ftjob").replace("_", "-")
        adapter = await self._ingest.check_name(principal, suffix or f"ft-{id[-12:]}")
        await self._check_rank(principal, options)
        job = TrainingJob(
            id=id,
            tenant_id=principal.tenant,
            project_id=principal.project,
            owner=principal.owner,
            key_id=principal.key_id,
            model=start.name,
            base_model=start.base_model,
            adapter_digest=None if start.revision is None else start.revision.digest,
            template_digest=hashlib.sha256(base.tokenizer.chat_template.encode()).hexdigest(),
            context=base.context,
            adapter=adapter,
            training_file_id=training_file_id,
            validation_file_id=validation_file_id,
            options=options,
            tags=canonical_tags(metadata),
            state=VALIDATING_FILES,
            server_id=self._server.server_id,
            attempts=1,
            created_at=self._database.now(),
        )
        async with self._database.begin() as session:
            jobs = TrainingRepository(session, principal.tenant)
            await self._ensure_room(jobs)
            files = FileRepository(session, principal.tenant)
            await _ensure_file(files, principal, training_file_id, "training_file")
            if validation_file_id is not None:
                await _ensure_file(files, principal, validation_file_id, "validation_file")
            await jobs.add(job)
            await TrainingJobs(session).log(id, f"Created fine-tuning job: {id}", job.created_at)
        self._wake()
        return job

    async def get(self, principal: Principal, id: str) -> TrainingJob:
        """Return a job. Raises JobNotFound."""
        async with self._database.read() as session:
            return _found(id, await TrainingRepository(session, principal.tenant).get(id, Viewpoint.of(principal)))

    async def before(
        self, principal: Principal, id: str | None, limit: int, metadata: Mapping[str, str]
    ) -> list[TrainingJob]:
        """List at most `limit` jobs with this metadata that are older than that one, newest first.

        Raises InvalidRequest.
        """
        tags = [canonical_tags({name: value})[1:-1] for name, value in metadata.items()]
        async with self._database.read() as session:
            jobs = TrainingRepository(session, principal.tenant)
            return await jobs.before(Viewpoint.of(principal), id, limit, tags)

    async def events(self, principal: Principal, id: str, before: int | None, limit: int) -> list[TrainingEvent]:
        """List at most `limit` entries of a job's log, newest first. Raises JobNotFound."""
        await self.get(principal, id)
        async with self._database.read() as session:
            return await TrainingRepository(session, principal.tenant).events(id, before, limit)

    async def checkpoints(self, principal: Principal, id: str) -> list[TrainingCheckpoint]:
        """List a job's checkpoints, newest first. Raises JobNotFound."""
        await self.get(principal, id)
        async with self._database.read() as session:
            return await TrainingRepository(session, principal.tenant).checkpoints(id)

    async def cancel(self, principal: Principal, id: str) -> TrainingJob:
        """End a job; it keeps its last checkpoint. A job that has ended does not change. Raises JobNotFound."""
        return await self._order(principal, id, CANCEL)

    async def pause(self, principal: Principal, id: str) -> TrainingJob:
        """Stop a job at a checkpoint. Raises JobNotFound, JobConflict."""
        return await self._order(principal, id, PAUSE)

    async def resume(self, principal: Principal, id: str) -> TrainingJob:
        """Let a paused job go on from its checkpoint. Raises JobNotFound, JobConflict."""
        async with self._database.begin() as session:
            jobs = TrainingRepository(session, principal.tenant)
            job = _found(id, await jobs.get(id, Viewpoint.of(principal), lock=True))
            if job.state == PAUSED:
                state = VALIDATING_FILES if job.plan is None else QUEUED
                await jobs.change(id, state=state, wanted=None)
                await TrainingJobs(session).log(id, "The job is resumed", self._database.now())
                job = msgspec.structs.replace(job, state=state, wanted=None)
            elif job.state in TRAINABLE and job.wanted == PAUSE:
                raise JobConflict("The job is being paused; resume it when its status is 'paused'.", "status")
            else:
                raise JobConflict(f"A job is resumed from 'paused'; this one is '{status_of(job)}'.", "status")
        self._wake()
        return job

    async def _order(self, principal: Principal, id: str, order: str) -> TrainingJob:
        """Give an order, which the job's trainer follows, or this server if no trainer has the job."""
        async with self._database.begin() as session:
            jobs = TrainingRepository(session, principal.tenant)
            job = _found(id, await jobs.get(id, Viewpoint.of(principal), lock=True))
            may = (*TRAINABLE, PAUSED) if order == CANCEL else TRAINABLE
            if job.state in may:
                await jobs.change(id, wanted=order)
                job = msgspec.structs.replace(job, wanted=order)
            elif order == PAUSE:
                raise JobConflict(f"A job that is '{status_of(job)}' cannot be paused.", "status")
            elif job.state == FINISHING:
                raise JobConflict("The training has ended, and its result is being registered.", "status")
        self._wake()
        return job

    def _ensure_enabled(self) -> None:
        if not self._settings.enabled:
            raise TrainingDisabled("This server runs no fine-tuning jobs (training.enabled).")
        if self._settings.local_trainer and find_spec("trl") is None:
            raise TrainingDisabled(
                "This server has no trainer: install the extra `loramux[training]` there, or run `loramux trainer` "
                "elsewhere and set training.local_trainer to false."
            )

    async def _ensure_room(self, jobs: TrainingRepository) -> None:
        """Raise TooManyJobs if the tenant may have no further job."""
        unfinished = await jobs.count_unfinished()
        if unfinished >= self._settings.unfinished_per_tenant:
            raise TooManyJobs(
                f"You have {unfinished} unfinished fine-tuning jobs, the most that is allowed "
                "(training.unfinished_per_tenant); wait for one to end.",
                "training_file",
            )

    def _check_start(self, principal: Principal, start: ResolvedModel, options: TrainingOptions) -> None:
        """Raise InvalidJob unless the caller may go on from this adapter."""
        revision = start.revision
        if revision is None:
            return
        if revision.owner != principal.tenant:
            raise InvalidJob(f"`{start.name}` is another tenant's; a job goes on from an adapter of yours.", "model")
        if options.lora != TrainingOptions().lora:
            raise InvalidJob(
                f"A job that goes on from `{start.name}` keeps its rank and modules; leave `lora` out.", "lora"
            )
        if (revision.directory / BUNDLE_FILE).exists():
            raise InvalidJob(
                f"`{start.name}` brings its own chat template or tokenizer, and a job trains with the base's. Go on "
                "from an adapter without them, or train on the base.",
                "model",
            )

    async def _check_rank(self, principal: Principal, options: TrainingOptions) -> None:
        async with self._database.read() as session:
            quota = await adapter_quota(session, principal, self._limits)
        if options.lora.r > quota.rank:
            raise InvalidJob(f"'lora.r' is at most {quota.rank} (adapter_rank); got {options.lora.r}.", "lora.r")


def status_of(job: TrainingJob) -> str:
    """Return OpenAI's word for a job's state."""
    return "running" if job.state == FINISHING else job.state


def _found(id: str, job: TrainingJob | None) -> TrainingJob:
    if job is None:
        raise JobNotFound(id)
    return job


async def _ensure_file(files: FileRepository, principal: Principal, id: str, field: str) -> None:
    """Raise FileNotFound unless the caller sees a training file of this id."""
    file = await files.get(id, Viewpoint.of(principal))
    if file is None or file.purpose != FINE_TUNE:
        raise FileNotFound(id, field)
