"""Base models that differ from the servers' settings files, and migrations of adapters from base to base.

A row of `bases` is a base that was added to running servers, or retired. A migration has one row, and one item row per
checked revision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import CheckConstraint, ForeignKey, Index, func, select, update
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.data.entities import BaseUpgrade, UpgradeItem
from loramux.data.records.adapters import READY, AdapterRow, RevisionRow
from loramux.data.records.aliases import AliasTargetRow
from loramux.data.records.base import Base, Repository, TenantScoped, to_struct
from loramux.data.records.database import BASES, advisory_lock
from loramux.data.records.leases import LeasedRow, adopt_abandoned
from loramux.data.records.tenants import TenantRow

RUNNING, COMPLETED, CANCELLED, FAILED = "running", "completed", "cancelled", "failed"
PENDING, EVALUATING = "pending", "evaluating"
FITS, NEEDS_RETRAINING, REFUSED = "fits", "needs_retraining", "refused"
OUTCOMES = (PENDING, EVALUATING, FITS, NEEDS_RETRAINING, REFUSED)


class BaseRow(Base):
    """A base model that was added or retired."""

    __tablename__ = "bases"

    name: Mapped[str] = mapped_column(primary_key=True)
    settings: Mapped[str | None]
    """The base's settings as JSON, like one table of `[[bases]]`; null: the servers' settings files have them."""
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


class BaseRepository(Repository):
    """The added and the retired bases, and the tenants' adapters on a base."""

    async def all(self) -> list[BaseRecord]:
        """List the bases in the order of their last change, oldest first."""
        rows = await self._session.scalars(select(BaseRow).order_by(BaseRow.changed_at, BaseRow.name))
        return [to_struct(BaseRecord, row) for row in rows]

    async def lock(self) -> list[BaseRecord]:
        """List the bases, and lock them against other transactions until this transaction ends."""
        await advisory_lock(self._session, BASES)
        return await self.all()

    async def put(self, record: BaseRecord) -> None:
        """Insert or replace a base."""
        await self._put(BaseRow(**msgspec.structs.asdict(record)))

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


