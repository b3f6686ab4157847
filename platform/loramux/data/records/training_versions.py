"""Versions of adapters that trainers push while they train: rows and statements.

A name may have several versions, which are numbered. Names such as `policy-v12` and `policy-v13` are a *series*,
`policy`. An older version is deleted with its row: nothing refers to it, and it cannot be restored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from sqlalchemy import ForeignKey, Index, UniqueConstraint, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId, new_id
from loramux.data.records.access import AccessibleRevision
from loramux.data.records.adapters import RevisionContent, Stamp
from loramux.data.records.base import Base, Repository, TenantScoped, among
from loramux.data.records.tenants import TenantRow

_number = re.compile(r"[-_]v?[0-9]+$")


class TrainingVersionRow(Base):
    """One version of a training adapter: immutable weights, until a later version replaces them."""

    __tablename__ = "training_versions"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", "number"),
        Index("ix_training_versions_digest", "digest"),
        Index("ix_training_versions_created_at", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    series: Mapped[str]
    name: Mapped[str]
    """The adapter's own name."""
    number: Mapped[int]
    digest: Mapped[str]
    rank: Mapped[int]
    size_bytes: Mapped[int]
    base: Mapped[str]
    """Fingerprint of the base model."""
    base_model: Mapped[str]
    pushed_by: Mapped[str]
    created_at: Mapped[int]
    parity: Mapped[str | None]
    """`passed`, `failed` or `not_run`; null if the version was not sampled."""
    parity_detail: Mapped[str | None]


def series_of(name: str) -> str:
    """Return the series of a name: the name without a number at its end, such as `-v12`, `_12` or `-12`."""
    return _number.sub("", name) or name


class TrainingVersionRepository(TenantScoped):
    """The versions of one tenant."""

    async def of_name(self, name: str) -> Sequence[TrainingVersionRow]:
        """List the versions of a name, newest first."""
        statement = select(TrainingVersionRow).where(
            TrainingVersionRow.tenant_id == self._tenant, TrainingVersionRow.name == name
        )
        return (await self._session.scalars(statement.order_by(TrainingVersionRow.number.desc()))).all()

    async def all(self) -> Sequence[TrainingVersionRow]:
        """List all versions, the latest push first."""
        statement = select(TrainingVersionRow).where(TrainingVersionRow.tenant_id == self._tenant)
        order = TrainingVersionRow.created_at.desc(), TrainingVersionRow.name, TrainingVersionRow.number.desc()
        return (await self._session.scalars(statement.order_by(*order))).all()

    async def callable(self, name: str, number: int | None) -> AccessibleRevision | None:
        """Return the version with that number, or the newest version of the name."""
        row = next((one for one in await self.of_name(name) if number in (None, one.number)), None)
        if row is None:
            return None
        return AccessibleRevision(
            tenant_id=row.tenant_id,
            adapter_id=row.id,
            revision_id=row.id,
            number=row.number,
            digest=row.digest,
            base=row.base,
            base_model=row.base_model,
            series=row.series,
        )

    async def series(self) -> frozenset[str]:
        """Return the tenant's series."""
        statement = select(TrainingVersionRow.series).where(TrainingVersionRow.tenant_id == self._tenant).distinct()
        return frozenset(await self._session.scalars(statement))

    async def bytes_besides(self, digest: str) -> int:
        """Sum the bytes of the tenant's versions, without versions that have this content."""
        statement = select(func.sum(TrainingVersionRow.size_bytes)).where(
            TrainingVersionRow.tenant_id == self._tenant, TrainingVersionRow.digest != digest
        )
        return int(await self._session.scalar(statement) or 0)

    async def add(self, name: str, content: RevisionContent, stamp: Stamp) -> TrainingVersionRow:
        """Insert the next version of a name."""
        versions = await self.of_name(name)
        row = TrainingVersionRow(
            id=new_id("version"),
            tenant_id=self._tenant,
            series=series_of(name),
            name=name,
            number=versions[0].number + 1 if versions else 1,
            digest=content.digest,
            rank=content.rank,
            size_bytes=content.size_bytes,
            base=content.base,
            base_model=content.base_model,
            pushed_by=stamp.by,
            created_at=stamp.at,
        )
        await self._insert(row)
        return row

    async def remove_older(self, series: str, keep: int) -> list[TrainingVersionRow]:
        """Delete all but the `keep` newest versions of each name, and all but the `keep` names of the series that were
        pushed last; return the deleted versions.
        """
        statement = select(TrainingVersionRow).where(
            TrainingVersionRow.tenant_id == self._tenant, TrainingVersionRow.series == series
        )
        order = TrainingVersionRow.created_at.desc(), TrainingVersionRow.number.desc()
        by_name: dict[str, list[TrainingVersionRow]] = {}
        for row in await self._session.scalars(statement.order_by(*order)):
            by_name.setdefault(row.name, []).append(row)
        older = [row for rows in list(by_name.values())[:keep] for row in rows[keep:]]
        older += [row for rows in list(by_name.values())[keep:] for row in rows]
        return await self._remove(older)

    async def remove(self, name: str) -> list[TrainingVersionRow]:
        """Delete all versions of a name, and return them."""
        return await self._remove(await self.of_name(name))

    async def _remove(self, rows: Sequence[TrainingVersionRow]) -> list[TrainingVersionRow]:
        for row in rows:
            await self._session.delete(row)
        await self._session.flush()
        return list(rows)


class ExpiredVersions(Repository):
    """The versions of every tenant."""

    async def remove_before(self, moment: int) -> list[tuple[TenantId, str]]:
        """Delete the series whose last push was before that time; return the tenants and digests of the versions."""
        columns = TrainingVersionRow.tenant_id, TrainingVersionRow.series
        idle = select(*columns).group_by(*columns).having(func.max(TrainingVersionRow.created_at) < moment)
        removed = []
        for tenant, series in (await self._session.execute(idle)).all():
            statement = (
                delete(TrainingVersionRow)
                .where(TrainingVersionRow.tenant_id == tenant, TrainingVersionRow.series == series)
                .returning(TrainingVersionRow.digest)
            )
            removed += [(tenant, digest) for digest in await self._session.scalars(statement)]
        return removed

    async def mark(self, id: str, parity: str, detail: str) -> None:
        """Record the outcome of a parity check; a version that was removed since is ignored."""
        statement = update(TrainingVersionRow).where(TrainingVersionRow.id == id)
        await self._session.execute(statement.values(parity=parity, parity_detail=detail))


async def digests_of_versions(session: AsyncSession, digests: Collection[str]) -> frozenset[tuple[TenantId, str]]:
    """Return the tenants and digests of the versions that have one of these digests."""
    statement = select(TrainingVersionRow.tenant_id, TrainingVersionRow.digest)
    found = await session.execute(statement.where(among(session, TrainingVersionRow.digest, digests)))
    return frozenset((tenant, digest) for tenant, digest in found)


async def names_of_versions(session: AsyncSession, digests: Collection[str]) -> dict[tuple[str, TenantId], str]:
    """Return `tenant/policy@3` for each digest and owner, of several names the last. For operators only."""
    statement = (
        select(TrainingVersionRow, TenantRow.name)
        .join(TenantRow, TenantRow.id == TrainingVersionRow.tenant_id)
        .where(among(session, TrainingVersionRow.digest, digests))
        .order_by(TrainingVersionRow.created_at, TrainingVersionRow.number)
    )
    rows = (await session.execute(statement)).all() if digests else []
    return {(row.digest, row.tenant_id): f"{tenant}/{row.name}@{row.number}" for row, tenant in rows}
