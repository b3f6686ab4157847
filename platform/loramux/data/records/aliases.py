"""Aliases: movable names of revisions, their targets and their history. Rows and statements.

An alias may have a release policy and a canary guard. A policy states the demands that a revision must meet before it
gets most of the alias's requests. A guard removes a new revision if it is worse than the others. The policy remains
when the alias is deleted; the guard is deleted together with the alias.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, UniqueConstraint, delete, func, select
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId, new_id
from loramux.data.records.adapters import AdapterRow, RevisionRow, Stamp
from loramux.data.records.base import Base, Repository, TenantScoped, among
from loramux.data.records.tenants import TenantRow

DEFAULT_ALIAS = "default"
WHOLE = 100
"""The weight of an alias's only target."""
KEPT_VERSIONS = 100
"""The maximum number of versions of an alias that are kept. Older versions are in the audit log."""


class AliasRow(Base):
    """A movable name for an adapter's revisions; its targets are rows of `AliasTargetRow`."""

    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("tenant_id", "adapter_id", "name"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    """The alias's id, which keys the choice between targets, so that two aliases choose independently."""
    tenant_id: Mapped[TenantId]
    version: Mapped[int]
    """The latest version of the alias's history."""
    updated_at: Mapped[int]


class AliasTargetRow(Base):
    """A target of an alias: a revision and its share."""

    __tablename__ = "alias_targets"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
        ),
        CheckConstraint("weight >= 1", name="weight"),
        Index("ix_alias_targets_revision_id", "revision_id"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    revision_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    weight: Mapped[int]


class AliasVersionRow(Base):
    """The targets of an alias from one change to the next. The row remains when the alias is deleted."""

    __tablename__ = "alias_versions"
    __table_args__ = (ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),)

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[TenantId]
    targets: Mapped[str]
    """Revision numbers to weights, as JSON; empty if the alias was removed."""
    restores: Mapped[int | None]
    """The version that a rollback restored."""
    changed_by: Mapped[str]
    changed_at: Mapped[int]


class Target(msgspec.Struct, frozen=True):
    """A target of an alias: a revision with its `weight`. The share of a target is its weight divided by the sum of all
    weights.
    """

    revision: RevisionRow
    weight: int


class Pointed(msgspec.Struct, frozen=True):
    """An alias with its targets, by revision number."""

    alias: AliasRow
    targets: tuple[Target, ...]


Weights = Mapping[int, int]
"""Revision numbers to weights."""


def targets_of(version: AliasVersionRow) -> dict[int, int]:
    """Return the targets of this version, revision numbers to weights; empty if the alias was removed."""
    return msgspec.json.decode(version.targets, type=dict[int, int])


def canary_of(versions: Sequence[AliasVersionRow]) -> int:
    """Return the canary of an alias with this history, newest version first: the target that was added last.

    The number of a revision says nothing: an older revision may be tried next to a newer one. A rollback makes the
    target the canary that was it in the restored version. Of targets that were added together, the canary has the
    smallest share, and then the highest number.
    """
    added: dict[int, int] = {}
    added_in_version: dict[int, dict[int, int]] = {}
    weights: dict[int, int] = {}
    for row in reversed(versions):
        weights = targets_of(row)
        restored = added_in_version.get(row.restores or 0, {})
        before = restored if restored.keys() == weights.keys() else added
        added = added_in_version[row.version] = {number: before.get(number, row.version) for number in weights}
    return max(weights, key=lambda number: (added[number], -weights[number], number))


