"""An adapter's content, and the digest that names it.

    StorageError
    ├── BlobMissing          503  no such content is stored
    ├── BlobCorrupt          503  the stored files have another digest than their name
    └── StorageUnavailable   503  the object store does not answer, or refuses, or a disk is full

A content's digest is the SHA-256 of the lines that `sha256sum adapter_config.json adapter_model.safetensors` prints,
so it can be computed in a shell. A content with a bundle has a third line, for `bundle.json`.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from loramux.bundle import BUNDLE_FILE
from loramux.errors import LoramuxError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files that every content has."""

_digest = re.compile("sha256:[0-9a-f]{64}")


class StorageError(LoramuxError):
    """Base of storage's errors; the messages are for operators."""

    code = "storage_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = 1
    public_message = "The storage of adapters does not answer; what was confirmed before is kept. Please retry."


class BlobMissing(StorageError):
    """The store has no content of this digest, which the message names."""


class BlobCorrupt(StorageError):
    """The stored files have another digest than their name. Uploading the same files again repairs it."""


class StorageUnavailable(StorageError):
    """The store does not answer, or refuses. The message repeats its answer, for the operator and not for a tenant."""


_SHORTAGES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Errors of a machine that lacks something which it may have again: space, files, a disk that answers."""


@contextmanager
def shortages_are_outages() -> Iterator[None]:
    """Raise StorageUnavailable for a full or failing disk: it is the operator's to mend, and a retry may help."""
    try:
        yield
    except OSError as error:
        if error.errno not in _SHORTAGES:
            raise
        raise StorageUnavailable(f"this machine's disk: {error}") from error


def digest_of(hashes: Mapping[str, str]) -> str:
    """Compute the digest of a content from its files' SHA-256s in hexadecimal, by name in the files' order."""
    lines = "".join(f"{hashed}  {name}\n" for name, hashed in hashes.items())
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def files_of(folder: Path) -> tuple[str, ...]:
    """Name the files of the content in `folder`: its bundle too, if it has one."""
    return (*FILES, BUNDLE_FILE) if (folder / BUNDLE_FILE).exists() else FILES


def content_digest(folder: Path) -> str:
    """Compute the digest of the folder's files, which are read whole. Raises FileNotFoundError."""
    hashes = {}
    for name in files_of(folder):
        with (folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_of(hashes)


def is_digest(text: str) -> bool:
    """Return whether `text` has the form of a digest."""
    return _digest.fullmatch(text) is not None


def place_of(digest: str) -> str:
    """Return a content's path in the store and in the cache: `sha256/ab/cdef...`."""
    assert is_digest(digest), f"not a digest: {digest!r}"
    hexadecimal = digest.removeprefix("sha256:")
    return f"sha256/{hexadecimal[:2]}/{hexadecimal[2:]}"


def digest_at(place: str) -> str | None:
    """Return the digest of the content at this path, or of which this is a file; None for any other path."""
    parts = place.split("/")
    digest = f"sha256:{''.join(parts[1:3])}"
    return digest if is_digest(digest) and place_of(digest) == "/".join(parts[:3]) else None
