"""Room for what is not finished: an area for each process, so that what a dead one left is known for sure."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Staging:
    """This process's area in a folder that any number of processes share; it holds a lock on it while it lives."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._area = root / secrets.token_hex(8)
        self._lock = _claim(self._area)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder, gone when the block ends; what is needed of it is renamed out of it."""
        folder = self._area / secrets.token_hex(8)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def holds(self, path: Path) -> bool:
        """Whether `path` lies in some process's area, and so is nobody else's."""
        return path.resolve().is_relative_to(self._root.resolve())

    def discard(self, path: Path) -> None:
        """Remove a folder of the same file system, for everybody at once; nothing where there is none."""
        doomed = self._area / secrets.token_hex(8)
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what processes that are gone left behind; the number of areas removed."""
        swept = 0
        for area in self._root.iterdir():
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
