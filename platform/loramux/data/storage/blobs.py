"""Adapters' files by their digest, kept in an object store and served from a cache on this machine.

A content's digest is the SHA-256 of the lines that `sha256sum adapter_config.json adapter_model.safetensors` prints, so
a shell can compute it. If a content has a bundle, `bundle.json` adds a third line.

The engine reads from the cache, which is verified, bounded, and shared by this machine's processes.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from loramux.common.bundle import BUNDLE_FILE
from loramux.data.storage.errors import StorageError, StorageFaults
from loramux.data.storage.objects import Objects, Staging, open_objects

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files that every content has."""

_digest = re.compile("sha256:[0-9a-f]{64}")


class BlobMissing(StorageError):
    """The store has no content with this digest, which the message names."""


class BlobCorrupt(StorageError):
    """The stored files have another digest than their name. Uploading the same files again repairs the content."""


def digest_of(hashes: Mapping[str, str]) -> str:
    """Compute a content's digest from the SHA-256s of its files, in hexadecimal, by name in the order of FILES."""
    lines = "".join(f"{hashed}  {name}\n" for name, hashed in hashes.items())
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def files_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of the content in `folder`, including its bundle if there is one."""
    return (*FILES, BUNDLE_FILE) if (folder / BUNDLE_FILE).exists() else FILES


def content_digest(folder: Path) -> str:
    """Read all files of the folder and compute their digest. Raises FileNotFoundError."""
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
    """Return the digest of the content that is, or has a file, at this path; None for other paths."""
    parts = place.split("/")
    digest = f"sha256:{''.join(parts[1:3])}"
    return digest if is_digest(digest) and place_of(digest) == "/".join(parts[:3]) else None


class BlobStore:
    """The contents of one store, shared by any number of processes on any number of machines.

    A content is complete when FILES are stored. Each file is complete or absent, and a bundle is stored before FILES.
    An object's name is the digest of its content, so objects are never renamed or locked. All methods block, so call
    them from a thread.
    """

    def __init__(self, objects: Objects, cache: Path, faults: StorageFaults) -> None:
        """`cache` is a folder on this machine's disk, shared by its processes only; `faults` counts failures."""
        self.objects = objects
        """Store of objects that are not contents: parts of uploads."""
        self.faults = faults
        self._staging = Staging(cache / "incoming", faults)
        self._cache = ContentCache(cache, self._staging)

    def staging(self) -> AbstractContextManager[Path]:
        """Return an empty folder to receive files in, removed when the block ends."""
        return self._staging.folder()

    def seal(self, folder: Path) -> str:
        """Make a folder's files read-only and return their digest."""
        for name in files_of(folder):
            (folder / name).chmod(0o400)
        return content_digest(folder)

    def publish(self, folder: Path, digest: str, *, durable: bool = True) -> None:
        """Store copies of a sealed folder's files. Without `durable`, a crash of this machine may damage them, which
        their digest then shows.

        A content that is there already is stored again, which repairs damage. The registration calls `is_stored` once
        more, under the lock that removals hold.
        """
        put = self.objects.put_file if durable else self.objects.put_file_unsynced
        for name in reversed(files_of(folder)):
            put(f"{place_of(digest)}/{name}", folder / name)

    def adopt(self, folder: Path, digest: str) -> None:
        """Move a sealed folder into the cache, so that its content is not fetched and read again."""
        with self.faults.of_disk():
            self._cache.adopt(folder, digest)

    def is_stored(self, digest: str) -> bool:
        """Return whether the store has the content."""
        place = place_of(digest)
        return {f"{place}/{name}" for name in FILES} <= set(self.objects.names(place))

    def directory(self, digest: str) -> Path:
        """Return a local folder with the content's files. The digest of the files was checked when they were fetched.

        Raises BlobMissing, BlobCorrupt or StorageUnavailable.
        """
        with self.faults.of_disk():
            folder = self._cache.verified(digest)
            while folder is None:
                with self.staging() as fetched:
                    self._fetch(digest, fetched)
                    self._cache.adopt(fetched, digest)
                folder = self._cache.known(digest)
            return folder

    def known_directory(self, digest: str) -> Path | None:
        """Return the content's folder if no file needs to be read; otherwise None. The call is fast enough for an event
        loop.
        """
        return self._cache.known(digest)

    def digests(self) -> list[str]:
        """List the digests of contents with at least one stored file."""
        places = (digest_at(name) for name in self.objects.names("sha256"))
        return sorted({digest for digest in places if digest is not None})

    def cached(self) -> list[Cached]:
        """List the contents of this machine's cache, the least recently used first."""
        return self._cache.contents()

    def evict(self, digest: str) -> None:
        """Remove a content from this machine's cache."""
        self._cache.discard(digest)

    def remove(self, digest: str) -> None:
        """Remove a content from the store and the cache; an absent content is ignored."""
        self.objects.delete_under(place_of(digest))
        self._cache.discard(digest)

    def sweep_incoming(self) -> int:
        """Remove the staging areas of this machine's dead processes; return their number."""
        return self._staging.sweep() + self.objects.sweep()

    def close(self) -> None:
        """Remove this process's staging areas."""
        self._staging.close()
        self.objects.close()

    def _fetch(self, digest: str, folder: Path) -> None:
        try:
            place = place_of(digest)
            has_bundle = f"{place}/{BUNDLE_FILE}" in self.objects.names(place)
            for name in (*FILES, BUNDLE_FILE) if has_bundle else FILES:
                self.objects.fetch(f"{place}/{name}", folder / name)
        except FileNotFoundError:
            raise BlobMissing(f"{digest} is not stored") from None
        found = found_in(folder)
        if found != digest:
            raise BlobCorrupt(f"what is stored as {digest} is now {found}; upload the adapter again")


