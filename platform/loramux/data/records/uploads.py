"""Uploads: their rows, their files and parts, and the jobs of the servers that check uploads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.data.entities import Refusal, Submitter, Upload, UploadFile, UploadOutcome
from loramux.data.records.base import Base, Repository, TenantScoped, newest_first, to_struct
from loramux.data.records.leases import LeasedRow, adopt_abandoned
from loramux.data.records.tenants import TenantRow, lock_tenant

UPLOADING, VALIDATING, READY, REJECTED, EXPIRED = "uploading", "validating", "ready", "rejected", "expired"
OPEN = (UPLOADING, VALIDATING)
"""States in which an upload's parts are needed."""


class UploadRow(LeasedRow, Base):
    """An upload. No other row refers to its files until they have passed the checks."""

    __tablename__ = "uploads"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint("state IN ('uploading', 'validating', 'ready', 'rejected', 'expired')", name="state"),
        CheckConstraint("(state = 'ready') = (revision IS NOT NULL)", name="revision"),
        Index("ix_uploads_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_uploads_state_expires_at", "state", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    adapter: Mapped[str]
    """The adapter's own name. The adapter need not exist."""
    promote: Mapped[bool]
    """True: the default alias moves to the new revision."""
    source: Mapped[str | None]
    """The place from which the server fetches the files, as JSON; null if the client sends them."""
    base_model: Mapped[str | None]
    """The base that the caller named; null: the files decide the base."""
    ignored: Mapped[str | None]
    """Names of announced files that are not stored because serving does not need them, as JSON."""
    submitter: Mapped[str | None]
    """A Submitter as JSON; null until the files are complete, and for uploads of releases without this column."""
    state: Mapped[str]
    revision: Mapped[int | None]
    digest: Mapped[str | None]
    error: Mapped[str | None]
    """A `data.entities.Refusal` as JSON."""
    report: Mapped[str | None]
    """The validation report as JSON."""
    created_at: Mapped[int]
    expires_at: Mapped[int]
    finished_at: Mapped[int | None]


class UploadFileRow(Base):
    """An announced file, and the number of its stored bytes."""

    __tablename__ = "upload_files"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "upload_id"], ["uploads.tenant_id", "uploads.id"], ondelete="CASCADE"),
        CheckConstraint("received BETWEEN 0 AND size", name="received"),
    )

    upload_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    size: Mapped[int]
    sha256: Mapped[str]
    """The file's SHA-256 as 64 hexadecimal digits."""
    received: Mapped[int]
    """Bytes, counted from the start, that are stored in parts."""


