"""Adapters, their revisions, and expired ones: rows and statements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    func,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, deferred, mapped_column

from loramux.common.identity import TenantId, new_id
from loramux.data.entities import EventDetail
from loramux.data.records import webhooks
from loramux.data.records.base import Base, Repository, TenantScoped, among, index_where_set
from loramux.data.records.tenants import TenantRow
from loramux.data.records.webhooks import EventRepository

READY = "ready"
DELETED = "deleted"


class AdapterRow(Base):
    """An adapter's name, which a tenant owns. The row remains after a deletion, so a revision number always names the
    same content.
    """

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "id"),
        index_where_set("adapters", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]
    version: Mapped[int] = mapped_column(server_default=text("1"))
    """The number of changes of the adapter and of all objects under its name, which is the adapter's ETag."""
    expires_at: Mapped[int | None]
    """The time of the automatic deletion."""


class RevisionRow(Base):
    """An adapter's immutable, content-addressed weights; columns that are not about the content may change."""

    __tablename__ = "revisions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("adapter_id", "number"),
        UniqueConstraint("adapter_id", "digest", "base_model"),
        UniqueConstraint("tenant_id", "adapter_id", "id"),
        CheckConstraint("state IN ('ready', 'deleted')", name="state"),
        CheckConstraint("number >= 1 AND rank >= 0 AND size_bytes >= 0", name="quantities"),
        Index("ix_revisions_digest", "digest"),
        *(index_where_set("revisions", moment) for moment in ("deleted_at", "purge_at", "expires_at")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    adapter_id: Mapped[str]
    number: Mapped[int]
    digest: Mapped[str]
    """`sha256:` and 64 hexadecimal digits, over its files (`loramux.data.storage`)."""
    rank: Mapped[int]
    size_bytes: Mapped[int]
    base: Mapped[str]
    """Fingerprint of the base model against which the revision was last validated."""
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    """The name of the revision's base; empty for revisions from releases that had only one base. The same files may be
    revisions of two bases.
    """
    bundle: Mapped[str | None] = deferred(mapped_column())
    """A `loramux.common.bundle.Bundle` as JSON; null if the revision has no bundle. The bundle is not read together
    with the row.
    """
    training: Mapped[str | None] = deferred(mapped_column())
    """A `data.entities.TrainingCard` as JSON; null if no fine-tuning job has made the revision. It is not read together
    with the row.
    """
    state: Mapped[str]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]
    """The time of the revision's deletion, which ends its storage charge."""
    counted_until: Mapped[int | None]
    """The time up to which the revision's storage is billed; None: not billed yet."""
    purge_at: Mapped[int | None]
    """The time at which a deleted revision's content is removed. None: not deleted, or already removed."""
    expires_at: Mapped[int | None]
    """The time of the automatic deletion."""


KEPT = or_(RevisionRow.state == READY, RevisionRow.purge_at.is_not(None))
"""Revisions whose content is kept: they can be called, or undeleted."""


class RevisionContent(msgspec.Struct, frozen=True):
    """The facts of a revision, without its name."""

    digest: str
    rank: int
    size_bytes: int
    base: str
    base_model: str = ""
    bundle: str | None = None
    """The bundle as JSON, as in the content's file."""


class Stamp(msgspec.Struct, frozen=True):
    """The time of a change, in microseconds since the epoch, and its author: a key, a member, or `system`."""

    at: int
    by: str


class DeletedAdapter(msgspec.Struct, frozen=True):
    """A deleted adapter that can be undeleted until `purge_at`. Times in microseconds since the epoch."""

    name: str
    deleted_at: int
    purge_at: int
    revisions: int


