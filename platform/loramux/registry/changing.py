"""One change of an adapter: a transaction that holds the adapter, checks what the caller demands, and is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository
from loramux.records.aliases import AliasRepository, Stamp
from loramux.records.grants import GrantRepository
from loramux.records.models import AdapterRow, RevisionRow
from loramux.records.pins import PinRepository
from loramux.registry.entities import AdapterInfo, RevisionInfo, adapter_info, etag, revision_info
from loramux.registry.errors import AdapterNotFound, PartNotFound, PreconditionFailed
from loramux.registry.names import adapter_part
from loramux.tenants import Change, Mandate

T = TypeVar("T")


class Once(Protocol):
    """Has a change made once, however often it is sent."""

    async def said(self, session: AsyncSession, now: int) -> bytes | None:
        """What it was answered, where it was made before."""
        ...

    async def say(self, session: AsyncSession, answer: bytes) -> None:
        """Keep the answer, with the change."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller demands of a change."""

    if_match: str | None = None
    """The header: ETags of which the adapter must have one, or `*`."""
    once: Once | None = None


UNCONDITIONAL = Terms()


class Turn:
    """A change under way."""

    def __init__(self, session: AsyncSession, principal: Principal, adapter: AdapterRow, now: int) -> None:
        self.session = session
        self.adapter = adapter
        self.now = now
        self.tenant_name = principal.tenant_name
        self.name = f"{principal.tenant_name}/{adapter.name}"
        self.stamp = Stamp(now, principal.key_id)
        self.adapters = AdapterRepository(session, principal.tenant)
        self.aliases = AliasRepository(session, principal.tenant)
        self.pins = PinRepository(session, principal.tenant)
        self.grants = GrantRepository(session, principal.tenant)
        self._tenant = principal.tenant
        self._change = Change(session, Mandate(principal.key_id, principal.origin, principal.scopes), now)
        self._version = adapter.version

    async def revision(self, number: int) -> RevisionRow:
        """One of the adapter's that can be called. Raises PartNotFound."""
        revision = await self.adapters.revision(self.adapter.id, number)
        if revision is None or revision.deleted_at is not None:
            raise PartNotFound("revision", self.name, f"has no revision {number}; list them with GET .../revisions.")
        return revision

    async def info(self) -> AdapterInfo:
        """The adapter as it is now."""
        aliases = await self.aliases.all(self.adapter.id)
        return adapter_info(self.tenant_name, self.adapter, aliases[self.adapter.id])

    async def revision_info(self, revision: RevisionRow) -> RevisionInfo:
        """A revision as it is now."""
        aliases, pins = await self.aliases.all(self.adapter.id), await self.pins.of(self.adapter.id)
        return revision_info(self.name, revision, aliases.get(self.adapter.id, ()), pins.get(revision.id))

    async def note(
        self,
        action: str,
        subject: str = "",
        *,
        before: msgspec.Struct | None = None,
        after: msgspec.Struct | None = None,
    ) -> None:
        """Something was changed: for the audit log (`subject` follows the adapter's name), and for the ETag."""
        self.adapter.version = self._version + 1
        await self.session.flush()
        await self._change.note(action, f"{self.name}{subject}", tenant=self._tenant, before=before, after=after)


class Changing:
    """Makes changes, one at a time for each adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def change(
        self, principal: Principal, name: str, terms: Terms, act: Callable[[Turn], Awaitable[T]], answer: type[T]
    ) -> T:
        """What `act` answers, or answered before. Raises AdapterNotFound, PreconditionFailed, and what they raise."""
        return await self._make(principal, name, terms, (AdapterRepository.lock, act), answer)

    async def change_deleted(
        self, principal: Principal, name: str, terms: Terms, act: Callable[[Turn], Awaitable[T]], answer: type[T]
    ) -> T:
        """The same for a deleted adapter."""
        return await self._make(principal, name, terms, (AdapterRepository.lock_deleted, act), answer)

    async def _make(
        self,
        principal: Principal,
        name: str,
        terms: Terms,
        how: tuple[Callable[[AdapterRepository, str], Awaitable[AdapterRow | None]], Callable[[Turn], Awaitable[T]]],
        answer: type[T],
    ) -> T:
        find, act = how
        own = own_adapter(principal, name)
        async with self._database.begin() as session:
            now = self._database.now()
            if terms.once is not None and (said := await terms.once.said(session, now)) is not None:
                return msgspec.msgpack.decode(said, type=answer)
            adapter = await find(AdapterRepository(session, principal.tenant), own)
            if adapter is None:
                raise AdapterNotFound(name)
            _demand_match(terms.if_match, adapter)
            done = await act(Turn(session, principal, adapter, now))
            if terms.once is not None:
                await terms.once.say(session, msgspec.msgpack.encode(done))
        return done


def own_adapter(principal: Principal, name: str) -> str:
    """`adapter` of `adapter` or `tenant/adapter`. Raises AdapterNotFound where it cannot be the caller's."""
    adapter = adapter_part(principal.tenant_name, name)
    if adapter is None or not principal.may_use(f"{principal.tenant_name}/{adapter}"):
        raise AdapterNotFound(name)
    return adapter


def _demand_match(if_match: str | None, adapter: AdapterRow) -> None:
    if if_match is None:
        return
    wanted = {tag.strip() for tag in if_match.split(",")}
    if not wanted & {"*", etag(adapter.version)}:
        raise PreconditionFailed(
            f"The adapter was changed since you read it: its ETag is {etag(adapter.version)} now. Read it again, and "
            "send the change with that If-Match.",
            "If-Match",
        )
