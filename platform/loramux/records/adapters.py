"""Statements about adapters, their revisions and aliases."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import ColumnElement, Row, Select, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import events
from loramux.records.events import Detail, EventRepository
from loramux.records.identity import TenantId, new_id
from loramux.records.ledger_models import RequestRow
from loramux.records.models import AdapterRow, AliasRow, RevisionRow

DEFAULT_ALIAS = "default"
READY = "ready"
DELETED = "deleted"

Listed = Row[AdapterRow, RevisionRow]


class RevisionContent(msgspec.Struct, frozen=True):
    """What a revision is, apart from its name."""

    digest: str
    rank: int
    size_bytes: int
    base: str


class AdapterRepository:
    """One tenant's adapters; a deleted one is invisible here until its name is uploaded again."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def register(self, name: str, content: RevisionContent, at: int, promote: bool = True) -> Listed:
        """The adapter with `content`: a new revision unless it already has this very content.

        `promote` makes it what `name` means; an adapter's first revision always is. The caller holds the registry's
        lock, so that numbers are given out one at a time.
        """
        adapter = await self._adapter_named(name)
        if adapter is None:
            adapter = AdapterRow(id=new_id("adapter"), tenant_id=self._tenant, name=name, created_at=at)
            self._session.add(adapter)
        adapter.deleted_at = None
        await self._session.flush()
        revision = await self._revision_with(adapter.id, content.digest)
        appears = revision is None or revision.deleted_at is not None
        if revision is None:
            revision = await self._add_revision(adapter.id, content, at)
        if revision.deleted_at is not None:  # nothing was stored meanwhile; what is not counted of before still is
            uncounted = revision.deleted_at - (revision.counted_until or revision.created_at)
            revision.counted_until = at - max(0, uncounted)
        revision.state, revision.base, revision.deleted_at = READY, content.base, None
        await self._session.flush()
        if appears:
            await self._tell(events.READY, name, revision.number, revision.digest, at)
        if promote or await self.default(name) is None:
            await self._point(adapter.id, DEFAULT_ALIAS, revision.id, at)
        listed = await self.numbered(name, revision.number)
        assert listed is not None
        return listed

    async def count(self) -> int:
        """How many adapters the tenant has."""
        statement = select(func.count()).select_from(AdapterRow)
        return await self._session.scalar(statement.where(*self._visible())) or 0

    async def bytes_besides(self, digest: str) -> int:
        """Bytes of all the tenant's revisions but those with this very content."""
        statement = select(func.sum(RevisionRow.size_bytes)).where(
            RevisionRow.tenant_id == self._tenant, RevisionRow.state == READY, RevisionRow.digest != digest
        )
        return int(await self._session.scalar(statement) or 0)

    async def exists(self, name: str) -> bool:
        """Whether the tenant has an adapter of that name."""
        return (
            await self._session.scalar(select(AdapterRow.id).where(*self._visible(), AdapterRow.name == name))
            is not None
        )

    async def all(self) -> Sequence[Listed]:
        """Every adapter with its default revision, by name."""
        return (await self._session.execute(self._aliased(DEFAULT_ALIAS).order_by(AdapterRow.name))).all()

    async def default(self, name: str) -> Listed | None:
        """The adapter with its default revision."""
        return await self.aliased(name, DEFAULT_ALIAS)

    async def aliased(self, name: str, alias: str) -> Listed | None:
        """The adapter with the revision that `alias` names."""
        return (await self._session.execute(self._aliased(alias).where(AdapterRow.name == name))).one_or_none()

    async def numbered(self, name: str, number: int) -> Listed | None:
        """The adapter with its revision `number`."""
        statement = self._listed().where(AdapterRow.name == name, RevisionRow.number == number)
        return (await self._session.execute(statement)).one_or_none()

    async def delete(self, name: str, at: int) -> Sequence[str] | None:
        """Hide the adapter and all its revisions; their digests, or None when there is no such adapter."""
        adapter = await self._session.scalar(select(AdapterRow).where(*self._visible(), AdapterRow.name == name))
        if adapter is None:
            return None
        adapter.deleted_at = at
        ready = (RevisionRow.adapter_id == adapter.id, RevisionRow.state == READY)
        statement = select(RevisionRow.number, RevisionRow.digest).where(*ready).order_by(RevisionRow.number)
        retired = (await self._session.execute(statement)).all()
        await self._session.execute(update(RevisionRow).where(*ready).values(state=DELETED, deleted_at=at))
        for number, digest in retired:
            await self._tell(events.RETIRED, name, number, digest, at)
        return [digest for _, digest in retired]

    async def _tell(self, kind: str, name: str, number: int, digest: str, at: int) -> None:
        await EventRepository(self._session, self._tenant).add(kind, name, Detail(revision=number, digest=digest), at)

    def _visible(self) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return AdapterRow.tenant_id == self._tenant, AdapterRow.deleted_at.is_(None)

    def _listed(self) -> Select[AdapterRow, RevisionRow]:
        return (
            select(AdapterRow, RevisionRow)
            .join(RevisionRow, RevisionRow.adapter_id == AdapterRow.id)
            .where(*self._visible(), RevisionRow.state == READY)
        )

    def _aliased(self, alias: str) -> Select[AdapterRow, RevisionRow]:
        return self._listed().join(AliasRow, AliasRow.revision_id == RevisionRow.id).where(AliasRow.name == alias)

    async def _adapter_named(self, name: str) -> AdapterRow | None:
        statement = select(AdapterRow).where(AdapterRow.tenant_id == self._tenant, AdapterRow.name == name)
        return await self._session.scalar(statement)

    async def _revision_with(self, adapter_id: str, digest: str) -> RevisionRow | None:
        statement = select(RevisionRow).where(RevisionRow.adapter_id == adapter_id, RevisionRow.digest == digest)
        return await self._session.scalar(statement)

    async def _add_revision(self, adapter_id: str, content: RevisionContent, at: int) -> RevisionRow:
        last = select(func.max(RevisionRow.number)).where(RevisionRow.adapter_id == adapter_id)
        revision = RevisionRow(
            id=new_id("revision"),
            tenant_id=self._tenant,
            adapter_id=adapter_id,
            number=(await self._session.scalar(last) or 0) + 1,
            digest=content.digest,
            rank=content.rank,
            size_bytes=content.size_bytes,
            base=content.base,
            state=READY,
            created_at=at,
        )
        self._session.add(revision)
        return revision

    async def _point(self, adapter_id: str, alias: str, revision_id: str, at: int) -> None:
        row = AliasRow(
            adapter_id=adapter_id, name=alias, tenant_id=self._tenant, revision_id=revision_id, updated_at=at
        )
        await self._session.merge(row)
        await self._session.flush()


class ContentRepository:
    """Which stored contents are still needed, over all tenants; answers digests only."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that no visible revision has."""
        statement = select(RevisionRow.digest).where(RevisionRow.digest.in_(digests), RevisionRow.state == READY)
        return frozenset(digests) - frozenset(await self._session.scalars(statement))

    async def unused(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that no visible revision has and no open request runs with."""
        return await self.unreferenced(digests) - await self.running(digests)

    async def running(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that an open request runs with."""
        running = select(RequestRow.adapter_digest).where(RequestRow.status == "open").distinct()
        return frozenset(digests) & frozenset(await self._session.scalars(running))
