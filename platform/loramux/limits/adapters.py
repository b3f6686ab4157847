"""What a tenant may upload: its own limits within those of the server."""

from __future__ import annotations

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.limits.names import tier_subject
from loramux.records import Principal
from loramux.records.limits import LimitRepository
from loramux.settings import AdapterLimits


class AdapterCaps(msgspec.Struct, frozen=True):
    """How many adapters, and what each may be; None: no limit of the tenant's own."""

    adapters: int
    rank: int
    file_bytes: int
    """Of one adapter's weights."""
    modules: int | None
    """That one adapter changes."""
    bytes_in_all: int | None


async def adapter_caps(session: AsyncSession, principal: Principal, server: AdapterLimits) -> AdapterCaps:
    """The tenant's own limits, else its tier's, and never more than the server takes of anybody."""
    tier = tier_subject(principal.tier)
    rows = await LimitRepository(session).limits({principal.tenant, tier})
    values = {row.name: row.value for row in rows if row.subject == tier}
    values |= {row.name: row.value for row in rows if row.subject == principal.tenant}
    return AdapterCaps(
        adapters=min(values.get("adapters", server.max_adapters_per_tenant), server.max_adapters_per_tenant),
        rank=min(values.get("adapter_rank", server.max_rank), server.max_rank),
        file_bytes=min(values.get("adapter_file_bytes", server.max_bytes), server.max_bytes),
        modules=values.get("adapter_modules"),
        bytes_in_all=values.get("adapter_bytes"),
    )
