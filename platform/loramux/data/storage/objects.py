"""Objects: named bytes in a folder or in an object store. Each object is complete or absent, and never changed in
place.

Unfinished files are in staging areas. Each process has an area, and holds a lock on it while it lives. An area whose
lock is free therefore belongs to a dead process, and is safe to remove.

All calls block, so use them from a thread.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, from_url

from loramux.data.storage.errors import StorageFaults, StorageUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config


PART = 8 << 20
"""Bytes of a large object that are sent or read in one piece."""
PARTS_AT_ONCE = 4
"""Parts that are sent at the same time. PARTS_AT_ONCE * PART is the memory for a large object."""
RETRIES: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
SILENCE = timedelta(seconds=30)
"""The time without any byte from the store after which a transfer fails. A transfer that makes progress may take
LONGEST.
"""
LONGEST = timedelta(hours=1)


class Objects:
    """Any object store that obstore supports: readers see a put completely or not at all."""

    def __init__(self, store: ObjectStore, faults: StorageFaults) -> None:
        self._store = store
        self._faults = faults

    def put(self, name: str, data: bytes) -> None:
        """Store `data` durably, replacing an object of that name."""
        with self._faults.of_store(is_absence=True):
            obstore.put(self._store, name, data, use_multipart=False)

    def put_file(self, name: str, file: Path) -> None:
        """Store durably a file that is not written any more, replacing an object of that name."""
        with self._faults.of_store(is_absence=True):
            obstore.put(self._store, name, file, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)

    def put_file_unsynced(self, name: str, file: Path) -> None:
        """Store a file as `put_file` does. In a folder, a crash of the machine may damage it."""
        self.put_file(name, file)

    def read(self, name: str, size: int = PART) -> Iterator[bytes]:
        """Yield the object's bytes, about `size` at a time. Raises FileNotFoundError."""
        with self._faults.of_store():
            for data in obstore.get(self._store, name).stream(size):
                yield bytes(data)

    def fetch(self, name: str, target: Path) -> None:
        """Copy the object into a new file. Raises FileNotFoundError."""
        with target.open("xb") as file:
            for data in self.read(name):
                file.write(data)

    def names(self, prefix: str, count: int | None = None) -> list[str]:
        """List the objects under `prefix/`, or `count` of them."""
        with self._faults.of_store(is_absence=True):
            found = (one["path"] for page in obstore.list(self._store, prefix or None) for one in page)
            return sorted(islice(found, count))

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects. Absent objects are ignored."""
        with self._faults.of_store():
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:  # some stores stop at the first absent object
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def delete_under(self, prefix: str) -> None:
        """Remove everything under `prefix/`."""
        self.delete(self.names(prefix))

    def sweep(self) -> int:
        """Remove the leftovers of killed writers; return their number. In a bucket, a lifecycle rule does this."""
        return 0

    def close(self) -> None:
        """Remove this process's own leftovers."""


class Folder(Objects):
    """A folder of this machine, shared by its processes: an object is synced to the disk before it gets its name.

    obstore's own writer for folders does not sync, and does not remove leftovers after a kill. So this class writes the
    files itself.
    """

    def __init__(self, root: Path, faults: StorageFaults) -> None:
        super().__init__(LocalStore(root, mkdir=True), faults)
        self._root = root
        self._staging = Staging(root / "incoming", faults)

    def put(self, name: str, data: bytes) -> None:
        """Store `data`; return when it is on the disk."""
        with self._staging.folder() as folder:
            (folder / "data").write_bytes(data)
            self._place(folder / "data", name)

    def put_file(self, name: str, file: Path) -> None:
        """Store a file, as a link if it is on the same disk; return when it is on the disk."""
        with self._staging.folder() as folder:
            _link_or_copy(file, folder / "data")
            self._place(folder / "data", name)

    def put_file_unsynced(self, name: str, file: Path) -> None:
        """Store a file, as a link if it is on the same disk, without waiting for the disk."""
        with self._staging.folder() as folder:
            _link_or_copy(file, folder / "data")
            self._rename(folder / "data", name)

    def fetch(self, name: str, target: Path) -> None:
        """Link the object, or copy it if the target is on another disk. Raises FileNotFoundError."""
        with self._faults.of_disk():
            _link_or_copy(self._root / name, target)

    def delete_under(self, prefix: str) -> None:
        """Remove the folder."""
        self._staging.discard(self._root / prefix)

    def sweep(self) -> int:
        """Remove the staging areas of dead processes; return their number."""
        return self._staging.sweep()

    def close(self) -> None:
        """Remove this process's staging area."""
        self._staging.close()

    def _place(self, file: Path, name: str) -> None:
        _sync(file)
        target = self._rename(file, name)
        for folder in target.relative_to(self._root).parents:
            _sync(self._root / folder)

    def _rename(self, file: Path, name: str) -> Path:
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        return target


def open_objects(where: str, options: Mapping[str, str], faults: StorageFaults | None = None) -> Objects:
    """Open the folder `where`, or the object store at a URL like s3://bucket/prefix with obstore's options.

    `faults` counts failures. Raises StorageUnavailable if obstore does not know the URL or an option.
    """
    faults = faults or StorageFaults()
    if "://" not in where:
        return Folder(Path(where), faults)
    try:
        obstore.parse_scheme(where)
    except GenericError:
        raise StorageUnavailable(
            f"{where} is not an address of a store; write a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
            "az://CONTAINER/PREFIX"
        ) from None
    client: ClientConfig = {"timeout": LONGEST, "read_timeout": SILENCE}
    if any(value.startswith("http://") for value in options.values()):
        client["allow_http"] = True
    config = cast("S3Config", dict(options))  # or the options of Google or Azure, whose names obstore checks
    with faults.of_store():
        made = from_url(where, config=config, client_options=client, retry_config=RETRIES)
    return Objects(made, faults)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a disk without links
        shutil.copyfile(file, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Staging:
    """This process's area in a folder shared by any number of processes."""

    def __init__(self, root: Path, faults: StorageFaults) -> None:
        self._root = root
        self._faults = faults
        root.mkdir(parents=True, exist_ok=True)
        self._area = root / secrets.token_hex(8)
        self._lock = _claim(self._area)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield an empty folder, which is removed when the block ends. Finished files are renamed out of it.

        A disk that is full, refuses or fails in the block raises StorageUnavailable. All writes to disks use this
        method. If the disk is no longer mounted, the area does not exist, so nothing is written to the folder below the
        mount point.
        """
        with self._faults.of_disk():
            folder = self._area / secrets.token_hex(8)
            try:
                folder.mkdir()
            except FileNotFoundError:
                raise self._faults.absent(f"this server's folder {self._area} has gone") from None
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def discard(self, path: Path) -> None:
        """Remove a folder of the same file system in one atomic step. An absent folder is ignored."""
        doomed = self._area / secrets.token_hex(8)
        try:
            with self._faults.of_disk():
                path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> int:
        """Remove the areas of dead processes; return their number."""
        swept = 0
        for area in self._root.iterdir():
            lock = _try_claim(area)
            if lock is not None:
                shutil.rmtree(area, ignore_errors=True)
                os.close(lock)
                swept += 1
        return swept

    def close(self) -> None:
        """Remove this process's area."""
        shutil.rmtree(self._area, ignore_errors=True)
        os.close(self._lock)


def _claim(area: Path) -> int:
    """Create the area and lock it. Repeat this if another process's sweep has removed the area in between."""
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
