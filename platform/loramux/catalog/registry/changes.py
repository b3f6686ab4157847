"""One change of an adapter: a transaction that locks the adapter, checks preconditions, and is audited.

A change is an async function over an `AdapterChange`. `ChangeService` opens the transaction. If the idempotency key was
used before, it replays the stored answer. Otherwise the service locks the adapter's row, compares ETags, runs the
function, and stores its answer with the change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.authority import actor_of
from loramux.accounts.tenants.entities import Change
from loramux.catalog.registry.entities import (
    AdapterInfo,
    GrantInfo,
    RevisionInfo,
    adapter_info,
    etag,
    grant_info,
    revision_info,
)
from loramux.catalog.registry.errors import AdapterNotFound, PartNotFound, PreconditionFailed, where_listed
from loramux.catalog.registry.resolver import own_adapter
from loramux.common.identity import Principal
from loramux.data.entities import AliasMove, EventDetail
from loramux.data.records.access import GrantRepository, GrantRow
from loramux.data.records.adapters import AdapterRepository, AdapterRow, RevisionRow, Stamp
from loramux.data.records.aliases import AliasRepository
from loramux.data.records.credentials import names_of_actors
from loramux.data.records.database import Database
from loramux.data.records.pins import PinRepository
from loramux.data.records.webhooks import EventRepository

T = TypeVar("T")


class AnswerStore(Protocol):
    """Stores answers, so that a change is made at most once even if the request is sent several times."""

    async def find_answer(self, session: AsyncSession, now: int) -> bytes | None:
        """Return the answer to the first request; None if this is the first request."""
        ...

    async def store_answer(self, session: AsyncSession, answer: bytes) -> None:
        """Store the answer in the change's transaction."""
        ...


@dataclass(frozen=True, slots=True)
class Preconditions:
    """Conditions that a caller sets for a change."""

    if_match: str | None = None
    """The header If-Match: a list of ETags, one of which the adapter must have, or `*`."""
    idempotency: AnswerStore | None = None


UNCONDITIONAL = Preconditions()


class AdapterChange:
    """A change in progress: the locked adapter, and the repositories of the change's transaction."""

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
        self._audit = Change(session, actor_of(principal), now)
        self._version = adapter.version

    async def revision(self, number: int) -> RevisionRow:
        """Find a callable revision of the adapter. Raises PartNotFound."""
        revision = await self.adapters.revision(self.adapter.id, number)
        if revision is None or revision.deleted_at is not None:
            raise PartNotFound(
                "revision", self.name, f"has no revision {number}; {where_listed(self.name, 'revisions')}."
            )
        return revision

    async def info(self) -> AdapterInfo:
        """Describe the adapter as this transaction sees it."""
        aliases = await self.aliases.all(self.adapter.id)
        return adapter_info(self.tenant_name, self.adapter, aliases[self.adapter.id])

    async def revision_info(self, revision: RevisionRow) -> RevisionInfo:
        """Describe a revision as this transaction sees it."""
        aliases, pins = await self.aliases.all(self.adapter.id), await self.pins.of(self.adapter.id)
        return revision_info(self.name, revision, aliases.get(self.adapter.id, ()), pins.get(revision.id))

    async def grant_info(self, grant: GrantRow) -> GrantInfo:
        """Describe a grant as this transaction sees it."""
        names = await names_of_actors(self.session, {grant.granted_by}, self._tenant)
        return grant_info(grant, names.get(grant.granted_by))

    async def announce(self, kind: str, alias: AliasMove) -> None:
        """Write an event, and its deliveries to webhooks, in this transaction. The event's revision is the newest of
        the alias.
        """
        detail = EventDetail(revision=max(alias.after), alias=alias)
        await EventRepository(self.session, self._tenant).add(kind, self.adapter.name, detail, self.now)

    async def record(
        self,
        action: str,
        subject: str = "",
        *,
        before: msgspec.Struct | None = None,
        after: msgspec.Struct | None = None,
    ) -> None:
        """Write an audit entry (`subject` follows the adapter's name) and raise the version, once per change."""
        self.adapter.version = self._version + 1
        await self.session.flush()
        await self._audit.note(action, f"{self.name}{subject}", tenant=self._tenant, before=before, after=after)


class ChangeService:
    """Runs changes, one at a time for each adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def change(
        self,
        principal: Principal,
        name: str,
        preconditions: Preconditions,
        act: Callable[[AdapterChange], Awaitable[T]],
        answer: type[T],
        find: Callable[[AdapterRepository, str], Awaitable[AdapterRow | None]] = AdapterRepository.lock,
    ) -> T:
        """Run `act` and return its answer, which has the type `answer`, or return the stored answer.

        `find` locks the adapter. Raises AdapterNotFound, PreconditionFailed.
        """
        guard = preconditions.idempotency
        own = own_adapter(principal, name)
        async with self._database.begin() as session:
            now = self._database.now()
            if guard is not None and (recorded := await guard.find_answer(session, now)) is not None:
                return msgspec.msgpack.decode(recorded, type=answer)
            adapter = await find(AdapterRepository(session, principal.tenant), own)
            if adapter is None:
                raise AdapterNotFound(name)
            _check_match(preconditions.if_match, adapter)
            done = await act(AdapterChange(session, principal, adapter, now))
            if guard is not None:
                await guard.store_answer(session, msgspec.msgpack.encode(done))
        return done


def _check_match(if_match: str | None, adapter: AdapterRow) -> None:
    if if_match is None:
        return
    wanted = {tag.strip() for tag in if_match.split(",")}
    if not wanted & {"*", etag(adapter.version)}:
        raise PreconditionFailed(
            f"The adapter was changed since you read it: its ETag is {etag(adapter.version)} now. Read it again, and "
            "send the change with that If-Match.",
            "If-Match",
        )
