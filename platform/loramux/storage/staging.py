"""Staging areas for unfinished files, one for each process: a process holds a lock on its area while it lives.

An area without a holder therefore belongs to a dead process, and is safe to remove.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.storage.contents import shortages_are_outages


class Staging:
    """This process's area in a folder shared by any number of processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._area = root / secrets.token_hex(8)
        self._lock = _claim(self._area)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield an empty folder, removed when the block ends; finished files are renamed out of it.

        A disk that is full in the block raises StorageUnavailable: all that is written to disks goes this way.
        """
        with shortages_are_outages():
            folder = self._area / secrets.token_hex(8)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def discard(self, path: Path) -> None:
        """Remove a folder of the same file system in one step for all readers; does nothing where it is absent."""
        doomed = self._area / secrets.token_hex(8)
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> int:
        """Remove the areas of dead processes; return how many."""
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
    """Create the area and lock it; again where another process's sweep removed it in between."""
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
