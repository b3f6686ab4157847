"""Bytes of a file, taken from a request as they come: what a client was told to be there, is there for good."""

from __future__ import annotations

from collections.abc import AsyncIterator

from loramux.records import Database, Principal
from loramux.records.uploads import UPLOADING, Piece, Upload, UploadFile, UploadRepository
from loramux.registry.threads import finished
from loramux.settings import UploadSettings
from loramux.storage import BlobStore
from loramux.uploads.errors import InvalidUpload, UploadClosed, UploadError, WrongOffset
from loramux.uploads.pieces import PIECE_BYTES, most_pieces, new_object
from loramux.uploads.sessions import SECOND, visible


class Reception:
    """Takes files' bytes, in order."""

    def __init__(self, database: Database, blobs: BlobStore, settings: UploadSettings) -> None:
        self._database = database
        self._objects = blobs.objects
        self._settings = settings

    async def receive(
        self, principal: Principal, id: str, name: str, offset: int, body: AsyncIterator[bytes]
    ) -> UploadFile:
        """Store the body's bytes as those of the file from `offset` on; the file, with what it has then.

        A body that ends too soon counts as far as it came. Memory: PIECE_BYTES and a chunk of the network. Raises
        UploadNotFound, UploadClosed, InvalidUpload or WrongOffset, and keeps what was stored until then.
        """
        async with self._database.read() as session:
            upload = await UploadRepository(session, principal.tenant).get(id)
        file = _file(visible(principal, id, upload), name, offset)
        buffer = bytearray()
        async for chunk in body:
            buffer += chunk
            if file.received + len(buffer) > file.size:
                raise InvalidUpload(
                    f"'{name}' was announced with {file.size} bytes, and more than that was sent; "
                    f"it has {file.received}",
                    name,
                )
            while len(buffer) >= PIECE_BYTES:
                file = await self._keep(principal, id, file, bytes(buffer[:PIECE_BYTES]))
                del buffer[:PIECE_BYTES]
        return await self._keep(principal, id, file, bytes(buffer)) if buffer else file

    async def _keep(self, principal: Principal, id: str, file: UploadFile, data: bytes) -> UploadFile:
        piece = Piece(file=file.name, start=file.received, size=len(data), object=new_object(id))
        await finished(self._objects.put, piece.object, data)
        try:
            async with self._database.begin() as session:
                uploads = UploadRepository(session, principal.tenant)
                upload = visible(principal, id, await uploads.locked(id))
                now = _file(upload, file.name, piece.start)
                if await uploads.piece_count(id, file.name) >= most_pieces(file.size):
                    raise InvalidUpload(
                        f"'{file.name}' came in too many pieces; send at least {PIECE_BYTES} bytes in a request",
                        file.name,
                    )
                await uploads.add_piece(id, piece, self._database.now() + self._settings.session_seconds * SECOND)
        except UploadError:  # after any other error the row may be there all the same
            await finished(self._objects.delete, [piece.object])
            raise
        return UploadFile(name=now.name, size=now.size, sha256=now.sha256, received=piece.start + piece.size)


def _file(upload: Upload, name: str, offset: int) -> UploadFile:
    """The upload's file, whose next bytes are those from `offset` on."""
    if upload.state != UPLOADING:
        raise UploadClosed(f"the upload {upload.id} is {upload.state}: it takes no more bytes", "id")
    file = next((file for file in upload.files if file.name == name), None)
    if file is None:
        announced = " and ".join(f"'{file.name}'" for file in upload.files)
        raise InvalidUpload(f"the upload has {announced}, and no '{name[:80]}'", "name")
    if offset != file.received:
        raise WrongOffset(name, offset, file.received)
    return file
