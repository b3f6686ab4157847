"""Places of this machine from which a trainer may push: folders, and segments of POSIX shared memory.

A trainer on this machine may be hostile, and may exchange a file for a link at any moment. So a file is opened first,
and then the open file is checked: where it is, and whose. The bytes are copied before any check reads them, so that
the checked bytes are the served ones.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from loramux.catalog.pushes.errors import InvalidPlace, PlaceNotAllowed, PlaceNotFound
from loramux.common.settings.serving import PushSettings
from loramux.data.storage.blobs import CONFIG_FILE, FILES, WEIGHTS_FILE

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  POSIX shared memory, from which the server only reads
SEGMENT = "shm:"
"""Prefix of a place in shared memory."""
CHUNK_BYTES = 1 << 20
_segment = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Places:
    """The places of every tenant."""

    def __init__(self, settings: PushSettings, max_bytes: Mapping[str, int]) -> None:
        """`max_bytes` are the largest sizes of an adapter's files."""
        self._root = Path(settings.root).resolve() if settings.root else None
        self._takes_segments = settings.shared_memory
        self._max_bytes = max_bytes

    def copy(self, tenant_name: str, place: str, config: bytes | None, folder: Path) -> None:
        """Copy the adapter at `place` into `folder`: a folder of the tenant's, or `shm:NAME` and the `config`.

        Blocks. Raises InvalidPlace, PlaceNotAllowed, PlaceNotFound.
        """
        if not place or "\0" in place:
            raise InvalidPlace("'lora_path' is the path of a folder, or shm:NAME.", "lora_path")
        if place.startswith(SEGMENT):
            self._copy_segment(tenant_name, place.removeprefix(SEGMENT), config, folder)
        else:
            self._copy_folder(tenant_name, place, folder)

    def _copy_folder(self, tenant_name: str, place: str, folder: Path) -> None:
        if self._root is None:
            raise PlaceNotAllowed(
                "This server takes no training adapters from its own folders: set pushes.root in its settings, or send "
                "the files in the body, as multipart/form-data.",
                "lora_path",
            )
        own = self._root / tenant_name
        absent = PlaceNotFound(
            f"'lora_path' is no folder with {' and '.join(FILES)} below the tenant's own folder, {tenant_name}, of the "
            "folder that the operator has set (pushes.root).",
            "lora_path",
        )
        for name in FILES:
            self._copy_file(own / place / name, folder / name, lambda at, _: at.is_relative_to(own), absent)

    def _copy_segment(self, tenant_name: str, name: str, config: bytes | None, folder: Path) -> None:
        if not self._takes_segments:
            raise PlaceNotAllowed(
                "This server reads no shared memory: set pushes.shared_memory in its settings, or send the files in "
                "the body, as multipart/form-data.",
                "lora_path",
            )
        own = f"{tenant_name}:"
        if not name.startswith(own) or not _segment.fullmatch(name.removeprefix(own)):
            raise InvalidPlace(
                f"The name of a segment is {own}NAME, where NAME is 1 to 128 letters, digits, '.', '_' and '-'.",
                "lora_path",
            )
        if config is None:
            raise InvalidPlace(
                "'adapter_config' is missing: a segment has the bytes of adapter_model.safetensors only.",
                "adapter_config",
            )
        (folder / CONFIG_FILE).write_bytes(config)
        absent = PlaceNotFound(
            "There is no such segment of shared memory that belongs to the server's own user and that no other user "
            "may write.",
            "lora_path",
        )
        path = SHARED_MEMORY / name
        self._copy_file(path, folder / WEIGHTS_FILE, lambda at, found: at == path and _is_own(found), absent)

    def _copy_file(
        self, source: Path, target: Path, accepts: Callable[[Path, os.stat_result], bool], absent: PlaceNotFound
    ) -> None:
        """Copy an open file that `accepts` takes, by its real path and its status."""
        try:
            # O_NONBLOCK: a pipe must not hold this thread
            descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise absent from None
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            at = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not stat.S_ISREG(found.st_mode) or not accepts(at, found):
                raise absent
            limit = left = self._max_bytes[target.name]
            with target.open("xb") as copy:
                while data := file.read(CHUNK_BYTES):
                    left -= len(data)
                    if left < 0:
                        raise InvalidPlace(
                            f"'{target.name}' has more than the {limit} bytes that are taken.", "lora_path"
                        )
                    copy.write(data)


def _is_own(found: os.stat_result) -> bool:
    """Return whether only the server's own user may write the file."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
