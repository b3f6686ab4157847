"""Files in pieces: each piece is an object in the store, so any server can take the next one, or put them together."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from loramux.records.uploads import Piece, UploadFile
from loramux.storage import Objects
from loramux.uploads.refusals import UploadRejected

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


def assemble(objects: Objects, file: UploadFile, pieces: Iterable[Piece], folder: Path) -> None:
    """Write the file into `folder`, in constant memory. Raises UploadRejected unless it is what was announced."""
    running = hashlib.sha256()
    with (folder / file.name).open("xb") as target:
        for piece in pieces:
            for data in _read(objects, piece):
                running.update(data)
                target.write(data)
        size = target.tell()
    if (size, running.hexdigest()) != (file.size, file.sha256):
        raise UploadRejected(
            "hash_mismatch",
            file.name,
            f"'{file.name}' was announced with the SHA-256 {file.sha256} and {file.size} bytes; what was received has "
            f"{running.hexdigest()} and {size}. Upload it again.",
        )


def _read(objects: Objects, piece: Piece) -> Iterable[bytes]:
    try:
        yield from objects.read(piece.object)
    except FileNotFoundError:
        raise UploadRejected(
            "bytes_lost", piece.file, f"bytes of '{piece.file}' have been lost from the store. Upload it again."
        ) from None
