"""Statements that add one tenant's ledger up by day, in the meters that prices are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import SQLColumnExpression, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId
from loramux.records.ledger_models import LedgerRow
from loramux.records.sums import exact_sum, exact_value

DAY = 86_400_000_000
"""Microseconds."""

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
"""Every meter, as what the ledger holds of it."""

GROUPS: dict[str, SQLColumnExpression[Any]] = {
    "project_id": LedgerRow.project_id,
    "api_key_id": LedgerRow.key_id,
    "model": LedgerRow.model,
    "adapter_digest": LedgerRow.adapter_digest,
    "tags": LedgerRow.tags,
}
"""By what usage and costs can be divided."""


class Span(msgspec.Struct, frozen=True):
    """Ledger entries from `first` to `last`, both counted; no `last`: to the end."""

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

    async def daily(self, span: Span, group_by: Sequence[str] = ()) -> list[DailyQuantities]:
        """Sums by the day that an entry is about, base model, tier and the GROUPS that are named."""
        day = func.coalesce(LedgerRow.occurred_at, LedgerRow.created_at) // DAY
        keys = [day, LedgerRow.base_model, LedgerRow.tier, *(GROUPS[name] for name in group_by)]
        sums = [part for column in METER_COLUMNS.values() for part in exact_sum(column)]
        statement = select(*keys, *sums).where(LedgerRow.tenant_id == self._tenant, LedgerRow.sequence >= span.first)
        if span.last is not None:
            statement = statement.where(LedgerRow.sequence <= span.last)
        rows = await self._session.execute(statement.group_by(*keys).order_by(*keys))
        return [_daily(tuple(row), len(group_by)) for row in rows]


def _daily(row: tuple[Any, ...], num_groups: int) -> DailyQuantities:
    halves = row[3 + num_groups :]
    values = (exact_value(*halves[2 * i : 2 * i + 2]) for i in range(len(METER_COLUMNS)))
    quantities = {meter: value for meter, value in zip(METER_COLUMNS, values, strict=True) if value}
    return DailyQuantities(int(row[0]), row[1], row[2], row[3 : 3 + num_groups], quantities)
