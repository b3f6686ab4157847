"""The protocol between the serving layer and an engine: requests, commands and reports, over a thread, pipe or socket.

    serving layer ── Submit(Request), Cancel, Retire, Pin, Unpin, Lift, Shutdown ──> engine
                         <── Ready(ModelFacts), then a StepReport a step, last Stopped ──────

A request is one generation: its prompt's tokens, its sampling parameters, its tenant and its revision. One `StepReport`
carries a step's `TokenEvent`s of all requests and, once a second, `EngineStats`. All messages are frozen, plain msgspec
data, the same on both sides for every kind of channel.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from loramux.common.bundle import SamplingDefaults
from loramux.common.sampling import TokenSelection
from loramux.common.units import TokenCounts
from loramux.engine.metrics import Distribution


class ServiceClass(enum.StrEnum):
    """Scheduling class of a request; classes divide the engine by weight and never starve each other."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class SamplingParams(TokenSelection, frozen=True, kw_only=True):
    """Parameters of choosing tokens, and of ending. Token ids only: the serving layer finds stop *strings*.

    Log probabilities are the model's, before any parameter.
    """

    max_tokens: int
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end generation. The stop token itself is counted and reported; its text is never shown."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log probabilities to report. None: no log probabilities. 0: that of the chosen token. n > 0: also those of the n
    most likely tokens.
    """
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: tokens whose log probabilities are reported instead of those of the most likely ones."""
    prompt_logprobs: int | None = None
    """Log probabilities to report for the prompt's tokens after the first, in the same format as `logprobs`. The whole
    prompt is then computed, without the prefix cache.
    """

    @property
    def greedy(self) -> bool:
        """True if the most likely token is chosen."""
        return self.temperature == 0.0


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar that an answer follows from its first token to its end."""

    grammar: str
    """The grammar in llguidance's format, as `loramux.constraints` writes it."""
    field: str
    """Field of the API request that set the constraint; errors name it."""
    after: int | None = None
    """Token that ends a leading part of the answer, such as a thought, to which the grammar does not apply. The answer
    may end within this part, because a model that does not think ends its answer there. None: the grammar begins with
    the answer.
    """
    opening: int | None = None
    """Token that begins the leading part, if the answer may begin with either this part or the grammar. None: the
    answer begins within the leading part.
    """
    entry: int | None = None
    """Token of the grammar that also ends the leading part, such as the mark of a call. The grammar includes this
    token.
    """


Pooling = Literal["last", "mean", "cls", "classify", "token_classify"]
"""Ways to make numbers from a prompt's hidden states: the last one, the mean of all, the first one (of encoders alone),
or the state that the classification head of the request's adapter reads, after this head; `token_classify` puts each of
them through that head.
"""


class AdapterRef(msgspec.Struct, frozen=True):
    """One immutable revision: its content digest, and the local folder that holds its verified PEFT files."""

    digest: str
    path: str


def owner_of(digest: str) -> str:
    """Return the owner of the weights with this digest in the engine, which ends in the owner's name."""
    return digest.rpartition("/")[2]


