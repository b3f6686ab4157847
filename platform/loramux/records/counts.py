"""Statements about what engines counted by themselves, and what the ledger says beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.database import is_postgresql
from loramux.records.ledger_models import EngineCountRow, LedgerRow
from loramux.records.sums import exact_sum, exact_value


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that went through an engine for requests that got at least one token out; a preempted one's count once."""

    prompt_tokens: int = 0
    """Computed or found in the KV cache."""
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def drift(self, other: Counted) -> int:
        """Tokens by which two counts differ."""
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))


Weights = tuple[str, str]
"""A base model and an adapter's digest; no digest for the base itself."""


class CountRepository:
    """Engines' counts and the ledger's."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, server_id: str, counts: Mapping[Weights, Counted]) -> None:
        """Add to what this server's engine has counted so far."""
        dialect = postgresql if is_postgresql(self._session) else sqlite
        insert = dialect.insert(EngineCountRow)
        keys = ("server_id", "base_model", "adapter_digest")
        added = {
            name: getattr(EngineCountRow, name) + getattr(insert.excluded, name) for name in Counted.__struct_fields__
        }
        rows = [
            {"server_id": server_id, "base_model": base, "adapter_digest": digest} | msgspec.structs.asdict(counted)
            for (base, digest), counted in sorted(counts.items())
        ]
        await self._session.execute(insert.on_conflict_do_update(index_elements=keys, set_=added), rows)

    async def engines(self) -> dict[Weights, Counted]:
        """What all engines ever counted for settled requests."""
        columns = EngineCountRow.prompt_tokens, EngineCountRow.cached_tokens, EngineCountRow.output_tokens
        keys = EngineCountRow.base_model, EngineCountRow.adapter_digest
        statement = select(*keys, *(part for column in columns for part in exact_sum(column))).group_by(*keys)
        return {(row[0], row[1]): _counted(tuple(row)) for row in await self._session.execute(statement)}

    async def ledger(self) -> dict[Weights, Counted]:
        """The same from the ledger: what is billed and what is waived, corrections left out."""
        keys = LedgerRow.base_model, func.coalesce(LedgerRow.adapter_digest, "")
        sums = (
            LedgerRow.input_tokens + LedgerRow.waived_input_tokens,
            LedgerRow.cached_tokens + LedgerRow.waived_cached_tokens,
            LedgerRow.output_tokens + LedgerRow.waived_output_tokens,
        )
        statement = (
            select(*keys, *(part for column in sums for part in exact_sum(column)))
            .where(LedgerRow.kind.in_(("usage", "interrupted")))
            .group_by(*keys)
        )
        return {(row[0], row[1]): _counted(tuple(row)) for row in await self._session.execute(statement)}


def _counted(row: tuple[Any, ...]) -> Counted:
    values = [exact_value(*row[2 + 2 * i : 4 + 2 * i]) for i in range(3)]
    return Counted(prompt_tokens=values[0], cached_tokens=values[1], output_tokens=values[2])
