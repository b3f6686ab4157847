"""The cache of contents on this machine's disk, from which the engine reads: verified, bounded, shared by processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from loramux.storage.contents import content_digest, digest_at, files_of, place_of
from loramux.storage.staging import Staging

_Signature = tuple[tuple[int, int, int], ...]


class Cached(NamedTuple):
    """A content in the cache: its bytes, and the seconds since it was last requested."""

    digest: str
    size: int
    idle: float


class ContentCache:
    """Folders named after the digest of their content; one under its final name is complete.

    Each process computes a folder's digest once, and again when the size, time or inode of a file has changed.
    """

    def __init__(self, root: Path, staging: Staging) -> None:
        self._root = root
        self._staging = staging
        self._verified: dict[str, _Signature] = {}

    def known(self, digest: str) -> Path | None:
        """Return the content's folder where this process has verified it; no file is read."""
        folder = self._root / place_of(digest)
        signature = self._verified.get(digest)
        if signature is None or signature != _signature(folder):
            return None
        try:
            os.utime(folder)
        except FileNotFoundError:  # evicted at this moment
            return None
        return folder

    def verified(self, digest: str) -> Path | None:
        """Return the content's folder, its files read if need be; a folder with another content is removed."""
        folder = self.known(digest)
        if folder is not None:
            return folder
        folder = self._root / place_of(digest)
        signature = _signature(folder)
        if signature is None or found_in(folder) != digest:
            self.discard(digest)
            return None
        self._verified[digest] = signature
        return self.known(digest)

    def adopt(self, folder: Path, digest: str) -> None:
        """Move a folder with this content to its place, unless another process has done so."""
        signature = _signature(folder)
        assert signature is not None, "only a complete folder is adopted"
        place = self._root / place_of(digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        while self.verified(digest) is None:
            try:
                folder.rename(place)
            except OSError:
                if not place.is_dir():
                    raise
            else:
                self._verified[digest] = signature

    def discard(self, digest: str) -> None:
        """Remove a content; does nothing where it is absent."""
        self._verified.pop(digest, None)
        self._staging.discard(self._root / place_of(digest))

    def contents(self) -> list[Cached]:
        """List the contents, the longest unused first."""
        found = []
        for folder in self._root.glob("sha256/??/*"):
            digest, signature = digest_at(folder.relative_to(self._root).as_posix()), _signature(folder)
            if digest is not None and signature is not None:
                idle = max(0.0, time.time() - folder.stat().st_mtime)
                found.append(Cached(digest, sum(size for size, _, _ in signature), idle))
        return sorted(found, key=lambda cached: -cached.idle)


def found_in(folder: Path) -> str | None:
    """Return the digest of the folder's files; None where a file is missing."""
    try:
        return content_digest(folder)
    except FileNotFoundError:
        return None


def _signature(folder: Path) -> _Signature | None:
    try:
        stats = [(folder / name).stat() for name in files_of(folder)]
    except FileNotFoundError:
        return None
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)
