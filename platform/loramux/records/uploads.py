"""Statements about a tenant's uploads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.events import Refusal
from loramux.records.identity import TenantId
from loramux.records.models import TenantRow
from loramux.records.upload_models import UploadFileRow, UploadPieceRow, UploadRow

UPLOADING, VALIDATING, READY, REJECTED, EXPIRED = "uploading", "validating", "ready", "rejected", "expired"
OPEN = (UPLOADING, VALIDATING)
"""Their pieces are needed."""


class UploadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was announced, and how many bytes of it are stored."""

    name: str
    size: int
    sha256: str
    received: int = 0


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a file, and the object that holds it."""

    file: str
    start: int
    size: int
    object: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an upload: a revision, or a refusal."""

    revision: int | None = None
    digest: str | None = None
    error: Refusal | None = None
    report: str | None = None
    """JSON."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An upload and its files, by name. Times in microseconds since the epoch."""

    id: str
    adapter: str
    """The adapter's own name."""
    promote: bool
    source: str | None
    state: str
    files: tuple[UploadFile, ...]
    outcome: Outcome
    created_at: int
    expires_at: int


class UploadRepository:
    """One tenant's uploads."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, upload: Upload, server_id: str | None) -> None:
        """Insert a new upload; `server_id` is the server that fetches its files, if the client does not send them."""
        row = UploadRow(
            id=upload.id,
            tenant_id=self._tenant,
            adapter=upload.adapter,
            promote=upload.promote,
            source=upload.source,
            state=upload.state,
            server_id=server_id,
            attempts=0 if server_id is None else 1,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
        )
        self._session.add(row)
        await self._session.flush()
        names = UploadFile.__struct_fields__
        self._session.add_all(
            UploadFileRow(upload_id=upload.id, tenant_id=self._tenant, **{name: getattr(file, name) for name in names})
            for file in upload.files
        )
        await self._session.flush()

    async def get(self, id: str) -> Upload | None:
        """One of the tenant's."""
        return await self._found(id, lock=False)

    async def locked(self, id: str) -> Upload | None:
        """The same, and nobody else changes it until this transaction ends."""
        return await self._found(id, lock=True)

    async def before(self, id: str | None, limit: int, adapters: Collection[str] | None = None) -> list[Upload]:
        """At most `limit` uploads older than that one, newest first; for these adapters, or for all."""
        statement = select(UploadRow).where(UploadRow.tenant_id == self._tenant)
        if adapters is not None:
            statement = statement.where(UploadRow.adapter.in_(adapters))
        if id is not None:
            last = select(UploadRow.created_at, UploadRow.id).where(UploadRow.tenant_id == self._tenant)
            statement = statement.where(
                tuple_(UploadRow.created_at, UploadRow.id) < last.where(UploadRow.id == id).scalar_subquery()
            )
        newest = statement.order_by(UploadRow.created_at.desc(), UploadRow.id.desc()).limit(limit)
        rows = (await self._session.scalars(newest)).all()
        files = await self._files([row.id for row in rows])
        return [_upload(row, files.get(row.id, ())) for row in rows]

    async def open_now(self) -> tuple[int, int]:
        """How many uploads are open and the bytes that were announced for them; nobody opens one meanwhile."""
        await self._session.execute(
            select(TenantRow.id).where(TenantRow.id == self._tenant).with_for_update(key_share=True)
        )
        ours = (UploadRow.tenant_id == self._tenant, UploadRow.state.in_(OPEN))
        count = await self._session.scalar(select(func.count()).select_from(UploadRow).where(*ours))
        size = await self._session.scalar(
            select(func.sum(UploadFileRow.size)).join(UploadRow, UploadRow.id == UploadFileRow.upload_id).where(*ours)
        )
        return count or 0, int(size or 0)

    async def pieces(self, id: str) -> list[Piece]:
        """The pieces of the upload's files, in their order."""
        statement = (
            select(UploadPieceRow)
            .join(UploadRow, UploadRow.id == UploadPieceRow.upload_id)
            .where(UploadRow.tenant_id == self._tenant, UploadRow.id == id)
            .order_by(UploadPieceRow.file, UploadPieceRow.start)
        )
        return [
            Piece(file=row.file, start=row.start, size=row.size, object=row.object)
            for row in await self._session.scalars(statement)
        ]

    async def piece_count(self, id: str, file: str) -> int:
        """How many pieces one of its files has."""
        statement = select(func.count()).select_from(UploadPieceRow)
        return (
            await self._session.scalar(statement.where(UploadPieceRow.upload_id == id, UploadPieceRow.file == file))
            or 0
        )

    async def add_piece(self, id: str, piece: Piece, expires_at: int) -> None:
        """Append a piece to its file. The caller has the upload `locked`, and the piece begins where the file ends."""
        self._session.add(UploadPieceRow(upload_id=id, **msgspec.structs.asdict(piece)))
        await self._session.execute(
            update(UploadFileRow)
            .where(
                UploadFileRow.tenant_id == self._tenant, UploadFileRow.upload_id == id, UploadFileRow.name == piece.file
            )
            .values(received=piece.start + piece.size)
        )
        await self._change(id, expires_at=expires_at)

    async def begin_validating(self, id: str, server_id: str) -> None:
        """Its files are there; that server takes it on. The caller has the upload `locked`."""
        await self._change(id, state=VALIDATING, server_id=server_id, attempts=1)

    async def finish(self, id: str, outcome: Outcome, at: int) -> None:
        """Write what became of it. The caller has the upload `locked`."""
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
        """Forget it. The caller has the upload `locked`."""
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
            file = UploadFile(name=row.name, size=row.size, sha256=row.sha256, received=row.received)
            found[row.upload_id] = (*found.get(row.upload_id, ()), file)
        return found


def _upload(row: UploadRow, files: tuple[UploadFile, ...]) -> Upload:
    error = None if row.error is None else msgspec.json.decode(row.error, type=Refusal)
    return Upload(
        id=row.id,
        adapter=row.adapter,
        promote=row.promote,
        source=row.source,
        state=row.state,
        files=files,
        outcome=Outcome(revision=row.revision, digest=row.digest, error=error, report=row.report),
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
