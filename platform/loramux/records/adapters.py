"""Statements about adapters and their revisions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import events
from loramux.records.aliases import DEFAULT_ALIAS, WHOLE, AliasRepository, Stamp, Target
from loramux.records.events import Detail, EventRepository
from loramux.records.identity import TenantId, new_id
from loramux.records.lifecycle_models import GrantRow
from loramux.records.models import AdapterRow, AliasRow, RevisionRow

READY = "ready"
DELETED = "deleted"

Listed = tuple[AdapterRow, RevisionRow]

KEPT = or_(RevisionRow.state == READY, RevisionRow.purge_at.is_not(None))
"""Whether a revision's content is kept: it can be called, or undeleted."""


class RevisionContent(msgspec.Struct, frozen=True):
    """What a revision is, apart from its name."""

    digest: str
    rank: int
    size_bytes: int
    base: str


class AdapterRepository:
    """One tenant's adapters; a deleted one is invisible but to `lock_deleted`, until its name is uploaded again."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant
        self._aliases = AliasRepository(session, tenant)

    async def register(self, name: str, content: RevisionContent, stamp: Stamp, promote: bool = True) -> Listed:
        """Make `content` a revision of `name`: a new one unless the adapter already has this very content.

        With `promote`, and always for an adapter's first, it is also what `default` means. The caller holds the
        registry's lock, so that numbers are given out one at a time.
        """
        adapter = await self._revived(name, stamp.at)
        revision = await self._revision_with(adapter.id, content.digest)
        fresh = revision is None or revision.state != READY or revision.base != content.base
        if revision is None:
            revision = await self._add_revision(adapter, content, stamp.at)
        elif revision.state != READY:
            await self.restore(adapter, revision, stamp.at)
        revision.base = content.base
        await self._session.flush()
        weights = await self._aliases.weights(adapter.id, DEFAULT_ALIAS)
        moves = not weights or (promote and weights.keys() != {revision.number})
        if moves:
            await self._aliases.point(adapter.id, DEFAULT_ALIAS, [Target(revision, WHOLE)], stamp)
        if fresh or moves:
            adapter.version += 1
            await self._session.flush()
        return adapter, revision

    async def count(self) -> int:
        """How many adapters the tenant has."""
        statement = select(func.count()).select_from(AdapterRow)
        return await self._session.scalar(statement.where(*self._visible())) or 0

    async def bytes_besides(self, digest: str) -> int:
        """Bytes of all the tenant's revisions but those with this very content; of deleted ones until they are gone."""
        statement = select(func.sum(RevisionRow.size_bytes)).where(
            RevisionRow.tenant_id == self._tenant, KEPT, RevisionRow.digest != digest
        )
        return int(await self._session.scalar(statement) or 0)

    async def version(self, name: str) -> int:
        """How often the adapter was changed; 0 where there is none."""
        statement = select(AdapterRow.version).where(*self._visible(), AdapterRow.name == name)
        return await self._session.scalar(statement) or 0

    async def exists(self, name: str) -> bool:
        """Whether the tenant has an adapter of that name."""
        return await self.get(name) is not None

    async def get(self, name: str) -> AdapterRow | None:
        """The adapter of that name."""
        return await self._session.scalar(select(AdapterRow).where(*self._visible(), AdapterRow.name == name))

    async def lock(self, name: str) -> AdapterRow | None:
        """The adapter of that name, held until this transaction ends: whoever changes anything of it comes first here.

        Adapters are locked before what belongs to them, and after the registry's lock.
        """
        statement = select(AdapterRow).where(*self._visible(), AdapterRow.name == name)
        return await self._session.scalar(statement.with_for_update())

    async def lock_deleted(self, name: str) -> AdapterRow | None:
        """The same for one that is deleted."""
        statement = select(AdapterRow).where(
            AdapterRow.tenant_id == self._tenant, AdapterRow.name == name, AdapterRow.deleted_at.is_not(None)
        )
        return await self._session.scalar(statement.with_for_update())

    async def all(self) -> Sequence[AdapterRow]:
        """Every adapter, by name."""
        return (await self._session.scalars(select(AdapterRow).where(*self._visible()).order_by(AdapterRow.name))).all()

    async def revisions(self, adapter_id: str) -> Sequence[RevisionRow]:
        """Its revisions whose content is kept, newest first."""
        statement = select(RevisionRow).where(
            RevisionRow.tenant_id == self._tenant, RevisionRow.adapter_id == adapter_id, KEPT
        )
        return (await self._session.scalars(statement.order_by(RevisionRow.number.desc()))).all()

    async def revision(self, adapter_id: str, number: int) -> RevisionRow | None:
        """One of those."""
        statement = select(RevisionRow).where(
            RevisionRow.tenant_id == self._tenant,
            RevisionRow.adapter_id == adapter_id,
            RevisionRow.number == number,
            KEPT,
        )
        return await self._session.scalar(statement)

    async def count_revisions(self, name: str) -> int:
        """How many revisions of `name` can be called."""
        statement = select(func.count()).select_from(RevisionRow).join(AdapterRow).where(AdapterRow.name == name)
        return await self._session.scalar(statement.where(*self._visible(), RevisionRow.state == READY)) or 0

    async def delete(self, adapter: AdapterRow, at: int, purge_at: int) -> Sequence[RevisionRow]:
        """Hide the adapter and all its revisions, whose contents stay until `purge_at`; those that could be called."""
        adapter.deleted_at = at
        ready = [revision for revision in await self.revisions(adapter.id) if revision.state == READY]
        for revision in ready:
            await self.retire(adapter, revision, at, purge_at)
        return ready

    async def retire(self, adapter: AdapterRow, revision: RevisionRow, at: int, purge_at: int) -> None:
        """The revision cannot be called any more; its content stays until `purge_at`."""
        revision.state, revision.deleted_at, revision.purge_at = DELETED, at, purge_at
        await self._tell(events.RETIRED, adapter, revision, at)

    async def undelete(self, adapter: AdapterRow, at: int) -> int:
        """Undo `delete`; how many revisions came back, and none where their contents have gone."""
        statement = select(RevisionRow).where(
            RevisionRow.adapter_id == adapter.id,
            RevisionRow.deleted_at == adapter.deleted_at,
            RevisionRow.purge_at.is_not(None),
        )
        revisions = (await self._session.scalars(statement.with_for_update())).all()
        for revision in revisions:
            await self.restore(adapter, revision, at)
        if revisions:
            adapter.deleted_at = adapter.expires_at = None
            await self._session.flush()
        return len(revisions)

    async def restore(self, adapter: AdapterRow, revision: RevisionRow, at: int) -> None:
        """A deleted revision can be called again. What it is charged for storage, it is charged from now on."""
        assert revision.deleted_at is not None
        uncounted = revision.deleted_at - (revision.counted_until or revision.created_at)
        revision.counted_until = at - max(0, uncounted)
        revision.state, revision.deleted_at, revision.purge_at, revision.expires_at = READY, None, None, None
        await self._tell(events.READY, adapter, revision, at)

    def _visible(self) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return AdapterRow.tenant_id == self._tenant, AdapterRow.deleted_at.is_(None)

    async def _revived(self, name: str, at: int) -> AdapterRow:
        """The adapter of that name, new where it must be; nothing of a deleted one's but its revision numbers stays."""
        adapter = await self.lock_deleted(name)
        if adapter is not None:
            for table in (AliasRow, GrantRow):
                await self._session.execute(delete(table).where(table.adapter_id == adapter.id))
            adapter.deleted_at = adapter.expires_at = None
        adapter = adapter or await self.lock(name)
        if adapter is None:
            adapter = AdapterRow(id=new_id("adapter"), tenant_id=self._tenant, name=name, created_at=at, version=0)
            self._session.add(adapter)
        await self._session.flush()
        return adapter

    async def _revision_with(self, adapter_id: str, digest: str) -> RevisionRow | None:
        statement = select(RevisionRow).where(RevisionRow.adapter_id == adapter_id, RevisionRow.digest == digest)
        return await self._session.scalar(statement)

    async def _add_revision(self, adapter: AdapterRow, content: RevisionContent, at: int) -> RevisionRow:
        last = select(func.max(RevisionRow.number)).where(RevisionRow.adapter_id == adapter.id)
        revision = RevisionRow(
            id=new_id("revision"),
            tenant_id=self._tenant,
            adapter_id=adapter.id,
            number=(await self._session.scalar(last) or 0) + 1,
            digest=content.digest,
            rank=content.rank,
            size_bytes=content.size_bytes,
            base=content.base,
            state=READY,
            created_at=at,
        )
        self._session.add(revision)
        await self._tell(events.READY, adapter, revision, at)
        return revision

    async def _tell(self, kind: str, adapter: AdapterRow, revision: RevisionRow, at: int) -> None:
        detail = Detail(revision=revision.number, digest=revision.digest)
        await EventRepository(self._session, self._tenant).add(kind, adapter.name, detail, at)
