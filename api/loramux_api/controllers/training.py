"""/v1/fine_tuning/jobs: fine-tuning jobs in OpenAI's form."""

from __future__ import annotations

from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.common.identity import Principal
from loramux.training.service import FineTuningJobs
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest
from loramux_api.openapi import ApiController
from loramux_api.parameters import OptionalText, PathName, ShortPageLimit
from loramux_api.schemas.batches import Cursored, page_of
from loramux_api.schemas.training import (
    FineTuningCheckpointObject,
    FineTuningEventObject,
    FineTuningJobBody,
    FineTuningJobObject,
    checkpoint_id,
    checkpoint_object,
    event_id,
    event_number,
    event_object,
    job_object,
    metadata_filter,
    training_options,
)


class FineTuningController(ApiController):
    """Fine-tuning jobs, whose results are revisions of adapters."""

    path = "/v1/fine_tuning/jobs"
    tags = ("Fine-tuning",)
    guards = (requires("adapters"),)

    @post(status_code=200, summary="Create a fine-tuning job")
    async def create(
        self,
        data: JSONBody[FineTuningJobBody],
        principal: NamedDependency[Principal],
        training: NamedDependency[FineTuningJobs],
    ) -> FineTuningJobObject:
        """Train an adapter on a file. The result is a revision of the adapter `suffix`; no alias moves to it if the
        adapter has others.
        """
        made = await training.create(
            principal,
            model=data.model,
            training_file_id=data.training_file,
            validation_file_id=data.validation_file,
            suffix=data.suffix,
            options=training_options(data),
            metadata=data.metadata,
        )
        return job_object(made)

    @get(summary="List fine-tuning jobs")
    async def list_jobs(
        self,
        request: AnyRequest,
        principal: NamedDependency[Principal],
        training: NamedDependency[FineTuningJobs],
        after: OptionalText = None,
        limit: ShortPageLimit = 20,
    ) -> Cursored[FineTuningJobObject]:
        """List your project's jobs, newest first. `after` is the id of the last job on the previous page;
        `metadata[team]=a` lists the jobs with this metadata only.
        """
        found = await training.before(principal, after, limit + 1, metadata_filter(request.query_params))
        return page_of([job_object(job) for job in found], limit, [job.id for job in found])

    @get("/{job_id:str}", summary="Describe a fine-tuning job")
    async def get_job(
        self, job_id: PathName, principal: NamedDependency[Principal], training: NamedDependency[FineTuningJobs]
    ) -> FineTuningJobObject:
        """Describe a job: its status, its hyperparameters, and after its end its revision or its error."""
        return job_object(await training.get(principal, job_id))

    @post("/{job_id:str}/cancel", status_code=200, summary="Cancel a fine-tuning job")
    async def cancel(
        self, job_id: PathName, principal: NamedDependency[Principal], training: NamedDependency[FineTuningJobs]
    ) -> FineTuningJobObject:
        """Cancel a job. Its last checkpoint becomes a revision, and the tokens up to it are billed."""
        return job_object(await training.cancel(principal, job_id))

    @post("/{job_id:str}/pause", status_code=200, summary="Pause a fine-tuning job")
    async def pause(
        self, job_id: PathName, principal: NamedDependency[Principal], training: NamedDependency[FineTuningJobs]
    ) -> FineTuningJobObject:
        """Stop a job at a checkpoint, from which it can be resumed."""
        return job_object(await training.pause(principal, job_id))

    @post("/{job_id:str}/resume", status_code=200, summary="Resume a fine-tuning job")
    async def resume(
        self, job_id: PathName, principal: NamedDependency[Principal], training: NamedDependency[FineTuningJobs]
    ) -> FineTuningJobObject:
        """Let a paused job go on from its checkpoint."""
        return job_object(await training.resume(principal, job_id))

    @get("/{job_id:str}/events", summary="List a fine-tuning job's events")
    async def events(
        self,
        job_id: PathName,
        principal: NamedDependency[Principal],
        training: NamedDependency[FineTuningJobs],
        after: OptionalText = None,
        limit: ShortPageLimit = 20,
    ) -> Cursored[FineTuningEventObject]:
        """List a job's log, newest first: messages, and the figures of its steps."""
        before = None if after is None else event_number(after)
        found = await training.events(principal, job_id, before, limit + 1)
        return page_of([event_object(event) for event in found], limit, [event_id(event) for event in found])

    @get("/{job_id:str}/checkpoints", summary="List a fine-tuning job's checkpoints")
    async def checkpoints(
        self,
        job_id: PathName,
        principal: NamedDependency[Principal],
        training: NamedDependency[FineTuningJobs],
        after: OptionalText = None,
        limit: ShortPageLimit = 10,
    ) -> Cursored[FineTuningCheckpointObject]:
        """List the checkpoints of an ended job that are revisions, newest first."""
        found = [one for one in await training.checkpoints(principal, job_id) if one.result is not None]
        ids = [checkpoint_id(one) for one in found]
        first = ids.index(after) + 1 if after in ids else 0
        return page_of([checkpoint_object(one) for one in found[first:]], limit, ids[first:])