class AliasRepository(TenantScoped):
    """One tenant's aliases. Changes require the lock on the adapter's row (`AdapterRepository.lock`)."""

    async def all(self, *adapter_ids: str) -> dict[str, list[Pointed]]:
        """List the aliases of these adapters by adapter id, each list by name."""
        statement = (
            select(AliasRow, RevisionRow, AliasTargetRow.weight)
            .join(
                AliasTargetRow,
                (AliasTargetRow.adapter_id == AliasRow.adapter_id) & (AliasTargetRow.alias == AliasRow.name),
            )
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .where(AliasRow.tenant_id == self._tenant, among(self._session, AliasRow.adapter_id, adapter_ids))
            .order_by(AliasRow.adapter_id, AliasRow.name, RevisionRow.number)
        )
        targets: dict[str, dict[str, list[Target]]] = defaultdict(lambda: defaultdict(list))
        rows: dict[tuple[str, str], AliasRow] = {}
        for alias, revision, weight in await self._session.execute(statement):
            rows[alias.adapter_id, alias.name] = alias
            targets[alias.adapter_id][alias.name].append(Target(revision, weight))
        return {
            id: [Pointed(rows[id, name], tuple(pointed)) for name, pointed in aliases.items()]
            for id, aliases in targets.items()
        }

    async def get(self, adapter_id: str, name: str) -> AliasRow | None:
        """Find the alias of that name."""
        return await self._session.get(AliasRow, (adapter_id, name))

    async def weights(self, adapter_id: str, name: str) -> dict[int, int]:
        """Return the alias's targets; empty if the alias does not exist."""
        statement = (
            select(RevisionRow.number, AliasTargetRow.weight)
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .where(AliasTargetRow.adapter_id == adapter_id, AliasTargetRow.alias == name)
            .order_by(RevisionRow.number)
        )
        return {number: weight for number, weight in await self._session.execute(statement)}

    async def naming(self, revision_id: str) -> Sequence[str]:
        """List the aliases that have this revision as a target."""
        statement = select(AliasTargetRow.alias).where(AliasTargetRow.revision_id == revision_id)
        return (await self._session.scalars(statement.order_by(AliasTargetRow.alias))).all()

    async def point(
        self, adapter_id: str, name: str, targets: Sequence[Target], stamp: Stamp, restores: int | None = None
    ) -> None:
        """Point the alias, new or existing, at one or more `targets`."""
        weights = {target.revision.number: target.weight for target in targets}
        version = await self._add_version(adapter_id, name, weights, stamp, restores)
        alias = await self.get(adapter_id, name)
        if alias is None:
            alias = AliasRow(adapter_id=adapter_id, name=name, id=new_id("alias"), tenant_id=self._tenant)
            self._session.add(alias)
        alias.version, alias.updated_at = version, stamp.at
        await self._session.flush()
        await self._session.execute(
            delete(AliasTargetRow).where(AliasTargetRow.adapter_id == adapter_id, AliasTargetRow.alias == name)
        )
        self._session.add_all(
            AliasTargetRow(
                adapter_id=adapter_id,
                alias=name,
                revision_id=target.revision.id,
                tenant_id=self._tenant,
                weight=target.weight,
            )
            for target in targets
        )
        await self._session.flush()

    async def remove(self, adapter_id: str, name: str, stamp: Stamp) -> None:
        """Remove the alias; its history remains."""
        await self._add_version(adapter_id, name, {}, stamp, None)
        await self._session.execute(delete(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.name == name))

    async def history(self, adapter_id: str, name: str) -> Sequence[AliasVersionRow]:
        """List the alias's versions, newest first."""
        statement = select(AliasVersionRow).where(
            AliasVersionRow.adapter_id == adapter_id, AliasVersionRow.alias == name
        )
        return (await self._session.scalars(statement.order_by(AliasVersionRow.version.desc()))).all()

    async def _add_version(
        self, adapter_id: str, name: str, weights: Weights, stamp: Stamp, restores: int | None
    ) -> int:
        mine = (AliasVersionRow.adapter_id == adapter_id, AliasVersionRow.alias == name)
        version = (await self._session.scalar(select(func.max(AliasVersionRow.version)).where(*mine)) or 0) + 1
        row = AliasVersionRow(
            adapter_id=adapter_id,
            alias=name,
            version=version,
            tenant_id=self._tenant,
            targets=msgspec.json.encode(dict(sorted(weights.items()))).decode(),
            restores=restores,
            changed_by=stamp.by,
            changed_at=stamp.at,
        )
        await self._insert(row)
        await self._session.execute(
            delete(AliasVersionRow).where(*mine, AliasVersionRow.version <= version - KEPT_VERSIONS)
        )
        return version


