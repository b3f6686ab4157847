"""Named bytes in a folder or in an object store: each is whole or absent, and none is ever changed in place.

Everything here blocks: call it from a thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from loramux.storage.contents import StorageUnavailable
from loramux.storage.staging import Staging

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

PART = 8 << 20
"""Bytes of a large object that are sent or read at a time..."""
PARTS_AT_ONCE = 4
"""...and how many such are sent: their product is what a large object costs in memory."""
PATIENCE: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
SILENCE = timedelta(seconds=30)
"""How long a store may say nothing; a transfer that goes on may take LONGEST."""
LONGEST = timedelta(hours=1)


class Objects:
    """Any object store that obstore speaks to: a put is seen whole or not at all."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, name: str, data: bytes) -> None:
        """Store `data`, durably; takes the place of what had the name."""
        with _told():
            obstore.put(self._store, name, data, use_multipart=False)

    def put_file(self, name: str, file: Path) -> None:
        """Store a file that nobody writes to any more, durably; takes the place of what had the name."""
        with _told():
            obstore.put(self._store, name, file, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)

    def read(self, name: str) -> Iterator[bytes]:
        """The object's bytes, PART or more at a time. Raises FileNotFoundError."""
        with _told():
            for data in obstore.get(self._store, name).stream(PART):
                yield bytes(data)

    def fetch(self, name: str, target: Path) -> None:
        """Copy the object into a file that is not there yet. Raises FileNotFoundError."""
        with target.open("xb") as file:
            for data in self.read(name):
                file.write(data)

    def names(self, prefix: str) -> list[str]:
        """The objects under `prefix/`."""
        with _told():
            return sorted(found["path"] for page in obstore.list(self._store, prefix) for found in page)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are passed over."""
        with _told():
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:  # some stores stop at the first that is not there
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def delete_under(self, prefix: str) -> None:
        """Remove everything under `prefix/`."""
        self.delete(self.names(prefix))

    def sweep(self) -> int:
        """Remove what killed writers left half-written; how many such there were. A bucket's lifecycle rule does it."""
        return 0

    def close(self) -> None:
        """Give up what is this process's own."""


class Folder(Objects):
    """A folder of this machine, shared by its processes: what is written is on the disk before it has its name.

    obstore's own writer for folders neither syncs nor tidies up after a kill, so this class writes by itself.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(LocalStore(root, mkdir=True))
        self._root = root
        self._staging = Staging(root / "incoming")

    def put(self, name: str, data: bytes) -> None:
        """Store `data`, and return when the disk has it."""
        with self._staging.folder() as folder:
            (folder / "data").write_bytes(data)
            self._place(folder / "data", name)

    def put_file(self, name: str, file: Path) -> None:
        """Store a file, linked where it is on this disk already, and return when the disk has it."""
        with self._staging.folder() as folder:
            _link_or_copy(file, folder / "data")
            self._place(folder / "data", name)

    def fetch(self, name: str, target: Path) -> None:
        """Link the object, or copy it on to another disk. Raises FileNotFoundError."""
        _link_or_copy(self._root / name, target)

    def delete_under(self, prefix: str) -> None:
        """Remove the folder."""
        self._staging.discard(self._root / prefix)

    def sweep(self) -> int:
        """Remove what processes that are gone have not finished writing; how many such there were."""
        return self._staging.sweep()

    def close(self) -> None:
        """Give up this process's area."""
        self._staging.close()

    def _place(self, file: Path, name: str) -> None:
        _sync(file)
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        for folder in target.relative_to(self._root).parents:
            _sync(self._root / folder)


def open_objects(where: str, options: Mapping[str, str]) -> Objects:
    """The folder `where`, or the object store at a URL like s3://bucket/prefix, with obstore's options for it.

    Raises StorageUnavailable where the URL or an option is none that obstore knows.
    """
    if "://" not in where:
        return Folder(Path(where))
    client: ClientConfig = {"timeout": LONGEST, "read_timeout": SILENCE}
    if any(value.startswith("http://") for value in options.values()):
        client["allow_http"] = True
    config = cast("S3Config", dict(options))  # or Google's, or Azure's: obstore checks the names
    with _told():
        made = from_url(where, config=config, client_options=client, retry_config=PATIENCE)
    return Objects(made)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (BaseError, ValueError) as error:
        raise StorageUnavailable(f"the object store: {error}") from error


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
