"""GET /v1/audit."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from msgspec import Meta

from loramux.gateway import Platform
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.tenancy import AuditObject, Listing, audit_object


class AuditController(Controller):
    """What was changed in the tenant."""

    path = "/v1/audit"
    tags = ("Audit",)
    guards = (requires("audit"),)

    @get(summary="Read the audit log", responses=REFUSALS)
    async def read(
        self,
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
        before: FromQuery[int | None] = None,
        limit: FromQuery[Annotated[int, Meta(ge=1, le=500)]] = 100,
    ) -> Listing[AuditObject]:
        """Every change, newest first: who, from where, before and after; `before` is the last page's last sequence."""
        entries = await platform.tenants.audit.read(tenant=principal.tenant, before=before, limit=limit)
        return Listing(data=[audit_object(entry) for entry in entries])
