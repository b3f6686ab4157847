"""The files of a folder that a server writes and removes at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files_under(folder: Path) -> Iterator[Path]:
    """Every file under `folder`; a folder that is removed during this time is left out (`rglob` raises)."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def holding(folder: Path, content: bytes) -> list[Path]:
    """List the files under `folder` that hold `content`; a file that is removed during this time does not."""
    found = []
    for path in files_under(folder):
        with suppress(FileNotFoundError):
            if content in path.read_bytes():
                found.append(path)
    return found