class ReleasePolicyRow(Base):
    """The policy of one alias, by the alias's name. The policy remains when the alias is deleted."""

    __tablename__ = "release_policies"
    __table_args__ = (ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),)

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    policy: Mapped[str]
    """The policy as JSON."""
    changed_by: Mapped[str]
    changed_at: Mapped[int]


class ReleasePolicyRepository(Repository):
    """Policies of adapters that the caller has looked up."""

    async def get(self, adapter_id: str, alias: str) -> ReleasePolicyRow | None:
        """Return the policy of an alias."""
        return await self._session.get(ReleasePolicyRow, (adapter_id, alias))

    async def put(self, row: ReleasePolicyRow) -> None:
        """Insert the row, or replace the row of the same alias."""
        await self._put(row)

    async def remove(self, adapter_id: str, alias: str) -> None:
        """Delete the policy of an alias, if there is one."""
        mine = (ReleasePolicyRow.adapter_id == adapter_id, ReleasePolicyRow.alias == alias)
        await self._session.execute(delete(ReleasePolicyRow).where(*mine))


class CanaryGuardRow(Base):
    """A guard on one alias; it is deleted with the alias."""

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
    """The measures that are compared, sorted, separated by spaces."""
    first_token_seconds: Mapped[float | None]
    """The bound in seconds for `latency`: a first token within this time is good."""
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
    """The time of the alias's last change."""
    targets: tuple[tuple[int, int], ...]
    """Revision and weight, by revision."""
    canary: int
    """The revision that is compared with the other targets."""


class CanaryGuardRepository(Repository):
    """Guards of every tenant."""

    async def get(self, adapter_id: str, alias: str) -> CanaryGuardRow | None:
        """Return the guard of an alias."""
        return await self._session.get(CanaryGuardRow, (adapter_id, alias))

    async def put(self, row: CanaryGuardRow) -> None:
        """Insert the row, or replace the row of the same alias."""
        await self._put(row)

    async def remove(self, row: CanaryGuardRow) -> None:
        """Delete the row."""
        await self._delete(row)

    async def canaries(self) -> list[GuardedCanary]:
        """List the guarded aliases that have several targets now."""
        several = (
            select(AliasTargetRow.adapter_id, AliasTargetRow.alias)
            .group_by(AliasTargetRow.adapter_id, AliasTargetRow.alias)
            .having(func.count() > 1)
            .subquery()
        )
        is_same = (several.c.adapter_id == CanaryGuardRow.adapter_id) & (several.c.alias == CanaryGuardRow.alias)
        statement = (
            select(CanaryGuardRow, AliasRow.updated_at, AdapterRow.name, TenantRow.name, AliasVersionRow)
            .join(several, is_same)
            .join(
                AliasRow, (AliasRow.adapter_id == CanaryGuardRow.adapter_id) & (AliasRow.name == CanaryGuardRow.alias)
            )
            .join(AdapterRow, AdapterRow.id == CanaryGuardRow.adapter_id)
            .join(TenantRow, TenantRow.id == CanaryGuardRow.tenant_id)
            .join(
                AliasVersionRow,
                (AliasVersionRow.adapter_id == CanaryGuardRow.adapter_id)
                & (AliasVersionRow.alias == CanaryGuardRow.alias),
            )
            .order_by(CanaryGuardRow.adapter_id, CanaryGuardRow.alias, AliasVersionRow.version.desc())
        )
        history: defaultdict[tuple[str, str], list[AliasVersionRow]] = defaultdict(list)
        facts: dict[tuple[str, str], tuple[CanaryGuardRow, int, str, str]] = {}
        for guard, since, adapter, tenant, version in await self._session.execute(statement):
            key = (guard.adapter_id, guard.alias)
            history[key].append(version)
            facts[key] = guard, since, adapter, tenant
        return [
            GuardedCanary(
                tenant=guard.tenant_id,
                tenant_name=tenant,
                adapter=adapter,
                alias=guard.alias,
                measures=tuple(guard.measures.split()),
                first_token_seconds=guard.first_token_seconds,
                since=since,
                targets=tuple(sorted(targets_of(history[key][0]).items())),
                canary=canary_of(history[key]),
            )
            for key, (guard, since, adapter, tenant) in facts.items()
        ]