def open_blobs(where: str, cache: str, options: Mapping[str, str]) -> BlobStore:
    """Open the store at `where`, a folder or a URL, with a cache on this machine. Raises StorageUnavailable."""
    faults = StorageFaults()
    return BlobStore(open_objects(where, options, faults), Path(cache), faults)


_Signature = tuple[tuple[int, int, int], ...]


class Cached(NamedTuple):
    """A content in the cache: its bytes, and the seconds since it was last requested."""

    digest: str
    size: int
    idle: float


class ContentCache:
    """Folders that are named by the digest of their content. A folder with its final name is complete.

    Each process computes a folder's digest once, and again when the size, time or inode of a file has changed.
    """

    def __init__(self, root: Path, staging: Staging) -> None:
        self._root = root
        self._staging = staging
        self._verified: dict[str, _Signature] = {}

    def known(self, digest: str) -> Path | None:
        """Return the content's folder if this process has verified it; no file is read."""
        folder = self._root / place_of(digest)
        signature = self._verified.get(digest)
        if signature is None or signature != _signature(folder):
            return None
        try:
            os.utime(folder)
        except FileNotFoundError:  # the content was evicted just now
            return None
        return folder

    def verified(self, digest: str) -> Path | None:
        """Return the content's folder; read its files if necessary. A folder with wrong content is removed."""
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
        """Move a folder with this content to its place, unless another process has already done this."""
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
        """Remove a content; an absent content is ignored."""
        self._verified.pop(digest, None)
        self._staging.discard(self._root / place_of(digest))

    def contents(self) -> list[Cached]:
        """List the contents, the least recently used first."""
        found = []
        for folder in self._root.glob("sha256/??/*"):
            digest, signature = digest_at(folder.relative_to(self._root).as_posix()), _signature(folder)
            if digest is not None and signature is not None:
                idle = max(0.0, time.time() - folder.stat().st_mtime)
                found.append(Cached(digest, sum(size for size, _, _ in signature), idle))
        return sorted(found, key=lambda cached: -cached.idle)


def found_in(folder: Path) -> str | None:
    """Return the digest of the folder's files; None if a file is missing."""
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
