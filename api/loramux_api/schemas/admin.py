"""What operators send and see. Times in Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loramux.tenants import Tenant, Tier
from loramux_api.schemas.strict import Body
from loramux_api.schemas.tenancy import seconds


class TenantBody(Body, forbid_unknown_fields=True):
    """A new tenant."""

    name: str
    tier: str = "standard"


class TenantChange(Body, forbid_unknown_fields=True):
    """What is to change; what is left out stays."""

    tier: str | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET


class TierBody(Body, forbid_unknown_fields=True):
    """A level of service."""

    service_class: str
    """interactive, standard or batch."""
    weight: int = 1
    """A tenant's share within the class, 1 to 1000."""


class TenantObject(msgspec.Struct, kw_only=True):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    tier: str
    created_at: int
    suspended_at: int | None


class TierObject(msgspec.Struct, kw_only=True):
    """A tier."""

    object: Literal["tier"] = "tier"
    name: str
    service_class: str
    weight: int


def tenant_object(tenant: Tenant) -> TenantObject:
    """The tenant, as operators see it."""
    return TenantObject(
        id=tenant.id,
        name=tenant.name,
        tier=tenant.tier,
        created_at=seconds(tenant.created_at) or 0,
        suspended_at=seconds(tenant.suspended_at),
    )


def tier_object(tier: Tier) -> TierObject:
    """The tier, as operators see it."""
    return TierObject(name=tier.name, service_class=tier.service_class, weight=tier.weight)
