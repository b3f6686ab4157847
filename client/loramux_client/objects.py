"""Objects that the server returns. Times are Unix seconds; fields that a newer server adds are ignored."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")


class ApiObject(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all objects that the server returns."""


class Listing(ApiObject, Generic[T], frozen=True, kw_only=True):
    """A list, or a page of a list."""

    data: list[T]


class File(ApiObject, frozen=True, kw_only=True):
    """A file of a project."""

    id: str
    filename: str
    purpose: str
    """Purpose of the file: batch, evals or batch_output."""
    bytes: int
    created_at: int
    expires_at: int | None = None


class RequestCounts(ApiObject, frozen=True, kw_only=True):
    """Number of a batch's lines in each state."""

    total: int
    completed: int
    failed: int


class LineError(ApiObject, frozen=True, kw_only=True):
    """Error of a line of a batch."""

    message: str
    code: str | None = None
    line: int | None = None
    param: str | None = None


class BatchErrors(ApiObject, frozen=True, kw_only=True):
    """Errors of a batch's input."""

    data: list[LineError]


class Batch(ApiObject, frozen=True, kw_only=True):
    """A batch of requests."""

    id: str
    endpoint: str
    status: str
    """Status of the batch: validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled."""
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: RequestCounts
    errors: BatchErrors | None = None
    created_at: int
    expires_at: int | None = None
    metadata: dict[str, str] | None = None


class JobError(ApiObject, frozen=True, kw_only=True):
    """The reason why a fine-tuning job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(ApiObject, frozen=True, kw_only=True):
    """A fine-tuning job."""

    id: str
    model: str
    status: str
    """Status of the job: validating_files, queued, running, paused, succeeded, failed or cancelled."""
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    training_file: str
    validation_file: str | None = None
    error: JobError | None = None
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    metadata: dict[str, str] | None = None


class FineTuningEvent(ApiObject, frozen=True, kw_only=True):
    """An entry of a fine-tuning job's log."""

    id: str
    level: str
    message: str
    data: dict[str, Any] = {}
    """Figures of a step; or `samples`, answers to prompts of the validation file, with their `step`."""
    created_at: int


class FineTuningCheckpoint(ApiObject, frozen=True, kw_only=True):
    """A checkpoint of a fine-tuning job that is a revision."""

    id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, float] = {}
    created_at: int


class Interval(ApiObject, frozen=True, kw_only=True):
    """A mean and its 95% confidence interval."""

    mean: float
    low: float
    high: float


class Latency(ApiObject, frozen=True, kw_only=True):
    """Speed of the answers of an evaluation, without the time in the queue."""

    answers: int
    first_token_seconds: dict[str, float]
    tokens_per_second: float | None = None


class Cost(ApiObject, frozen=True, kw_only=True):
    """Price of the answers of an evaluation; `amount` is a decimal number."""

    amount: str
    currency: str


class EvaluatedRevision(ApiObject, frozen=True, kw_only=True):
    """Results of one revision in an evaluation."""

    model: str
    score: Interval
    errors: int
    prompt_tokens: int
    output_tokens: int
    f1: dict[str, float] | None = None
    latency: Latency | None = None
    cost: Cost | None = None


class EvaluationResult(ApiObject, frozen=True, kw_only=True):
    """Scores in pairs; `difference` is the candidate's score minus the other revision's."""

    questions: int
    candidate: EvaluatedRevision
    against: EvaluatedRevision
    difference: Interval
    better: int
    worse: int


class Evaluation(ApiObject, frozen=True, kw_only=True):
    """A comparison of two revisions on one set of questions."""

    id: str
    adapter: str
    models: list[str]
    """The candidate, and the revision that it is compared with."""
    file_id: str
    batch_id: str
    status: str
    """Status of the evaluation: running, completed or failed."""
    result: EvaluationResult | None = None
    error: str | None = None
    created_at: int
    finished_at: int | None = None


