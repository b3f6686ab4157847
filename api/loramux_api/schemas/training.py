"""JSON objects of fine-tuning jobs in OpenAI's form, and `lora` next to them. Times are Unix seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.common.units import SECOND
from loramux.data.entities import (
    SAMPLES,
    LoraOptions,
    TrainingCheckpoint,
    TrainingEvent,
    TrainingJob,
    TrainingOptions,
)
from loramux.training.errors import InvalidJob
from loramux.training.service import status_of
from loramux_api.bodies import Body, Unsupported
from loramux_api.schemas.bounds import Fields, ModelName, Name, Tags
from loramux_api.schemas.tenancy import seconds

Auto = Literal["auto"]
Epochs = Annotated[int, Meta(ge=1, le=100)]
BatchSize = Annotated[int, Meta(ge=1, le=256)]
Multiplier = Annotated[float, Meta(gt=0, le=1000)]
Beta = Annotated[float, Meta(gt=0, le=2)]
Alpha = Annotated[int, Meta(ge=1, le=65536)]
Rank = Annotated[int, Meta(ge=1, le=4096)]
ModuleName = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.]+$")]
MAX_SEED = 2**31 - 1
_METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)


class SupervisedHyperparameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Hyperparameters of supervised fine-tuning; `auto`: the trainer chooses."""

    n_epochs: Auto | Epochs = "auto"
    batch_size: Auto | BatchSize = "auto"
    learning_rate_multiplier: Auto | Multiplier = "auto"


class DpoHyperparameters(SupervisedHyperparameters, forbid_unknown_fields=True, kw_only=True):
    """Hyperparameters of direct preference optimization."""

    beta: Auto | Beta = "auto"


class SupervisedMethod(msgspec.Struct, forbid_unknown_fields=True):
    """Supervised fine-tuning."""

    hyperparameters: SupervisedHyperparameters = msgspec.field(default_factory=SupervisedHyperparameters)


class DpoMethod(msgspec.Struct, forbid_unknown_fields=True):
    """Direct preference optimization."""

    hyperparameters: DpoHyperparameters = msgspec.field(default_factory=DpoHyperparameters)


