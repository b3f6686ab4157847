"""The end of adapters and revisions, and its undoing."""

from __future__ import annotations

from loramux.limits import adapter_caps
from loramux.records import Database, Principal
from loramux.records.aliases import DEFAULT_ALIAS, WHOLE, Target
from loramux.records.expiry import ExpiryRepository, Overdue
from loramux.records.models import RevisionRow
from loramux.records.pins import BY_DELETION
from loramux.registry.changing import UNCONDITIONAL, Changing, Terms, Turn
from loramux.registry.entities import AdapterInfo, RevisionInfo
from loramux.registry.errors import AdapterNotFound, ChangeConflict, InvalidChange, PartNotFound, TooManyAdapters
from loramux.settings import AdapterLimits
from loramux.tenants import house_of

SECOND = 1_000_000
"""Microseconds."""
ADMISSION_SECONDS = 60
"""What was deleted keeps its content so long at least, for requests that had found it and were not queued yet."""
MAX_TTL_SECONDS = 10 * 365 * 86_400
AT_A_TIME = 100


class Retiring:
    """Deletes, undeletes, and sets when something deletes itself. Raises what `Changing.change` raises."""

    def __init__(self, database: Database, changing: Changing, limits: AdapterLimits) -> None:
        self._database = database
        self._changing = changing
        self._limits = limits

    async def delete(
        self, principal: Principal, name: str, terms: Terms = UNCONDITIONAL, undo_seconds: int | None = None
    ) -> tuple[AdapterInfo, frozenset[str]]:
        """Admit nobody to the adapter any more; what it was, and the digests of what could be called.

        It can be undone for `undo_seconds`, by default those of the settings. Requests that run finish.
        """

        async def act(turn: Turn) -> tuple[AdapterInfo, frozenset[str]]:
            return await self._delete(turn, "adapter.delete", self._purge_at(turn.now, undo_seconds))

        return await self._changing.change(principal, name, terms, act, tuple[AdapterInfo, frozenset[str]])

    async def delete_revision(
        self,
        principal: Principal,
        name: str,
        number: int,
        terms: Terms = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> RevisionInfo:
        """The same for one revision. Raises PartNotFound, and ChangeConflict where an alias points at it."""

        async def act(turn: Turn) -> RevisionInfo:
            revision = await turn.revision(number)
            if aliases := await turn.aliases.naming(revision.id):
                raise ChangeConflict(
                    "revision_in_use",
                    f"`{turn.name}@{number}` is what {', '.join(aliases)} points at: promote another revision there "
                    "first, or delete the adapter.",
                    "revision",
                )
            return await self._delete_revision(turn, revision, "revision.delete", undo_seconds)

        return await self._changing.change(principal, name, terms, act, RevisionInfo)

    async def undelete(self, principal: Principal, name: str, terms: Terms = UNCONDITIONAL) -> AdapterInfo:
        """Undo `delete`: the adapter with its aliases and grants, and the revisions that went with it; no pins.

        Raises AdapterNotFound where there is nothing to undelete, or not any more, and TooManyAdapters.
        """

        async def act(turn: Turn) -> AdapterInfo:
            caps = await adapter_caps(turn.session, principal, self._limits)
            if await turn.adapters.count() >= caps.adapters:
                raise TooManyAdapters(f"you have {caps.adapters} adapters, the most that is allowed", "name")
            if not await turn.adapters.undelete(turn.adapter, turn.now):
                raise AdapterNotFound(name)
            info = await turn.info()
            await turn.note("adapter.undelete", after=info)
            return await turn.info()

        return await self._changing.change_deleted(principal, name, terms, act, AdapterInfo)

    async def undelete_revision(
        self, principal: Principal, name: str, number: int, terms: Terms = UNCONDITIONAL
    ) -> AdapterInfo:
        """Undo `delete_revision`; one that can be called stays as it is. Raises PartNotFound."""

        async def act(turn: Turn) -> AdapterInfo:
            revision = await turn.adapters.revision(turn.adapter.id, number)
            if revision is None:
                raise PartNotFound(
                    "revision", turn.name, f"has no revision {number}, deleted or not, whose content is still there."
                )
            if revision.deleted_at is not None:
                await turn.adapters.restore(turn.adapter, revision, turn.now)
                await turn.note("revision.undelete", f"@{number}", after=await turn.revision_info(revision))
            return await turn.info()

        return await self._changing.change(principal, name, terms, act, AdapterInfo)

    async def set_ttl(
        self, principal: Principal, name: str, ttl: int | None, terms: Terms = UNCONDITIONAL
    ) -> AdapterInfo:
        """The adapter deletes itself in `ttl` seconds; None: never. Raises InvalidChange."""
        check_ttl(ttl)

        async def act(turn: Turn) -> AdapterInfo:
            before = await turn.info()
            turn.adapter.expires_at = _moment(turn.now, ttl)
            await turn.note("adapter.update", before=before, after=await turn.info())
            return await turn.info()

        return await self._changing.change(principal, name, terms, act, AdapterInfo)

    async def set_revision_ttl(
        self, principal: Principal, name: str, number: int, ttl: int | None, terms: Terms = UNCONDITIONAL
    ) -> RevisionInfo:
        """The same for one revision; aliases fall to what is left then. Raises InvalidChange, PartNotFound."""
        check_ttl(ttl)

        async def act(turn: Turn) -> RevisionInfo:
            revision = await turn.revision(number)
            before = await turn.revision_info(revision)
            revision.expires_at = _moment(turn.now, ttl)
            after = await turn.revision_info(revision)
            await turn.note("revision.update", f"@{number}", before=before, after=after)
            return after

        return await self._changing.change(principal, name, terms, act, RevisionInfo)

    async def expire(self) -> int:
        """Delete what has had its time; how many."""
        async with self._database.read() as session:
            overdue = await ExpiryRepository(session).overdue(self._database.now(), AT_A_TIME)
        for one in overdue:
            await self._expire(one)
        return len(overdue)

    async def _expire(self, one: Overdue) -> None:
        house = house_of(one.tenant, one.tenant_name)

        async def act(turn: Turn) -> None:
            purge_at = self._purge_at(turn.now, None)
            if one.number is None:
                if _is_over(turn.adapter.expires_at, turn.now):
                    await self._delete(turn, "adapter.expire", purge_at)
                return
            revision = await turn.adapters.revision(turn.adapter.id, one.number)
            if revision is None or revision.deleted_at is not None or not _is_over(revision.expires_at, turn.now):
                return  # its owner was quicker
            if await _leave_aliases(turn, revision):
                await self._delete_revision(turn, revision, "revision.expire", None)
            else:
                await self._delete(turn, "adapter.expire", purge_at)

        try:
            await self._changing.change(house, one.adapter, UNCONDITIONAL, act, type(None))
        except AdapterNotFound:
            return  # its owner was quicker

    async def _delete(self, turn: Turn, action: str, purge_at: int) -> tuple[AdapterInfo, frozenset[str]]:
        before = await turn.info()
        gone = await turn.adapters.delete(turn.adapter, turn.now, purge_at)
        await turn.pins.end([row.id for row in gone], BY_DELETION, turn.now)
        await turn.note(action, before=before)
        return before, frozenset(row.digest for row in gone)

    async def _delete_revision(
        self, turn: Turn, revision: RevisionRow, action: str, undo_seconds: int | None
    ) -> RevisionInfo:
        before = await turn.revision_info(revision)
        await turn.pins.end([revision.id], BY_DELETION, turn.now)
        await turn.adapters.retire(turn.adapter, revision, turn.now, self._purge_at(turn.now, undo_seconds))
        await turn.note(action, f"@{revision.number}", before=before)
        return await turn.revision_info(revision)

    def _purge_at(self, now: int, undo_seconds: int | None) -> int:
        undo = self._limits.undo_seconds if undo_seconds is None else undo_seconds
        return now + max(undo, ADMISSION_SECONDS) * SECOND


def check_ttl(ttl: int | None) -> None:
    """Raise InvalidChange for a time that cannot be."""
    if ttl is not None and not 1 <= ttl <= MAX_TTL_SECONDS:
        raise InvalidChange(f"ttl_s is 1 to {MAX_TTL_SECONDS} seconds, or null for ever; got {ttl}", "ttl_s")


def _moment(now: int, ttl: int | None) -> int | None:
    return None if ttl is None else now + ttl * SECOND


def _is_over(expires_at: int | None, now: int) -> bool:
    return expires_at is not None and expires_at <= now


async def _leave_aliases(turn: Turn, revision: RevisionRow) -> bool:
    """Take the revision out of every alias; False where the default would have nothing left to mean.

    An alias that loses its only target is removed, but the default falls to the newest revision there is.
    """
    pointed = {one.alias.name: one.targets for one in (await turn.aliases.all(turn.adapter.id))[turn.adapter.id]}
    others = [
        row
        for row in await turn.adapters.revisions(turn.adapter.id)
        if row.deleted_at is None and row.id != revision.id
    ]
    if not others:
        return False
    for name in await turn.aliases.naming(revision.id):
        rest = [target for target in pointed[name] if target.revision.id != revision.id]
        if not rest and name == DEFAULT_ALIAS:
            rest = [Target(others[0], WHOLE)]
        if rest:
            await turn.aliases.point(turn.adapter.id, name, rest, turn.stamp)
        else:
            await turn.aliases.remove(turn.adapter.id, name, turn.stamp)
    return True