class FeedbackSummary(ApiObject, frozen=True, kw_only=True):
    """Feedback on a revision's answers."""

    count: int
    mean_score: float | None = None
    labels: dict[str, int] = msgspec.field(default_factory=dict)


class RevisionReport(ApiObject, frozen=True, kw_only=True):
    """Measures of a revision in a window of time."""

    model: str
    requests: int
    completed: int
    cancelled: int
    failed: int
    refused: int
    finish_reasons: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    first_token_seconds: dict[str, float | None]
    tokens_per_second: float | None = None
    feedback: FeedbackSummary


class PolicyCheck(ApiObject, frozen=True, kw_only=True):
    """Check of one revision by one demand of a release policy."""

    rule: str
    passed: bool
    message: str


class Policy(ApiObject, frozen=True, kw_only=True):
    """The release policy of an alias, and its checks of one revision."""

    alias: str
    policy: dict[str, Any] | None = None
    current: int | None = None
    """The revision that gets most of the alias's requests."""
    revision: int | None = None
    passed: bool | None = None
    checks: list[PolicyCheck] = []


class ShadowMeasure(ApiObject, frozen=True, kw_only=True):
    """A mean over requests, with its 95% confidence interval."""

    requests: int
    mean: float
    low: float
    high: float


class ShadowRequests(ApiObject, frozen=True, kw_only=True):
    """Number of the requests chosen by a shadow, by result."""

    compared: int
    failed: int
    dropped: dict[str, int]
    """Number of requests that did not run, by reason: queue_full, too_old, day_limit or stopped."""
    outputs_dropped: int = 0


class Shadow(ApiObject, frozen=True, kw_only=True):
    """A candidate revision that answers a share of an adapter's requests again, in addition to the adapter."""

    id: str
    revision: int
    share: float
    max_tokens_per_day: int
    keep_outputs: bool
    created_at: int
    ended_at: int | None = None
    ended_because: str | None = None
    tokens_today: int
    requests: ShadowRequests
    current_tokens: int
    candidate_tokens: int
    measures: dict[str, ShadowMeasure]
    """Measures by name: exact, prefix, similarity, length_ratio, same_finish_reason, valid_current and so on."""


class Target(ApiObject, frozen=True, kw_only=True):
    """A revision and its share of an alias's traffic: `weight` divided by the sum over the alias's targets."""

    revision: int
    weight: int = 100


class Alias(ApiObject, frozen=True, kw_only=True):
    """A movable name for revisions."""

    name: str
    targets: list[Target]
    version: int = 0
    """Number of the alias's latest change."""
    updated_at: int | None = None


class AliasVersion(ApiObject, frozen=True, kw_only=True):
    """The targets of an alias between two changes."""

    version: int
    targets: list[Target]
    restores: int | None = None
    """Version that a rollback restored."""
    changed_by: str | None = None
    changed_by_name: str | None = None
    """Name of the key or the member; None if it has no name."""
    changed_at: int | None = None


class Adapter(ApiObject, frozen=True, kw_only=True):
    """An adapter at its current revision."""

    id: str
    name: str
    """Name `tenant/adapter`, the value of a request's `model`."""
    revision: int
    digest: str
    state: str
    rank: int
    size_bytes: int
    created_at: int
    aliases: list[Alias] = []
    etag: str | None = None
    """Value for `if_match`: a change with it is made only if the adapter has not changed since."""
    expires_at: int | None = None


class TrainingAdapter(ApiObject, frozen=True, kw_only=True):
    """A live version of a training adapter, which a trainer has pushed."""

    id: str
    """Version `tenant/policy@12`, a value of a request's `model`."""
    series: str
    digest: str
    base_model: str
    rank: int
    size_bytes: int
    created_at: int
    parity: str | None = None
    """Outcome of the comparison with PEFT: `passed`, `failed`, `not_run`; None if it was not compared."""
    parity_detail: str | None = None


