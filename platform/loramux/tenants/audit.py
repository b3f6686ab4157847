"""Changes and their audit entries, in one transaction; and the log as it is read."""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import Database, Origin, TenantId
from loramux.records.tenancy import AuditRepository
from loramux.records.tenancy_models import AuditRow
from loramux.tenants.access import SCOPES, Role
from loramux.tenants.entities import AuditEntry, Mandate, entry_of

MAX_PAGE = 500


class Change:
    """A transaction under way, in the name of somebody."""

    def __init__(self, session: AsyncSession, mandate: Mandate, now: int) -> None:
        self.session = session
        self.now = now
        self._mandate = mandate

    async def note(
        self,
        action: str,
        object_id: str,
        *,
        tenant: TenantId | None,
        before: msgspec.Struct | None = None,
        after: msgspec.Struct | None = None,
    ) -> None:
        """Append what was changed to the audit log. `action` reads `key.create`."""
        row = AuditRow(
            at=self.now,
            tenant_id=tenant,
            actor=self._mandate.actor,
            source=self._mandate.origin.source,
            request_id=self._mandate.origin.request_id,
            action=action,
            object_id=object_id,
            before=_json(before),
            after=_json(after),
        )
        await AuditRepository(self.session).add(row)


class Changes:
    """Makes changes in the name of whoever holds the mandate."""

    def __init__(self, database: Database, mandate: Mandate) -> None:
        self.database = database
        self.mandate = mandate

    @classmethod
    def of_this_machine(cls, database: Database) -> Changes:
        """In the name of whoever runs this process: the command line's."""
        return cls(database, Mandate(f"local:{_user()}", Origin(), SCOPES, frozenset(Role)))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Change]:
        """One transaction: what is changed and what is noted of it are committed together, or not at all."""
        async with self.database.begin() as session:
            yield Change(session, self.mandate, self.database.now())


class AuditLog:
    """The log, read newest first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(
        self, *, tenant: TenantId | None = None, before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """At most `limit` (up to 500) entries older than the sequence `before`; `tenant` None: everybody's."""
        async with self._database.read() as session:
            rows = await AuditRepository(session).before(before, min(limit, MAX_PAGE), tenant)
        return [entry_of(row) for row in rows]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"


def _json(entity: msgspec.Struct | None) -> str | None:
    return None if entity is None else msgspec.json.encode(entity, order="sorted").decode()