class KvIdentity(NamedTuple):
    """The owner of KV: KV that is computed under one identity is never read under another."""

    tenant: str
    digest: str | None
    """Digest of the revision's content, not its name, so that a name that moves to other weights leaves no stale KV.
    None: the base model.
    """
    scope: str


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt, resized."""

    digest: str
    """SHA-256 of the image's pixels as the engine gets them and of their grid, in hexadecimal digits. Never an address.
    """
    patches: bytes
    """The patches, one byte a value: uint8 [temporal * height * width, channels * temporal_patch * patch * patch], as
    the checkpoint's image processor orders them before it scales and normalises values. If the family's tower reads
    pictures, the picture: uint8 [channels, height * patch, width * patch].
    """
    grid: tuple[int, int, int]
    """Temporal, height and width, in patches."""
    start: int
    """Position of the image's first placeholder in `prompt_token_ids`."""
    num_tokens: int
    """Number of its tokens: its placeholders, which are the product of `grid` divided by the square of the merge size,
    and `num_lines` tokens between them."""
    num_lines: int = 0
    """Number of lines of placeholders, each followed by one token of text; 0: placeholders follow each other."""

    @property
    def num_placeholders(self) -> int:
        """Number of its tokens whose embeddings are replaced."""
        return self.num_tokens - self.num_lines


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `tenant` and `adapter` are set by the server and never read from a client's body."""

    id: str
    tenant: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    """Beginning of the request's answer, which another engine has generated. This engine continues after these tokens.
    """
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, in order of `start`; their tokens do not overlap."""
    adapter: AdapterRef | None = None
    """Revision that answers the request; None: the base model."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: float = 1.0
    """The tenant's share within its class."""
    deadline_ms: int | None = None
    """Deadline of the first token of the request's group, in milliseconds after arrival. The group is refused if it
    misses the deadline. None: the policy's deadline.
    """
    group_id: str = ""
    """Id that the choices of one API request share. The deadline of these choices is decided once, before the first
    choice begins. Empty: the request is a separate group.
    """
    constraint: Constraint | None = None
    """Grammar of the answer; None: any text."""
    pooling: Pooling | None = None
    """Kind of pooling: the result is the prompt's pooled hidden states, and no token is generated. None: an answer."""
    group_started: bool = False
    """True if a choice of the request's group has begun on another engine, so that the group's deadline is already
    decided.
    """
    report_start: bool = False
    """Report events with `is_worked_on` for the request: before each step or load until its first token, and after the
    step.
    """
    num_tokens: int = 0
    """Size of the revision's vocabulary if it is larger than the model's, because the revision's embedding has more
    rows. Otherwise 0.
    """
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer instead of the model's end tokens; empty: the model's end tokens."""
    cache_scope: str = ""
    """Scope within which requests of one tenant share the base's KV (a project's id, or empty). All requests of a
    tenant share an adapter's KV. The server sets this scope.
    """
    second_text_at: int | None = None
    """First token of the second text of a pair, if the model is an encoder that tells the texts apart; None: one text.
    """
    prefix_digests: tuple[int, ...] = ()
    """Digests of the prompt's beginnings (`engine.memory.prefix_digests`); empty: the server needs no reports of them.
    """

    @property
    def max_output(self) -> int:
        """Maximum number of tokens that the request generates."""
        return self.sampling.max_tokens if self.pooling is None else 0

    @property
    def kv_identity(self) -> KvIdentity:
        """Identity under which KV of the request's own model may be reused."""
        return KvIdentity(self.tenant, self.adapter.digest, "") if self.adapter else self.base_kv_identity

    @property
    def base_kv_identity(self) -> KvIdentity:
        """Identity under which KV that the base computed for the request may be reused."""
        return KvIdentity(self.tenant, None, self.cache_scope)


# ---- towards the engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. Its TokenEvents follow."""

    request: Request

    def apart(self) -> tuple[Submit, list[bytes]]:
        """Return the command without the patches of its images, and the patches. They follow the encoded command as
        they are: to encode or decode megabytes would stop the event loop or the steps.
        """
        patches = [image.patches for image in self.request.images]
        return self.with_patches([b""] * len(patches)), patches

    def with_patches(self, patches: Iterable[bytes]) -> Submit:
        """Return the command with other patches of its images. Raises ValueError unless there is one for each."""
        pairs = zip(self.request.images, patches, strict=True)
        images = tuple(msgspec.structs.replace(image, patches=own) for image, own in pairs)
        if not images:
            return self
        return Submit(msgspec.structs.replace(self.request, images=images))


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request, for example after a disconnect or a stop string. The request's pages are free at the next step."""

    request_id: str


class Retire(msgspec.Struct, frozen=True, tag=True):
    """Free a deleted revision's pages once its last running request has ended."""

    digest: str


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep a revision in the pool from now on, in use or not; a Pinned follows."""

    ref: AdapterRef
    owner: str = ""
    """Owner of the pin: a tenant; empty: the operator."""


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """Release `owner`'s pin."""

    digest: str
    owner: str = ""


class TenantService(msgspec.Struct, frozen=True, array_like=True):
    """Service, in units, that one tenant (by its opaque id) or the sum of all other tenants received in a class."""

    tenant: str
    service_class: str
    units: float


class Lift(msgspec.Struct, frozen=True, tag=True):
    """Count the service of other engines of the fleet, because a tenant's share counts across all engines."""

    services: list[TenantService]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Run every request to its end, then stop."""


Command = Submit | Cancel | Retire | Pin | Unpin | Lift | Shutdown

# ---- towards the serving layer


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One alternative token at a position."""

    token_id: int
    logprob: float


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token of a prompt, and the most likely tokens at its position."""

    logprob: float
    rank: int
    """Rank of the token by probability; 1 is the most likely token."""
    top: list[TopLogprob]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of consecutive tokens of a prompt."""

    start: int
    """Position of the first of these tokens in the prompt."""
    tokens: list[PromptLogprob]


