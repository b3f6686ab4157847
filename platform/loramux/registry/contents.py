"""Stored contents: gone when no revision keeps them and no request runs with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loramux.records import Database
from loramux.records.contents import ContentRepository
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.retiring import ADMISSION_SECONDS, SECOND
from loramux.registry.threads import finished
from loramux.storage import BlobStore, Cached

SWEEP_PAGE = 500
IDLE_SECONDS = 600.0
"""A content that was resolved so short a time ago may be about to be read, its request not yet in the records."""


class Contents:
    """The blobs of every tenant's revisions, and the rows that say which are needed."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._left: frozenset[str] = frozenset()
        """Given up, and to be removed when the last request with them has ended."""

    async def sweep(self) -> int:
        """At boot: remove what crashes left behind, staged or stored; the number of contents removed."""
        await finished(self._blobs.sweep_incoming)
        stored = await finished(self._blobs.digests)
        pages = [stored[start : start + SWEEP_PAGE] for start in range(0, len(stored), SWEEP_PAGE)]
        return sum([len(await self.remove_unused(frozenset(page))) for page in pages])

    async def trim_cache(self, most: int) -> int:
        """Take out of this machine's cache what nobody needs, and of what is idle the bytes over `most`; how many."""
        cached = await finished(self._blobs.cached)
        pages = [cached[start : start + SWEEP_PAGE] for start in range(0, len(cached), SWEEP_PAGE)]
        over = sum(content.size for content in cached) - most
        evicted = 0
        for page in pages:
            idle = [content for content in page if content.idle >= IDLE_SECONDS]
            for content in await self._evictable(idle, over):
                await finished(self._blobs.evict, content.digest)
                over, evicted = over - content.size, evicted + 1
        return evicted

    async def _evictable(self, idle: Sequence[Cached], over: int) -> list[Cached]:
        """Those without a revision, and others until `over` bytes leave; none that a request runs with."""
        digests = frozenset(content.digest for content in idle)
        async with self._database.read() as session:
            contents = ContentRepository(session)
            unused, running = await contents.unused(digests), await contents.running(digests)
        leaving = []
        for content in idle:
            if content.digest in unused or (over > 0 and content.digest not in running):
                leaving.append(content)
                over -= content.size
        return leaving

    async def purge(self) -> int:
        """Remove the contents of what was deleted for good; the number removed."""
        async with self._database.begin() as session:
            self._left |= await ContentRepository(session).expire(self._database.now(), SWEEP_PAGE)
        removed = await self.remove_unused(self._left) if self._left else frozenset()
        async with self._database.read() as session:
            self._left = await ContentRepository(session).unkept(self._left - removed)
        return len(removed)

    async def uncallable(self, digests: Collection[str]) -> frozenset[str]:
        """Those of `digests` that no name means any more."""
        async with self._database.read() as session:
            return await ContentRepository(session).uncallable(digests)

    async def departed(self) -> frozenset[str]:
        """The contents that no name means any more, of those that were deleted lately.

        Each is named until no request can come that had found it before its deletion.
        """
        async with self._database.read() as session:
            contents = ContentRepository(session)
            lately = self._database.now() - 2 * ADMISSION_SECONDS * SECOND
            return await contents.uncallable(await contents.deleted_since(lately))

    async def remove_unused(self, digests: frozenset[str]) -> frozenset[str]:
        """Remove those of `digests` that no revision keeps and no request runs with; which they were."""
        async with self._database.begin() as session:
            await exclusive(session, CONTENTS)
            unused = await ContentRepository(session).unused(digests)
            for digest in unused:
                await finished(self._blobs.remove, digest)
        return unused
