"""Statements about requests: opened before the engine sees them, closed with the ledger entry that bills them.

They go by request id, which only the server makes; the tenant of a settlement is read from the row, never given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec
from sqlalchemy import Table, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.bulk import among, insert_new
from loramux.records.identity import ProjectId, TenantId
from loramux.records.ledger_models import RequestRow
from loramux.records.models import AdapterRow, RevisionRow, TenantRow

OPEN = "open"
SETTLED = "settled"
INTERRUPTED = "interrupted"


class BilledRequest(msgspec.Struct, frozen=True):
    """What a request hands down to its line on the bill, and whether it may have taken anything."""

    id: str
    tenant_id: TenantId
    key_id: str
    project_id: ProjectId | None
    model: str
    adapter_digest: str | None
    base_model: str
    tier: str
    tags: str
    has_holds: bool
    has_claim: bool


REQUESTS = cast(Table, RequestRow.__table__)
BILLED = tuple(REQUESTS.c[name] for name in BilledRequest.__struct_fields__)


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a revision was asked to answer. Times in microseconds since the epoch."""

    id: str
    model: str
    adapter_digest: str
    key_id: str
    status: str
    prompt_tokens: int
    created_at: int
    settled_at: int | None


class RequestRepository:
    """Requests."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Insert rows, given as columns; False when some id was there already, and then only the others are added."""
        return await insert_new(self._session, RequestRow, rows) == len(rows)

    async def owners(self, ids: Collection[str]) -> dict[str, str]:
        """Which server has opened each of these requests, those that exist."""
        statement = select(RequestRow.id, RequestRow.server_id).where(among(self._session, RequestRow.id, ids))
        return {id: server for id, server in await self._session.execute(statement)}

    async def note_holds(self, ids: Collection[str]) -> None:
        """These requests hold something now."""
        statement = update(REQUESTS).where(among(self._session, RequestRow.id, ids)).values(has_holds=True)
        await self._session.execute(statement)

    async def servers_with_open(self, *, besides: str) -> list[str]:
        """The other servers that have requests open."""
        statement = select(RequestRow.server_id).where(RequestRow.status == OPEN, RequestRow.server_id != besides)
        return list(await self._session.scalars(statement.distinct()))

    async def left_open(self, servers: Collection[str], limit: int) -> list[str]:
        """Some of the requests that these servers have open, by id."""
        statement = select(RequestRow.id).where(RequestRow.status == OPEN, RequestRow.server_id.in_(servers))
        return list(await self._session.scalars(statement.order_by(RequestRow.id).limit(limit)))

    async def close(self, ids: Collection[str], status: str, at: int) -> dict[str, BilledRequest]:
        """Write the end of these requests; those that were not settled before, by id."""
        statement = (
            update(REQUESTS)
            .where(among(self._session, RequestRow.id, ids), REQUESTS.c.status != SETTLED)
            .values(status=status, settled_at=at)
            .returning(*BILLED)
        )
        return {row[0]: BilledRequest(*row) for row in await self._session.execute(statement)}

    async def answered_by(
        self, tenant: TenantId, owner: str, adapter: str, before: str | None, limit: int
    ) -> list[AnsweredRequest]:
        """The tenant's requests to `owner`'s adapter, which may be another tenant's, newest first.

        `before` is a request's id.
        """
        digests = (
            select(RevisionRow.digest)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(TenantRow.name == owner, AdapterRow.name == adapter)
        )
        statement = select(RequestRow).where(
            RequestRow.tenant_id == tenant,
            RequestRow.adapter_digest.in_(digests),
            RequestRow.model.startswith(f"{owner}/{adapter}@", autoescape=True),
        )
        if before is not None:
            last = select(RequestRow.created_at, RequestRow.id).where(
                RequestRow.tenant_id == tenant, RequestRow.id == before
            )
            statement = statement.where(tuple_(RequestRow.created_at, RequestRow.id) < last.scalar_subquery())
        newest = statement.order_by(RequestRow.created_at.desc(), RequestRow.id.desc()).limit(limit)
        names = AnsweredRequest.__struct_fields__
        return [
            AnsweredRequest(**{name: getattr(row, name) for name in names})
            for row in await self._session.scalars(newest)
        ]
