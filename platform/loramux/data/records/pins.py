"""Pins: revisions that tenants keep in the adapter pool and pay for."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, func, select, text, update
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId, new_id
from loramux.data.records.adapters import AdapterRow, RevisionRow, Stamp
from loramux.data.records.base import Base, Repository, TenantScoped, among
from loramux.data.records.tenants import TenantRow

ACTIVE = text("until IS NULL")
UNPINNED, BY_DELETION, IDLE = "unpinned", "deleted", "idle"
"""Reasons for the end of a pin."""


class PinRow(Base):
    """A revision kept in the pool from `since` to `until`: residency is charged by these rows."""

    __tablename__ = "adapter_pins"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
        ),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        Index(
            "ix_adapter_pins_standing",
            "revision_id",
            unique=True,
            sqlite_where=ACTIVE,
            postgresql_where=ACTIVE,
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    adapter_id: Mapped[str]
    revision_id: Mapped[str]
    digest: Mapped[str]
    size_bytes: Mapped[int]
    pinned_by: Mapped[str]
    """The id of the key or the member that pinned it."""
    since: Mapped[int]
    used_at: Mapped[int]
    """The approximate time of the last request with the revision."""
    until: Mapped[int | None]
    """The end of the pin; None while it is active."""
    counted_until: Mapped[int | None]
    """The time up to which the pin is billed; None: not billed yet."""
    ended_by: Mapped[str | None]
    """The reason of the end: `unpinned`, `deleted`, `idle`, or the engine's code if the pool has no space."""


class PinRepository(TenantScoped):
    """One tenant's active pins."""

    async def count(self) -> int:
        """Count the tenant's active pins."""
        statement = select(func.count()).select_from(PinRow)
        return (
            await self._session.scalar(statement.where(PinRow.tenant_id == self._tenant, PinRow.until.is_(None))) or 0
        )

    async def of(self, adapter_id: str) -> dict[str, PinRow]:
        """Return the adapter's active pins by revision id."""
        statement = select(PinRow).where(
            PinRow.tenant_id == self._tenant, PinRow.adapter_id == adapter_id, PinRow.until.is_(None)
        )
        return {row.revision_id: row for row in await self._session.scalars(statement)}

    async def add(self, revision: RevisionRow, stamp: Stamp) -> PinRow:
        """Insert a pin of a revision that has none."""
        row = PinRow(
            id=new_id("pin"),
            tenant_id=self._tenant,
            adapter_id=revision.adapter_id,
            revision_id=revision.id,
            digest=revision.digest,
            size_bytes=revision.size_bytes,
            pinned_by=stamp.by,
            since=stamp.at,
            used_at=stamp.at,
        )
        await self._insert(row)
        return row

    async def end(self, revision_ids: Collection[str], why: str, at: int) -> None:
        """End the pins of these revisions."""
        await self._session.execute(
            update(PinRow)
            .where(
                PinRow.tenant_id == self._tenant,
                among(self._session, PinRow.revision_id, revision_ids),
                PinRow.until.is_(None),
            )
            .values(until=at, ended_by=why)
        )


class ActivePin(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that the engine must keep in the pool."""

    tenant: TenantId
    tenant_name: str
    adapter: str
    number: int
    digest: str
    base_model: str
    used_at: int


class ActivePinRepository(Repository):
    """Every tenant's active pins. The system uses this repository to apply and end pins."""

    async def all(self) -> list[ActivePin]:
        """List the active pins, oldest first."""
        statement = (
            select(
                PinRow.tenant_id.label("tenant"),
                TenantRow.name.label("tenant_name"),
                AdapterRow.name.label("adapter"),
                RevisionRow.number,
                PinRow.digest,
                RevisionRow.base_model,
                PinRow.used_at,
            )
            .join(TenantRow, TenantRow.id == PinRow.tenant_id)
            .join(AdapterRow, AdapterRow.id == PinRow.adapter_id)
            .join(RevisionRow, RevisionRow.id == PinRow.revision_id)
            .where(PinRow.until.is_(None))
            .order_by(PinRow.since, PinRow.id)
        )
        return [ActivePin(**row._mapping) for row in await self._session.execute(statement)]

    async def touch(self, revision_ids: Collection[str], at: int) -> None:
        """Record the time of requests with these revisions."""
        await self._session.execute(
            update(PinRow)
            .where(among(self._session, PinRow.revision_id, revision_ids), PinRow.until.is_(None), PinRow.used_at < at)
            .values(used_at=at)
        )
