"""Garbage collection of stored files: a content is removed when no revision keeps it and no request runs with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loramux.records import Database, TenantId
from loramux.records.contents import ContentRepository
from loramux.records.locks import CONTENTS, advisory_lock
from loramux.registry.deletion import ADMISSION_SECONDS
from loramux.registry.entities import engine_key
from loramux.storage import BlobStore, Cached
from loramux.threads import run_blocking
from loramux.units import SECOND

SWEEP_PAGE = 500
IDLE_SECONDS = 600.0
"""A content resolved more recently may be about to be read by a request that is not in the records yet."""


class BlobCollector:
    """Removes the blobs of every tenant's revisions that no row needs any more."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._pending: frozenset[str] = frozenset()
        """Digests without a revision, to be removed when the last request with them has ended."""

    async def sweep(self) -> int:
        """Remove staged and stored files that crashes left behind, at boot; return the number of contents removed."""
        await run_blocking(self._blobs.sweep_incoming)
        stored = await run_blocking(self._blobs.digests)
        pages = [stored[start : start + SWEEP_PAGE] for start in range(0, len(stored), SWEEP_PAGE)]
        return sum([len(await self.remove_unused(frozenset(page))) for page in pages])

    async def trim_cache(self, most: int) -> int:
        """Evict unneeded contents from this machine's cache, and idle ones beyond `most` bytes; return how many."""
        cached = await run_blocking(self._blobs.cached)
        pages = [cached[start : start + SWEEP_PAGE] for start in range(0, len(cached), SWEEP_PAGE)]
        over = sum(content.size for content in cached) - most
        evicted = 0
        for page in pages:
            idle = [content for content in page if content.idle >= IDLE_SECONDS]
            for content in await self._evictable(idle, over):
                await run_blocking(self._blobs.evict, content.digest)
                over, evicted = over - content.size, evicted + 1
        return evicted

    async def _evictable(self, idle: Sequence[Cached], over: int) -> list[Cached]:
        """Choose contents without a revision, then others until `over` bytes leave; none that a request runs with."""
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
        """Remove the contents of revisions that cannot be undeleted any more; return the number removed."""
        async with self._database.begin() as session:
            self._pending |= await ContentRepository(session).expire(self._database.now(), SWEEP_PAGE)
        removed = await self.remove_unused(self._pending) if self._pending else frozenset()
        async with self._database.read() as session:
            self._pending = await ContentRepository(session).unkept(self._pending - removed)
        return len(removed)

    def remove_later(self, digest: str) -> None:
        """Have the next `purge` remove a stored content that may have no revision."""
        self._pending |= {digest}

    async def uncallable(self, tenant: TenantId, digests: Collection[str]) -> frozenset[str]:
        """Return the engine's keys of those of `digests` that no name of the tenant resolves to."""
        async with self._database.read() as session:
            found = await ContentRepository(session).uncallable(tenant, digests)
        return frozenset(engine_key(tenant, digest) for digest in found)

    async def recently_uncallable(self) -> frozenset[str]:
        """Return the engine's keys that no name resolves to, of revisions deleted recently.

        Each is returned until no request can arrive that had resolved it before its deletion.
        """
        async with self._database.read() as session:
            found = await ContentRepository(session).uncallable_since(
                self._database.now() - 2 * ADMISSION_SECONDS * SECOND
            )
        return frozenset(engine_key(tenant, digest) for tenant, digest in found)

    async def remove_unused(self, digests: frozenset[str]) -> frozenset[str]:
        """Remove those of `digests` that no revision keeps and no request runs with; return them."""
        async with self._database.begin() as session:
            await advisory_lock(session, CONTENTS)
            unused = await ContentRepository(session).unused(digests)
            for digest in unused:
                await run_blocking(self._blobs.remove, digest)
        return unused
