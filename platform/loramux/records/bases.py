"""Base models that differ from the servers' settings files: added to running servers, or retired."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.adapters import READY, AdapterRow, RevisionRow
from loramux.records.aliases import AliasTargetRow
from loramux.records.base import Base
from loramux.records.locks import BASES, advisory_lock
from loramux.records.tenants import TenantRow


class BaseRow(Base):
    """A base model that was added or retired."""

    __tablename__ = "bases"

    name: Mapped[str] = mapped_column(primary_key=True)
    settings: Mapped[str | None]
    """JSON, as one table of `[[bases]]`; null: the servers' settings files have it."""
    successor: Mapped[str | None]
    """The base to use instead of a retired one."""
    retired_at: Mapped[int | None]
    changed_at: Mapped[int]


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `bases`. Times in microseconds since the epoch."""

    name: str
    settings: str | None = None
    successor: str | None = None
    retired_at: int | None = None
    changed_at: int


class BaseRepository:
    """The added and the retired bases, and what every tenant has on a base."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def all(self) -> list[BaseRecord]:
        """List the bases by the time of their last change, oldest first."""
        rows = await self._session.scalars(select(BaseRow).order_by(BaseRow.changed_at, BaseRow.name))
        return [BaseRecord(**{name: getattr(row, name) for name in BaseRecord.__struct_fields__}) for row in rows]

    async def lock(self) -> list[BaseRecord]:
        """List the same, and let no other transaction change them until this one ends."""
        await advisory_lock(self._session, BASES)
        return await self.all()

    async def put(self, record: BaseRecord) -> None:
        """Insert or replace a base."""
        await self._session.merge(BaseRow(**msgspec.structs.asdict(record)))
        await self._session.flush()

    async def count_adapters(self) -> dict[str, int]:
        """Count the adapters that have a callable revision, by the base of those revisions."""
        statement = (
            select(RevisionRow.base_model, func.count(RevisionRow.adapter_id.distinct()))
            .where(RevisionRow.state == READY)
            .group_by(RevisionRow.base_model)
        )
        return {name: count for name, count in await self._session.execute(statement)}

    async def has_adapter(self, name: str) -> bool:
        """Return whether `name` is `tenant/adapter` of some tenant."""
        tenant, _, adapter = name.partition("/")
        statement = select(AdapterRow.id).join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        found = statement.where(TenantRow.name == tenant, AdapterRow.name == adapter, AdapterRow.deleted_at.is_(None))
        return await self._session.scalar(found) is not None

    async def aliased_adapters(self, names: Collection[str], limit: int) -> list[str]:
        """List at most `limit` adapters, as `tenant/adapter`, with an alias of a revision for one of these bases."""
        name = (TenantRow.name + "/" + AdapterRow.name).label("name")
        statement = (
            select(name)
            .select_from(AdapterRow)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .join(RevisionRow, RevisionRow.adapter_id == AdapterRow.id)
            .join(AliasTargetRow, AliasTargetRow.revision_id == RevisionRow.id)
            .where(RevisionRow.base_model.in_(names), RevisionRow.state == READY, AdapterRow.deleted_at.is_(None))
            .distinct()
            .order_by("name")
            .limit(limit)
        )
        return list(await self._session.scalars(statement))