class AdapterRepository(TenantScoped):
    """One tenant's adapters; a deleted adapter is visible only to `lock_deleted`, until its name is uploaded again."""

    async def count(self) -> int:
        """Count the tenant's adapters."""
        statement = select(func.count()).select_from(AdapterRow)
        return await self._session.scalar(statement.where(*self._visible())) or 0

    async def bytes_besides(self, digest: str) -> int:
        """Sum the bytes of the tenant's kept revisions, without revisions that have this content."""
        statement = select(func.sum(RevisionRow.size_bytes)).where(
            RevisionRow.tenant_id == self._tenant, KEPT, RevisionRow.digest != digest
        )
        return int(await self._session.scalar(statement) or 0)

    async def version(self, name: str) -> int:
        """Return the adapter's version, the count of its changes; 0 if the adapter does not exist."""
        statement = select(AdapterRow.version).where(*self._visible(), AdapterRow.name == name)
        return await self._session.scalar(statement) or 0

    async def exists(self, name: str) -> bool:
        """Return whether the tenant has an adapter of that name."""
        return await self.get(name) is not None

    async def get(self, name: str) -> AdapterRow | None:
        """Find the adapter of that name."""
        return await self._session.scalar(select(AdapterRow).where(*self._visible(), AdapterRow.name == name))

    async def lock(self, name: str) -> AdapterRow | None:
        """Find the adapter of that name and lock it until this transaction ends. Every change begins here.

        An adapter is locked before its other rows, and after the lock CONTENTS.
        """
        statement = select(AdapterRow).where(*self._visible(), AdapterRow.name == name)
        return await self._session.scalar(statement.with_for_update())

    async def lock_deleted(self, name: str) -> AdapterRow | None:
        """Find and lock a deleted adapter of that name."""
        statement = select(AdapterRow).where(
            AdapterRow.tenant_id == self._tenant, AdapterRow.name == name, AdapterRow.deleted_at.is_not(None)
        )
        return await self._session.scalar(statement.with_for_update())

    async def page(
        self,
        after: str | None = None,
        limit: int | None = None,
        names: Collection[str] | None = None,
        search: str | None = None,
    ) -> Sequence[AdapterRow]:
        """List at most `limit` adapters by name, after the adapter with that id, among these names or among all names.

        `search` limits the list to names that contain this text.

        `after` may be the id of a deleted adapter, so that a deletion does not break a listing in progress.
        """
        statement = select(AdapterRow).where(*self._visible()).order_by(AdapterRow.name).limit(limit)
        if after is not None:
            last = select(AdapterRow.name).where(AdapterRow.tenant_id == self._tenant, AdapterRow.id == after)
            statement = statement.where(AdapterRow.name > last.scalar_subquery())
        if names is not None:
            statement = statement.where(among(self._session, AdapterRow.name, names))
        if search is not None:
            statement = statement.where(AdapterRow.name.contains(search, autoescape=True))
        return (await self._session.scalars(statement)).all()

    async def deleted(
        self, limit: int, names: Collection[str] | None = None, search: str | None = None
    ) -> list[DeletedAdapter]:
        """List at most `limit` adapters that `undelete` would restore, the newest deletion first.

        `names` limits the list to these names, `search` to names that contain this text.
        """
        statement = (
            select(AdapterRow.name, AdapterRow.deleted_at, func.min(RevisionRow.purge_at), func.count())
            .join(RevisionRow, RevisionRow.adapter_id == AdapterRow.id)
            .where(
                AdapterRow.tenant_id == self._tenant,
                RevisionRow.deleted_at == AdapterRow.deleted_at,
                RevisionRow.purge_at.is_not(None),
            )
            .group_by(AdapterRow.id, AdapterRow.name, AdapterRow.deleted_at)
            .order_by(AdapterRow.deleted_at.desc(), AdapterRow.name)
            .limit(limit)
        )
        if names is not None:
            statement = statement.where(among(self._session, AdapterRow.name, names))
        if search is not None:
            statement = statement.where(AdapterRow.name.contains(search, autoescape=True))
        rows = await self._session.execute(statement)
        return [DeletedAdapter(*row) for row in rows]  # type: ignore[arg-type]  # the statement leaves no null

    async def revisions(self, adapter_id: str) -> Sequence[RevisionRow]:
        """List the adapter's kept revisions, newest first."""
        statement = select(RevisionRow).where(
            RevisionRow.tenant_id == self._tenant, RevisionRow.adapter_id == adapter_id, KEPT
        )
        return (await self._session.scalars(statement.order_by(RevisionRow.number.desc()))).all()

    async def revision(self, adapter_id: str, number: int) -> RevisionRow | None:
        """Find a kept revision of the adapter."""
        statement = select(RevisionRow).where(
            RevisionRow.tenant_id == self._tenant,
            RevisionRow.adapter_id == adapter_id,
            RevisionRow.number == number,
            KEPT,
        )
        return await self._session.scalar(statement)

    async def bundle_and_training(self, revision_id: str) -> tuple[str | None, str | None]:
        """Return a revision's bundle and its training as JSON; None if the revision has none."""
        statement = select(RevisionRow.bundle, RevisionRow.training).where(
            RevisionRow.tenant_id == self._tenant, RevisionRow.id == revision_id
        )
        row = (await self._session.execute(statement)).one_or_none()
        return (None, None) if row is None else (row[0], row[1])

    async def note_training(self, name: str, number: int, card: str) -> None:
        """Record the training that has made a revision of `name`, unless one is recorded already."""
        adapter = select(AdapterRow.id).where(AdapterRow.tenant_id == self._tenant, AdapterRow.name == name)
        found = RevisionRow.adapter_id.in_(adapter), RevisionRow.number == number, RevisionRow.training.is_(None)
        await self._session.execute(
            update(RevisionRow).where(RevisionRow.tenant_id == self._tenant, *found).values(training=card)
        )

    async def count_revisions(self, name: str) -> int:
        """Count the callable revisions of `name`."""
        statement = select(func.count()).select_from(RevisionRow).join(AdapterRow).where(AdapterRow.name == name)
        return await self._session.scalar(statement.where(*self._visible(), RevisionRow.state == READY)) or 0

    async def delete(self, adapter: AdapterRow, at: int, purge_at: int) -> Sequence[RevisionRow]:
        """Delete the adapter and its revisions, whose contents remain until `purge_at`; return the revisions that could
        be called.
        """
        adapter.deleted_at = at
        ready = [revision for revision in await self.revisions(adapter.id) if revision.state == READY]
        for revision in ready:
            await self.retire(adapter, revision, at, purge_at)
        return ready

    async def retire(self, adapter: AdapterRow, revision: RevisionRow, at: int, purge_at: int) -> None:
        """Delete a revision; its content remains until `purge_at`."""
        revision.state, revision.deleted_at, revision.purge_at = DELETED, at, purge_at
        await self._record_event(webhooks.RETIRED, adapter, revision, at)

    async def undelete(self, adapter: AdapterRow, at: int) -> int:
        """Undo `delete`; return the number of restored revisions, which is 0 if their contents are removed."""
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
        """Restore a deleted revision; its storage is charged from now on."""
        assert revision.deleted_at is not None
        uncounted = revision.deleted_at - (revision.counted_until or revision.created_at)
        revision.counted_until = at - max(0, uncounted)
        revision.state, revision.deleted_at, revision.purge_at, revision.expires_at = READY, None, None, None
        await self._record_event(webhooks.RESTORED, adapter, revision, at)

    def _visible(self) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return AdapterRow.tenant_id == self._tenant, AdapterRow.deleted_at.is_(None)

    async def with_content(self, adapter_id: str, content: RevisionContent) -> RevisionRow | None:
        """Find the adapter's revision with this content for this base, deleted or not."""
        statement = select(RevisionRow).where(
            RevisionRow.adapter_id == adapter_id,
            RevisionRow.digest == content.digest,
            RevisionRow.base_model == content.base_model,
        )
        return await self._session.scalar(statement)

    async def add_revision(self, adapter: AdapterRow, content: RevisionContent, at: int) -> RevisionRow:
        """Insert the adapter's next revision."""
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
            base_model=content.base_model,
            bundle=content.bundle,
            state=READY,
            created_at=at,
        )
        self._session.add(revision)
        await self._record_event(webhooks.READY, adapter, revision, at)
        return revision

    async def _record_event(self, kind: str, adapter: AdapterRow, revision: RevisionRow, at: int) -> None:
        detail = EventDetail(revision=revision.number, digest=revision.digest)
        await EventRepository(self._session, self._tenant).add(kind, adapter.name, detail, at)