class TrainingMethod(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The method of the training."""

    type: Annotated[str, Meta(max_length=40)]
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: Fields | None = None


class LoraForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The adapter that is made, with PEFT's names."""

    r: Rank = 16
    alpha: Alpha | None = None
    """`lora_alpha`; absent: twice the rank."""
    target_modules: Literal["all-linear"] | Annotated[list[ModuleName], Meta(min_length=1, max_length=64)] = (
        "all-linear"
    )
    use_rslora: bool = False
    use_dora: bool = False


class FineTuningJobBody(Body, forbid_unknown_fields=True):
    """A fine-tuning job to create."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "integrations": Unsupported("read the figures from the job's events.", (None, []))
    }

    model: ModelName
    """A base model, or one of your adapters, from which the training goes on."""
    training_file: Name
    """A file of purpose `fine-tune`."""
    validation_file: Name | None = None
    """A file of purpose `fine-tune`, whose loss is measured after each epoch."""
    suffix: Name | None = None
    """The name of the adapter; the result becomes its next revision. Absent: a new name."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    method: TrainingMethod | None = None
    """`supervised` or `dpo`, with its hyperparameters; absent: `supervised`."""
    hyperparameters: SupervisedHyperparameters | None = None
    """The earlier place of the hyperparameters."""
    lora: LoraForm | None = None
    """Rank, scaling and modules of the adapter."""
    metadata: Tags | None = None


class JobError(msgspec.Struct):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None


class JobHyperparameters(msgspec.Struct, kw_only=True):
    """The hyperparameters, as chosen by the trainer once it has read the examples."""

    n_epochs: Auto | int
    batch_size: Auto | int
    learning_rate_multiplier: Auto | float
    beta: Auto | float | msgspec.UnsetType = msgspec.UNSET
    """Only of `dpo`."""


class JobMethodParameters(msgspec.Struct):
    """The hyperparameters of a method."""

    hyperparameters: JobHyperparameters


class JobMethod(msgspec.Struct, kw_only=True):
    """The method of a job."""

    type: str
    supervised: JobMethodParameters | msgspec.UnsetType = msgspec.UNSET
    dpo: JobMethodParameters | msgspec.UnsetType = msgspec.UNSET


class FineTuningJobObject(msgspec.Struct, kw_only=True):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobError | None
    fine_tuned_model: str | None
    """The revision that it has made, such as `acme/support@1`; null until it has succeeded."""
    finished_at: int | None
    hyperparameters: JobHyperparameters
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: str
    """Status of the job: validating_files, queued, running, paused, succeeded, failed or cancelled."""
    trained_tokens: int | None
    """Tokens that are billed; null until the job has ended."""
    training_file: str
    validation_file: str | None
    estimated_finish: int | None
    integrations: list[Any]
    metadata: dict[str, str] | None
    method: JobMethod
    lora: LoraOptions | None
    """Null if the job goes on from an adapter, whose rank and modules it keeps."""


class FineTuningEventObject(msgspec.Struct, kw_only=True):
    """An entry of a job's log."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    data: dict[str, Any]
    """Figures of a step; or `samples`, answers to the first prompts of the validation file, with their `step`."""
    type: Literal["message", "metrics"]


class FineTuningCheckpointObject(msgspec.Struct, kw_only=True):
    """A checkpoint of a job that is a revision."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
    step_number: int


def training_options(body: FineTuningJobBody) -> TrainingOptions:
    """Return the wishes of a job's creator. Raises InvalidJob."""
    method, given = _method(body)
    lora = body.lora or LoraForm()
    targets = lora.target_modules
    return TrainingOptions(
        method=method,
        n_epochs=_chosen(given.n_epochs),
        batch_size=_chosen(given.batch_size),
        learning_rate_multiplier=_chosen(given.learning_rate_multiplier),
        beta=_chosen(given.beta) if isinstance(given, DpoHyperparameters) else None,
        seed=body.seed or 0,
        lora=LoraOptions(
            r=lora.r,
            alpha=lora.alpha or 2 * lora.r,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
        ),
    )


def metadata_filter(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that listed jobs must have: parameters such as `metadata[team]=a`. Raises InvalidJob."""
    wanted = {}
    for name, value in query.items():
        if match := _METADATA.fullmatch(name):
            wanted[match[1]] = value
        elif name.startswith("metadata"):
            raise InvalidJob(f"Write 'metadata[NAME]=VALUE'; got '{name[:80]}'.", "metadata")
    return wanted


def _method(body: FineTuningJobBody) -> tuple[Literal["supervised", "dpo"], SupervisedHyperparameters]:
    """Return the method and its hyperparameters. Raises InvalidJob."""
    asked = body.method
    if asked is None:
        return "supervised", body.hyperparameters or SupervisedHyperparameters()
    if body.hyperparameters is not None:
        raise InvalidJob("Give 'hyperparameters' in 'method' only.", "hyperparameters")
    for name in ("supervised", "dpo", "reinforcement"):
        if name != asked.type and getattr(asked, name) is not None:
            raise InvalidJob(
                f"'method.{name}' belongs to the method of this name; the type is '{asked.type}'.", "method"
            )
    if asked.type == "supervised":
        return "supervised", (asked.supervised or SupervisedMethod()).hyperparameters
    if asked.type == "dpo":
        return "dpo", (asked.dpo or DpoMethod()).hyperparameters
    if asked.type == "reinforcement":
        raise InvalidJob(
            "'method.type' is 'reinforcement', and this server runs no graders in the training. Use 'supervised' or "
            "'dpo', or train with TRL against this server and push the adapter.",
            "method.type",
        )
    raise InvalidJob(f"'method.type' is 'supervised' or 'dpo'; got '{asked.type}'.", "method.type")


def _chosen(value: Any) -> Any:
    return None if value == "auto" else value


def job_object(job: TrainingJob) -> FineTuningJobObject:
    """Return the job as a JSON object."""
    chosen = job.plan or job.options
    is_dpo = job.options.method == "dpo"
    hyperparameters = JobHyperparameters(
        beta=(chosen.beta or "auto") if is_dpo else msgspec.UNSET,
        n_epochs=chosen.n_epochs or "auto",
        batch_size=chosen.batch_size or "auto",
        learning_rate_multiplier=chosen.learning_rate_multiplier or "auto",
    )
    parameters = JobMethodParameters(hyperparameters)
    method = JobMethod(type="dpo", dpo=parameters) if is_dpo else JobMethod(type="supervised", supervised=parameters)
    return FineTuningJobObject(
        id=job.id,
        created_at=job.created_at // SECOND,
        error=None if job.error is None else JobError(job.error.code, job.error.message, job.error.param),
        fine_tuned_model=job.result,
        finished_at=seconds(job.finished_at),
        hyperparameters=hyperparameters,
        model=job.model,
        organization_id=job.tenant_id,
        result_files=[],
        seed=job.options.seed,
        status=status_of(job),
        trained_tokens=None if job.finished_at is None else job.trained_tokens,
        training_file=job.training_file_id,
        validation_file=job.validation_file_id,
        estimated_finish=seconds(job.estimated_finish),
        integrations=[],
        metadata=msgspec.json.decode(job.tags, type=dict[str, str]) if job.tags else None,
        method=method,
        lora=job.lora,
    )


def event_id(event: TrainingEvent) -> str:
    """Return the id of an entry of a job's log."""
    return f"ftevent-{event.job_id.removeprefix('ftjob-')}-{event.number}"


def event_number(id: str) -> int:
    """Return the number of an entry of a job's log. Raises InvalidJob."""
    number = id.rpartition("-")[2]
    if not (number.isascii() and number.isdigit()) or len(number) > 12:
        raise InvalidJob(f"'after' is the id of an event; got '{id[:80]}'.", "after")
    return int(number)


def event_object(event: TrainingEvent) -> FineTuningEventObject:
    """Return an entry of a job's log as a JSON object."""
    data = {} if event.data is None else msgspec.json.decode(event.data, type=dict[str, Any])
    return FineTuningEventObject(
        id=event_id(event),
        created_at=event.created_at // SECOND,
        level=event.level,
        message=event.message,
        data=data,
        type="metrics" if data and SAMPLES not in data else "message",
    )


def checkpoint_id(checkpoint: TrainingCheckpoint) -> str:
    """Return the id of a checkpoint."""
    return f"ftckpt-{checkpoint.job_id.removeprefix('ftjob-')}-{checkpoint.step}"


def checkpoint_object(checkpoint: TrainingCheckpoint) -> FineTuningCheckpointObject:
    """Return a checkpoint that is a revision as a JSON object."""
    assert checkpoint.result is not None
    return FineTuningCheckpointObject(
        id=checkpoint_id(checkpoint),
        created_at=checkpoint.created_at // SECOND,
        fine_tuned_model_checkpoint=checkpoint.result,
        fine_tuning_job_id=checkpoint.job_id,
        metrics=msgspec.json.decode(checkpoint.metrics, type=dict[str, float]),
        step_number=checkpoint.step,
    )
