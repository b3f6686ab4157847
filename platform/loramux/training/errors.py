"""Errors of fine-tuning jobs.

TrainingError
├── InvalidJob       the request for a job is not valid: 400
├── JobNotFound      404
├── JobConflict      the job's state does not allow the change: 409
├── TooManyJobs      429
└── TrainingDisabled this server runs no fine-tuning jobs: 501
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError


class TrainingError(LoramuxError):
    """Base of the errors of fine-tuning jobs."""


class InvalidJob(TrainingError):
    """The request for a job is not valid; the message names the change to make."""

    code = "invalid_job"


class JobNotFound(TrainingError):
    """No such job, or another project's or tenant's."""

    code = "fine_tuning_job_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"No such fine-tuning job: '{id[:80]}'.", "fine_tuning_job_id")


class JobConflict(TrainingError):
    """The job's state does not allow the change."""

    code = "invalid_state"
    status = HTTPStatus.CONFLICT


class TooManyJobs(TrainingError):
    """The tenant has too many unfinished jobs."""

    code = "too_many_jobs"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 60


class TrainingDisabled(TrainingError):
    """This server runs no fine-tuning jobs."""

    code = "training_disabled"
    status = HTTPStatus.NOT_IMPLEMENTED
