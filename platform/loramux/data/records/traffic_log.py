"""Served requests as a log of traffic: times and sizes, without names and without texts."""

from __future__ import annotations

from sqlalchemy import func, select

from loramux.data.entities import ServedRequest
from loramux.data.records.adapters import RevisionRow
from loramux.data.records.base import Repository
from loramux.data.records.ledger import LedgerRow
from loramux.data.records.requests import RequestRow


class TrafficLogRepository(Repository):
    """The served requests of all tenants."""

    async def served_since(self, since: int, base: str | None, limit: int) -> list[ServedRequest]:
        """List the newest `limit` requests that arrived after `since`, in order of arrival; of one base if given."""
        ranks = select(RevisionRow.digest, func.max(RevisionRow.rank).label("rank")).group_by(RevisionRow.digest)
        rank = ranks.subquery()
        statement = (
            select(
                RequestRow.created_at,
                RequestRow.tenant_id,
                RequestRow.adapter_digest,
                rank.c.rank,
                RequestRow.tier,
                LedgerRow.input_tokens + LedgerRow.waived_input_tokens,
                LedgerRow.output_tokens + LedgerRow.waived_output_tokens,
                RequestRow.max_tokens,
                RequestRow.base_model,
            )
            .join(LedgerRow, LedgerRow.request_id == RequestRow.id)
            .outerjoin(rank, rank.c.digest == RequestRow.adapter_digest)
            .where(LedgerRow.kind == "usage", RequestRow.created_at >= since)
            .where(LedgerRow.input_tokens + LedgerRow.waived_input_tokens > 0)
            .order_by(RequestRow.created_at.desc())
            .limit(limit)
        )
        if base is not None:
            statement = statement.where(RequestRow.base_model == base)
        rows = [ServedRequest(*row) for row in await self._session.execute(statement)]
        return rows[::-1]
