"""JSON objects for operators: the running batch, the contents of the pool that are evicted next, and the verification
of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from loramux.common.units import SECOND
from loramux.engine.messages import EngineMeters, Evictable, StepSample
from loramux.engine.statistics import OTHERS
from loramux.money.billing.reconcile import LedgerState, ReconciliationOutcome
from loramux_api.schemas.tenancy import seconds

NameOfModel = Callable[[str | None], str]


class RowsObject(msgspec.Struct, kw_only=True):
    """Rows of a step that share a model and a class."""

    model: str
    """Name `tenant/adapter@3`, the base's name, or `others`."""
    service_class: str
    prefill: int
    decode: int


class StepObject(msgspec.Struct, kw_only=True):
    """One step of about a second, and the engine's totals at its begin."""

    at: float
    steps: int
    prompt_tokens: int
    output_tokens: int
    rows: list[RowsObject]


class EvictableObject(msgspec.Struct, kw_only=True):
    """An adapter or a set of cached prefixes that leaves the pool when pages are needed."""

    kind: Literal["adapter", "cached_prefix"]
    model: str
    tenant: str | None
    """Tenant of the cached prefixes; null for adapters."""
    pages: int
    recent_uses: float
    """Number of recent uses; each counts half after five minutes."""
    value: float
    """Recent uses x cost of a miss, per page: the lowest value is evicted first."""
    is_wanted: bool
    """True if a request waits for this content, which is then evicted last."""


class ActivityObject(msgspec.Struct, kw_only=True):
    """One engine's steps of the last minute that had work, and the contents of its pool that are evicted next."""

    object: Literal["engine.activity"] = "engine.activity"
    engine: str
    base_model: str
    timeline: list[StepObject]
    evictable: list[EvictableObject]


class SinkProgressObject(msgspec.Struct, kw_only=True):
    """Position of a sink in the ledger."""

    name: str
    delivered_to: int
    """Sequence number up to which every entry was delivered or parked."""
    behind: int
    trying_since: int | None
    parked: int


class ParkedObject(msgspec.Struct, kw_only=True):
    """An event that a sink refused."""

    sink: str
    event_id: str
    sequence: int
    reason: str
    parked_at: int


class AnchorObject(msgspec.Struct, kw_only=True):
    """The newest checkpoint of the ledger outside the database."""

    sequence: int
    hash: str
    created_at: int


class ReconciliationObject(msgspec.Struct, kw_only=True):
    """The outcome of a verification of the whole ledger."""

    at: int
    entries: int
    drift_tokens: int
    problems: list[str]


class LedgerObject(msgspec.Struct, kw_only=True):
    """The ledger's proof."""

    object: Literal["ledger"] = "ledger"
    sequence: int
    hash: str
    checkpoint: AnchorObject | None
    reconciliation: ReconciliationObject | None
    """The latest reconciliation that this server made."""
    sinks: list[SinkProgressObject]
    parked: list[ParkedObject]


def activity_object(
    engine: str, base: str, meters: EngineMeters, models: Mapping[str, str], tenants: Mapping[str, str]
) -> ActivityObject:
    """Return an engine's activity. `models` has names by engine key, `tenants` by id."""

    def model_of(digest: str | None) -> str:
        if digest is None:
            return base
        return "others" if digest == OTHERS else models.get(digest, digest[:19])

    return ActivityObject(
        engine=engine,
        base_model=base,
        timeline=[_step_object(one, model_of) for one in meters.timeline],
        evictable=[_evictable_object(one, model_of(one.digest), tenants) for one in meters.evictable],
    )


def _step_object(one: StepSample, model_of: NameOfModel) -> StepObject:
    rows = [
        RowsObject(model=model_of(row.digest), service_class=row.service_class, prefill=row.prefill, decode=row.decode)
        for row in one.rows
    ]
    return StepObject(
        at=one.at, steps=one.steps, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens, rows=rows
    )


def _evictable_object(one: Evictable, model: str, tenants: Mapping[str, str]) -> EvictableObject:
    return EvictableObject(
        kind="adapter" if one.is_adapter else "cached_prefix",
        model=model,
        tenant=None if one.tenant is None else tenants.get(one.tenant),
        pages=one.pages,
        recent_uses=one.uses,
        value=2.0 ** max(-60.0, min(one.score, 60.0)),
        is_wanted=one.is_wanted,
    )


def reconciliation_object(one: ReconciliationOutcome) -> ReconciliationObject:
    """Return a reconciliation's outcome as a JSON object."""
    return ReconciliationObject(
        at=one.at // SECOND, entries=one.entries, drift_tokens=one.drift_tokens, problems=one.problems
    )


def ledger_object(state: LedgerState) -> LedgerObject:
    """Return the ledger's proof as a JSON object."""
    anchor, last = state.checkpoint, state.reconciliation
    return LedgerObject(
        sequence=state.sequence,
        hash=state.hash,
        checkpoint=None
        if anchor is None
        else AnchorObject(sequence=anchor.sequence, hash=anchor.hash, created_at=anchor.created_at // SECOND),
        reconciliation=None if last is None else reconciliation_object(last),
        sinks=[
            SinkProgressObject(
                name=one.name,
                delivered_to=one.cursor,
                behind=max(0, state.sequence - one.cursor),
                trying_since=seconds(one.trying_since),
                parked=one.parked,
            )
            for one in state.sinks
        ],
        parked=[
            ParkedObject(
                sink=one.sink,
                event_id=one.event_id,
                sequence=one.sequence,
                reason=one.reason,
                parked_at=one.parked_at // SECOND,
            )
            for one in state.parked
        ],
    )
