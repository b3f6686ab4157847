"""Files that tenants send or get: inputs and outputs of batches. The bytes are objects in the store."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import (
    ColumnElement,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.identity import ProjectId, TenantId
from loramux.records.tenants import TenantRow


class FileRow(Base):
    """A stored file; its object is there before the row and goes after it."""

    __tablename__ = "files"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        Index("ix_files_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_files_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[ProjectId]
    owner: Mapped[str]
    """The first key of the chain of rotations that made it, or the member."""
    purpose: Mapped[str]
    filename: Mapped[str]
    size: Mapped[int]
    created_at: Mapped[int]
    expires_at: Mapped[int]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times in microseconds since the epoch."""

    id: str
    project_id: ProjectId
    owner: str
    purpose: str
    filename: str
    size: int
    created_at: int
    expires_at: int


class Viewpoint(msgspec.Struct, frozen=True):
    """What a caller sees of files and batches: its project's; `owner` narrows them to the caller's own."""

    project: ProjectId
    owner: str | None = None


class FileRepository:
    """One tenant's files."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, file: StoredFile) -> None:
        """Insert the row."""
        self._session.add(FileRow(tenant_id=self._tenant, **msgspec.structs.asdict(file)))
        await self._session.flush()

    async def get(self, id: str, seen: Viewpoint) -> StoredFile | None:
        """Find one of the files that the caller sees."""
        statement = select(FileRow).where(FileRow.tenant_id == self._tenant, FileRow.id == id, *_seen(seen))
        row = await self._session.scalar(statement)
        return None if row is None else _file(row)

    async def listed(
        self, seen: Viewpoint, after: str | None, limit: int, purpose: str | None = None, *, oldest_first: bool = False
    ) -> list[StoredFile]:
        """List at most `limit` files behind the file `after`."""
        statement = select(FileRow).where(FileRow.tenant_id == self._tenant, *_seen(seen))
        if purpose is not None:
            statement = statement.where(FileRow.purpose == purpose)
        place = tuple_(FileRow.created_at, FileRow.id)
        if after is not None:
            last = select(FileRow.created_at, FileRow.id).where(FileRow.tenant_id == self._tenant, FileRow.id == after)
            end = last.scalar_subquery()
            statement = statement.where(place > end if oldest_first else place < end)
        columns = (FileRow.created_at, FileRow.id)
        order = columns if oldest_first else tuple(column.desc() for column in columns)
        return [_file(row) for row in await self._session.scalars(statement.order_by(*order).limit(limit))]

    async def total_size(self) -> int:
        """Return the bytes of all files; the tenant adds none until this transaction ends."""
        await self._session.execute(
            select(TenantRow.id).where(TenantRow.id == self._tenant).with_for_update(key_share=True)
        )
        statement = select(func.coalesce(func.sum(FileRow.size), 0)).where(FileRow.tenant_id == self._tenant)
        return int(await self._session.scalar(statement) or 0)

    async def expire_all(self, now: int) -> None:
        """Let every file expire now."""
        await self._session.execute(update(FileRow).where(FileRow.tenant_id == self._tenant).values(expires_at=now))

    async def remove(self, id: str) -> None:
        """Delete the row."""
        await self._session.execute(delete(FileRow).where(FileRow.tenant_id == self._tenant, FileRow.id == id))


async def expired_files(session: AsyncSession, now: int, needed: Collection[str], limit: int) -> list[str]:
    """Delete the rows of files past their expiry, of every tenant, but not of those `needed`; return their ids."""
    due = select(FileRow.id).where(FileRow.expires_at <= now, FileRow.id.not_in(needed)).limit(limit)
    statement = delete(FileRow).where(FileRow.id.in_(due)).returning(FileRow.id)
    return list(await session.scalars(statement))


async def known_files(session: AsyncSession, ids: Collection[str]) -> frozenset[str]:
    """Return those of `ids` that have a row."""
    return frozenset(await session.scalars(select(FileRow.id).where(FileRow.id.in_(ids))))


def _seen(seen: Viewpoint) -> tuple[ColumnElement[bool], ...]:
    own = () if seen.owner is None else (FileRow.owner == seen.owner,)
    return (FileRow.project_id == seen.project, *own)


def _file(row: FileRow) -> StoredFile:
    return StoredFile(**{name: getattr(row, name) for name in StoredFile.__struct_fields__})
