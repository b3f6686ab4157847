"""Statements about aliases: what they point at, and what they pointed at before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId, new_id
from loramux.records.lifecycle_models import AliasTargetRow, AliasVersionRow
from loramux.records.models import AliasRow, RevisionRow

DEFAULT_ALIAS = "default"
WHOLE = 100
"""The weight of an alias's only target."""
KEPT_VERSIONS = 100
"""Of an alias; older ones are in the audit log."""


class Stamp(msgspec.Struct, frozen=True):
    """When something was changed, in microseconds since the epoch, and by whom: a key, a member, or `house`."""

    at: int
    by: str


class Target(msgspec.Struct, frozen=True):
    """One of an alias's revisions, with its share: `weight` of the sum over all targets."""

    revision: RevisionRow
    weight: int


class Pointed(msgspec.Struct, frozen=True):
    """An alias with its targets, by revision number."""

    alias: AliasRow
    targets: tuple[Target, ...]


Weights = Mapping[int, int]
"""Revision numbers to weights."""


def targets_of(version: AliasVersionRow) -> dict[int, int]:
    """What the alias pointed at from this version on: revision numbers to weights; none where it was removed."""
    return msgspec.json.decode(version.targets, type=dict[int, int])


class AliasRepository:
    """One tenant's aliases. Whoever changes them holds the adapter's row (`AdapterRepository.lock`)."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def all(self, adapter_id: str | None = None) -> dict[str, list[Pointed]]:
        """The aliases of every adapter, or of one, each list by name."""
        statement = (
            select(AliasRow, RevisionRow, AliasTargetRow.weight)
            .join(
                AliasTargetRow,
                (AliasTargetRow.adapter_id == AliasRow.adapter_id) & (AliasTargetRow.alias == AliasRow.name),
            )
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .where(AliasRow.tenant_id == self._tenant)
            .order_by(AliasRow.adapter_id, AliasRow.name, RevisionRow.number)
        )
        if adapter_id is not None:
            statement = statement.where(AliasRow.adapter_id == adapter_id)
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
        """The alias of that name."""
        return await self._session.get(AliasRow, (adapter_id, name))

    async def weights(self, adapter_id: str, name: str) -> dict[int, int]:
        """What the alias points at; nothing where there is no such alias."""
        statement = (
            select(RevisionRow.number, AliasTargetRow.weight)
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .where(AliasTargetRow.adapter_id == adapter_id, AliasTargetRow.alias == name)
            .order_by(RevisionRow.number)
        )
        return {number: weight for number, weight in await self._session.execute(statement)}

    async def naming(self, revision_id: str) -> Sequence[str]:
        """The aliases that have this revision as a target."""
        statement = select(AliasTargetRow.alias).where(AliasTargetRow.revision_id == revision_id)
        return (await self._session.scalars(statement.order_by(AliasTargetRow.alias))).all()

    async def point(
        self, adapter_id: str, name: str, targets: Sequence[Target], stamp: Stamp, restores: int | None = None
    ) -> None:
        """Have the alias, new or not, mean `targets` from now on, at least one."""
        weights = {target.revision.number: target.weight for target in targets}
        version = await self._note(adapter_id, name, weights, stamp, restores)
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
        """The alias means nothing from now on; its history stays."""
        await self._note(adapter_id, name, {}, stamp, None)
        await self._session.execute(delete(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.name == name))

    async def history(self, adapter_id: str, name: str) -> Sequence[AliasVersionRow]:
        """The alias's versions, newest first."""
        statement = select(AliasVersionRow).where(
            AliasVersionRow.adapter_id == adapter_id, AliasVersionRow.alias == name
        )
        return (await self._session.scalars(statement.order_by(AliasVersionRow.version.desc()))).all()

    async def _note(self, adapter_id: str, name: str, weights: Weights, stamp: Stamp, restores: int | None) -> int:
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
        self._session.add(row)
        await self._session.flush()
        await self._session.execute(
            delete(AliasVersionRow).where(*mine, AliasVersionRow.version <= version - KEPT_VERSIONS)
        )
        return version
