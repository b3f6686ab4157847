"""Flows of /v1/fine_tuning/jobs: adapters that the server trains on your files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux_client.batches import MAX_POLL_SECONDS, POLL_SECONDS, create_file
from loramux_client.flow import Call, Flow, R, Resource, item_path, method, poll, read, read_list
from loramux_client.objects import FineTuningCheckpoint, FineTuningEvent, FineTuningJob, Listing

JOBS = "/v1/fine_tuning/jobs"
ENDED = frozenset({"succeeded", "failed", "cancelled"})
"""Final states of a job."""


def create_job(
    training_file: str,
    model: str,
    *,
    suffix: str | None = None,
    validation_file: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    seed: int | None = None,
    lora: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Call[FineTuningJob]:
    """Fine-tune a model on a file that was sent with the purpose `fine-tune`."""
    method = None
    if hyperparameters is not None:
        method = {"type": "supervised", "supervised": {"hyperparameters": dict(hyperparameters)}}
    optional: dict[str, Any] = {
        "suffix": suffix,
        "validation_file": validation_file,
        "method": method,
        "seed": seed,
        "lora": None if lora is None else dict(lora),
        "metadata": None if metadata is None else dict(metadata),
    }
    body: dict[str, Any] = {"training_file": training_file, "model": model}
    body |= {name: value for name, value in optional.items() if value is not None}
    return Call(method="POST", path=JOBS, answer=FineTuningJob, body=body)


def run_job(
    examples: str | Path, model: str, *, validation: str | Path | None = None, **wishes: Any
) -> Flow[FineTuningJob]:
    """Send a file of examples, and fine-tune a model on it. `wishes` are those of `create`."""
    file = yield from create_file(examples, "fine-tune")
    if validation is not None:
        wishes["validation_file"] = (yield from create_file(validation, "fine-tune")).id
    return (yield from create_job(file.id, model, **wishes))


def list_jobs(*, limit: int = 20, after: str | None = None) -> Flow[list[FineTuningJob]]:
    """Return your project's jobs, newest first. `after` is the id of the last job on the previous page."""
    return read_list(JOBS, Listing[FineTuningJob], limit=limit, after=after)


def get_job(id: str) -> Call[FineTuningJob]:
    """Return one job."""
    return read(item_path(JOBS, id), FineTuningJob)


def cancel_job(id: str) -> Call[FineTuningJob]:
    """Cancel a job: its last checkpoint becomes a revision, and the tokens up to it are billed."""
    return Call(method="POST", path=f"{item_path(JOBS, id)}/cancel", answer=FineTuningJob, repeatable=True)


def pause_job(id: str) -> Call[FineTuningJob]:
    """Stop a job at a checkpoint."""
    return Call(method="POST", path=f"{item_path(JOBS, id)}/pause", answer=FineTuningJob, repeatable=True)


def resume_job(id: str) -> Call[FineTuningJob]:
    """Let a paused job go on."""
    return Call(method="POST", path=f"{item_path(JOBS, id)}/resume", answer=FineTuningJob)


def list_events(id: str, *, limit: int = 20, after: str | None = None) -> Flow[list[FineTuningEvent]]:
    """Return a job's log, newest first."""
    return read_list(f"{item_path(JOBS, id)}/events", Listing[FineTuningEvent], limit=limit, after=after)


def list_checkpoints(id: str, *, limit: int = 10) -> Flow[list[FineTuningCheckpoint]]:
    """Return a job's checkpoints that are revisions, newest first."""
    return read_list(f"{item_path(JOBS, id)}/checkpoints", Listing[FineTuningCheckpoint], limit=limit)


def wait_for_job(id: str) -> Flow[FineTuningJob]:
    """Wait for the end of a job and return it."""
    return poll(lambda: get_job(id), lambda job: job.status in ENDED, POLL_SECONDS, MAX_POLL_SECONDS)


class FineTuning(Resource[R]):
    """Calls of fine-tuning jobs: `client.fine_tuning`."""

    create = method(create_job)
    run = method(run_job)
    list = method(list_jobs)
    get = method(get_job)
    cancel = method(cancel_job)
    pause = method(pause_job)
    resume = method(resume_job)
    events = method(list_events)
    checkpoints = method(list_checkpoints)
    wait = method(wait_for_job)
