"""Plain structs of records that leave this area: repositories return them and callers pass them on. No SQL.

Structs that only repositories and their services exchange are in their aggregate's module in `records`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.common.identity import Origin, ProjectId, TenantId


class BaseUpgrade(msgspec.Struct, frozen=True, kw_only=True):
    """A migration of adapters from base to base. Times in microseconds since the epoch."""

    id: str
    source: str
    target: str
    tenant: str | None
    adapter: str | None
    evaluates: int
    created_by: str
    state: str
    error: str | None = None
    server_id: str | None
    attempts: int
    created_at: int
    finished_at: int | None = None


class UpgradeItem(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of a migration."""

    migration_id: str
    position: int
    tenant_id: TenantId
    tenant_name: str
    adapter: str
    revision_id: str
    number: int
    digest: str
    outcome: str
    code: str | None = None
    reason: str | None = None
    new_number: int | None = None
    evaluation_id: str | None = None
    weight: int = 0

    @property
    def name(self) -> str:
        """`tenant/adapter`."""
        return f"{self.tenant_name}/{self.adapter}"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times in microseconds since the epoch."""

    id: str
    project_id: ProjectId
    owner: str
    purpose: str
    filename: str
    size: int
    created_at: int
    expires_at: int


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is stored for later requests, encrypted. Times in microseconds since the epoch."""

    id: str
    project_id: ProjectId
    owner: str
    previous_id: str | None
    """Id of the response that this response continues, which may be deleted."""
    items: bytes
    """The items of the response's input and output."""
    items_size: int
    """Bytes of `items`."""
    content: bytes
    """The rest of the response."""
    size: int
    """Bytes of both."""
    created_at: int
    expires_at: int


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a line of a batch's input, or of the batch as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """The line's number, counted from 1; None: the error is about the whole batch."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times in microseconds since the epoch."""

    id: str
    tenant_id: TenantId
    project_id: ProjectId
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    tags: str
    state: str
    server_id: str | None
    attempts: int
    lines: int = 0
    flushed: int = 0
    completed: int = 0
    failed: int = 0
    """Number of lines in the error file."""
    not_run: int = 0
    """Number of failed lines that were not run because the batch was cancelled or expired."""
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    finished_at: int | None = None
    output_seconds: int | None = None
    """Seconds for which the output and error files are kept; None: the server's retention of files."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation. Times in microseconds since the epoch."""

    id: str
    tenant_id: TenantId
    project_id: ProjectId
    owner: str
    adapter: str
    models: str
    file_id: str
    batch_id: str
    grader: str
    judge_key: bytes | None = None
    state: str
    server_id: str | None
    attempts: int
    result: str | None = None
    error: str | None = None
    created_at: int
    finished_at: int | None = None


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an adapter's revision. Times in microseconds since the epoch."""

    id: str
    model: str
    adapter_digest: str
    key_id: str
    status: str
    prompt_tokens: int
    created_at: int
    settled_at: int | None


class IdempotencyClaim(msgspec.Struct, frozen=True):
    """The caller's idempotency key for one request, and a digest of the request's body."""

    name: str
    fingerprint: str
    holder: str = ""
    """The owner of the idempotency key if it is not the caller, such as a batch that makes keys for its lines."""
    expires_at: int | None = None
    """The expiry in microseconds since the epoch; None: after the time for which answers are kept."""


ServiceTier = Literal["default", "flex", "priority", "batch", "shadow", "training"]
CHOSEN: tuple[ServiceTier, ...] = ("flex", "priority", "batch")
"""Service tiers that a tenant's tier may allow; `default` needs no permission."""
ALLOWED_AT_FIRST = ("batch", "flex")
"""Service tiers that a new tier allows. Requests in them never have precedence over other requests."""
FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the counters of first tokens, in seconds. The last counter is for times above all bounds."""


class ParkedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that an operator must decide about."""

    sink: str
    event_id: str
    sequence: int
    reason: str
    parked_at: int


class UploadFile(msgspec.Struct, frozen=True, kw_only=True):
    """An announced file, and the number of its bytes that are stored."""

    name: str
    size: int
    sha256: str
    received: int = 0


class Submitter(msgspec.Struct, frozen=True):
    """The caller that submitted an upload to the checks. The audit log names it as the author of the revision."""

    actor: str
    """The id of a key or a member."""
    origin: Origin = Origin()


class UploadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an upload: a revision or a refusal."""

    revision: int | None = None
    digest: str | None = None
    error: Refusal | None = None
    report: str | None = None
    """The validation report as JSON."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An upload and its files, by name. Times in microseconds since the epoch."""

    id: str
    adapter: str
    """The adapter's own name."""
    promote: bool
    source: str | None
    base_model: str | None
    state: str
    files: tuple[UploadFile, ...]
    submitter: Submitter | None = None
    ignored: tuple[str, ...] = ()
    """Files that were announced but are not stored, because serving does not need them."""
    outcome: UploadOutcome
    created_at: int
    expires_at: int


