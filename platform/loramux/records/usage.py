"""Sums over the ledger: token counts in buckets of time for usage queries, and daily quantities by meter for bills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Label, SQLColumnExpression, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.base import BigInt
from loramux.records.identity import TenantId
from loramux.records.ledger import LedgerRow
from loramux.records.service_tiers import SHADOW
from loramux.records.statements import among, exact_sum, exact_value, model_name
from loramux.units import DAY, TokenCounts


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of ledger entries; the first five fields only where the sum was grouped by them."""

    bucket: int = 0
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    tier: str | None = None
    tokens: TokenCounts
    requests: int
    waived: TokenCounts = TokenCounts()
    """Computed and not charged."""

    def __add__(self, other: UsageTotals) -> UsageTotals:
        """Add the sums of another group to this one's."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens + other.tokens,
            requests=self.requests + other.requests,
            waived=self.waived + other.waived,
        )


class UsageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The entries to add up: times in microseconds, `start` inclusive, `end` exclusive."""

    start: int
    end: int
    width: int
    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()
    user_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    batch: bool | None = None
    """True: lines of batches only; False: everything else."""
    shadows: bool = False
    """Shadows count too; they are no requests of the caller's."""
    allowed: frozenset[str] | None = None
    """The only models that count, without revisions (`Principal.models`); None: all."""
    project_id: str | None = None
    """The only project that counts (`Principal.bound_project`); None: all."""


Group = SQLColumnExpression[Any]

USAGE_GROUPS: dict[str, Group] = {
    "model": LedgerRow.model,
    "api_key_id": LedgerRow.key_id,
    "project_id": LedgerRow.project_id,
    "user_id": LedgerRow.user_id,
    "tier": LedgerRow.tier,
}


