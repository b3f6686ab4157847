"""Contents of adapters over their life: they are registered as revisions, metered for the bill, and freed when unused.

`register_revision` makes an uploaded content a revision, and uses the modules of adapters, aliases and grants.
`StorageMeterRepository` reads and writes the time up to which each stored or pinned revision is billed.
`ContentRepository` finds, over all tenants, the contents that no revision keeps and no open request uses. This module
has statements only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import delete, exists, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from loramux.common.identity import TenantId, new_id
from loramux.data.records.access import GrantRow
from loramux.data.records.adapters import (
    KEPT,
    READY,
    AdapterRepository,
    AdapterRow,
    RevisionContent,
    RevisionRow,
    Stamp,
)
from loramux.data.records.aliases import (
    DEFAULT_ALIAS,
    WHOLE,
    AliasRepository,
    AliasRow,
    ReleasePolicyRepository,
    ReleasePolicyRow,
    Target,
)
from loramux.data.records.base import Repository, among
from loramux.data.records.pins import PinRow
from loramux.data.records.requests import RequestRow
from loramux.data.records.tenants import TenantRow
from loramux.data.records.training import digests_of_unfinished_jobs
from loramux.data.records.training_versions import digests_of_versions

FOREVER = 2**62
"""A time later than any end."""


async def register_revision(
    session: AsyncSession, tenant: TenantId, name: str, content: RevisionContent, stamp: Stamp, *, promote: bool = True
) -> tuple[AdapterRow, RevisionRow]:
    """Make `content` a new revision of `name`, unless the adapter already has this content.

    With `promote`, and always for an adapter's first revision, the default alias moves to a new or restored revision.
    If the default alias has a release policy, it does not move. If the adapter already has the content, no row changes,
    because a repeated upload must not undo a later release. The caller holds the lock CONTENTS, so that revision
    numbers are assigned one at a time.
    """
    adapters, aliases = AdapterRepository(session, tenant), AliasRepository(session, tenant)
    adapter = await _revive(session, tenant, name, stamp.at)
    revision = await adapters.with_content(adapter.id, content)
    is_fresh = revision is None or revision.state != READY or revision.base != content.base
    if revision is None:
        revision = await adapters.add_revision(adapter, content, stamp.at)
    elif revision.state != READY:
        await adapters.restore(adapter, revision, stamp.at)
    revision.base, revision.base_model = content.base, content.base_model
    await session.flush()
    weights = await aliases.weights(adapter.id, DEFAULT_ALIAS)
    may_promote = promote and await ReleasePolicyRepository(session).get(adapter.id, DEFAULT_ALIAS) is None
    if not weights or (may_promote and is_fresh and weights.keys() != {revision.number}):
        await aliases.point(adapter.id, DEFAULT_ALIAS, [Target(revision, WHOLE)], stamp)
    if is_fresh:
        adapter.version += 1
        await session.flush()
    return adapter, revision


async def _revive(session: AsyncSession, tenant: TenantId, name: str, at: int) -> AdapterRow:
    """Return the adapter of that name; insert it if necessary. A deleted adapter keeps only its revision numbers."""
    adapters = AdapterRepository(session, tenant)
    adapter = await adapters.lock_deleted(name)
    if adapter is not None:
        for table in (AliasRow, GrantRow, ReleasePolicyRow):
            await session.execute(delete(table).where(table.adapter_id == adapter.id))
        adapter.deleted_at = adapter.expires_at = None
    adapter = adapter or await adapters.lock(name)
    if adapter is None:
        adapter = AdapterRow(id=new_id("adapter"), tenant_id=tenant, name=name, created_at=at, version=0)
        session.add(adapter)
    await session.flush()
    return adapter


@dataclass(frozen=True, slots=True)
class MeteredRows:
    """A table whose rows keep a revision's bytes from one time to another."""

    row: type[RevisionRow | PinRow]
    revision_id: InstrumentedAttribute[str]
    began: InstrumentedAttribute[int]
    ended: InstrumentedAttribute[int | None]


STORED = MeteredRows(RevisionRow, RevisionRow.id, RevisionRow.created_at, RevisionRow.deleted_at)
"""Revisions, from their upload to their deletion."""
PINNED = MeteredRows(PinRow, PinRow.revision_id, PinRow.since, PinRow.until)
"""Pins, from their creation to their end."""


class UnbilledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stored or pinned revision, from the time up to which it is billed."""

    id: str
    tenant_id: TenantId
    model: str
    """The revision: `tenant/adapter@3`."""
    digest: str
    size_bytes: int
    counted_until: int
    """The time up to which the row is billed, in microseconds since the epoch."""
    until: int
    """The end of the span, or FOREVER."""


class StorageMeterRepository(Repository):
    """MeteredRows of one kind."""

    def __init__(self, session: AsyncSession, rows: MeteredRows) -> None:
        super().__init__(session)
        self._rows = rows

    async def due(self, before: int, limit: int) -> list[UnbilledSpan]:
        """List spans that began before that time and are not yet billed up to that time or up to their end."""
        row, ended, numbered = self._rows.row, self._rows.ended, aliased(RevisionRow)
        counted = func.coalesce(row.counted_until, self._rows.began)
        statement = (
            select(
                row.id,
                row.tenant_id,
                (TenantRow.name + "/" + AdapterRow.name).label("name"),
                numbered.number,
                row.digest,
                row.size_bytes,
                counted.label("counted_until"),
                func.coalesce(ended, literal(FOREVER)).label("until"),
            )
            .join(numbered, numbered.id == self._rows.revision_id)
            .join(AdapterRow, AdapterRow.id == row.adapter_id)
            .join(TenantRow, TenantRow.id == row.tenant_id)
            .where(counted < before, or_(ended.is_(None), counted < ended))
            .order_by(counted, row.id)
            .limit(limit)
        )
        return [
            UnbilledSpan(
                id=found.id,
                tenant_id=found.tenant_id,
                model=f"{found.name}@{found.number}",
                digest=found.digest,
                size_bytes=found.size_bytes,
                counted_until=found.counted_until,
                until=found.until,
            )
            for found in await self._session.execute(statement)
        ]

    async def counted(self, until: Mapping[str, int]) -> None:
        """Record the time up to which each span is billed, by the span's id."""
        row = self._rows.row
        for moment in sorted(set(until.values())):
            ids = [id for id, at in until.items() if at == moment]
            statement = update(row).where(among(self._session, row.id, ids)).values(counted_until=moment)
            await self._session.execute(statement, execution_options={"synchronize_session": False})


class ContentRepository(Repository):
    """Contents of adapters, by digest."""

    async def expire(self, now: int, limit: int) -> frozenset[str]:
        """End the undeletion period of at most `limit` due revisions; return their digests."""
        due = select(RevisionRow.id).where(RevisionRow.purge_at <= now).order_by(RevisionRow.purge_at).limit(limit)
        ids = (await self._session.scalars(due)).all()
        statement = (
            update(RevisionRow)
            .where(among(self._session, RevisionRow.id, ids), RevisionRow.purge_at <= now)
            .values(purge_at=None)
            .returning(RevisionRow.digest)
            .execution_options(synchronize_session=False)
        )
        return frozenset(await self._session.scalars(statement))

    async def unused(self, digests: Collection[str]) -> frozenset[str]:
        """Return the digests that no revision keeps and no open request uses."""
        return await self.unkept(digests) - await self.running(digests)

    async def running(self, digests: Collection[str]) -> frozenset[str]:
        """Return the digests that an open request uses."""
        running = select(RequestRow.adapter_digest).where(RequestRow.status == "open").distinct()
        return frozenset(digests) & frozenset(await self._session.scalars(running))

    async def unkept(self, digests: Collection[str]) -> frozenset[str]:
        """Return the digests that no revision, training adapter or unfinished fine-tuning job keeps."""
        kept = select(RevisionRow.digest).where(among(self._session, RevisionRow.digest, digests), KEPT)
        pushed = {digest for _, digest in await digests_of_versions(self._session, digests)}
        begun = await digests_of_unfinished_jobs(self._session)
        return frozenset(digests) - frozenset(await self._session.scalars(kept)) - pushed - begun

    async def uncallable(self, tenant: TenantId, digests: Collection[str]) -> frozenset[str]:
        """Return the digests that no callable revision and no training adapter of the tenant has."""
        callable_ = select(RevisionRow.digest).where(
            RevisionRow.tenant_id == tenant,
            among(self._session, RevisionRow.digest, digests),
            RevisionRow.state == READY,
        )
        pushed = {digest for owner, digest in await digests_of_versions(self._session, digests) if owner == tenant}
        return frozenset(digests) - frozenset(await self._session.scalars(callable_)) - pushed

    async def uncallable_since(self, moment: int) -> frozenset[tuple[TenantId, str]]:
        """Return tenants and digests of revisions deleted since then that the tenant cannot call by any other name."""
        other = aliased(RevisionRow)
        callable_ = exists().where(
            other.tenant_id == RevisionRow.tenant_id, other.digest == RevisionRow.digest, other.state == READY
        )
        statement = select(RevisionRow.tenant_id, RevisionRow.digest).where(
            RevisionRow.deleted_at >= moment, ~callable_
        )
        found = frozenset((tenant, digest) for tenant, digest in await self._session.execute(statement))
        return found - await digests_of_versions(self._session, {digest for _, digest in found})
