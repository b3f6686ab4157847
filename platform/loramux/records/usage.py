"""Statements that add the ledger up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Label, SQLColumnExpression, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId
from loramux.records.ledger_models import LedgerRow
from loramux.records.models import BigInt


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of ledger entries, in whole tokens; the first three only where the sum was grouped by them."""

    bucket: int = 0
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int


class UsageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries to add up: times in microseconds, `start` counts and `end` does not."""

    start: int
    end: int
    width: int
    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()


Group = SQLColumnExpression[Any]

GROUPS: dict[str, Group] = {
    "model": LedgerRow.model,
    "api_key_id": LedgerRow.key_id,
    "project_id": LedgerRow.project_id,
}


class UsageRepository:
    """One tenant's usage."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def by_model(self) -> list[UsageTotals]:
        """Everything the tenant ever used, by model."""
        return await self._totals({"model": LedgerRow.model}, [])

    async def by_bucket(self, window: UsageWindow, group_by: Sequence[str]) -> list[UsageTotals]:
        """Sums by bucket (created_at // width) and by those of GROUPS that are named; empty buckets are absent."""
        conditions = [LedgerRow.created_at >= window.start, LedgerRow.created_at < window.end]
        if window.models:
            conditions.append(LedgerRow.model.in_(window.models))
        if window.api_key_ids:
            conditions.append(LedgerRow.key_id.in_(window.api_key_ids))
        bucket: dict[str, Group] = {"bucket": LedgerRow.created_at // window.width}
        return await self._totals(bucket | {name: GROUPS[name] for name in group_by}, conditions)

    async def _totals(
        self,
        groups: dict[str, Group],
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[UsageTotals]:
        keys: list[Label[Any]] = [column.label(name) for name, column in groups.items()]
        statement = (
            select(*keys, *_sums())
            .where(LedgerRow.tenant_id == self._tenant, *conditions)
            .group_by(*keys)
            .order_by(*keys)
        )
        return [UsageTotals(**row) for row in (await self._session.execute(statement)).mappings()]


def _sums() -> tuple[ColumnElement[int], ...]:
    quantities = {
        "input_tokens": LedgerRow.input_tokens,
        "cached_tokens": LedgerRow.cached_tokens,
        "output_tokens": LedgerRow.output_tokens,
        "requests": case((LedgerRow.kind == "usage", 1), else_=0),
    }
    # PostgreSQL's sum over bigint is numeric; whole tokens stay integers
    return tuple(cast(func.sum(column), BigInt).label(name) for name, column in quantities.items())
