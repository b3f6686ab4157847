"""JSON objects of tenants and tiers, for operators. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.gateway import EngineStatus
from loramux.logs import Level
from loramux.tenants import ALLOWED_AT_FIRST, Tenant, Tier
from loramux_api.schemas.strict import Body
from loramux_api.schemas.tenancy import seconds


class TenantBody(Body, forbid_unknown_fields=True):
    """A tenant to create."""

    name: str
    tier: str = "standard"


class TenantChange(Body, forbid_unknown_fields=True):
    """Changes of a tenant. Absent fields stay as they are."""

    tier: str | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    zero_retention: bool | UnsetType = UNSET
    """Nothing that its requests say or get is stored."""
    allow_judges: bool | UnsetType = UNSET
    """Its evaluations may show prompts and answers to judges, which are third parties."""


class LogLevelBody(Body, forbid_unknown_fields=True):
    """The least level of log lines."""

    level: Level


class EngineOrderBody(Body, forbid_unknown_fields=True):
    """An engine to drain or to restart."""

    engine: str
    """Its name in the list of engines."""
    seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Time for its requests to end; those that still run then go on at other engines."""


class EngineObject(msgspec.Struct, kw_only=True):
    """One engine."""

    engine: str
    object: Literal["engine"] = "engine"
    base_model: str
    state: Literal["starting", "ready", "draining", "resting", "lost"]
    requests: int
    """Requests that wait or run in it."""
    starts: int
    """Times that it was started."""
    problem: str | None
    """The reason of its last end."""


def engine_object(status: EngineStatus) -> EngineObject:
    """Return the engine as a JSON object."""
    return EngineObject(
        engine=status.engine,
        base_model=status.base_model,
        state=status.state.value,
        requests=status.requests,
        starts=status.starts,
        problem=status.problem,
    )


class TierBody(Body, forbid_unknown_fields=True):
    """A tier to create or change."""

    service_class: str
    """interactive, standard or batch."""
    weight: int = 1
    """A tenant's weight within the class, 1 to 1000."""
    service_tiers: tuple[str, ...] = ALLOWED_AT_FIRST
    """The service tiers that requests may ask for beside `default`: some of flex, priority and batch."""


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