class Pin(ApiObject, frozen=True, kw_only=True):
    """A revision that stays in the engine's memory."""

    since: int | None = None
    pinned_by: str | None = None
    used_at: int | None = None


class AddedToken(ApiObject, frozen=True, kw_only=True):
    """A token that a revision's tokenizer adds to the base's."""

    id: int
    content: str
    special: bool = False


class Bundle(ApiObject, frozen=True, kw_only=True):
    """Settings and parts of a revision in addition to its weights."""

    task: str | None = None
    """Task for which the adapter was trained: SEQ_CLS, TOKEN_CLS or FEATURE_EXTRACTION; None: generating text.
    """
    num_labels: int = 0
    labels: list[str] = []
    """Classes of a classifier."""
    problem_type: str | None = None
    pooling: str | None = None
    """Method that turns a text's hidden states into its vector."""
    matryoshka_dimensions: list[int] = []
    chat_template: str | None = None
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    added_tokens: list[AddedToken] = []
    eos_token_ids: list[int] = []
    sampling: dict[str, float | None] = msgspec.field(default_factory=dict)
    max_tokens: int | None = None
    stop: list[str] = []
    system_prompt: str | None = None
    tool_parser: str | None = None
    description: str | None = None
    license: str | None = None


class TrainingCard(ApiObject, frozen=True, kw_only=True):
    """The origin of a revision that a fine-tuning job has made."""

    job: str
    model: str
    chat_template: str
    """SHA-256 of the chat template."""
    digests: dict[str, str]
    """SHA-256 of the files of examples."""
    method: str
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None = None
    seed: int
    lora: dict[str, Any] | None = None
    step: int
    trained_tokens: int
    metrics: dict[str, float]


class Revision(ApiObject, frozen=True, kw_only=True):
    """A revision of an adapter, with immutable weights."""

    id: str
    name: str
    """Name of the revision, `tenant/adapter@3`."""
    revision: int
    digest: str
    state: str
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None = None
    undo_until: int | None = None
    """End of the time in which a deletion can be undone."""
    expires_at: int | None = None
    aliases: list[str] = []
    pin: Pin | None = None
    bundle: Bundle | None = None
    """Bundle that is served with the revision's weights. Lists leave this field out."""
    training: TrainingCard | None = None
    """The fine-tuning job that has made the revision. Lists leave this field out."""


class Grant(ApiObject, frozen=True, kw_only=True):
    """A tenant that may call another tenant's adapter."""

    tenant: str
    granted_by: str | None = None
    granted_by_name: str | None = None
    """Name of the key or the member; None if it has no name."""
    granted_at: int | None = None


class Failure(ApiObject, frozen=True, kw_only=True):
    """Reason of a failure event."""

    code: str
    message: str
    param: str | None = None


class AliasMove(ApiObject, frozen=True, kw_only=True):
    """A change of an alias: revision numbers and their weights, before and after."""

    name: str
    before: dict[int, int]
    after: dict[int, int]


class EventData(ApiObject, frozen=True, kw_only=True):
    """The adapter of an event, and its details."""

    adapter: str
    revision: int | None = None
    model: str | None = None
    digest: str | None = None
    upload: str | None = None
    alias: AliasMove | None = None
    error: Failure | None = None


class Event(ApiObject, frozen=True, kw_only=True):
    """A change of an adapter or an upload."""

    id: str
    type: str
    created_at: int
    data: EventData


class LoggedRequest(ApiObject, frozen=True, kw_only=True):
    """A request that an adapter answered."""

    id: str
    model: str
    """Revision that answered."""
    digest: str
    api_key_id: str
    status: str
    """Status of the request: open, settled or interrupted."""
    prompt_tokens: int
    created_at: int
    settled_at: int | None = None


class Webhook(ApiObject, frozen=True, kw_only=True):
    """An endpoint that receives events. Only the call that creates it returns its `secret`."""

    id: str
    url: str
    events: list[str]
    enabled: bool
    created_at: int
    disabled_because: str | None = None
    failing_since: int | None = None
    secret: str | None = None


