"""/admin: the operators' view of tenants, tiers and the audit log. Errors are RFC 9457 problem details."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta

from loramux.tenants import Tenant, Tenants
from loramux_api.auth import requires
from loramux_api.openapi import PROBLEMS
from loramux_api.schemas.admin import (
    TenantBody,
    TenantChange,
    TenantObject,
    TierBody,
    TierObject,
    tenant_object,
    tier_object,
)
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import AuditObject, KeyBody, KeyObject, Listing, audit_object, key_object


class AdminTenantController(Controller):
    """Customers."""

    path = "/admin/tenants"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get(summary="List tenants", responses=PROBLEMS)
    async def list_tenants(self, operators: NamedDependency[Tenants]) -> Listing[TenantObject]:
        """Every tenant, by name."""
        return Listing(data=[tenant_object(tenant) for tenant in await operators.list_tenants()])

    @post(dto=StrictJSON[TenantBody], return_dto=None, summary="Make a tenant", responses=PROBLEMS)
    async def create(self, data: JSONBody[TenantBody], operators: NamedDependency[Tenants]) -> TenantObject:
        """With the project `default`, and without a key."""
        return tenant_object(await operators.create(data.name, data.tier))

    @get("/{name:str}", summary="Describe a tenant", responses=PROBLEMS)
    async def get_tenant(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> TenantObject:
        """One tenant."""
        return tenant_object(await operators.named(name))

    @patch("/{name:str}", dto=StrictJSON[TenantChange], return_dto=None, summary="Change a tenant", responses=PROBLEMS)
    async def change(
        self, name: FromPath[str], data: JSONBody[TenantChange], operators: NamedDependency[Tenants]
    ) -> TenantObject:
        """Its tier, or whether it is suspended; counts from the next request on."""
        tenant: Tenant = await operators.named(name)
        if isinstance(data.tier, str):
            tenant = await operators.move(name, data.tier)
        if isinstance(data.suspended, bool):
            tenant = await (operators.suspend(name) if data.suspended else operators.resume(name))
        return tenant_object(tenant)

    @get("/{name:str}/keys", summary="List a tenant's keys", responses=PROBLEMS)
    async def list_keys(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[KeyObject]:
        """Revoked ones too, oldest first."""
        return Listing(data=[key_object(key) for key in await (await operators.account(name)).keys.all()])

    @post("/{name:str}/keys", dto=StrictJSON[KeyBody], return_dto=None, summary="Make a key", responses=PROBLEMS)
    async def create_key(
        self, name: FromPath[str], data: JSONBody[KeyBody], operators: NamedDependency[Tenants]
    ) -> KeyObject:
        """Its secret is in `key`, this once."""
        return key_object(*await (await operators.account(name)).keys.create(data.request()))


class AdminTierController(Controller):
    """Levels of service."""

    path = "/admin/tiers"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get(summary="List tiers", responses=PROBLEMS)
    async def list_tiers(self, operators: NamedDependency[Tenants]) -> Listing[TierObject]:
        """Every tier, by name."""
        return Listing(data=[tier_object(tier) for tier in await operators.tiers.all()])

    @put("/{name:str}", dto=StrictJSON[TierBody], return_dto=None, summary="Make or change a tier", responses=PROBLEMS)
    async def put_tier(
        self, name: FromPath[str], data: JSONBody[TierBody], operators: NamedDependency[Tenants]
    ) -> TierObject:
        """Its tenants have it from their next request on."""
        return tier_object(await operators.tiers.put(name, data.service_class, data.weight))

    @delete("/{name:str}", status_code=200, summary="Remove a tier", responses=PROBLEMS)
    async def remove(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> TierObject:
        """One that no tenant has."""
        return tier_object(await operators.tiers.remove(name))


class AdminController(Controller):
    """Keys by their ids, and the audit log."""

    path = "/admin"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @delete("/keys/{key_id:str}", status_code=200, summary="Revoke a key", responses=PROBLEMS)
    async def revoke_key(self, key_id: FromPath[str], operators: NamedDependency[Tenants]) -> KeyObject:
        """Anybody's, at once and for good."""
        return key_object(await operators.revoke_key(key_id))

    @get("/audit", summary="Read the audit log", responses=PROBLEMS)
    async def audit(
        self,
        operators: NamedDependency[Tenants],
        tenant: FromQuery[str | None] = None,
        before: FromQuery[int | None] = None,
        limit: FromQuery[Annotated[int, Meta(ge=1, le=500)]] = 100,
    ) -> Listing[AuditObject]:
        """Everybody's changes, newest first, or one tenant's; `before` is the last page's last sequence."""
        whose = (await operators.named(tenant)).id if tenant else None
        return Listing(
            data=[audit_object(e) for e in await operators.audit.read(tenant=whose, before=before, limit=limit)]
        )
