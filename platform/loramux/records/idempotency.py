"""Idempotency keys: claimed with the request's row, answered with its settlement. Row and statements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import msgspec
from sqlalchemy import ForeignKey, Index, Table, bindparam, delete, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.identity import TenantId
from loramux.records.statements import among


class ClaimRow(Base):
    """One idempotency key of one caller; deleted when its request ends without an answer."""

    __tablename__ = "idempotency_claims"
    __table_args__ = (
        Index("ix_idempotency_claims_request_id", "request_id"),
        Index("ix_idempotency_claims_expires_at", "expires_at"),
    )

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """The API key, the member or the batch: another caller's idempotency keys are its own."""
    name: Mapped[str] = mapped_column(primary_key=True)
    """The idempotency key."""
    fingerprint: Mapped[str]
    """Digest of the request's body: the same key with another body is refused."""
    request_id: Mapped[str]
    answer: Mapped[bytes | None]
    """None while it runs."""
    expires_at: Mapped[int]


class IdempotencyClaim(msgspec.Struct, frozen=True):
    """The caller's name for one request, and a digest of the body that came with it."""

    name: str
    fingerprint: str
    holder: str = ""
    """Whose name it is, where that is not the caller: a batch that names its lines."""
    expires_at: int | None = None
    """Microseconds since the epoch; None: after the time for which answers are kept."""


Claimed = tuple[str, str, str]
"""Tenant, caller and idempotency key."""

CLAIMS = cast(Table, ClaimRow.__table__)
KEY = (CLAIMS.c.tenant_id, CLAIMS.c.key_id, CLAIMS.c.name)


class ClaimRepository:
    """Idempotency keys."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def claim(self, rows: Sequence[dict[str, Any]], now: int) -> Mapping[Claimed, Any]:
        """Insert the claims that are free; afterwards, all of them as they stand.

        Waits for another transaction that claims the same at this moment.
        """
        keys = sorted({(row["tenant_id"], row["key_id"], row["name"]) for row in rows})
        await self._session.execute(delete(CLAIMS).where(tuple_(*KEY).in_(keys), CLAIMS.c.expires_at <= now))
        is_sqlite = self._session.get_bind().dialect.name == "sqlite"
        insert = sqlite.insert(CLAIMS) if is_sqlite else postgresql.insert(CLAIMS)
        ordered = sorted(rows, key=lambda row: (row["tenant_id"], row["key_id"], row["name"]))
        await self._session.execute(insert.on_conflict_do_nothing(), ordered)
        found = await self._session.execute(select(*CLAIMS.c).where(tuple_(*KEY).in_(keys)))
        return {(row.tenant_id, row.key_id, row.name): row for row in found}

    async def answer(self, answers: Mapping[str, bytes]) -> None:
        """Store the answers of these requests."""
        statement = update(CLAIMS).where(CLAIMS.c.request_id == bindparam("request")).values(answer=bindparam("said"))
        rows = [{"request": request, "said": answer} for request, answer in sorted(answers.items())]
        await (await self._session.connection()).execute(statement, rows)

    async def free(self, request_ids: Collection[str]) -> None:
        """Delete the claims of requests that have ended without an answer."""
        await self._session.execute(delete(CLAIMS).where(among(self._session, CLAIMS.c.request_id, request_ids)))

    async def remove_before(self, tenant: TenantId, holder: str, name: str | None) -> None:
        """Delete the holder's claims with names before `name`, or all of them."""
        mine = (CLAIMS.c.tenant_id == tenant, CLAIMS.c.key_id == holder)
        before = () if name is None else (CLAIMS.c.name < name,)
        await self._session.execute(delete(CLAIMS).where(*mine, *before))

    async def remove_all(self, tenant: TenantId) -> None:
        """Delete every claim of a tenant, with its answer; a request that still runs stores none."""
        await self._session.execute(delete(CLAIMS).where(CLAIMS.c.tenant_id == tenant))

    async def remove_expired(self, now: int) -> None:
        """Delete claims past their expiry."""
        await self._session.execute(delete(CLAIMS).where(CLAIMS.c.expires_at <= now))