class WebhookTest(ApiObject, frozen=True, kw_only=True):
    """The result of a test delivery."""

    delivered: bool
    status: int | None = None
    error: str | None = None
    milliseconds: int


class Delivery(ApiObject, frozen=True, kw_only=True):
    """The delivery of one event to one webhook."""

    event: Event
    state: str
    attempts: int
    status: int | None = None
    error: str | None = None
    next_attempt_at: int | None = None


class UsageResult(ApiObject, frozen=True, kw_only=True):
    """Sums of one group. Fields that the query does not group by are None."""

    input_tokens: int
    output_tokens: int
    input_cached_tokens: int = 0
    input_image_tokens: int = 0
    num_model_requests: int
    waived_input_tokens: int = 0
    """Input tokens that were computed and not charged."""
    waived_output_tokens: int = 0
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None


class Linears(ApiObject, frozen=True, kw_only=True):
    """An engine's linears on a CPU: their format, and the floor of a decode step."""

    format: str
    """panels (layers are one call), onednn or torch; codes if the weights are quantized."""
    gflops: float | None = None
    """10^9 operations per second for 256 rows, measured at start."""
    memory_gb_per_s: float | None = None
    """10^9 bytes per second that the engine's threads read from memory, measured at start."""
    floor_ms: float | None = None
    """Time to read the base's weights from memory, in ms: no decode step is shorter."""
    reading_ms: float | None = None
    """Time of a step in which the weights are read, in ms, by the latest steps."""


class StepLimits(ApiObject, frozen=True, kw_only=True):
    """Limits of an engine's steps: its settings, and the device's defaults for settings that are unset."""

    max_num_seqs: int
    """The largest number of sequences in one step."""
    max_num_batched_tokens: int
    """The largest number of tokens in one step."""
    max_mixed_prefill_tokens: int
    """The largest number of prompt tokens in a step in which sequences decode."""
    max_draft_tokens: int
    """The longest draft of a sequence in one step; 0: nothing is drafted."""


class Engine(ApiObject, frozen=True, kw_only=True):
    """One engine of a server."""

    engine: str
    base_model: str
    state: str
    """State of the engine: starting, ready, draining, resting (not needed now) or lost."""
    requests: int
    starts: int
    """Number of times that the engine was started."""
    problem: str | None = None
    """The reason why the engine last ended."""
    step_graphs_missing: int = 0
    """Recordings of steps that run without a CUDA graph, slower; 0 on a CPU."""
    linears: Linears | None = None
    """The linears' format and floor; None on a GPU, and before the engine's first start."""
    step_limits: StepLimits | None = None
    """Limits of a step; None before the engine's first start."""


class Base(ApiObject, frozen=True, kw_only=True):
    """One base model, with its state on the server that answered."""

    name: str
    path: str
    state: str
    """State of the base: loading, serving, failed, draining or retired."""
    source: str
    """Source of the base: settings or added."""
    engines_ready: int
    engines_min: int
    engines_max: int
    seconds_in_state: float = 0.0
    problem: str | None = None
    """Reason why the base did not load."""
    retired_at: int | None = None
    successor: str | None = None
    """Base model to use instead of a retired one."""


class BaseMigration(ApiObject, frozen=True, kw_only=True):
    """A check of the adapters of one base model on another base model."""

    id: str
    source: str
    target: str
    status: str
    """Status of the migration: running, completed, cancelled or failed."""
    outcomes: dict[str, int]
    """Number of revisions by outcome: pending, evaluating, fits, needs_retraining, refused."""
    created_at: int
    tenant: str | None = None
    adapter: str | None = None
    evaluate: bool = True
    error: str | None = None
    finished_at: int | None = None


