"""Adapters' files under the name of their content: kept in an object store, served from a cache on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from loramux.storage.cache import Cached, ContentCache, found_in
from loramux.storage.contents import (
    FILES,
    BlobCorrupt,
    BlobMissing,
    content_digest,
    digest_at,
    place_of,
)
from loramux.storage.objects import Objects, open_objects
from loramux.storage.staging import Staging


class BlobStore:
    """The contents of one store, shared by any number of processes on any number of machines.

    A content is whole once both its files are stored, each of which is whole or absent; names say what is inside, so
    nothing is ever renamed or locked. Everything here blocks: call it from a thread.
    """

    def __init__(self, objects: Objects, cache: Path) -> None:
        """`cache` is a folder on this machine's disk, for its processes alone."""
        self.objects = objects
        """For what is not a content: pieces of uploads."""
        self._staging = Staging(cache / "incoming")
        self._cache = ContentCache(cache, self._staging)

    def staging(self) -> AbstractContextManager[Path]:
        """An empty folder to receive files in; gone when the block ends."""
        return self._staging.folder()

    def stage(self, folder: Path, files: Iterable[Path]) -> None:
        """Put files into `folder` under their own names: moved out of a staging area, else copied.

        One that is not there is left out.
        """
        for file in files:
            if not file.is_file():
                continue
            if self._staging.holds(file):
                file.rename(folder / file.name)
            else:
                shutil.copyfile(file, folder / file.name)

    def seal(self, folder: Path) -> str:
        """Make a folder's two files read-only and return their digest."""
        for name in FILES:
            (folder / name).chmod(0o444)
        return content_digest(folder)

    def publish(self, folder: Path, digest: str) -> None:
        """Store a sealed folder's files, durably, and leave them there too.

        Stored again where the same content is there: that repairs what is damaged. Whoever registers the content asks
        `is_stored` once more, when nobody can remove it.
        """
        for name in FILES:
            self.objects.put_file(f"{place_of(digest)}/{name}", folder / name)

    def adopt(self, folder: Path, digest: str) -> None:
        """Move a sealed folder into the cache, so that nothing is fetched and read to serve it."""
        self._cache.adopt(folder, digest)

    def is_stored(self, digest: str) -> bool:
        """Whether the store has both files."""
        place = place_of(digest)
        return {f"{place}/{name}" for name in FILES} <= set(self.objects.names(place))

    def directory(self, digest: str) -> Path:
        """A folder of this machine with the content's two files, read whole and compared when it was fetched.

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
        """What `directory` answers, if it can without reading the files; quick enough for an event loop."""
        return self._cache.known(digest)

    def digests(self) -> list[str]:
        """Every content of which anything is stored."""
        places = (digest_at(name) for name in self.objects.names("sha256"))
        return sorted({digest for digest in places if digest is not None})

    def cached(self) -> list[Cached]:
        """Every content in this machine's cache, the longest unused first."""
        return self._cache.contents()

    def evict(self, digest: str) -> None:
        """Take a content out of this machine's cache."""
        self._cache.discard(digest)

    def remove(self, digest: str) -> None:
        """Forget a content, here and in the store; does nothing when it is not stored."""
        self.objects.delete_under(place_of(digest))
        self._cache.discard(digest)

    def sweep_incoming(self) -> int:
        """Remove what processes of this machine that are gone left behind; the number of areas removed."""
        return self._staging.sweep() + self.objects.sweep()

    def close(self) -> None:
        """Give up what is this process's own."""
        self._staging.close()
        self.objects.close()

    def _fetch(self, digest: str, folder: Path) -> None:
        try:
            for name in FILES:
                self.objects.fetch(f"{place_of(digest)}/{name}", folder / name)
        except FileNotFoundError:
            raise BlobMissing(f"{digest} is not stored") from None
        found = found_in(folder)
        if found != digest:
            raise BlobCorrupt(f"what is stored as {digest} is now {found}; upload the adapter again")


def open_blobs(where: str, cache: str, options: Mapping[str, str]) -> BlobStore:
    """The store at `where`, a folder or a URL, with a cache on this machine. Raises StorageUnavailable."""
    return BlobStore(open_objects(where, options), Path(cache))
