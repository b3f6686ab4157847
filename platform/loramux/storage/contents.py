"""What an adapter's content is, and the name that follows from it.

    StorageError
    ├── BlobMissing          no such content is stored
    ├── BlobCorrupt          what is stored under that name is not that content
    └── StorageUnavailable   the object store does not answer, or refuses

A content's digest is the SHA-256 of the two lines that `sha256sum adapter_config.json adapter_model.safetensors`
prints, so that anybody can compute it in a shell.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)

_digest = re.compile("sha256:[0-9a-f]{64}")


class StorageError(Exception):
    """Base of what storage raises."""


class BlobMissing(StorageError):
    """The message names the digest."""


class BlobCorrupt(StorageError):
    """The message names both digests; uploading the same files again repairs it."""


class StorageUnavailable(StorageError):
    """The message repeats what the store said; it is for the operator, not for a tenant."""


def digest_of(hashes: Mapping[str, str]) -> str:
    """The digest of a content whose files have these SHA-256s, in hexadecimal, by name."""
    lines = "".join(f"{hashes[name]}  {name}\n" for name in FILES)
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def content_digest(folder: Path) -> str:
    """The digest of the folder's two files; reads them whole. Raises FileNotFoundError."""
    hashes = {}
    for name in FILES:
        with (folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_of(hashes)


def is_digest(text: str) -> bool:
    """Whether `text` could be a content's digest."""
    return _digest.fullmatch(text) is not None


def place_of(digest: str) -> str:
    """Where a content lies, in the store and in the cache: `sha256/ab/cdef...`."""
    assert is_digest(digest), f"not a digest: {digest!r}"
    hexadecimal = digest.removeprefix("sha256:")
    return f"sha256/{hexadecimal[:2]}/{hexadecimal[2:]}"


def digest_at(place: str) -> str | None:
    """The digest whose place this is, or what lies in it; None where it is no content's."""
    parts = place.split("/")
    digest = f"sha256:{''.join(parts[1:3])}"
    return digest if is_digest(digest) and place_of(digest) == "/".join(parts[:3]) else None
