"""Adapters' files on disk, under the name of their content.

    StorageError
    ├── BlobMissing    no such content is stored
    └── BlobCorrupt    what is stored under that name is not that content

A content's digest is the SHA-256 of the two lines that `sha256sum adapter_config.json adapter_model.safetensors`
prints, so that anybody can compute it in a shell. A folder under its final name is complete and on disk: it is
written elsewhere, synced, and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)

_digest = re.compile("sha256:[0-9a-f]{64}")
_Signature = tuple[tuple[int, int, int], ...]


class StorageError(Exception):
    """Base of what storage raises."""


class BlobMissing(StorageError):
    """The message names the digest."""


class BlobCorrupt(StorageError):
    """The message names both digests; uploading the same files again repairs it."""


def content_digest(folder: Path) -> str:
    """`sha256:` and the digest of the folder's two files; reads them whole."""
    lines = []
    for name in FILES:
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


class BlobStore:
    """A folder of contents, shared by any number of processes.

    Everything here blocks on the disk: call it from a thread. Every process writes into an area of its own under
    `incoming/` and holds a lock on it as long as it lives, so what a dead process left behind is known for sure.
    """

    def __init__(self, root: Path) -> None:
        self._contents = root / "sha256"
        self._incoming = root / "incoming"
        self._contents.mkdir(parents=True, exist_ok=True)
        self._incoming.mkdir(exist_ok=True)
        self._area = self._incoming / secrets.token_hex(8)
        self._lock = _claim(self._area)
        self._verified: dict[str, _Signature] = {}

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder to receive files in, on the same file system; gone when the block ends."""
        folder = self._area / secrets.token_hex(8)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stage(self, folder: Path, config_file: Path, weights_file: Path) -> None:
        """Put both files into `folder` under their standard names: moved out of a staging area, else copied.

        One that is not there is left out.
        """
        for source, name in ((config_file, CONFIG_FILE), (weights_file, WEIGHTS_FILE)):
            if not source.is_file():
                continue
            if source.resolve().is_relative_to(self._incoming.resolve()):
                source.rename(folder / name)
            else:
                shutil.copyfile(source, folder / name)

    def seal(self, folder: Path) -> str:
        """Write a staged folder's files through to the disk, read-only, and return their digest."""
        for name in FILES:
            (folder / name).chmod(0o444)
            _sync(folder / name)
        _sync(folder)
        return content_digest(folder)

    def publish(self, folder: Path, digest: str) -> None:
        """Give a sealed folder its final name, unless content that `directory` has verified has it already.

        Reads no file: it is quick enough to be done while a transaction is open.
        """
        if self.known_directory(digest) is not None:
            return
        self.remove(digest)
        signature = _signature(folder)
        assert signature is not None, "a folder is sealed before it is published"
        target = self._path(digest)
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        _sync(target.parent)
        _sync(self._contents)
        self._verified[digest] = signature

    def directory(self, digest: str) -> Path:
        """The folder with this content's two files.

        Read whole and compared the first time, and again whenever a file's size or times have changed.
        Raises BlobMissing or BlobCorrupt.
        """
        folder = self._path(digest)
        signature = _signature(folder)
        if signature is None:
            raise BlobMissing(f"{digest} is not stored")
        if self._verified.get(digest) != signature:
            found = content_digest_or_none(folder)
            if found != digest:
                raise BlobCorrupt(f"what is stored as {digest} is now {found}; upload the adapter again")
            self._verified[digest] = signature
        return folder

    def known_directory(self, digest: str) -> Path | None:
        """What `directory` answers, if it can without reading the files; quick enough for an event loop."""
        folder = self._path(digest)
        signature = self._verified.get(digest)
        return folder if signature is not None and signature == _signature(folder) else None

    def digests(self) -> list[str]:
        """Every content that is stored."""
        names = (f"sha256:{folder.parent.name}{folder.name}" for folder in self._contents.glob("??/*"))
        return sorted(name for name in names if _digest.fullmatch(name))

    def remove(self, digest: str) -> None:
        """Forget a content; does nothing when it is not stored."""
        self._verified.pop(digest, None)
        doomed = self._area / secrets.token_hex(8)
        try:
            self._path(digest).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)

    def sweep_incoming(self) -> int:
        """Remove what processes that are gone left behind; the number of areas removed."""
        swept = 0
        for area in self._incoming.iterdir():
            lock = _try_claim(area)
            if lock is not None:
                shutil.rmtree(area, ignore_errors=True)
                os.close(lock)
                swept += 1
        return swept

    def close(self) -> None:
        """Give up this process's own area."""
        shutil.rmtree(self._area, ignore_errors=True)
        os.close(self._lock)

    def _path(self, digest: str) -> Path:
        assert _digest.fullmatch(digest), f"not a digest: {digest!r}"
        hexadecimal = digest.removeprefix("sha256:")
        return self._contents / hexadecimal[:2] / hexadecimal[2:]


def content_digest_or_none(folder: Path) -> str | None:
    """The folder's digest; None when a file is missing."""
    try:
        return content_digest(folder)
    except FileNotFoundError:
        return None


def _claim(area: Path) -> int:
    """Make the area and hold it; again where another process's sweep took it in between."""
    while True:
        area.mkdir(exist_ok=True)
        descriptor = _try_claim(area)
        if descriptor is not None and area.exists():
            return descriptor
        if descriptor is not None:
            os.close(descriptor)


def _try_claim(area: Path) -> int | None:
    try:
        descriptor = os.open(area, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _signature(folder: Path) -> _Signature | None:
    try:
        stats = [(folder / name).stat() for name in FILES]
    except FileNotFoundError:
        return None
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
