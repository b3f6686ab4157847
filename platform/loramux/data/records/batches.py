"""Batches, their input and output files, chunks of finished lines, and the jobs of the servers that run batches.

The bytes of files and chunks are objects in the store. A file's object is stored before its row is inserted, and
removed after its row is deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Select,
    UniqueConstraint,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import Batch, LineError, StoredFile
from loramux.data.records.base import Base, Repository, TenantScoped, Viewpoint, newest_first, oldest_first, to_struct
from loramux.data.records.leases import LeasedRow, adopt_abandoned
from loramux.data.records.tenants import lock_tenant

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
UNFINISHED = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"


class FileRow(Base):
    """A stored file. The file's object is stored before the row is inserted, and removed after the row is deleted."""

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
    """The first key in the chain of rotations of the key that made the file, or the member."""
    purpose: Mapped[str]
    filename: Mapped[str]
    size: Mapped[int]
    created_at: Mapped[int]
    expires_at: Mapped[int]


class FileRepository(TenantScoped):
    """One tenant's files."""

    async def add(self, file: StoredFile) -> None:
        """Insert the row."""
        await self._insert(FileRow(tenant_id=self._tenant, **msgspec.structs.asdict(file)))

    async def get(self, id: str, seen: Viewpoint) -> StoredFile | None:
        """Find one of the files that the caller sees."""
        statement = select(FileRow).where(
            FileRow.tenant_id == self._tenant, FileRow.id == id, *seen.conditions(FileRow)
        )
        row = await self._session.scalar(statement)
        return None if row is None else to_struct(StoredFile, row)

    async def listed(
        self, seen: Viewpoint, after: str | None, limit: int, purpose: str | None = None, *, oldest_first: bool = False
    ) -> list[StoredFile]:
        """List at most `limit` files after the file `after`."""
        statement = select(FileRow).where(FileRow.tenant_id == self._tenant, *seen.conditions(FileRow))
        if purpose is not None:
            statement = statement.where(FileRow.purpose == purpose)
        place = tuple_(FileRow.created_at, FileRow.id)
        if after is not None:
            last = select(FileRow.created_at, FileRow.id).where(FileRow.tenant_id == self._tenant, FileRow.id == after)
            end = last.scalar_subquery()
            statement = statement.where(place > end if oldest_first else place < end)
        columns = (FileRow.created_at, FileRow.id)
        order = columns if oldest_first else tuple(column.desc() for column in columns)
        return [
            to_struct(StoredFile, row) for row in await self._session.scalars(statement.order_by(*order).limit(limit))
        ]

    async def total_size(self) -> int:
        """Return the bytes of all files; until this transaction ends, no other one adds a file of the tenant."""
        await lock_tenant(self._session, self._tenant)
        statement = select(func.coalesce(func.sum(FileRow.size), 0)).where(FileRow.tenant_id == self._tenant)
        return int(await self._session.scalar(statement) or 0)

    async def expire_all(self, now: int) -> None:
        """Let every file expire now."""
        await self._session.execute(update(FileRow).where(FileRow.tenant_id == self._tenant).values(expires_at=now))

    async def expire(self, ids: Collection[str], now: int) -> None:
        """Let these files expire now."""
        ours = FileRow.tenant_id == self._tenant, FileRow.id.in_(ids)
        await self._session.execute(update(FileRow).where(*ours).values(expires_at=now))

    async def remove(self, id: str) -> None:
        """Delete the row."""
        await self._session.execute(delete(FileRow).where(FileRow.tenant_id == self._tenant, FileRow.id == id))


async def expired_files(session: AsyncSession, now: int, needed: Collection[str], limit: int) -> list[str]:
    """Delete the rows of expired files of every tenant, except `needed` files; return the ids of deleted files."""
    due = select(FileRow.id).where(FileRow.expires_at <= now, FileRow.id.not_in(needed)).limit(limit)
    statement = delete(FileRow).where(FileRow.id.in_(due)).returning(FileRow.id)
    return list(await session.scalars(statement))


