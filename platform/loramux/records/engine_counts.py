"""Tokens that engines counted by themselves, beside what the ledger says: row and statements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.database import is_postgresql
from loramux.records.ledger import LedgerRow
from loramux.records.statements import exact_sum, exact_value
from loramux.units import TokenCounts


class EngineCountRow(Base):
    """Tokens that one server's engine counted by itself for settled requests, by revision.

    `adapter_digest` is empty for the base model. Each row is written by its server alone, in the transactions that
    settle.
    """

    __tablename__ = "engine_counts"

    server_id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    adapter_digest: Mapped[str] = mapped_column(primary_key=True)
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]


Weights = tuple[str, str]
"""A base model and an adapter's digest; no digest for the base itself."""


class EngineCountRepository:
    """Engines' counts and the ledger's."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, server_id: str, counts: Mapping[Weights, TokenCounts]) -> None:
        """Add to what this server's engine has counted so far."""
        dialect = postgresql if is_postgresql(self._session) else sqlite
        insert = dialect.insert(EngineCountRow)
        keys = ("server_id", "base_model", "adapter_digest")
        columns = ("prompt_tokens", "cached_tokens", "output_tokens")
        added = {name: getattr(EngineCountRow, name) + getattr(insert.excluded, name) for name in columns}
        rows = [
            {
                "server_id": server_id,
                "base_model": base,
                "adapter_digest": digest,
                "prompt_tokens": tokens.prompt,
                "cached_tokens": tokens.cached,
                "output_tokens": tokens.output,
            }
            for (base, digest), tokens in sorted(counts.items())
        ]
        await self._session.execute(insert.on_conflict_do_update(index_elements=keys, set_=added), rows)

    async def engines(self) -> dict[Weights, TokenCounts]:
        """Return the tokens that all engines ever counted for settled requests."""
        columns = EngineCountRow.prompt_tokens, EngineCountRow.cached_tokens, EngineCountRow.output_tokens
        keys = EngineCountRow.base_model, EngineCountRow.adapter_digest
        statement = select(*keys, *(part for column in columns for part in exact_sum(column))).group_by(*keys)
        return {(row[0], row[1]): _tokens(tuple(row)) for row in await self._session.execute(statement)}

    async def ledger(self) -> dict[Weights, TokenCounts]:
        """Return the same from the ledger: billed and waived tokens, without corrections."""
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
        return {(row[0], row[1]): _tokens(tuple(row)) for row in await self._session.execute(statement)}


def _tokens(row: tuple[Any, ...]) -> TokenCounts:
    values = [exact_value(*row[2 + 2 * i : 4 + 2 * i]) for i in range(3)]
    return TokenCounts(prompt=values[0], cached=values[1], output=values[2])
