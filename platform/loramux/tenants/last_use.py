"""When keys were last used: noted in memory, written in batches, so that no request waits for it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from loramux.records import Database, RecordsUnavailable
from loramux.records.tenants import CredentialRepository

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
"""How far `last_used_at` may be behind; a crash loses as much."""


class LastUse:
    """One process's notes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, key_id: str, at: int) -> None:
        """The key was used at `at`, in microseconds."""
        self._noted[key_id] = at

    def start(self) -> None:
        """Begin to write; needs a running event loop."""
        self._task = asyncio.create_task(self._write_on(), name="last-use")

    async def stop(self) -> None:
        """Write what is left, then end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.flush()

    async def flush(self) -> None:
        """Write what was noted, in one statement; what the database does not take is kept for the next time."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            async with self._database.begin() as session:
                await CredentialRepository(session).touch(noted)
        except RecordsUnavailable:
            logger.warning("the database did not take when %d keys were last used", len(noted))
            self._noted = noted | self._noted

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()