async def known_files(session: AsyncSession, ids: Collection[str]) -> frozenset[str]:
    """Return the ids among `ids` that have a row."""
    return frozenset(await session.scalars(select(FileRow.id).where(FileRow.id.in_(ids))))


class BatchRow(LeasedRow, Base):
    """A batch. The outcomes of the lines before `flushed` are in chunks. The other lines run or will run."""

    __tablename__ = "batches"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'cancelling',"
            " 'completed', 'failed', 'expired', 'cancelled')",
            name="state",
        ),
        CheckConstraint("completed + failed = flushed AND flushed <= lines", name="counts"),
        Index("ix_batches_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_batches_state", "state"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[ProjectId]
    owner: Mapped[str]
    """The first key of the creator's chain of rotations, or the member. The batch runs with this owner's rights."""
    endpoint: Mapped[str]
    input_file_id: Mapped[str]
    completion_window: Mapped[str]
    tags: Mapped[str]
    """The creator's `metadata` as JSON."""
    state: Mapped[str]
    lines: Mapped[int]
    """The number of lines; 0 until the input is validated."""
    flushed: Mapped[int]
    completed: Mapped[int]
    failed: Mapped[int]
    not_run: Mapped[int] = mapped_column(server_default="0")
    """Number of failed lines that were not run because the batch was cancelled or expired."""
    errors: Mapped[str | None]
    """A list of `LineError` as JSON."""
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    created_at: Mapped[int]
    expires_at: Mapped[int]
    in_progress_at: Mapped[int | None]
    finalizing_at: Mapped[int | None]
    cancelling_at: Mapped[int | None]
    finished_at: Mapped[int | None]
    output_seconds: Mapped[int | None]
    """Seconds for which the output and error files are kept; None: the server's retention of files."""


class BatchChunkRow(Base):
    """Outcomes of consecutive lines, stored as an object."""

    __tablename__ = "batch_chunks"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first line, counted from 0."""
    object: Mapped[str]


class BatchRepository(TenantScoped):
    """One tenant's batches."""

    async def add(self, batch: Batch) -> None:
        """Insert the row."""
        await self._insert(BatchRow(**_columns(msgspec.structs.asdict(batch))))

    async def get(self, id: str, seen: Viewpoint, *, lock: bool = False) -> Batch | None:
        """Find a batch that the caller sees, and lock it if requested."""
        statement = select(BatchRow).where(
            BatchRow.tenant_id == self._tenant, BatchRow.id == id, *seen.conditions(BatchRow)
        )
        row = await self._session.scalar(statement.with_for_update() if lock else statement)
        return None if row is None else _batch(row)

    async def before(self, seen: Viewpoint, id: str | None, limit: int, endpoint: str | None = None) -> list[Batch]:
        """List at most `limit` batches older than that one, newest first; with `endpoint`, only those of it."""
        newest = newest_first(_seen(seen, endpoint), BatchRow, self._tenant, id, limit)
        return [_batch(row) for row in await self._session.scalars(newest)]

    async def following(self, seen: Viewpoint, id: str, limit: int, endpoint: str | None = None) -> list[Batch]:
        """List the `limit` batches that were created next after that one, newest first."""
        oldest = oldest_first(_seen(seen, endpoint), BatchRow, self._tenant, id, limit)
        return [_batch(row) for row in await self._session.scalars(oldest)][::-1]

    async def remove(self, id: str) -> None:
        """Delete the row."""
        await self._session.execute(delete(BatchRow).where(BatchRow.tenant_id == self._tenant, BatchRow.id == id))

    async def count_unfinished(self) -> int:
        """Count the unfinished batches. Until this transaction ends, no other one adds a batch of the tenant."""
        await lock_tenant(self._session, self._tenant)
        ours = (BatchRow.tenant_id == self._tenant, BatchRow.state.in_(UNFINISHED))
        return await self._session.scalar(select(func.count()).select_from(BatchRow).where(*ours)) or 0

    async def user_of(self, file_id: str) -> str | None:
        """Return the id of an unfinished batch that reads this file."""
        ours = (BatchRow.tenant_id == self._tenant, BatchRow.state.in_(UNFINISHED))
        statement = select(BatchRow.id).where(*ours, BatchRow.input_file_id == file_id)
        return await self._session.scalar(statement.limit(1))

    async def cancel_all(self, now: int) -> None:
        """Cancel every unfinished batch."""
        begun = (BatchRow.tenant_id == self._tenant, BatchRow.state.in_((VALIDATING, IN_PROGRESS)))
        await self._session.execute(update(BatchRow).where(*begun).values(state=CANCELLING, cancelling_at=now))

    async def change(self, id: str, **values: object) -> None:
        """Set columns of a batch, which the caller has locked."""
        await self._session.execute(
            update(BatchRow).where(BatchRow.tenant_id == self._tenant, BatchRow.id == id).values(_columns(values))
        )


class BatchJobs(Repository):
    """Every tenant's batches. The servers that run batches use this repository."""

    async def adopt_abandoned(self, server_id: str) -> bool:
        """Move the unfinished batches of dead servers to this server; return whether any server is dead."""
        return await adopt_abandoned(self._session, BatchRow, BatchRow.state.in_(UNFINISHED), server_id)

    async def of(self, server_id: str) -> list[Batch]:
        """List the server's unfinished batches, oldest first."""
        statement = select(BatchRow).where(BatchRow.state.in_(UNFINISHED), BatchRow.server_id == server_id)
        return [_batch(row) for row in await self._session.scalars(statement.order_by(BatchRow.created_at))]

    async def held(self, id: str, server_id: str, *, lock: bool = True) -> Batch | None:
        """Return an unfinished batch that this server holds, locked unless `lock` is false."""
        statement = select(BatchRow).where(
            BatchRow.id == id, BatchRow.server_id == server_id, BatchRow.state.in_(UNFINISHED)
        )
        row = await self._session.scalar(statement.with_for_update() if lock else statement)
        return None if row is None else _batch(row)

    async def add_chunk(self, id: str, start: int, name: str) -> None:
        """Insert a chunk of a batch that is held and locked."""
        await self._insert(BatchChunkRow(batch_id=id, start=start, object=name))

    async def chunks(self, id: str) -> list[str]:
        """List the objects of a batch's chunks, in the order of their lines."""
        statement = select(BatchChunkRow.object).where(BatchChunkRow.batch_id == id).order_by(BatchChunkRow.start)
        return list(await self._session.scalars(statement))

    async def remove_chunks(self, id: str) -> None:
        """Delete the rows of a batch's chunks."""
        await self._session.execute(delete(BatchChunkRow).where(BatchChunkRow.batch_id == id))

    async def inputs(self) -> list[str]:
        """List the input files of unfinished batches."""
        return list(await self._session.scalars(select(BatchRow.input_file_id).where(BatchRow.state.in_(UNFINISHED))))

    async def unfinished(self, ids: list[str]) -> frozenset[str]:
        """Return the ids among `ids` that are unfinished batches."""
        statement = select(BatchRow.id).where(BatchRow.id.in_(ids), BatchRow.state.in_(UNFINISHED))
        return frozenset(await self._session.scalars(statement))

    async def forget(self, before: int) -> None:
        """Delete the batches that finished before that time."""
        await self._session.execute(delete(BatchRow).where(BatchRow.finished_at < before))


def _seen(seen: Viewpoint, endpoint: str | None) -> Select[BatchRow]:
    """Select the batches that the caller sees; with `endpoint`, only those of it."""
    conditions = seen.conditions(BatchRow)
    return select(BatchRow).where(*conditions, *([] if endpoint is None else [BatchRow.endpoint == endpoint]))


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    if "errors" not in values:
        return values
    return values | {"errors": msgspec.json.encode(values["errors"]).decode() if values["errors"] else None}


def _batch(row: BatchRow) -> Batch:
    errors = () if row.errors is None else msgspec.json.decode(row.errors, type=tuple[LineError, ...])
    return to_struct(Batch, row, errors=errors)
