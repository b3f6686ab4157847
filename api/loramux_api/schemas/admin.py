"""JSON objects for operators: tenants, tiers and engines, and the state of the whole server at one moment.

Times are Unix seconds; counters are totals since an engine's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.accounts.tenants.entities import Tenant, Tier
from loramux.common.logs import Level
from loramux.data.entities import ALLOWED_AT_FIRST, CHOSEN
from loramux.engine.messages import EngineStats, LinearFacts, TenantService
from loramux.fleet.member import EngineStatus
from loramux.money.exports.delivery import SinkDelivery
from loramux.money.usage.service import UsageService
from loramux.serving.service import CompletionService
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name
from loramux_api.schemas.tenancy import seconds


class TenantBody(Body, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Name
    tier: Name = "standard"


class TenantChange(Body, forbid_unknown_fields=True):
    """Changes of a tenant. Absent fields are not changed."""

    tier: Name | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    zero_retention: bool | UnsetType = UNSET
    """Store no text of the tenant's requests and answers."""
    allow_judges: bool | UnsetType = UNSET
    """Let the tenant's evaluations send prompts and answers to judges, which are third parties."""


class LogLevelBody(Body, forbid_unknown_fields=True):
    """Lowest level of log lines."""

    level: Level


class EngineOrderBody(Body, forbid_unknown_fields=True):
    """An engine to drain or to restart."""

    engine: Name
    """Name of the engine in the list of engines."""
    seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Time in seconds that the engine's requests have to end. Requests that still run after this time move to other
    engines.
    """


class LinearsObject(msgspec.Struct, kw_only=True):
    """An engine's linears on a CPU: their format, and the floor of a decode step."""

    format: str
    """panels (layers are one call), onednn or torch; codes if the weights are quantized."""
    gflops: float | None
    """10^9 operations per second for 256 rows, measured at start. The figures are null for a small base, which is not
    measured."""
    memory_gb_per_s: float | None
    """10^9 bytes per second that the engine's threads read from memory, measured at start."""
    floor_ms: float | None
    """Time to read the base's weights from memory, in ms: no decode step is shorter."""
    reading_ms: float | None
    """Time of a step in which the weights are read, in ms, by the latest steps; null before the first steps."""


class StepLimitsObject(msgspec.Struct, kw_only=True):
    """Limits of an engine's steps: its settings, and the device's defaults for settings that are unset."""

    max_num_seqs: int
    """The largest number of sequences in one step."""
    max_num_batched_tokens: int
    """The largest number of tokens in one step."""
    max_mixed_prefill_tokens: int
    """The largest number of prompt tokens in a step in which sequences decode."""
    max_draft_tokens: int
    """The longest draft of a sequence in one step; 0: nothing is drafted."""


class EngineObject(msgspec.Struct, kw_only=True):
    """One engine."""

    engine: str
    object: Literal["engine"] = "engine"
    base_model: str
    state: Literal["starting", "ready", "draining", "resting", "lost"]
    requests: int
    """Number of requests that wait or run in the engine."""
    starts: int
    """Number of times that the engine was started."""
    problem: str | None
    """The reason why the engine last ended."""
    step_graphs_missing: int
    """Recordings of steps that run without a CUDA graph, slower; 0 on a CPU."""
    linears: LinearsObject | None
    """The linears' format and floor; null on a GPU, and before the engine's first start."""
    step_limits: StepLimitsObject | None
    """Limits of a step; null before the engine's first start."""


def engine_object(status: EngineStatus) -> EngineObject:
    """Return the engine as a JSON object."""
    return EngineObject(
        engine=status.engine,
        base_model=status.base_model,
        state=status.state.value,
        requests=status.requests,
        starts=status.starts,
        problem=status.problem,
        step_graphs_missing=status.step_graphs_missing,
        linears=None if status.linears is None else _linears_object(status.linears, status.weights_s),
        step_limits=None if status.limits is None else StepLimitsObject(**msgspec.structs.asdict(status.limits)),
    )


def _linears_object(facts: LinearFacts, weights_s: float) -> LinearsObject:
    return LinearsObject(
        format=facts.format,
        gflops=facts.gflops,
        memory_gb_per_s=None if facts.bandwidth is None else facts.bandwidth / 1e9,
        floor_ms=None if facts.floor_s is None else 1e3 * facts.floor_s,
        reading_ms=1e3 * weights_s or None,
    )


class TierBody(Body, forbid_unknown_fields=True):
    """A tier to create or change."""

    service_class: Name
    """interactive, standard or batch."""
    weight: int = 1
    """A tenant's weight within the class, 1 to 1000."""
    service_tiers: Annotated[tuple[Name, ...], Meta(max_length=len(CHOSEN))] = ALLOWED_AT_FIRST
    """The service tiers that requests may use in addition to `default`: some of flex, priority and batch."""


class TenantObject(msgspec.Struct, kw_only=True):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    tier: str
    created_at: int
    suspended_at: int | None
    zero_retention: bool
    allow_judges: bool


class TierObject(msgspec.Struct, kw_only=True):
    """A tier."""

    object: Literal["tier"] = "tier"
    name: str
    service_class: str
    weight: int
    service_tiers: list[str]


def tenant_object(tenant: Tenant) -> TenantObject:
    """Return the tenant as a JSON object."""
    return TenantObject(
        id=tenant.id,
        name=tenant.name,
        tier=tenant.tier,
        created_at=seconds(tenant.created_at) or 0,
        suspended_at=seconds(tenant.suspended_at),
        zero_retention=tenant.zero_retention,
        allow_judges=tenant.allow_judges,
    )