class BaseMigrationRow(LeasedRow, Base):
    """A check of adapters of one base on another base, with a lease of the server that runs the check."""

    __tablename__ = "base_migrations"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'completed', 'cancelled', 'failed')", name="state"),
        Index("ix_base_migrations_state", "state"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    target: Mapped[str]
    tenant: Mapped[str | None]
    """The name of the only tenant that the migration is about; null: all tenants."""
    adapter: Mapped[str | None]
    """The own name of the tenant's only adapter that the migration is about; null: all adapters."""
    evaluates: Mapped[int]
    """1: customers' evaluation sets are used."""
    created_by: Mapped[str]
    state: Mapped[str]
    error: Mapped[str | None]
    created_at: Mapped[int]
    finished_at: Mapped[int | None]


class BaseMigrationItemRow(Base):
    """One revision of a migration, and its outcome."""

    __tablename__ = "base_migration_items"
    __table_args__ = (
        CheckConstraint("outcome IN ('pending', 'evaluating', 'fits', 'needs_retraining', 'refused')", name="outcome"),
        Index("ix_base_migration_items_tenant_id", "tenant_id"),
    )

    migration_id: Mapped[str] = mapped_column(ForeignKey("base_migrations.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    tenant_name: Mapped[str]
    adapter: Mapped[str]
    """The adapter's own name."""
    revision_id: Mapped[str]
    number: Mapped[int]
    digest: Mapped[str]
    outcome: Mapped[str]
    code: Mapped[str | None]
    """A stable code of the outcome; null if the outcome has no code."""
    reason: Mapped[str | None]
    """The reason of the outcome, as a sentence."""
    new_number: Mapped[int | None]
    """The number of the new revision for the target base."""
    evaluation_id: Mapped[str | None]
    weight: Mapped[int]
    """Percent of the old revision's share of aliases that the last shift moved to the new revision."""


class BaseUpgradeRepository(Repository):
    """Migrations of every tenant's adapters, which operators read and servers run."""

    async def begin(self, migration: BaseUpgrade, names: Collection[str]) -> int:
        """Insert a migration, with an item for every revision on `names` that has an alias; return their number."""
        await self._insert(BaseMigrationRow(**msgspec.structs.asdict(migration)))
        aliased = select(AliasTargetRow.revision_id)
        statement = (
            select(RevisionRow, AdapterRow.name, TenantRow.name)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == RevisionRow.tenant_id)
            .where(
                RevisionRow.base_model.in_(names),
                RevisionRow.state == READY,
                AdapterRow.deleted_at.is_(None),
                RevisionRow.id.in_(aliased),
            )
            .order_by(TenantRow.name, AdapterRow.name, RevisionRow.number)
        )
        if migration.tenant is not None:
            statement = statement.where(TenantRow.name == migration.tenant)
        if migration.adapter is not None:
            statement = statement.where(AdapterRow.name == migration.adapter)
        rows = (await self._session.execute(statement)).all()
        self._session.add_all(
            BaseMigrationItemRow(
                migration_id=migration.id,
                position=position,
                tenant_id=revision.tenant_id,
                tenant_name=tenant,
                adapter=adapter,
                revision_id=revision.id,
                number=revision.number,
                digest=revision.digest,
                outcome=PENDING,
                weight=0,
            )
            for position, (revision, adapter, tenant) in enumerate(rows)
        )
        await self._session.flush()
        return len(rows)

    async def get(self, id: str) -> BaseUpgrade | None:
        """Find a migration."""
        row = await self._session.get(BaseMigrationRow, id)
        return None if row is None else to_struct(BaseUpgrade, row)

    async def newest(self, limit: int) -> list[BaseUpgrade]:
        """List at most `limit` migrations, newest first."""
        newest = select(BaseMigrationRow).order_by(BaseMigrationRow.created_at.desc(), BaseMigrationRow.id.desc())
        return [to_struct(BaseUpgrade, row) for row in await self._session.scalars(newest.limit(limit))]

    async def target_of(self, source: str) -> str | None:
        """Return the target of the newest migration from this base."""
        statement = select(BaseMigrationRow.target).where(BaseMigrationRow.source == source)
        return await self._session.scalar(statement.order_by(BaseMigrationRow.created_at.desc()).limit(1))

    async def running(self, like: BaseUpgrade) -> BaseUpgrade | None:
        """Find a migration under way with the same bases, tenant and adapter."""
        rows = await self._session.scalars(select(BaseMigrationRow).where(BaseMigrationRow.state == RUNNING))
        found = (to_struct(BaseUpgrade, row) for row in rows)
        return next((one for one in found if _scope(one) == _scope(like)), None)

    async def counts(self, ids: Collection[str]) -> dict[str, dict[str, int]]:
        """Count the revisions of these migrations by outcome."""
        statement = (
            select(BaseMigrationItemRow.migration_id, BaseMigrationItemRow.outcome, func.count())
            .where(BaseMigrationItemRow.migration_id.in_(ids))
            .group_by(BaseMigrationItemRow.migration_id, BaseMigrationItemRow.outcome)
        )
        counts: dict[str, dict[str, int]] = {id: {} for id in ids}
        for id, outcome, count in await self._session.execute(statement):
            counts[id][outcome] = count
        return counts

    async def items(
        self,
        id: str,
        *,
        outcomes: Sequence[str] = OUTCOMES,
        tenant: str | None = None,
        adapter: str | None = None,
        after: int = -1,
        limit: int = 1,
    ) -> list[UpgradeItem]:
        """List at most `limit` revisions of a migration with these outcomes by position, after the position `after`."""
        statement = select(BaseMigrationItemRow).where(
            BaseMigrationItemRow.migration_id == id,
            BaseMigrationItemRow.outcome.in_(outcomes),
            BaseMigrationItemRow.position > after,
        )
        if tenant is not None:
            statement = statement.where(BaseMigrationItemRow.tenant_name == tenant)
        if adapter is not None:
            statement = statement.where(BaseMigrationItemRow.adapter == adapter)
        rows = await self._session.scalars(statement.order_by(BaseMigrationItemRow.position).limit(limit))
        return [to_struct(UpgradeItem, row) for row in rows]

    async def adopt_abandoned(self, server_id: str) -> None:
        """Move the unfinished migrations of dead servers to this one."""
        await adopt_abandoned(self._session, BaseMigrationRow, BaseMigrationRow.state == RUNNING, server_id)

    async def held(self, server_id: str) -> list[BaseUpgrade]:
        """List the server's unfinished migrations, oldest first."""
        statement = select(BaseMigrationRow).where(
            BaseMigrationRow.state == RUNNING, BaseMigrationRow.server_id == server_id
        )
        return [
            to_struct(BaseUpgrade, row)
            for row in await self._session.scalars(statement.order_by(BaseMigrationRow.created_at))
        ]

    async def decide(self, item: UpgradeItem, server_id: str) -> bool:
        """Write an outcome if this server still holds the migration; return whether it does."""
        held = select(BaseMigrationRow.id).where(
            BaseMigrationRow.id == item.migration_id,
            BaseMigrationRow.server_id == server_id,
            BaseMigrationRow.state == RUNNING,
        )
        if await self._session.scalar(held.with_for_update()) is None:
            return False
        await self.change(item)
        return True

    async def change(self, item: UpgradeItem) -> None:
        """Write the columns of an item that may change."""
        names = ("outcome", "code", "reason", "new_number", "evaluation_id", "weight")
        place = (
            BaseMigrationItemRow.migration_id == item.migration_id,
            BaseMigrationItemRow.position == item.position,
        )
        values = {name: getattr(item, name) for name in names}
        await self._session.execute(update(BaseMigrationItemRow).where(*place).values(values))

    async def end(
        self, id: str, state: str, at: int, *, server_id: str | None = None, error: str | None = None
    ) -> bool:
        """Write the end of a running migration if `server_id` holds it; return whether the migration was running."""
        mine = [BaseMigrationRow.id == id, BaseMigrationRow.state == RUNNING]
        if server_id is not None:
            mine.append(BaseMigrationRow.server_id == server_id)
        values = {"state": state, "error": error, "finished_at": at}
        ended = update(BaseMigrationRow).where(*mine).values(values).returning(BaseMigrationRow.id)
        return (await self._session.execute(ended)).one_or_none() is not None

    async def is_callable(self, revision_id: str) -> bool:
        """Return whether a revision can still be called."""
        state = await self._session.scalar(select(RevisionRow.state).where(RevisionRow.id == revision_id))
        return state == READY


class UpgradeReports(TenantScoped):
    """The results of migrations for one tenant's adapters."""

    async def newest(self, limit: int) -> list[tuple[BaseUpgrade, UpgradeItem]]:
        """List at most `limit` revisions of the tenant, those of the newest migration first."""
        statement = (
            select(BaseMigrationRow, BaseMigrationItemRow)
            .join(BaseMigrationItemRow, BaseMigrationItemRow.migration_id == BaseMigrationRow.id)
            .where(BaseMigrationItemRow.tenant_id == self._tenant)
            .order_by(BaseMigrationRow.created_at.desc(), BaseMigrationRow.id, BaseMigrationItemRow.position)
            .limit(limit)
        )
        return [
            (to_struct(BaseUpgrade, row), to_struct(UpgradeItem, item))
            for row, item in await self._session.execute(statement)
        ]


def _scope(migration: BaseUpgrade) -> tuple[str, str, str | None, str | None]:
    return migration.source, migration.target, migration.tenant, migration.adapter
