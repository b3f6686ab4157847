"""Changes with their audit entries in one transaction, and the audit log."""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import Database, Origin, TenantId
from loramux.records.audit import AuditRepository, AuditRow
from loramux.tenants.authority import UNLIMITED, Actor
from loramux.tenants.entities import AuditEntry, entry_of

MAX_PAGE = 500


class Change:
    """A transaction under way, with the actor that its audit entries name."""

    def __init__(self, session: AsyncSession, actor: Actor, now: int) -> None:
        self.session = session
        self.now = now
        self._actor = actor

    async def note(
        self,
        action: str,
        object_id: str,
        *,
        tenant: TenantId | None,
        before: msgspec.Struct | None = None,
        after: msgspec.Struct | None = None,
    ) -> None:
        """Append one entry to the audit log; `action` is such as `key.create`."""
        row = AuditRow(
            at=self.now,
            tenant_id=tenant,
            actor=self._actor.name,
            source=self._actor.origin.source,
            request_id=self._actor.origin.request_id,
            action=action,
            object_id=object_id,
            before=_json(before),
            after=_json(after),
        )
        await AuditRepository(self.session).add(row)


class Changes:
    """Starts changes of one actor."""

    def __init__(self, database: Database, actor: Actor) -> None:
        self.database = database
        self.actor = actor

    @classmethod
    def local(cls, database: Database) -> Changes:
        """Return the changes of the user that runs this process: the command line."""
        return cls(database, Actor(f"local:{_user()}", Origin(), UNLIMITED))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Change]:
        """Open one transaction: a change and its audit entries are committed together, or not at all."""
        async with self.database.begin() as session:
            yield Change(session, self.actor, self.database.now())


class AuditLog:
    """The audit log, read newest first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(
        self, *, tenant: TenantId | None = None, before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """List at most `limit` (1 to 500) entries older than the sequence `before`; `tenant` None: of all tenants."""
        async with self._database.read() as session:
            rows = await AuditRepository(session).before(before, max(1, min(limit, MAX_PAGE)), tenant)
        return [entry_of(row) for row in rows]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"


def _json(entity: msgspec.Struct | None) -> str | None:
    return None if entity is None else msgspec.json.encode(entity, order="sorted").decode()