def tier_object(tier: Tier) -> TierObject:
    """Return the tier as a JSON object."""
    return TierObject(
        name=tier.name,
        service_class=tier.service_class,
        weight=tier.weight,
        service_tiers=list(tier.service_tiers),
    )


class PoolObject(msgspec.Struct, kw_only=True):
    """Pages of one engine's pool, by their current content."""

    total: int
    kv: int
    """Pages with KV of running sequences."""
    kv_cached: int
    """Pages with cached prefixes; evicted on demand."""
    adapters: int
    """Pages of adapters that are in use or being loaded."""
    adapters_idle: int
    """Pages of resident adapters that no sequence uses; evicted on demand."""
    free: int


class TenantServiceObject(msgspec.Struct, kw_only=True):
    """Service that a tenant received since the engine's start."""

    tenant: str | None
    """Name of the tenant; null: all tenants that are not listed, together."""
    service_class: str
    units: float
    """Service in units: a computed prompt token is 1, a generated token 2."""
    weight: int | None = None
    """Weight of the tenant's tier. Waiting tenants of one class are served in proportion to their weights. null for the
    sum of all other tenants.
    """


class EngineLoadObject(msgspec.Struct, kw_only=True):
    """One engine: its state, its pool, its queue and its counters."""

    engine: EngineObject
    pool: PoolObject
    waiting: int
    running: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    distinct_adapters: int
    """Number of distinct adapters in the latest step."""
    max_distinct_adapters: int
    adapters_resident: int
    adapters_pinned: int
    adapters_host: int
    adapter_hits: int
    adapter_misses: int
    adapter_loads: int
    adapter_load_seconds: float
    """Seconds of all adapter loads together."""
    adapter_evictions: int
    adapter_load_failures: int
    preemptions: int
    missed_deadlines: int
    refused_over_capacity: int
    service_gap: float
    """Largest difference of service divided by weight between two waiting tenants of one class."""
    tenants: list[TenantServiceObject]
    """Service of the most-served tenants, followed by the sum of all other tenants."""


class SinkCountObject(msgspec.Struct, kw_only=True):
    """Number of a sink's entries by result, since this server's start."""

    sink: str
    outcome: Literal["delivered", "parked", "failed"]
    count: int


class OverviewObject(msgspec.Struct, kw_only=True):
    """The server at one moment."""

    object: Literal["overview"] = "overview"
    at: float
    """Time of the snapshot, in Unix seconds. A rate is the difference of a counter divided by the difference of
    `at`.
    """
    started_at: int
    draining: bool
    database_reachable: bool
    requests_running: int
    requests_unsettled: int
    """Number of requests that have ended and are not in the database yet."""
    completed: dict[str, int]
    """Number of requests that have ended, by outcome."""
    ledger_drift_tokens: int
    """Number of tokens that the engines counted and the ledger lacks. If this number is not 0, the bill is wrong."""
    sinks: list[SinkCountObject]
    engines: list[EngineLoadObject]


class ServedTenant(msgspec.Struct, frozen=True):
    """Name and weight of a tenant, shown with its figures."""

    name: str
    weight: int


def overview_object(
    completions: CompletionService,
    usage: UsageService,
    sinks: SinkDelivery,
    tenants: Mapping[str, ServedTenant],
    *,
    started_at: int,
    at: float,
    reachable: bool,
) -> OverviewObject:
    """Return the server's state. `tenants` is keyed by id."""
    bases = completions.bases
    stats = {(name, one): found for name, base in bases.items() for one, found in base.engines.stats().items()}
    unclaimed = sum(base.engines.unclaimed_tokens for base in bases.values())
    return OverviewObject(
        at=at,
        started_at=started_at,
        draining=completions.draining,
        database_reachable=reachable,
        requests_running=completions.running,
        requests_unsettled=completions.unsettled,
        completed=dict(completions.counters.requests),
        ledger_drift_tokens=usage.drift_tokens + unclaimed,
        sinks=[
            SinkCountObject(sink=sink, outcome=outcome, count=count)  # type: ignore[arg-type]  # delivery.py's three
            for (sink, outcome), count in sorted(sinks.counters.items())
        ],
        engines=[
            _engine_load(status, stats.get((status.base_model, status.engine), EngineStats()), tenants)
            for status in bases.engines()
        ],
    )


def _service(one: TenantService, tenant: ServedTenant | None) -> TenantServiceObject:
    return TenantServiceObject(
        tenant=None if tenant is None else tenant.name,
        service_class=one.service_class,
        units=one.units,
        weight=None if tenant is None else tenant.weight,
    )


def _engine_load(status: EngineStatus, stats: EngineStats, tenants: Mapping[str, ServedTenant]) -> EngineLoadObject:
    return EngineLoadObject(
        engine=engine_object(status),
        pool=PoolObject(
            total=stats.pages_total,
            kv=stats.pages_kv,
            kv_cached=stats.pages_kv_cached,
            adapters=stats.pages_adapters,
            adapters_idle=stats.pages_adapters_idle,
            free=stats.pages_free,
        ),
        tenants=[_service(one, tenants.get(one.tenant)) for one in stats.meters.tenants],
        **{name: getattr(stats, name) for name in _COPIED},
    )


_COPIED = frozenset(EngineLoadObject.__struct_fields__) - {"engine", "pool", "tenants"}
