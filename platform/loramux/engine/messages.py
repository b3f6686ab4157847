"""The plain messages that cross between a gateway and an engine, whether thread, process or machine."""

from __future__ import annotations

import msgspec

from loramux.engine.distribution import Distribution
from loramux.engine.request import AdapterRef, Request

# ---- towards the engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request; its TokenEvents follow."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client left or a stop string was seen: free the request's pages at the next step."""

    request_id: str


class Retire(msgspec.Struct, frozen=True, tag=True):
    """A revision was deleted: free its pages once its last running request has ended."""

    digest: str


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep a revision in the pool from now on, whether it is asked for or not; a Pinned follows."""

    ref: AdapterRef
    owner: str = ""
    """A tenant; empty: the operator."""


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """`owner` keeps it no longer."""

    digest: str
    owner: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, answer what waits, stop."""


Command = Submit | Cancel | Retire | Pin | Unpin | Shutdown

# ---- towards the gateway


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative of a position."""

    token_id: int
    logprob: float


class EngineFault(msgspec.Struct, frozen=True):
    """Why a request could not be served: a stable code and a sentence for its caller."""

    code: str
    """`context_length_exceeded`, `adapter_failed`, `engine_overloaded` (refused when it came: it would miss its
    deadline), `deadline_exceeded` (its deadline passed while it waited) or `internal_error`."""
    message: str
    retry_after: int | None = None
    """Seconds after which it may go better."""


class EngineCount(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used, by the engine's own count; zero for one that got no token out."""

    prompt_tokens: int = 0
    """Computed, once however often, or found in the KV cache."""
    cached_tokens: int = 0
    """Those of them that were found."""
    output_tokens: int = 0
    adapter_loads: int = 0

    def __add__(self, other: EngineCount) -> EngineCount:
        return EngineCount(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            adapter_loads=self.adapter_loads + other.adapter_loads,
        )


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step's news of one request: a token, an end, or both.

    `finish_reason` is None while the request runs; then `stop` (end of sequence or a stop token), `length`,
    `cancelled` or `error` (with `fault`).
    """

    request_id: str
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[TopLogprob] | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; meaningful on the first event."""
    finish_reason: str | None = None
    fault: EngineFault | None = None
    count: EngineCount | None = None
    """On the last event."""


class Pinned(msgspec.Struct, frozen=True):
    """What became of a pin: it is in the pool, or a fault says why not (`pin_limit` or `adapter_failed`)."""

    digest: str
    owner: str
    fault: EngineFault | None = None


class TenantService(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant (by its opaque id), or all others together, received in a class, in units of service."""

    tenant: str
    service_class: str
    units: float


class EngineMeters(msgspec.Struct, frozen=True, kw_only=True):
    """What is more than a number."""

    queue_seconds: Distribution = Distribution((), [0], 0.0)
    """From a request's arrival to its first step."""
    adapter_load_seconds: Distribution = Distribution((), [0], 0.0)
    """From pages held to READY."""
    step_adapters: Distribution = Distribution((), [0], 0.0)
    """Distinct adapters in a step."""
    tenants: list[TenantService] = []


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of this moment."""

    steps: int = 0
    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_kv: int = 0
    """KV of running requests."""
    pages_kv_cached: int = 0
    """KV kept for requests that begin alike, and in no other use: given up when the room is needed."""
    pages_adapters: int = 0
    """Adapters in use or loading."""
    pages_adapters_idle: int = 0
    pages_free: int = 0
    kv_evictions: int = 0
    kv_pages_swapped_out: int = 0
    """Of preempted requests, into the host's memory."""
    kv_pages_swapped_in: int = 0
    """Back into the pool."""
    kv_pages_in_host: int = 0
    adapters_resident: int = 0
    adapters_pinned: int = 0
    """Revisions kept in the pool because somebody asked for it."""
    adapters_host: int = 0
    """Adapters kept in the host's memory."""
    adapters_host_bytes: int = 0
    adapter_loads: int = 0
    adapter_load_seconds: float = 0.0
    adapter_evictions: int = 0
    adapter_load_failures: int = 0
    adapter_hits: int = 0
    """Requests that found their adapter in the pool when they came."""
    adapter_misses: int = 0
    preemptions: int = 0
    refused_over_capacity: int = 0
    """Requests that would have missed their deadline."""
    missed_deadlines: int = 0
    """Requests whose deadline passed while they waited."""
    service_gap: float = 0.0
    """Between tenants of a class that wait now, in units over weight."""
    prompt_tokens: int = 0
    """Prompt tokens computed, each once per request: neither found in the cache nor computed again."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, of the requests that got a first token."""
    recomputed_tokens: int = 0
    """Tokens, of prompts and answers, computed again after a preemption."""
    output_tokens: int = 0
    ended_prompt_tokens: int = 0
    """The sum of `TokenEvent.count` over all requests that have ended, and so the next two."""
    ended_cached_tokens: int = 0
    ended_output_tokens: int = 0
    distinct_adapters: int = 0
    """Distinct adapters in the latest step that had any row."""
    max_distinct_adapters: int = 0
    """The most in any step since the start; the base model does not count."""
    max_distinct_adapters_beside_base: int = 0
    """The most in a step that also held rows of the base model."""
    adapter_bytes_read: int = 0
    """Sum over steps of the bytes of that step's distinct adapters (for omega)."""
    weight_bytes: int = 0
    """Bytes of the base model's weights that every step reads."""
    meters: EngineMeters = EngineMeters()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine learned when it loaded the model."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    pages_total: int
    block_size: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the loop runs."""

    facts: ModelFacts


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """Everything one step has to tell: one message a step, however many requests it held."""

    events: list[TokenEvent]
    stats: EngineStats
    pins: list[Pinned] = []


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended; with a reason when it did not mean to."""

    reason: str | None = None


Report = Ready | StepReport | Stopped