async def name_bases(session: AsyncSession, names: Mapping[str, str]) -> int:
    """Set the base's name in all tenants' revisions without a name. `names` maps fingerprints of bases to names."""
    named = 0
    for fingerprint, name in names.items():
        nameless = update(RevisionRow).where(RevisionRow.base_model == "", RevisionRow.base == fingerprint)
        named += len((await session.execute(nameless.values(base_model=name).returning(RevisionRow.id))).all())
    return named


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """An expired adapter, or an expired revision of one."""

    tenant: TenantId
    tenant_name: str
    adapter: str
    number: int | None = None
    """Number of the revision; None: the whole adapter."""


class ExpiryRepository(Repository):
    """Every tenant's adapters and revisions that have expired and are not deleted yet."""

    async def overdue(self, now: int, limit: int) -> list[Overdue]:
        """List at most `limit` adapters and at most `limit` revisions."""
        names = (TenantRow.id.label("tenant"), TenantRow.name.label("tenant_name"), AdapterRow.name.label("adapter"))
        adapters = (
            select(*names)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(AdapterRow.deleted_at.is_(None), AdapterRow.expires_at <= now)
            .limit(limit)
        )
        revisions = (
            select(*names, RevisionRow.number)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(RevisionRow.state == READY, RevisionRow.expires_at <= now)
            .limit(limit)
        )
        found = [Overdue(**row._mapping) for row in await self._session.execute(adapters)]
        return found + [Overdue(**row._mapping) for row in await self._session.execute(revisions)]


async def names_of_digests(session: AsyncSession, digests: Collection[str]) -> dict[tuple[str, TenantId], str]:
    """Return `tenant/adapter@3` for each digest and owner, of several names the first. For operators only."""
    statement = (
        select(RevisionRow.digest, RevisionRow.tenant_id, TenantRow.name, AdapterRow.name, RevisionRow.number)
        .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
        .join(TenantRow, TenantRow.id == RevisionRow.tenant_id)
        .where(among(session, RevisionRow.digest, digests))
        .order_by(TenantRow.name.desc(), AdapterRow.name.desc(), RevisionRow.number)
    )
    rows = (await session.execute(statement)).all() if digests else []
    return {(digest, owner): f"{tenant}/{adapter}@{number}" for digest, owner, tenant, adapter, number in rows}