class BaseMigrationItem(ApiObject, frozen=True, kw_only=True):
    """One revision of a migration."""

    position: int
    adapter: str
    revision: int
    outcome: str
    code: str | None = None
    reason: str | None = None
    new_revision: int | None = None
    """Number of the revision with the same files for the target."""
    evaluation_id: str | None = None
    weight: int = 0
    """Part of the adapter's share of aliases, in percent, that the last call moved to the new revision."""


class MigrationReport(BaseMigrationItem, frozen=True, kw_only=True):
    """Result of a migration for one of your adapters."""

    migration_id: str
    source: str
    target: str
    created_at: int


class Moved(ApiObject, frozen=True, kw_only=True):
    """An adapter whose aliases were moved, or the reason why they were not moved."""

    position: int
    adapter: str
    revision: int
    aliases: list[str]
    new_revision: int | None = None
    code: str | None = None
    error: str | None = None


class MovedPage(ApiObject, frozen=True, kw_only=True):
    """Adapters that one call moved."""

    data: list[Moved]
    next: int | None = None


class UsageBucket(ApiObject, frozen=True, kw_only=True):
    """Usage in a span of time."""

    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(ApiObject, frozen=True, kw_only=True):
    """One page of buckets."""

    data: list[UsageBucket]
    next_page: str | None = None


class Deleted(ApiObject, frozen=True, kw_only=True):
    """The confirmation of a deletion."""

    deleted: bool = True


class ReceivedBytes(ApiObject, frozen=True, kw_only=True):
    """Number of bytes of a file that the server has, counted from the file's start."""

    received: int


class UploadFile(ApiObject, frozen=True, kw_only=True):
    """A file of an upload, with the number of bytes that the server has."""

    name: str
    size: int
    sha256: str
    received: int


class UploadError(ApiObject, frozen=True, kw_only=True):
    """Reason why an upload was rejected."""

    code: str | None = None
    message: str
    param: str | None = None


class Check(ApiObject, frozen=True, kw_only=True):
    """One validation check of the uploaded files."""

    name: str
    outcome: str
    """Outcome of the check: passed, failed or not_run."""
    detail: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)


class UploadWarning(ApiObject, frozen=True, kw_only=True):
    """A property of the files that is valid but probably not intended."""

    code: str
    field: str | None = None
    message: str


class AdapterSummary(ApiObject, frozen=True, kw_only=True):
    """A summary of the uploaded adapter."""

    peft_type: str | None = None
    task: str | None = None
    """PEFT's task type: CAUSAL_LM, SEQ_CLS, TOKEN_CLS or FEATURE_EXTRACTION."""
    labels: int | None = None
    """Number of a classifier's labels."""
    base_model_name_or_path: str | None = None
    """Base model that the adapter's config names."""
    rank: int | None = None
    """Largest rank of the adapter's modules."""
    targets: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of modules by name."""
    layers: int | None = None
    tensors: int | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    ignored_fields: dict[str, str] = msgspec.field(default_factory=dict)
    """Fields of adapter_config.json that have no effect on serving, with the reason."""


class ValidationReport(ApiObject, frozen=True, kw_only=True):
    """The checks of an upload and their results."""

    checks: list[Check] = msgspec.field(default_factory=list)
    found: AdapterSummary | None = None
    converted: str | None = None
    """Description of the conversion, if the served adapter is a converted form of the uploaded one."""
    warnings: list[UploadWarning] = msgspec.field(default_factory=list)


class Upload(ApiObject, frozen=True, kw_only=True):
    """An upload session."""

    id: str
    adapter: str
    state: Literal["uploading", "validating", "ready", "rejected", "expired"]
    files: list[UploadFile]
    """Files to send."""
    ignored: list[str] = []
    """Announced files that serving does not need and the server does not accept."""
    created_at: int
    expires_at: int | None = None
    revision: str | None = None
    """Revision that the upload created, such as `tenant/adapter@3`."""
    digest: str | None = None
    promote: bool = True
    base_model: str | None = None
    """Base model that the upload's owner has named."""
    error: UploadError | None = None
    report: ValidationReport | None = None
