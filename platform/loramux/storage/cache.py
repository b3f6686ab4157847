"""Contents on this machine's disk, where the engine reads them: verified, bounded, shared by its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from loramux.storage.contents import FILES, content_digest, digest_at, place_of
from loramux.storage.staging import Staging

_Signature = tuple[tuple[int, int, int], ...]


class Cached(NamedTuple):
    """A content in the cache: its bytes, and how many seconds ago it was last asked for."""

    digest: str
    size: int
    idle: float


class ContentCache:
    """Folders named after the content that they hold; one under its final name is complete.

    What a file's content is, each process finds out for itself, once, and again when its size or times have changed.
    """

    def __init__(self, root: Path, staging: Staging) -> None:
        self._root = root
        self._staging = staging
        self._verified: dict[str, _Signature] = {}

    def known(self, digest: str) -> Path | None:
        """The content's folder if this process has verified it: no file is read."""
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
        """The content's folder, its files read if need be; one that holds anything else is removed."""
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
        """Give a folder that holds this very content its place, unless another process was quicker."""
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
        """Forget a content; nothing where it is not here."""
        self._verified.pop(digest, None)
        self._staging.discard(self._root / place_of(digest))

    def contents(self) -> list[Cached]:
        """Every content that is here, the longest unused first."""
        found = []
        for folder in self._root.glob("sha256/??/*"):
            digest, signature = digest_at(folder.relative_to(self._root).as_posix()), _signature(folder)
            if digest is not None and signature is not None:
                idle = max(0.0, time.time() - folder.stat().st_mtime)
                found.append(Cached(digest, sum(size for size, _, _ in signature), idle))
        return sorted(found, key=lambda cached: -cached.idle)


def found_in(folder: Path) -> str | None:
    """The digest of what the folder holds; None when a file is missing."""
    try:
        return content_digest(folder)
    except FileNotFoundError:
        return None


def _signature(folder: Path) -> _Signature | None:
    try:
        stats = [(folder / name).stat() for name in FILES]
    except FileNotFoundError:
        return None
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)