class Refusal(msgspec.Struct, frozen=True):
    """The reason why an upload was rejected."""

    code: str
    message: str
    param: str | None = None


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter that a fine-tuning job makes, with PEFT's names."""

    r: int = 16
    alpha: int = 32
    target_modules: tuple[str, ...] | str = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The wishes of the creator of a fine-tuning job; None: the trainer chooses (`auto`)."""

    method: Literal["supervised", "dpo"] = "supervised"
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate_multiplier: float | None = None
    beta: float | None = None
    """The weight of the reference model in DPO."""
    seed: int = 0
    lora: LoraOptions = LoraOptions()


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of a trainer about a job, after it has read the examples."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None = None
    sequences: int
    """Sequences of an epoch: an example whose turns are rendered differently later is several sequences."""
    epoch_tokens: int
    total_steps: int
    digests: dict[str, str] = {}
    """SHA-256 of the job's files, by their fields in the request: `training_file`, `validation_file`."""

    @property
    def total_tokens(self) -> int:
        """Maximum number of tokens that the job trains on."""
        return self.n_epochs * self.epoch_tokens


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuning job. Times in microseconds since the epoch."""

    id: str
    tenant_id: TenantId
    project_id: ProjectId
    owner: str
    key_id: str
    """The id of the key, or of the member, that made the job."""
    model: str
    """The model that it begins with: a base, or a revision of one of the tenant's adapters."""
    base_model: str
    adapter_digest: str | None
    template_digest: str
    """SHA-256 of the chat template with which the model is served."""
    context: int
    """Maximum number of tokens of a sequence."""
    adapter: str
    """The own name of the adapter that the result becomes a revision of."""
    training_file_id: str
    validation_file_id: str | None
    options: TrainingOptions
    tags: str
    state: str
    wanted: Literal["pause", "cancel"] | None = None
    """The order that a trainer has yet to follow."""
    server_id: str | None
    attempts: int
    trainer_id: str | None = None
    """The trainer that works on the job; if it dies, another one takes the job."""
    trainer_attempts: int = 0
    """The number of trainers that have taken the job since its last checkpoint."""
    request_id: str | None = None
    """The request in the ledger that holds the cost, and that bills the tokens; None: nothing is held yet."""
    plan: TrainingPlan | None = None
    trained_tokens: int = 0
    """The tokens up to the last checkpoint."""
    outcome: str | None = None
    """The state that the job ends with, once a trainer has ended its work."""
    error: Refusal | None = None
    result: str | None = None
    """The revision that it has made: `tenant/adapter@1`."""
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    estimated_finish: int | None = None

    @property
    def lora(self) -> LoraOptions | None:
        """The adapter that the job makes; None: it has the rank and the modules of the adapter that it goes on from."""
        return self.options.lora if self.adapter_digest is None else None


class TrainingCard(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a revision that a fine-tuning job has made. The field names are stored data."""

    job: str
    model: str
    """The model that the training began with: a base, or a revision."""
    chat_template: str
    """SHA-256 of the chat template."""
    digests: dict[str, str]
    """SHA-256 of the files of examples: `training_file`, `validation_file`."""
    method: str
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None
    seed: int
    lora: LoraOptions | None
    """None: those of `model`, because the training went on from an adapter."""
    step: int
    trained_tokens: int
    metrics: dict[str, float]


SAMPLES = "samples"
"""The first key of the data of a log's entry that holds answers of the model."""


class TrainingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a job's log. `data` is a JSON object of figures, or of samples."""

    job_id: str
    number: int
    level: Literal["info", "warn", "error"]
    message: str
    data: str | None
    created_at: int


class TrainingCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state of the training from which it can go on. Its files are objects in the store."""

    job_id: str
    step: int
    files: tuple[str, ...]
    is_epoch: bool
    """True if it is the end of an epoch."""
    trained_tokens: int
    metrics: str
    """A JSON object of figures."""
    result: str | None = None
    """The revision that was made of it."""
    created_at: int


class CanaryNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a removed canary: good outcomes and all outcomes, of the canary and of the earlier revisions."""

    measure: str
    candidate: tuple[float, int]
    before: tuple[float, int]


class ShadowNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of a shadow, when it begins and when it ends."""

    id: str
    ended_because: str | None = None
    """The reason of the end: `stopped`, `promoted`, `revision_deleted` or `adapter_deleted`; None: the shadow has
    begun.
    """
    compared: int = 0
    """Number of requests whose two answers were compared."""
    exact: tuple[float, float, float] | None = None
    """The share of equal answers, with its 95% confidence interval."""


class AliasMove(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an alias's targets: revision numbers and their weights, before and after the change."""

    name: str
    before: dict[int, int]
    """Targets before the change; empty for a new alias."""
    after: dict[int, int]


class EventDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The details of an event, in addition to its kind, adapter and time."""

    revision: int | None = None
    digest: str | None = None
    upload: str | None = None
    """The upload session's id."""
    batch: str | None = None
    """The batch's id."""
    job: str | None = None
    """The fine-tuning job's id."""
    alias: AliasMove | None = None
    canary: CanaryNumbers | None = None
    shadow: ShadowNumbers | None = None
    error: Refusal | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of an adapter. `created_at` in microseconds since the epoch."""

    id: str
    kind: str
    adapter: str
    """The adapter's own name."""
    detail: EventDetail
    created_at: int


class LoggedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery as the endpoint's log shows it."""

    event: Event
    state: str
    attempts: int
    status: int | None
    error: str | None
    next_attempt_at: int | None
    updated_at: int


class ServedRequest(msgspec.Struct, frozen=True):
    """Time and sizes of one settled request."""

    opened_at: int
    """Time of its arrival, Unix microseconds."""
    tenant_id: str
    adapter_digest: str | None
    rank: int | None
    """Rank of its adapter; None: the base, or an adapter that was removed."""
    tier: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    base_model: str
