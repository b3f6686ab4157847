"""Files that are written as their bytes come, with a running hash: constant memory, however large they are."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from loramux.registry.threads import finished


class Written(NamedTuple):
    """How large a file is, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class TooLarge(Exception):
    """There are more bytes than were allowed; the message is for nobody."""


async def write(target: Path, chunks: AsyncIterator[bytes], most: int) -> Written:
    """Write a new file. Raises TooLarge where there are more than `most` bytes."""
    running, size = hashlib.sha256(), 0

    def append(file: BinaryIO, data: bytes) -> None:
        running.update(data)
        file.write(data)

    with target.open("xb") as file:
        async for data in chunks:
            size += len(data)
            if size > most:
                raise TooLarge
            await finished(append, file, data)
    return Written(size, running.hexdigest())


async def off_loop(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same chunks, each waited for on a thread."""
    while (data := await finished(next, chunks, None)) is not None:
        yield data