class EngineFault(msgspec.Struct, frozen=True):
    """The reason why a request could not be served: a stable code and a sentence for its caller."""

    code: str
    """`context_length_exceeded`, `adapter_failed`, `engine_overloaded` (refused on arrival because it would miss its
    deadline), `deadline_exceeded` (its deadline passed while it waited), `adapter_not_finite` (its adapter's logits are
    not finite), `invalid_constraint` (its grammar cannot be compiled), `constraint_too_complex` (its grammar exceeds a
    limit while it is followed), `not_a_classifier` (its adapter has no classification head), `images_not_supported`
    (its adapter changes modules that read images, other than their linears) or `internal_error`.
    """
    message: str
    retry_after: int | None = None
    """Seconds after which the same request may succeed."""
    field: str | None = None
    """Field of the request that caused the fault."""


class EngineCount(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of a request by the engine's own count. Without a token, its prompt counts as far as it was gone over."""

    tokens: TokenCounts = TokenCounts()
    adapter_loads: int = 0

    def __add__(self, other: EngineCount) -> EngineCount:
        return EngineCount(tokens=self.tokens + other.tokens, adapter_loads=self.adapter_loads + other.adapter_loads)


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step's result for one request: a token, an end, or both.

    Instead, an event may contain log probabilities of a part of the request's prompt, or report that the engine works
    on the request.

    `finish_reason` is None while the request runs; then `stop` (end of sequence or a stop token), `length`,
    `cancelled` or `error` (with `fault`).
    """

    request_id: str
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[TopLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of a part of the prompt; such events contain nothing else, and come before the first token."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; set on the first event."""
    waited_s: float = 0.0
    """Seconds from arrival to the first step; set on the first event."""
    is_worked_on: bool | None = None
    """True: a step with the request, or the load of its adapter, begins; False: that step has ended. Such events
    contain nothing else, and are sent only if `Request.report_start` is set.
    """
    load: tuple[float, float] | None = None
    """Begin and end of the adapter's load, in seconds after arrival, if the request waited for a load; set on the first
    event.
    """
    finish_reason: str | None = None
    fault: EngineFault | None = None
    count: EngineCount | None = None
    """The engine's own count, set on the last event."""
    pooled: bytes | None = None
    """Result of a request with `pooling`, as float32s, in the request's only event. If each token has a row, each chunk
    of the prompt has an event with its rows, and the last one ends the request.
    """
    pooled_tokens: tuple[int, int] | None = None
    """Positions `[first, end)` of the prompt's tokens whose rows are in `pooled`. An engine that computes tokens again
    sends their rows again. None: `pooled` is the whole result.
    """

    @property
    def is_pooled(self) -> bool:
        """True if the event completes the result of a request with `pooling`."""
        return self.pooled is not None and self.finish_reason is not None


class Pinned(msgspec.Struct, frozen=True):
    """The outcome of a Pin: the revision is in the pool, or the fault is `pin_limit` or `adapter_failed`."""

    digest: str
    owner: str
    fault: EngineFault | None = None


class RevisionDrafts(msgspec.Struct, frozen=True, array_like=True):
    """Drafted tokens of one tenant's revision (empty: the base model), or of all other revisions together."""

    tenant: str
    revision: str
    drafted: int
    accepted: int


class BatchRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one step that share a revision and a class."""

    digest: str | None
    """Revision; None: the base model; OTHERS of `statistics`: all revisions that are not listed."""
    service_class: ServiceClass
    prefill: int
    """Rows of prompts."""
    decode: int
    """Rows of answers, including drafts."""


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of about one step per second: the step, and the totals at its begin. Differences between samples are
    rates.
    """

    at: float
    """Unix seconds."""
    steps: int
    prompt_tokens: int
    output_tokens: int
    rows: list[BatchRows]


class Evictable(msgspec.Struct, frozen=True, array_like=True):
    """A part of the pool that may be evicted when pages are needed: cached KV of one identity, or an idle adapter."""

    tenant: str | None
    """Tenant that owns the cached KV; None for adapters."""
    digest: str | None
    """The revision; None: the base model."""
    is_adapter: bool
    pages: int
    uses: float
    """Number of recent uses; a use counts half after five minutes."""
    score: float
    """log2 of (uses x cost of a miss / pages). The part with the lowest score is evicted first."""
    is_wanted: bool
    """True if a request waits for this part."""


class EngineMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Distributions, and service by tenant."""

    queue_seconds: Distribution = Distribution((), [0], 0.0)
    """Time from a request's arrival to its first step."""
    adapter_load_seconds: Distribution = Distribution((), [0], 0.0)
    """Time from an adapter's pages being held to READY."""
    step_adapters: Distribution = Distribution((), [0], 0.0)
    """Distinct adapters in a step."""
    tenants: list[TenantService] = []
    drafts: list[RevisionDrafts] = []
    """Drafted tokens of the revisions that had most, and of all others together."""
    running_adapters: list[str] = []
    """Revisions of the running batch."""
    waiting_adapters: list[str] = []
    """Revisions of waiting sequences, up to a maximum number."""
    timeline: list[StepSample] = []
    """Steps of the last minute in which any ran, the oldest first."""
    evictable: list[Evictable] = []
    """Parts of the pool that would leave next, in this order."""


class RoutingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an engine that a router needs."""

    resident: dict[str, int] = {}
    """Pages of the revisions that are in the pool or are being loaded."""
    activated: list[str] = []
    """Resident activated LoRAs, whose prompts begin with KV of the base."""
    pinned: list[str] = []
    """Revisions that pins keep in the pool."""
    prefixes: bytes = b""
    """Digests of the most recently used beginnings of prompts in the prefix cache, as little-endian 64-bit numbers."""
    queue_tokens: int = 0
    """Prompt tokens still to compute, of requests that wait or run."""
    waiting_tenants: int = 0
    """Tenants with requests that wait and could run; a tenant counts once for each class."""
    max_running: int = 1
    """Maximum number of rows in a step."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed per second while the present sequences decode; 0 before steps were measured."""
    wait_s: float = 0.0
    """Seconds until every request that waits has begun, by the engine's own estimates."""
    step_s: float = 0.0
    """Mean seconds of the latest steps; 0 before steps were measured."""
    page_s: float = 0.0
    """Seconds that reading one more page adds to a step: the time of a step without new tokens, divided by the pages
    that it reads (weights, adapters, KV). 0 before steps were measured.
    """
    weights_s: float = 0.0
    """Seconds of a step in which the weights of the base are read."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of this moment."""

    steps: int = 0
    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_kv: int = 0
    """Pages with KV of running requests."""
    pages_kv_cached: int = 0
    """Pages with KV and states kept only for requests with the same beginning; they are freed when pages are needed.
    """
    pages_states_cached: int = 0
    """Pages of `pages_kv_cached` with states of linear attention, Mamba 2 or convolutions."""
    pages_adapters: int = 0
    """Pages of adapters in use or loading."""
    pages_adapters_idle: int = 0
    pages_free: int = 0
    images_encoded: int = 0
    """Images that the vision tower has computed."""
    images_found: int = 0
    """Images of requests whose rows were kept from an earlier request."""
    image_bytes: int = 0
    """Bytes of host memory with rows of images."""
    kv_evictions: int = 0
    kv_pages_swapped_out: int = 0
    """Pages of preempted requests that were copied to the host's memory."""
    kv_pages_swapped_in: int = 0
    """Pages of preempted requests that were copied back into the pool."""
    kv_pages_in_host: int = 0
    adapters_resident: int = 0
    adapters_pinned: int = 0
    """Revisions kept in the pool by pins."""
    adapters_host: int = 0
    """Adapters kept in the host's memory."""
    adapters_host_bytes: int = 0
    step_graphs: int = 0
    """Recordings of steps that are CUDA graphs; 0 on a CPU."""
    step_graphs_missing: int = 0
    """Number of step recordings for which no CUDA graph could be made. Such steps are launched one operator at a time.
    """
    adapter_loads: int = 0
    adapter_load_seconds: float = 0.0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
    adapter_hits: int = 0
    """Requests whose adapter was in the pool on their arrival."""
    adapter_misses: int = 0
    preemptions: int = 0
    refused_over_capacity: int = 0
    """Requests that would have missed their deadline."""
    missed_deadlines: int = 0
    """Requests whose deadline passed while they waited."""
    service_gap: float = 0.0
    """The largest gap between waiting tenants of a class now, in units over weight."""
    prompt_tokens: int = 0
    """Prompt tokens computed, each once per request: neither found in the cache nor computed again."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, of the requests that got a first token."""
    recomputed_tokens: int = 0
    """Tokens, of prompts and answers, computed again after a preemption."""
    output_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens that speculative decoding drafted and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted; `output_tokens` has them too."""
    ended: TokenCounts = TokenCounts()
    """The sum of `TokenEvent.count` over all requests that have ended."""
    distinct_adapters: int = 0
    """Distinct adapters in the latest step that had any row."""
    max_distinct_adapters: int = 0
    """Maximum number of distinct adapters in one step since the start, without the base model."""
    max_distinct_adapters_beside_base: int = 0
    """Maximum number of distinct adapters in a step that also had rows of the base model."""
    adapter_bytes_read: int = 0
    """Sum over steps of the bytes of that step's distinct adapters (for omega)."""
    weight_bytes: int = 0
    """Bytes of the base model's weights that every step reads."""
    meters: EngineMeters = EngineMeters()
    routing: RoutingFacts = RoutingFacts()


class LinearFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The base's linears on a CPU: their format, and the floor of a decode step."""

    format: str
    """Name of the format: panels, onednn or torch; codes if the weights are quantized."""
    gflops: float | None = None
    """10^9 operations per second of all linears for 256 rows, measured at start; None: not measured."""
    bandwidth: float | None = None
    """Bytes per second that the engine's threads read from memory, measured at start; None: not measured."""
    floor_s: float | None = None
    """Seconds to read the base's weights at that bandwidth: no decode step can be shorter. None: not measured."""


class StepLimits(msgspec.Struct, frozen=True):
    """Limits of a step: the operator's settings, and the device's defaults for settings that are unset."""

    max_num_seqs: int
    """Maximum number of sequences."""
    max_num_batched_tokens: int
    """Maximum number of tokens."""
    max_mixed_prefill_tokens: int
    """Maximum number of prompt tokens in a step in which sequences decode."""
    max_draft_tokens: int = 0
    """Maximum number of a sequence's drafts; 0: nothing is drafted."""

    @property
    def most_sampled(self) -> int:
        """Maximum number of rows that tokens are chosen from."""
        return min(self.most_rows, self.max_num_seqs * (1 + self.max_draft_tokens))

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the loaded model.

    The serving layer applies `sampling_defaults` to requests that leave a parameter out, if `model.generation_config`
    is "auto"; "none" keeps the API's own defaults.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    pages_total: int
    block_size: int
    kv_cache_dtype: str
    """auto (that of `dtype`) or fp8."""
    weights: str
    """Digest of samples of every weight: equal engines of a base have loaded the same checkpoint in the same way."""
    hidden_size: int
    """Numbers in a prompt's vector."""
    limits: StepLimits
    state_pages: int = 0
    """Pages that each running sequence holds for its recurrent states; 0 for a model without."""
    cache_answers: bool = True
    """False if a token has another recurrent state in an answer than in a prompt, so that answers are not reused."""
    generates: bool = True
    """False for an encoder: each prompt is computed whole in one step, and becomes a vector or classes."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """Recommendations of the checkpoint's `generation_config.json`."""
    linears: LinearFacts | None = None
    """The linears' format and floor; None on a GPU."""
    images: bool = False
    """True if prompts may have images."""
    token_context: float | None = None
    """Tokens of context whose attention costs a token as much as its products with the weights. A step in which
    sequences decode takes fewer prompt tokens after a long context; None: it takes as many."""

    @property
    def context(self) -> int:
        """Maximum number of tokens (prompt and answer) that the model accepts and the pool can hold."""
        return min(self.max_model_len, (self.pages_total - self.state_pages) * self.block_size)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the loop runs."""

    facts: ModelFacts


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """One step's results, in one message for all requests of the step."""

    events: list[TokenEvent]
    stats: EngineStats | None = None
    """Statistics; None if the statistics of an earlier report are still recent."""
    pins: list[Pinned] = []
    service: list[TenantService] = []
    """Service of each tenant since the last report with service, sent a few times per second. In a fleet, one of the
    servers gets it and sends it to the other engines (`fleet.shares`).
    """


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts no more requests and gives its requests back, which end as cancelled. Stopped follows."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended; `reason` is set if no Shutdown was sent."""

    reason: str | None = None


Report = Ready | StepReport | Leaving | Stopped
