"""Statements about what a tenant may call: its own adapters, and those it was granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.adapters import READY
from loramux.records.identity import TenantId
from loramux.records.lifecycle_models import AliasTargetRow, GrantRow
from loramux.records.models import AdapterRow, AliasRow, RevisionRow, TenantRow


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that a name may mean."""

    adapter_id: str
    number: int
    digest: str
    base: str
    key: str = ""
    """The alias's, by which one of its targets is chosen."""
    weight: int = 1


_FOUND = (AdapterRow.id.label("adapter_id"), RevisionRow.number, RevisionRow.digest, RevisionRow.base)


class ReachRepository:
    """What one tenant, known by its id and name, may call."""

    def __init__(self, session: AsyncSession, tenant: TenantId, tenant_name: str) -> None:
        self._session = session
        self._tenant = tenant
        self._name = tenant_name

    async def numbered(self, owner: str, adapter: str, number: int) -> Reached | None:
        """`owner/adapter@number`."""
        statement = self._callable(select(*_FOUND), owner, adapter).where(RevisionRow.number == number)
        row = (await self._session.execute(statement)).one_or_none()
        return None if row is None else Reached(**row._mapping)

    async def aliased(self, owner: str, adapter: str, alias: str) -> list[Reached]:
        """The targets of `owner/adapter:alias`, by revision number; none where there is no such alias."""
        columns = (*_FOUND, AliasRow.id.label("key"), AliasTargetRow.weight)
        statement = self._callable(select(*columns), owner, adapter)
        statement = (
            statement.join(AliasTargetRow, AliasTargetRow.revision_id == RevisionRow.id)
            .join(
                AliasRow, (AliasRow.adapter_id == AliasTargetRow.adapter_id) & (AliasRow.name == AliasTargetRow.alias)
            )
            .where(AliasRow.name == alias)
            .order_by(RevisionRow.number)
        )
        return [Reached(**row._mapping) for row in await self._session.execute(statement)]

    async def granted(self) -> Sequence[tuple[str, int]]:
        """Others' adapters that the tenant may call, by name, each with the time of its grant."""
        statement = (
            select((TenantRow.name + "/" + AdapterRow.name).label("name"), GrantRow.granted_at)
            .join(AdapterRow, AdapterRow.id == GrantRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(GrantRow.grantee == self._name, AdapterRow.deleted_at.is_(None))
            .order_by("name")
        )
        return [(name, at) for name, at in await self._session.execute(statement)]

    def _callable(self, statement: Select[*tuple[Any, ...]], owner: str, adapter: str) -> Select[*tuple[Any, ...]]:
        return (
            statement.select_from(AdapterRow)
            .join(RevisionRow, RevisionRow.adapter_id == AdapterRow.id)
            .where(
                AdapterRow.name == adapter,
                AdapterRow.deleted_at.is_(None),
                RevisionRow.state == READY,
                self._permitted(owner),
            )
        )

    def _permitted(self, owner: str) -> ColumnElement[bool]:
        if owner == self._name:
            return AdapterRow.tenant_id == self._tenant
        granted = (
            select(GrantRow.adapter_id)
            .join(TenantRow, TenantRow.id == GrantRow.tenant_id)
            .where(TenantRow.name == owner, GrantRow.grantee == self._name)
        )
        return AdapterRow.id.in_(granted)
