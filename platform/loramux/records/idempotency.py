"""Statements about idempotency keys: claimed with the request's row, answered with its settlement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Table, bindparam, delete, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.bulk import among
from loramux.records.idempotency_models import ClaimRow

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
        """Keep what these requests were answered."""
        statement = update(CLAIMS).where(CLAIMS.c.request_id == bindparam("request")).values(answer=bindparam("said"))
        rows = [{"request": request, "said": answer} for request, answer in sorted(answers.items())]
        await (await self._session.connection()).execute(statement, rows)

    async def free(self, request_ids: Collection[str]) -> None:
        """Forget the claims of requests that have ended without an answer."""
        await self._session.execute(delete(CLAIMS).where(among(self._session, CLAIMS.c.request_id, request_ids)))

    async def remove_expired(self, now: int) -> None:
        """Forget what nobody may ask for again."""
        await self._session.execute(delete(CLAIMS).where(CLAIMS.c.expires_at <= now))
