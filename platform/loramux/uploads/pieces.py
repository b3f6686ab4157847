"""Files in pieces: each piece is an object in the store, so any server can take the next one, or put them together."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loramux.records.uploads import Piece, UploadFile
from loramux.storage import Objects
from loramux.uploads.refusals import UploadRejected
from loramux.uploads.writing import off_loop, write

PIECE_BYTES = 8 << 20
"""What of a request's body is kept in memory, and lost where the server dies."""
SPARE_PIECES = 1000
"""How many more pieces a file may have than are needed, for those who are cut off or send little at a time."""
FOLDER = "uploads"


def folder_of(upload_id: str) -> str:
    """Where an upload's pieces lie."""
    return f"{FOLDER}/{upload_id}"


def new_object(upload_id: str) -> str:
    """A name that no other piece has, so that two requests with the same bytes do not meet."""
    return f"{folder_of(upload_id)}/{secrets.token_hex(8)}"


def most_pieces(size: int) -> int:
    """How many pieces a file of that size may have."""
    return size // PIECE_BYTES + SPARE_PIECES


async def assemble(objects: Objects, file: UploadFile, pieces: Sequence[Piece], folder: Path) -> None:
    """Write the file into `folder`. Raises UploadRejected unless it is what was announced."""
    try:
        written = await write(folder / file.name, _all(objects, pieces), file.size)
    except FileNotFoundError:
        raise UploadRejected(
            "bytes_lost", file.name, f"bytes of '{file.name}' have been lost from the store. Upload it again."
        ) from None
    if written != (file.size, file.sha256):
        raise UploadRejected(
            "hash_mismatch",
            file.name,
            f"'{file.name}' was announced with {file.size} bytes and the SHA-256 {file.sha256}; what was received has "
            f"{written.size} and {written.sha256}. Upload it again.",
        )


async def _all(objects: Objects, pieces: Sequence[Piece]) -> AsyncIterator[bytes]:
    for piece in pieces:
        async for data in off_loop(objects.read(piece.object)):
            yield data