class UsageRepository:
    """One tenant's usage."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def by_model(self) -> list[UsageTotals]:
        """Sum everything that the tenant ever used, by model."""
        return await self._totals({"model": LedgerRow.model}, [])

    async def by_bucket(
        self, window: UsageWindow, group_by: Sequence[str], limit: int | None = None
    ) -> list[UsageTotals]:
        """Sum by bucket (created_at // width) and the named USAGE_GROUPS; buckets without entries are absent."""
        conditions = [LedgerRow.created_at >= window.start, LedgerRow.created_at < window.end]
        for column, kept in (
            (LedgerRow.model, window.models),
            (LedgerRow.key_id, window.api_key_ids),
            (LedgerRow.user_id, window.user_ids),
            (LedgerRow.project_id, window.project_ids),
        ):
            if kept:
                conditions.append(column.in_(kept))
        if window.batch is not None:
            in_batch = LedgerRow.tier.endswith("/batch", autoescape=True)
            conditions.append(in_batch if window.batch else ~in_batch)
        if not window.shadows:
            conditions.append(~LedgerRow.tier.endswith(f"/{SHADOW}", autoescape=True))
        if window.project_id is not None:
            conditions.append(LedgerRow.project_id == window.project_id)
        if window.allowed is not None:
            conditions.append(among(self._session, model_name(self._session, LedgerRow.model), window.allowed))
        bucket: dict[str, Group] = {"bucket": LedgerRow.created_at // window.width}
        return await self._totals(bucket | {name: USAGE_GROUPS[name] for name in group_by}, conditions, limit)

    async def _totals(
        self,
        groups: dict[str, Group],
        conditions: Sequence[ColumnElement[bool]],
        limit: int | None = None,
    ) -> list[UsageTotals]:
        keys: list[Label[Any]] = [column.label(name) for name, column in groups.items()]
        statement = (
            select(*keys, *_sums())
            .where(LedgerRow.tenant_id == self._tenant, *conditions)
            .group_by(*keys)
            .order_by(*keys)
            .limit(limit)
        )
        return [_totals(dict(row)) for row in (await self._session.execute(statement)).mappings()]


def _totals(row: dict[str, Any]) -> UsageTotals:
    tokens, waived = (
        TokenCounts(**{name: row.pop(f"{prefix}{name}") for name in ("prompt", "cached", "output")})
        for prefix in ("", "waived_")
    )
    return UsageTotals(tokens=tokens, waived=waived, **row)


def _sums() -> tuple[ColumnElement[int], ...]:
    quantities = {
        "prompt": LedgerRow.input_tokens,
        "cached": LedgerRow.cached_tokens,
        "output": LedgerRow.output_tokens,
        "waived_prompt": LedgerRow.waived_input_tokens,
        "waived_cached": LedgerRow.waived_cached_tokens,
        "waived_output": LedgerRow.waived_output_tokens,
        "requests": case((LedgerRow.kind == "usage", 1), else_=0),
    }
    # PostgreSQL's sum over bigint is numeric: cast it back, so that whole tokens stay integers
    return tuple(cast(func.sum(column), BigInt).label(name) for name, column in quantities.items())


METER_COLUMNS: dict[str, SQLColumnExpression[int]] = {
    "input_uncached": LedgerRow.input_tokens - LedgerRow.cached_tokens,
    "input_cached": LedgerRow.cached_tokens,
    "output": LedgerRow.output_tokens,
    "adapter_load": LedgerRow.adapter_load,
    "adapter_byte_seconds": LedgerRow.adapter_byte_seconds,
    "adapter_resident_byte_seconds": LedgerRow.adapter_resident_byte_seconds,
    "waived_input_uncached": LedgerRow.waived_input_tokens - LedgerRow.waived_cached_tokens,
    "waived_input_cached": LedgerRow.waived_cached_tokens,
    "waived_output": LedgerRow.waived_output_tokens,
}
"""Every meter as an expression over the ledger's columns."""

QUANTITY_GROUPS: dict[str, SQLColumnExpression[Any]] = {
    "project_id": LedgerRow.project_id,
    "api_key_id": LedgerRow.key_id,
    "model": LedgerRow.model,
    "adapter_digest": LedgerRow.adapter_digest,
    "tags": LedgerRow.tags,
}
"""The columns that bills can be divided by."""


class Span(msgspec.Struct, frozen=True):
    """Ledger entries from `first` to `last`, both inclusive; without `last` to the end."""

    first: int
    last: int | None


class DailyQuantities(msgspec.Struct, frozen=True):
    """One day's sums (days since the epoch, UTC) for one base model, tier and group; only meters that are not 0."""

    day: int
    base_model: str
    tier: str
    group: tuple[str | None, ...]
    quantities: dict[str, int]


class QuantityRepository:
    """One tenant's quantities."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def daily(self, span: Span, group_by: Sequence[str] = (), limit: int | None = None) -> list[DailyQuantities]:
        """Sum by the day that an entry is about, base model, tier and the named QUANTITY_GROUPS."""
        day = func.coalesce(LedgerRow.occurred_at, LedgerRow.created_at) // DAY
        keys = [day, LedgerRow.base_model, LedgerRow.tier, *(QUANTITY_GROUPS[name] for name in group_by)]
        sums = [part for column in METER_COLUMNS.values() for part in exact_sum(column)]
        statement = select(*keys, *sums).where(LedgerRow.tenant_id == self._tenant, LedgerRow.sequence >= span.first)
        if span.last is not None:
            statement = statement.where(LedgerRow.sequence <= span.last)
        rows = await self._session.execute(statement.group_by(*keys).order_by(*keys).limit(limit))
        return [_daily_quantities(tuple(row), len(group_by)) for row in rows]


def _daily_quantities(row: tuple[Any, ...], num_groups: int) -> DailyQuantities:
    halves = row[3 + num_groups :]
    values = (exact_value(*halves[2 * i : 2 * i + 2]) for i in range(len(METER_COLUMNS)))
    quantities = {meter: value for meter, value in zip(METER_COLUMNS, values, strict=True) if value}
    return DailyQuantities(int(row[0]), row[1], row[2], row[3 : 3 + num_groups], quantities)
