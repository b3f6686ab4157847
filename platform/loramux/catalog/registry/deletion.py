"""Deletion of adapters and revisions, undeletion, expiry, and the removal of unneeded files.

A deleted revision cannot be called. A deleted revision's files remain until `purge_at`. Until then the deletion can be
undone, and requests that had resolved the name before the deletion can still be queued. After that, `BlobCollector`
removes a content if no revision keeps it and no request uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from loramux.accounts.tenants.tenants import system_principal
from loramux.catalog.registry.aliases import AliasService, existing_alias
from loramux.catalog.registry.changes import UNCONDITIONAL, AdapterChange, ChangeService, Preconditions
from loramux.catalog.registry.entities import AdapterInfo, RevisionInfo, WeightedRevision
from loramux.catalog.registry.errors import (
    AdapterNotFound,
    ChangeConflict,
    InvalidChange,
    PartNotFound,
    TooManyAdapters,
)
from loramux.catalog.registry.resolver import engine_key
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, TenantId
from loramux.common.jobs import SERVER, run_blocking
from loramux.common.settings.serving import AdapterLimits
from loramux.common.units import SECOND
from loramux.data.records.adapters import AdapterRepository, ExpiryRepository, Overdue, RevisionRow
from loramux.data.records.aliases import DEFAULT_ALIAS, WHOLE, Target
from loramux.data.records.contents import ContentRepository
from loramux.data.records.database import CONTENTS, Database, advisory_lock
from loramux.data.records.pins import BY_DELETION
from loramux.data.storage.blobs import BlobStore, Cached
from loramux.money.limits.definitions import adapter_quota

ADMISSION_SECONDS = 60
"""Minimum seconds for which deleted files stay, because requests may have resolved the name but not be queued yet."""
MAX_TTL_SECONDS = 10 * 365 * 86_400
AT_A_TIME = 100
POSTPONED_SECONDS = 3600
"""Seconds until the next attempt to expire a revision whose aliases must not move to their other targets."""

SWEEP_PAGE = 500
IDLE_SECONDS = 600.0
"""Seconds for which a resolved content stays in the cache: a request that is not in the records yet may read it."""

logger = logging.getLogger(__name__)


class DeletionService:
    """Deletes, undeletes, and sets expiry times. Every change also raises the errors of `ChangeService.change`."""

    def __init__(
        self, database: Database, changes: ChangeService, aliases: AliasService, limits: AdapterLimits
    ) -> None:
        self._database = database
        self._changes = changes
        self._aliases = aliases
        self._limits = limits

    async def delete(
        self,
        principal: Principal,
        name: str,
        preconditions: Preconditions = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> tuple[AdapterInfo, frozenset[str]]:
        """Delete the adapter; return its last description, and the digests of the revisions that could be called.

        The deletion can be undone for `undo_seconds`, by default for the time of the settings. Running requests finish.
        """

        async def act(change: AdapterChange) -> tuple[AdapterInfo, frozenset[str]]:
            return await self._delete(change, "adapter.delete", self._purge_at(change.now, undo_seconds))

        return await self._changes.change(principal, name, preconditions, act, tuple[AdapterInfo, frozenset[str]])

    async def delete_revision(
        self,
        principal: Principal,
        name: str,
        number: int,
        preconditions: Preconditions = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> RevisionInfo:
        """Delete one revision. Raises PartNotFound, and ChangeConflict if an alias points at it."""

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            if aliases := await change.aliases.naming(revision.id):
                raise ChangeConflict(
                    "revision_in_use",
                    f"`{change.name}@{number}` is what {', '.join(aliases)} points at: promote another revision there "
                    "first, or delete the adapter.",
                    "revision",
                )
            return await self._delete_revision(change, revision, "revision.delete", undo_seconds)

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def undelete(
        self, principal: Principal, name: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> AdapterInfo:
        """Undo `delete`: restore the adapter, its aliases, grants and the revisions deleted with it, but not its pins.

        Raises AdapterNotFound if the adapter cannot be undeleted any more, and TooManyAdapters if the quota is full.
        """

        async def act(change: AdapterChange) -> AdapterInfo:
            quota = await adapter_quota(change.session, principal, self._limits)
            if await change.adapters.count() >= quota.adapters:
                raise TooManyAdapters(f"you have {quota.adapters} adapters, the most that is allowed", "name")
            if not await change.adapters.undelete(change.adapter, change.now):
                raise AdapterNotFound(name)
            info = await change.info()
            await change.record("adapter.undelete", after=info)
            return await change.info()

        find = AdapterRepository.lock_deleted
        return await self._changes.change(principal, name, preconditions, act, AdapterInfo, find)

    async def undelete_revision(
        self, principal: Principal, name: str, number: int, preconditions: Preconditions = UNCONDITIONAL
    ) -> AdapterInfo:
        """Undo `delete_revision`; a revision that is not deleted is not changed. Raises PartNotFound."""

        async def act(change: AdapterChange) -> AdapterInfo:
            revision = await change.adapters.revision(change.adapter.id, number)
            if revision is None:
                raise PartNotFound(
                    "revision", change.name, f"has no revision {number}, deleted or not, whose content is still there."
                )
            if revision.deleted_at is not None:
                await change.adapters.restore(change.adapter, revision, change.now)
                await change.record("revision.undelete", f"@{number}", after=await change.revision_info(revision))
            return await change.info()

        return await self._changes.change(principal, name, preconditions, act, AdapterInfo)

    async def set_ttl(
        self, principal: Principal, name: str, ttl: int | None, preconditions: Preconditions = UNCONDITIONAL
    ) -> AdapterInfo:
        """Set the adapter to expire in `ttl` seconds; None: never. Raises InvalidChange."""
        check_ttl(ttl)

        async def act(change: AdapterChange) -> AdapterInfo:
            before = await change.info()
            change.adapter.expires_at = _moment(change.now, ttl)
            await change.record("adapter.update", before=before, after=await change.info())
            return await change.info()

        return await self._changes.change(principal, name, preconditions, act, AdapterInfo)

    async def set_revision_ttl(
        self,
        principal: Principal,
        name: str,
        number: int,
        ttl: int | None,
        preconditions: Preconditions = UNCONDITIONAL,
    ) -> RevisionInfo:
        """Set the expiry of one revision. After the expiry, the revision's aliases keep their other targets. Raises
        InvalidChange, PartNotFound.

        If a condition of an alias refuses these targets, the revision remains, and its expiry is tried again every
        hour.
        """
        check_ttl(ttl)

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            before = await change.revision_info(revision)
            revision.expires_at = _moment(change.now, ttl)
            after = await change.revision_info(revision)
            await change.record("revision.update", f"@{number}", before=before, after=after)
            return after

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def expire(self) -> int:
        """Delete adapters and revisions that have expired; return their number."""
        async with self._database.read() as session:
            overdue = await ExpiryRepository(session).overdue(self._database.now(), AT_A_TIME)
        for one in overdue:
            await self._expire(one)
        return len(overdue)

    async def _expire(self, one: Overdue) -> None:
        system = system_principal(one.tenant, one.tenant_name)

        async def act(change: AdapterChange) -> None:
            purge_at = self._purge_at(change.now, None)
            if one.number is None:
                if _is_over(change.adapter.expires_at, change.now):
                    await self._delete(change, "adapter.expire", purge_at)
                return
            revision = await change.adapters.revision(change.adapter.id, one.number)
            if revision is None or revision.deleted_at is not None or not _is_over(revision.expires_at, change.now):
                return  # the owner has changed the expiry since
            others = [
                row
                for row in await change.adapters.revisions(change.adapter.id)
                if row.deleted_at is None and row.id != revision.id
            ]
            if not others:
                await self._delete(change, "adapter.expire", purge_at)
                return
            remaining = await _remaining_targets(change, revision, others[0])
            try:
                for alias, targets in remaining.items():
                    weighted = [WeightedRevision(target.revision.number, target.weight) for target in targets]
                    await self._aliases.ensure_allowed(system, change, await existing_alias(change, alias), weighted)
            except LoramuxError as error:
                await self._postpone(change, revision, error)
                return
            await _leave_aliases(change, remaining)
            await self._delete_revision(change, revision, "revision.expire", None)

        try:
            await self._changes.change(system, one.adapter, UNCONDITIONAL, act, type(None))
        except AdapterNotFound:
            return  # the owner has changed the expiry since

    async def _postpone(self, change: AdapterChange, revision: RevisionRow, error: LoramuxError) -> None:
        before = await change.revision_info(revision)
        revision.expires_at = change.now + POSTPONED_SECONDS * SECOND
        after = await change.revision_info(revision)
        await change.record("revision.update", f"@{revision.number}", before=before, after=after)
        logger.warning("%s@%d does not expire for another hour: %s", change.name, revision.number, error)

    async def _delete(self, change: AdapterChange, action: str, purge_at: int) -> tuple[AdapterInfo, frozenset[str]]:
        before = await change.info()
        gone = await change.adapters.delete(change.adapter, change.now, purge_at)
        await change.pins.end([row.id for row in gone], BY_DELETION, change.now)
        await change.record(action, before=before)
        return before, frozenset(row.digest for row in gone)

    async def _delete_revision(
        self, change: AdapterChange, revision: RevisionRow, action: str, undo_seconds: int | None
    ) -> RevisionInfo:
        before = await change.revision_info(revision)
        await change.pins.end([revision.id], BY_DELETION, change.now)
        await change.adapters.retire(change.adapter, revision, change.now, self._purge_at(change.now, undo_seconds))
        await change.record(action, f"@{revision.number}", before=before)
        return await change.revision_info(revision)

    def _purge_at(self, now: int, undo_seconds: int | None) -> int:
        undo = self._limits.undo_seconds if undo_seconds is None else undo_seconds
        return now + max(undo, ADMISSION_SECONDS) * SECOND


def check_ttl(ttl: int | None) -> None:
    """Raise InvalidChange if the time is out of range."""
    if ttl is not None and not 1 <= ttl <= MAX_TTL_SECONDS:
        raise InvalidChange(f"ttl_s is 1 to {MAX_TTL_SECONDS} seconds, or null for ever; got {ttl}", "ttl_s")


def _moment(now: int, ttl: int | None) -> int | None:
    return None if ttl is None else now + ttl * SECOND


def _is_over(expires_at: int | None, now: int) -> bool:
    return expires_at is not None and expires_at <= now


async def _remaining_targets(
    change: AdapterChange, revision: RevisionRow, newest: RevisionRow
) -> dict[str, list[Target]]:
    """Return the remaining targets of each alias of the revision. An alias without remaining targets is removed.

    If the default alias loses its only target, it moves to `newest`, the newest remaining revision.
    """
    pointed = {one.alias.name: one.targets for one in (await change.aliases.all(change.adapter.id))[change.adapter.id]}
    remaining = {}
    for name in await change.aliases.naming(revision.id):
        rest = [target for target in pointed[name] if target.revision.id != revision.id]
        if not rest and name == DEFAULT_ALIAS:
            rest = [Target(newest, WHOLE)]
        remaining[name] = rest
    return remaining


async def _leave_aliases(change: AdapterChange, remaining: dict[str, list[Target]]) -> None:
    for name, targets in remaining.items():
        if targets:
            await change.aliases.point(change.adapter.id, name, targets, change.stamp)
        else:
            await change.aliases.remove(change.adapter.id, name, change.stamp)


class BlobCollector:
    """Removes the blobs of every tenant's revisions that no row needs."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._pending: frozenset[str] = frozenset()
        """Digests without a revision, which are removed when the last request with them has ended."""

    async def sweep(self) -> int:
        """Remove staged and stored files that crashes left, at boot; return the number of contents removed."""
        await run_blocking(SERVER, self._blobs.sweep_incoming)
        stored = await run_blocking(SERVER, self._blobs.digests)
        pages = [stored[start : start + SWEEP_PAGE] for start in range(0, len(stored), SWEEP_PAGE)]
        return sum([len(await self.remove_unused(frozenset(page))) for page in pages])

    async def trim_cache(self, most: int) -> int:
        """Evict unneeded contents from this machine's cache, and idle contents above `most` bytes; return the number of
        evicted contents.
        """
        cached = await run_blocking(SERVER, self._blobs.cached)
        pages = [cached[start : start + SWEEP_PAGE] for start in range(0, len(cached), SWEEP_PAGE)]
        over = sum(content.size for content in cached) - most
        evicted = 0
        for page in pages:
            idle = [content for content in page if content.idle >= IDLE_SECONDS]
            for content in await self._evictable(idle, over):
                await run_blocking(SERVER, self._blobs.evict, content.digest)
                over, evicted = over - content.size, evicted + 1
        return evicted

    async def _evictable(self, idle: Sequence[Cached], over: int) -> list[Cached]:
        """Choose contents without a revision, then other contents until `over` bytes are chosen. Contents that a
        request uses are never chosen.
        """
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
        """Remove the contents of revisions that cannot be undeleted any more; return their number."""
        async with self._database.begin() as session:
            self._pending |= await ContentRepository(session).expire(self._database.now(), SWEEP_PAGE)
        removed = await self.remove_unused(self._pending) if self._pending else frozenset()
        async with self._database.read() as session:
            self._pending = await ContentRepository(session).unkept(self._pending - removed)
        return len(removed)

    def remove_later(self, digest: str) -> None:
        """Let the next `purge` remove a stored content if it has no revision."""
        self._pending |= {digest}

    async def uncallable(self, tenant: TenantId, digests: Collection[str]) -> frozenset[str]:
        """Return the engine's keys of those of `digests` that no name of the tenant resolves to."""
        async with self._database.read() as session:
            found = await ContentRepository(session).uncallable(tenant, digests)
        return frozenset(engine_key(tenant, digest) for digest in found)

    async def recently_uncallable(self) -> frozenset[str]:
        """Return the engine's keys of recently deleted revisions to which no name resolves.

        A key is returned as long as a request may arrive that resolved the revision before the deletion.
        """
        async with self._database.read() as session:
            found = await ContentRepository(session).uncallable_since(
                self._database.now() - 2 * ADMISSION_SECONDS * SECOND
            )
        return frozenset(engine_key(tenant, digest) for tenant, digest in found)

    async def remove_unused(self, digests: frozenset[str]) -> frozenset[str]:
        """Remove the contents among `digests` that no revision keeps and no request uses; return their digests."""
        async with self._database.begin() as session:
            await advisory_lock(session, CONTENTS)
            unused = await ContentRepository(session).unused(digests)
            for digest in unused:
                await run_blocking(SERVER, self._blobs.remove, digest)
        return unused