class UploadPartRow(Base):
    """A range of a file, stored as an object. The table keeps its first name."""

    __tablename__ = "upload_pieces"
    __table_args__ = (
        ForeignKeyConstraint(
            ["upload_id", "file"], ["upload_files.upload_id", "upload_files.name"], ondelete="CASCADE"
        ),
        CheckConstraint("size > 0", name="size"),
    )

    upload_id: Mapped[str] = mapped_column(primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size: Mapped[int]
    object: Mapped[str]
    """The object's name in the store."""


class UploadPart(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a file, and the object that holds it."""

    file: str
    start: int
    size: int
    object: str


class UploadRepository(TenantScoped):
    """One tenant's uploads."""

    async def add(self, upload: Upload, server_id: str | None) -> None:
        """Insert an upload; `server_id` is the server that fetches its files if the client does not send them."""
        row = UploadRow(
            id=upload.id,
            tenant_id=self._tenant,
            adapter=upload.adapter,
            promote=upload.promote,
            source=upload.source,
            ignored=msgspec.json.encode(upload.ignored).decode() if upload.ignored else None,
            base_model=upload.base_model,
            submitter=_encoded(upload.submitter),
            state=upload.state,
            server_id=server_id,
            attempts=0 if server_id is None else 1,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
        )
        await self._insert(row)
        names = UploadFile.__struct_fields__
        self._session.add_all(
            UploadFileRow(upload_id=upload.id, tenant_id=self._tenant, **{name: getattr(file, name) for name in names})
            for file in upload.files
        )
        await self._session.flush()

    async def get(self, id: str) -> Upload | None:
        """Find one of the tenant's uploads."""
        return await self._found(id, lock=False)

    async def locked(self, id: str) -> Upload | None:
        """Find an upload of the tenant and lock it until this transaction ends."""
        return await self._found(id, lock=True)

    async def before(self, id: str | None, limit: int, adapters: Collection[str] | None = None) -> list[Upload]:
        """List at most `limit` uploads older than that with this id, newest first; for these adapters, or for all."""
        statement = select(UploadRow)
        if adapters is not None:
            statement = statement.where(UploadRow.adapter.in_(adapters))
        newest = newest_first(statement, UploadRow, self._tenant, id, limit)
        rows = (await self._session.scalars(newest)).all()
        files = await self._files([row.id for row in rows])
        return [_upload(row, files.get(row.id, ())) for row in rows]

    async def open_now(self) -> tuple[int, int]:
        """Count the open uploads and their announced bytes; until this transaction ends, no upload is opened."""
        await lock_tenant(self._session, self._tenant)
        ours = (UploadRow.tenant_id == self._tenant, UploadRow.state.in_(OPEN))
        count = await self._session.scalar(select(func.count()).select_from(UploadRow).where(*ours))
        size = await self._session.scalar(
            select(func.sum(UploadFileRow.size)).join(UploadRow, UploadRow.id == UploadFileRow.upload_id).where(*ours)
        )
        return count or 0, int(size or 0)

    async def parts(self, id: str) -> list[UploadPart]:
        """List the parts of the upload's files, in order."""
        statement = (
            select(UploadPartRow)
            .join(UploadRow, UploadRow.id == UploadPartRow.upload_id)
            .where(UploadRow.tenant_id == self._tenant, UploadRow.id == id)
            .order_by(UploadPartRow.file, UploadPartRow.start)
        )
        return [to_struct(UploadPart, row) for row in await self._session.scalars(statement)]

    async def part_count(self, id: str, file: str) -> int:
        """Count the parts of a file of the upload."""
        statement = select(func.count()).select_from(UploadPartRow)
        return (
            await self._session.scalar(statement.where(UploadPartRow.upload_id == id, UploadPartRow.file == file)) or 0
        )

    async def add_part(self, id: str, part: UploadPart, expires_at: int) -> None:
        """Append a part to its file. The caller has locked the upload by `locked`. The part begins at the end of the
        file's stored bytes.
        """
        self._session.add(UploadPartRow(upload_id=id, **msgspec.structs.asdict(part)))
        await self._session.execute(
            update(UploadFileRow)
            .where(
                UploadFileRow.tenant_id == self._tenant, UploadFileRow.upload_id == id, UploadFileRow.name == part.file
            )
            .values(received=part.start + part.size)
        )
        await self._change(id, expires_at=expires_at)

    async def begin_validating(self, id: str, server_id: str, submitter: Submitter, expires_at: int) -> None:
        """Assign the complete upload to that server. The caller has the upload `locked`."""
        handed_over = {"submitter": _encoded(submitter), "server_id": server_id}
        await self._change(id, state=VALIDATING, attempts=1, expires_at=expires_at, **handed_over)

    async def finish(self, id: str, outcome: UploadOutcome, at: int) -> None:
        """Write the upload's end. The caller has the upload `locked`."""
        await self._change(
            id,
            state=REJECTED if outcome.revision is None else READY,
            revision=outcome.revision,
            digest=outcome.digest,
            error=None if outcome.error is None else msgspec.json.encode(outcome.error).decode(),
            report=outcome.report,
            finished_at=at,
        )

    async def remove(self, id: str) -> None:
        """Delete the upload. The caller has the upload `locked`."""
        await self._session.execute(delete(UploadRow).where(UploadRow.tenant_id == self._tenant, UploadRow.id == id))

    async def _change(self, id: str, **values: object) -> None:
        await self._session.execute(
            update(UploadRow).where(UploadRow.tenant_id == self._tenant, UploadRow.id == id).values(**values)
        )

    async def _found(self, id: str, *, lock: bool) -> Upload | None:
        statement = select(UploadRow).where(UploadRow.tenant_id == self._tenant, UploadRow.id == id)
        row = await self._session.scalar(statement.with_for_update() if lock else statement)
        return None if row is None else _upload(row, (await self._files([id])).get(id, ()))

    async def _files(self, ids: Sequence[str]) -> dict[str, tuple[UploadFile, ...]]:
        statement = select(UploadFileRow).where(
            UploadFileRow.tenant_id == self._tenant, UploadFileRow.upload_id.in_(ids)
        )
        found: dict[str, tuple[UploadFile, ...]] = {}
        for row in await self._session.scalars(statement.order_by(UploadFileRow.name)):
            found[row.upload_id] = (*found.get(row.upload_id, ()), to_struct(UploadFile, row))
        return found


class UploadJob(msgspec.Struct, frozen=True, kw_only=True):
    """An upload that a server has taken on."""

    id: str
    tenant: TenantId
    tenant_name: str
    attempts: int
    expires_at: int
    """The time by which the checks must end."""


class UploadJobs(Repository):
    """Every tenant's uploads, which servers check, expire and delete."""

    async def adopt_abandoned(self, server_id: str) -> None:
        """Move the unfinished uploads of dead servers to this one."""
        await adopt_abandoned(self._session, UploadRow, UploadRow.state == VALIDATING, server_id)

    async def of(self, server_id: str) -> list[UploadJob]:
        """List the server's unfinished uploads, oldest first."""
        statement = (
            select(UploadRow.id, UploadRow.tenant_id, TenantRow.name, UploadRow.attempts, UploadRow.expires_at)
            .join(TenantRow, TenantRow.id == UploadRow.tenant_id)
            .where(UploadRow.state == VALIDATING, UploadRow.server_id == server_id)
            .order_by(UploadRow.created_at, UploadRow.id)
        )
        return [
            UploadJob(
                id=row.id,
                tenant=row.tenant_id,
                tenant_name=row.name,
                attempts=row.attempts,
                expires_at=row.expires_at,
            )
            for row in await self._session.execute(statement)
        ]

    async def expire(self, now: int) -> list[str]:
        """Expire the uploads whose bytes did not arrive in time; return their ids."""
        statement = (
            update(UploadRow)
            .where(UploadRow.state == UPLOADING, UploadRow.expires_at <= now)
            .values(state=EXPIRED, finished_at=now)
            .returning(UploadRow.id)
        )
        return list(await self._session.scalars(statement))

    async def closed(self, ids: Collection[str]) -> frozenset[str]:
        """Return the uploads among `ids` whose parts are not needed any more."""
        statement = select(UploadRow.id).where(UploadRow.id.in_(ids), UploadRow.state.in_(OPEN))
        return frozenset(ids) - frozenset(await self._session.scalars(statement))

    async def forget(self, before: int) -> None:
        """Delete the uploads that finished before that time."""
        await self._session.execute(delete(UploadRow).where(UploadRow.finished_at < before))


def _upload(row: UploadRow, files: tuple[UploadFile, ...]) -> Upload:
    error = None if row.error is None else msgspec.json.decode(row.error, type=Refusal)
    return Upload(
        id=row.id,
        adapter=row.adapter,
        promote=row.promote,
        source=row.source,
        base_model=row.base_model,
        state=row.state,
        files=files,
        submitter=None if row.submitter is None else msgspec.json.decode(row.submitter, type=Submitter),
        ignored=() if row.ignored is None else msgspec.json.decode(row.ignored, type=tuple[str, ...]),
        outcome=UploadOutcome(revision=row.revision, digest=row.digest, error=error, report=row.report),
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def _encoded(submitter: Submitter | None) -> str | None:
    return None if submitter is None else msgspec.json.encode(submitter).decode()
