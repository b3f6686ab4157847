"""Stored contents: gone when no revision has them and no request runs with them."""

from __future__ import annotations

from loramux.records import Database
from loramux.records.adapters import ContentRepository
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.threads import finished
from loramux.storage import BlobStore

SWEEP_PAGE = 500


class Contents:
    """The blobs of every tenant's revisions, and the rows that say which are needed."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs

    async def sweep(self) -> int:
        """At boot: remove what crashes left behind, staged or stored; the number of contents removed."""
        await finished(self._blobs.sweep_incoming)
        stored = await finished(self._blobs.digests)
        pages = [stored[start : start + SWEEP_PAGE] for start in range(0, len(stored), SWEEP_PAGE)]
        return sum([await self.remove_unused(frozenset(page)) for page in pages])

    async def remove_unused(self, digests: frozenset[str]) -> int:
        """Remove those of `digests` that nobody needs; how many."""
        async with self._database.begin() as session:
            await exclusive(session, CONTENTS)
            unused = await ContentRepository(session).unused(digests)
            for digest in unused:
                await finished(self._blobs.remove, digest)
        return len(unused)
