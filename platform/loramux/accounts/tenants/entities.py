"""Tenants, tiers, projects, members and keys in the form that callers see, and their changes with audit entries.

A change and its audit entries are committed in one transaction. Times are in microseconds, UTC.
"""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.authority import UNLIMITED, Actor, Role
from loramux.common.identity import Origin, ProjectId, TenantId
from loramux.data.records.base import to_struct
from loramux.data.records.credentials import KeyRow, names_of_actors
from loramux.data.records.database import Database
from loramux.data.records.tenants import AuditRepository, AuditRow, MemberRow, ProjectRow, TenantRow, TierRow

MAX_PAGE = 500


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: TenantId
    name: str
    tier: str
    created_at: int
    suspended_at: int | None
    zero_retention: bool
    allow_judges: bool


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A level of service: the scheduler's class, the tenant's weight in it, and the service tiers that it allows."""

    name: str
    service_class: str
    weight: int
    service_tiers: tuple[str, ...]


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's own grouping."""

    id: ProjectId
    tenant: TenantId
    name: str
    created_at: int
    archived_at: int | None


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A person in a tenant."""

    id: str
    tenant: TenantId
    issuer: str
    subject: str
    role: Role
    created_at: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret."""

    id: str
    tenant: TenantId
    project: ProjectId
    name: str
    scopes: frozenset[str]
    models: frozenset[str] | None
    """The only models that the key may name; None: all models of the tenant."""
    hint: str
    """The secret's last four characters."""
    created_by: str
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    """The time of the last use. This time is written in batches, so it may be some seconds too early."""
    replaced_by: str | None
    revoked_at: int | None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change; `before` and `after` are the changed object, as an entity of this module."""

    sequence: int
    """Number among the entries of one tenant, or among those of all tenants, by which list is read."""
    at: int
    tenant: TenantId | None
    actor: str
    actor_name: str | None
    """The name of the key or the member; None if it has no name or the reader may not see it."""
    source: str
    request_id: str
    action: str
    object_id: str
    before: msgspec.Raw | None
    after: msgspec.Raw | None


def tenant_of(row: TenantRow) -> Tenant:
    """Return the entity of the row."""
    # both columns are None in a new row, until the row is read again
    return to_struct(Tenant, row, zero_retention=bool(row.zero_retention), allow_judges=bool(row.allow_judges))


def tier_of(row: TierRow) -> Tier:
    """Return the entity of the row."""
    return to_struct(Tier, row, service_tiers=tuple(row.service_tiers.split()))


def project_of(row: ProjectRow) -> Project:
    """Return the entity of the row."""
    return to_struct(Project, row, tenant=row.tenant_id)


def member_of(row: MemberRow) -> Member:
    """Return the entity of the row."""
    return to_struct(Member, row, tenant=row.tenant_id, role=Role(row.role))


def key_of(row: KeyRow) -> Key:
    """Return the entity of the row, without the MAC."""
    return to_struct(
        Key,
        row,
        tenant=row.tenant_id,
        project=row.project_id,
        scopes=frozenset(row.scopes.split()),
        models=None if row.models is None else frozenset(row.models.splitlines()),
    )


def entry_of(sequence: int, row: AuditRow, names: Mapping[str, str]) -> AuditEntry:
    """Return the entity of the row, with its number in the list that is read, and the names of keys and members."""
    return to_struct(
        AuditEntry,
        row,
        sequence=sequence,
        actor_name=names.get(row.actor),
        tenant=row.tenant_id,
        before=None if row.before is None else msgspec.Raw(row.before.encode()),
        after=None if row.after is None else msgspec.Raw(row.after.encode()),
    )


class Change:
    """A running transaction, with the actor that its audit entries name."""

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
        """Append one entry to the audit log; `action` is a name such as `key.create`."""
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
        """List at most `limit` (1 to 500) entries older than the entry with the number `before`.

        `tenant` None: entries of all tenants, numbered together. A tenant's own entries are numbered from 1.
        """
        limit = max(1, min(limit, MAX_PAGE))
        async with self._database.read() as session:
            log = AuditRepository(session)
            rows = await (log.before(before, limit) if tenant is None else log.of_tenant(tenant, before, limit))
            names = await names_of_actors(session, {row.actor for _, row in rows}, tenant)
        return [entry_of(sequence, row, names) for sequence, row in rows]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"


def _json(entity: msgspec.Struct | None) -> str | None:
    return None if entity is None else msgspec.json.encode(entity, order="sorted").decode()
