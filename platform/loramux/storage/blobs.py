"""Adapters' files under their digest: kept in an object store, served from a cache on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from loramux.bundle import BUNDLE_FILE
from loramux.storage.cache import Cached, ContentCache, found_in
from loramux.storage.contents import (
    FILES,
    BlobCorrupt,
    BlobMissing,
    content_digest,
    digest_at,
    files_of,
    place_of,
)
from loramux.storage.objects import Objects, open_objects
from loramux.storage.staging import Staging


class BlobStore:
    """The contents of one store, shared by any number of processes on any number of machines.

    A content is complete once FILES are stored, each of which is complete or absent; a bundle is stored before them. An
    object's name is the digest of its content, so nothing is ever renamed or locked. Everything here blocks: call it
    from a thread.
    """

    def __init__(self, objects: Objects, cache: Path) -> None:
        """`cache` is a folder on this machine's disk, shared by its processes only."""
        self.objects = objects
        """Store of objects that are no contents: parts of uploads."""
        self._staging = Staging(cache / "incoming")
        self._cache = ContentCache(cache, self._staging)

    def staging(self) -> AbstractContextManager[Path]:
        """Return an empty folder to receive files in, removed when the block ends."""
        return self._staging.folder()

    def seal(self, folder: Path) -> str:
        """Make a folder's files read-only and return their digest."""
        for name in files_of(folder):
            (folder / name).chmod(0o400)
        return content_digest(folder)

    def publish(self, folder: Path, digest: str) -> None:
        """Store copies of a sealed folder's files, durably.

        A content that is there already is stored again, which repairs damage. The registration asks `is_stored` once
        more, under the lock that removals hold.
        """
        for name in reversed(files_of(folder)):
            self.objects.put_file(f"{place_of(digest)}/{name}", folder / name)

    def adopt(self, folder: Path, digest: str) -> None:
        """Move a sealed folder into the cache, so that it is not fetched and read again."""
        self._cache.adopt(folder, digest)

    def is_stored(self, digest: str) -> bool:
        """Return whether the store has the content."""
        place = place_of(digest)
        return {f"{place}/{name}" for name in FILES} <= set(self.objects.names(place))

    def directory(self, digest: str) -> Path:
        """Return a local folder with the content's files, whose digest was compared when they were fetched.

        Raises BlobMissing, BlobCorrupt or StorageUnavailable.
        """
        folder = self._cache.verified(digest)
        while folder is None:
            with self.staging() as fetched:
                self._fetch(digest, fetched)
                self._cache.adopt(fetched, digest)
            folder = self._cache.known(digest)
        return folder

    def known_directory(self, digest: str) -> Path | None:
        """Return the same folder where no file needs to be read, else None; fast enough for an event loop."""
        return self._cache.known(digest)

    def digests(self) -> list[str]:
        """List the digests of which any file is stored."""
        places = (digest_at(name) for name in self.objects.names("sha256"))
        return sorted({digest for digest in places if digest is not None})

    def cached(self) -> list[Cached]:
        """List the contents of this machine's cache, the longest unused first."""
        return self._cache.contents()

    def evict(self, digest: str) -> None:
        """Remove a content from this machine's cache."""
        self._cache.discard(digest)

    def remove(self, digest: str) -> None:
        """Remove a content from the store and the cache; does nothing where it is absent."""
        self.objects.delete_under(place_of(digest))
        self._cache.discard(digest)

    def sweep_incoming(self) -> int:
        """Remove the staging areas of dead processes of this machine; return how many."""
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
    return BlobStore(open_objects(where, options), Path(cache))
