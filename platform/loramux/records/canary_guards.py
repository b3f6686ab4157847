"""Canary guards: aliases whose new revision is taken back by itself where it is worse. Row and statements."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from sqlalchemy import ForeignKeyConstraint, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.adapters import AdapterRow, RevisionRow
from loramux.records.aliases import AliasRow, AliasTargetRow
from loramux.records.base import Base
from loramux.records.identity import TenantId
from loramux.records.tenants import TenantRow


class CanaryGuardRow(Base):
    """A guard on one alias; it goes with the alias."""

    __tablename__ = "canary_guards"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            ondelete="CASCADE",
        ),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    measures: Mapped[str]
    """What is compared, sorted, separated by spaces."""
    first_token_seconds: Mapped[float | None]
    """For `latency`: a first token within it is a good one."""
    created_at: Mapped[int]


class GuardedCanary(msgspec.Struct, frozen=True, kw_only=True):
    """An alias with a guard and several targets."""

    tenant: TenantId
    tenant_name: str
    adapter: str
    """The adapter's own name."""
    alias: str
    measures: tuple[str, ...]
    first_token_seconds: float | None
    since: int
    """The last change of the alias."""
    targets: tuple[tuple[int, int], ...]
    """Revision and weight, by revision."""


class CanaryGuardRepository:
    """Guards of every tenant."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, adapter_id: str, alias: str) -> CanaryGuardRow | None:
        """Return the guard of an alias."""
        return await self._session.get(CanaryGuardRow, (adapter_id, alias))

    async def put(self, row: CanaryGuardRow) -> None:
        """Insert the row, or replace the one of its alias."""
        await self._session.merge(row)
        await self._session.flush()

    async def remove(self, row: CanaryGuardRow) -> None:
        """Delete the row."""
        await self._session.delete(row)
        await self._session.flush()

    async def canaries(self) -> list[GuardedCanary]:
        """List the guarded aliases that have several targets now."""
        statement = (
            select(CanaryGuardRow, AliasRow.updated_at, AdapterRow.name, TenantRow.name, RevisionRow.number)
            .add_columns(AliasTargetRow.weight)
            .join(
                AliasRow, (AliasRow.adapter_id == CanaryGuardRow.adapter_id) & (AliasRow.name == CanaryGuardRow.alias)
            )
            .join(AdapterRow, AdapterRow.id == CanaryGuardRow.adapter_id)
            .join(TenantRow, TenantRow.id == CanaryGuardRow.tenant_id)
            .join(
                AliasTargetRow,
                (AliasTargetRow.adapter_id == CanaryGuardRow.adapter_id)
                & (AliasTargetRow.alias == CanaryGuardRow.alias),
            )
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .order_by(CanaryGuardRow.adapter_id, CanaryGuardRow.alias, RevisionRow.number)
        )
        found: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        facts: dict[tuple[str, str], GuardedCanary] = {}
        for guard, since, adapter, tenant, number, weight in await self._session.execute(statement):
            key = (guard.adapter_id, guard.alias)
            found[key].append((number, weight))
            facts[key] = GuardedCanary(
                tenant=guard.tenant_id,
                tenant_name=tenant,
                adapter=adapter,
                alias=guard.alias,
                measures=tuple(guard.measures.split()),
                first_token_seconds=guard.first_token_seconds,
                since=since,
                targets=tuple(found[key]),
            )
        return [one for one in facts.values() if len(one.targets) > 1]
