"""Credentials: API keys, sessions of the web console, and the sign-in links that open sessions. Rows and statements.

Only MACs of secrets are stored. `CredentialRepository` finds the verified tenant of a secret's MAC or of a person. A
session stores no rights: it names a key or a member, and has the rights of that key or member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    CursorResult,
    Executable,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Select,
    UniqueConstraint,
    and_,
    bindparam,
    delete,
    func,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, aliased, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.records.base import Base, Repository, TenantScoped, among, table_of
from loramux.data.records.tenants import MemberRow, ProjectRow, TenantRow, TierRow


class KeyRow(Base):
    """A tenant's API key: the MAC of its secret and the secret's last characters, never the secret."""

    __tablename__ = "keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    scopes: Mapped[str]
    """The key's scopes, sorted, separated by spaces."""
    mac: Mapped[bytes] = mapped_column(unique=True)
    hint: Mapped[str]
    project_id: Mapped[ProjectId]
    models: Mapped[str | None]
    """The allow-list, sorted, one model per line; null allows every model of the tenant."""
    created_by: Mapped[str]
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    last_used_at: Mapped[int | None]
    replaced_by: Mapped[str | None]
    """Id of the key that replaced this key in a rotation."""
    revoked_at: Mapped[int | None]
    lineage: Mapped[str] = mapped_column(server_default=text("''"))  # a trigger sets the key's own id
    """Ids separated by spaces: the first key of this chain of rotations, followed by the lineage of the key's maker, if
    any.
    """


class PepperCheckRow(Base):
    """A table with one row: a MAC that is made with the pepper, and reveals a start with a wrong or a new pepper."""

    __tablename__ = "pepper_check"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    mac: Mapped[bytes]


class PepperRepository(Repository):
    """The check value of the pepper."""

    async def check_value(self) -> bytes | None:
        """Return the stored check value; None if no pepper has been used yet."""
        return await self._session.scalar(select(PepperCheckRow.mac))

    async def has_keys(self) -> bool:
        """Return whether any tenant has a key that is not revoked."""
        return await self._session.scalar(select(KeyRow.id).where(KeyRow.revoked_at.is_(None)).limit(1)) is not None

    async def set_check_value(self, mac: bytes) -> None:
        """Store the check value, and replace an earlier value."""
        await self._put(PepperCheckRow(id=1, mac=mac))

    async def revoke_all(self, at: int) -> int:
        """Revoke every key of every tenant; return their number."""
        table = table_of(KeyRow)
        statement = update(table).where(table.c.revoked_at.is_(None)).values(revoked_at=at)
        return (await (await self._session.connection()).execute(statement)).rowcount


class CallerTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's tenant, with its tier, and a project of the tenant."""

    tenant_id: TenantId
    tenant_name: str
    suspended_at: int | None
    zero_retention: bool
    tier: str
    service_class: str
    weight: int
    service_tiers: str
    project_id: ProjectId
    project_name: str
    archived_at: int | None
    """The time at which the project was archived."""


class CallerKey(CallerTenant, frozen=True, kw_only=True):
    """A key that is not revoked, in its tenant and project."""

    id: str
    scopes: str
    models: str | None
    expires_at: int | None
    lineage: str


class CallerMember(CallerTenant, frozen=True, kw_only=True):
    """A member of a tenant, in a project of the tenant."""

    id: str
    role: str


class CredentialRepository(Repository):
    """Lookups of the tenant for a secret's MAC or a person's identity, each in one statement."""

    async def key(self, mac: bytes) -> CallerKey | None:
        """Return the key with this MAC unless it is revoked."""
        return await self._key(_KEY_OF_MAC, mac=mac)

    async def key_of_id(self, tenant: TenantId, id: str) -> CallerKey | None:
        """Return the tenant's key of that id unless it is revoked."""
        return await self._key(_keys().where(KeyRow.tenant_id == tenant, KeyRow.id == id, KeyRow.revoked_at.is_(None)))

    async def newest_key(self, tenant: TenantId, line: str, now: int) -> CallerKey | None:
        """Return the newest working key of a chain of rotations; `line` is the id of its first key."""
        statement = _keys().where(KeyRow.tenant_id == tenant, *_in_line(line, now))
        return await self._key(statement.order_by(KeyRow.created_at.desc(), KeyRow.id.desc()).limit(1))

    async def _key(self, statement: Executable, **parameters: Any) -> CallerKey | None:
        row = (await self._session.execute(statement, parameters)).one_or_none()
        return None if row is None else CallerKey(**row._mapping)

    async def member(self, tenant: TenantId, id: str, project: ProjectId) -> CallerMember | None:
        """Return a member of the tenant with that project, unless the project is archived."""
        statement = _members().where(
            MemberRow.tenant_id == tenant,
            MemberRow.id == id,
            ProjectRow.id == project,
            ProjectRow.archived_at.is_(None),
        )
        row = (await self._session.execute(statement)).one_or_none()
        return None if row is None else CallerMember(**row._mapping)

    async def person(self, issuer: str, subject: str, project: str) -> list[CallerMember]:
        """Return the memberships of this person in tenants that have an open project of that name."""
        statement = (
            _members()
            .where(MemberRow.issuer == issuer, MemberRow.subject == subject)
            .where(ProjectRow.name == project, ProjectRow.archived_at.is_(None))
            .order_by(TenantRow.name)
        )
        return [CallerMember(**row._mapping) for row in await self._session.execute(statement)]

    async def macs_since(self, created_at: int) -> Sequence[bytes]:
        """Return the MACs of keys that were made at or after `created_at` and are not revoked."""
        statement = select(KeyRow.mac).where(KeyRow.created_at >= created_at, KeyRow.revoked_at.is_(None))
        return (await self._session.scalars(statement)).all()

    async def lock_maker(self, id: str, now: int) -> bool:
        """Return whether the key or member still works, and lock it, so that it cannot end before this transaction."""
        key = select(KeyRow.id).where(KeyRow.id == id, *_live(now)).with_for_update(read=True)
        if await self._session.scalar(key) is not None:
            return True
        member = select(MemberRow.id).where(MemberRow.id == id).with_for_update(read=True)
        return await self._session.scalar(member) is not None

    async def touch(self, used: Mapping[str, int]) -> None:
        """Store the times of the keys' last use, by id. A later time that is stored already stays."""
        statement = (
            update(table_of(KeyRow))
            .where(
                KeyRow.id == bindparam("key"), (KeyRow.last_used_at.is_(None)) | (KeyRow.last_used_at < bindparam("at"))
            )
            .values(last_used_at=bindparam("at"))
        )
        rows: list[dict[str, Any]] = [{"key": key, "at": used[key]} for key in sorted(used)]
        await (await self._session.connection()).execute(statement, rows)


def _live(now: int) -> tuple[ColumnElement[bool], ...]:
    """Select the keys that still work."""
    return KeyRow.revoked_at.is_(None), KeyRow.expires_at.is_(None) | (KeyRow.expires_at > now)


def _in_line(line: str, now: int) -> tuple[ColumnElement[bool], ...]:
    """Select the working keys of a chain of rotations; `line` is the id of its first key."""
    return *_live(now), (KeyRow.lineage == line) | KeyRow.lineage.startswith(f"{line} ", autoescape=True)


KEYS, MEMBERS, TENANTS, TIERS, PROJECTS = map(table_of, (KeyRow, MemberRow, TenantRow, TierRow, ProjectRow))
_TENANT = (
    TENANTS.c.id.label("tenant_id"),
    TENANTS.c.name.label("tenant_name"),
    TENANTS.c.suspended_at,
    TENANTS.c.zero_retention,
    TIERS.c.name.label("tier"),
    TIERS.c.service_class,
    TIERS.c.weight,
    TIERS.c.service_tiers,
    PROJECTS.c.id.label("project_id"),
    PROJECTS.c.name.label("project_name"),
    PROJECTS.c.archived_at,
)
"""The columns of CallerTenant."""
_OWN = (TENANTS.join(TIERS, TIERS.c.name == TENANTS.c.tier)).join(PROJECTS, PROJECTS.c.tenant_id == TENANTS.c.id)
"""Each tenant with its tier, once for each of its projects."""


def _keys() -> Select[*tuple[Any, ...]]:
    project = (KEYS.c.tenant_id == TENANTS.c.id) & (KEYS.c.project_id == PROJECTS.c.id)
    facts = (KEYS.c.id, KEYS.c.scopes, KEYS.c.models, KEYS.c.expires_at, KEYS.c.lineage)
    return select(*_TENANT, *facts).select_from(_OWN.join(KEYS, project))


_KEY_OF_MAC = _keys().where(KEYS.c.mac == bindparam("mac"), KEYS.c.revoked_at.is_(None))
"""Every request executes it, so it is built once."""


def _members() -> Select[*tuple[Any, ...]]:
    members = _OWN.join(MEMBERS, MEMBERS.c.tenant_id == TENANTS.c.id)
    return select(*_TENANT, MEMBERS.c.id, MEMBERS.c.role).select_from(members)


class KeyRepository(TenantScoped):
    """One tenant's keys."""

    async def add(self, row: KeyRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def all(self) -> Sequence[KeyRow]:
        """Return the tenant's keys, including revoked ones, oldest first."""
        statement = select(KeyRow).where(KeyRow.tenant_id == self._tenant).order_by(KeyRow.created_at, KeyRow.id)
        return (await self._session.scalars(statement)).all()

    async def after(self, key_id: str | None, limit: int) -> Sequence[KeyRow]:
        """Return at most `limit` keys newer than the key `after`, oldest first; None: from the first key on."""
        statement = select(KeyRow).where(KeyRow.tenant_id == self._tenant)
        if key_id is not None:
            last = aliased(KeyRow)
            found = select(last.created_at).where(last.tenant_id == self._tenant, last.id == key_id).scalar_subquery()
            statement = statement.where(
                or_(KeyRow.created_at > found, and_(KeyRow.created_at == found, KeyRow.id > key_id))
            )
        return (await self._session.scalars(statement.order_by(KeyRow.created_at, KeyRow.id).limit(limit))).all()

    async def count_live(self, now: int) -> int:
        """Return the number of keys that still work."""
        statement = select(func.count()).where(KeyRow.tenant_id == self._tenant, *_live(now))
        return await self._session.scalar(statement) or 0

    async def locked(self, key_id: str) -> KeyRow | None:
        """Return the tenant's key of that id, locked until this transaction ends."""
        statement = select(KeyRow).where(KeyRow.tenant_id == self._tenant, KeyRow.id == key_id)
        return await self._session.scalar(statement.with_for_update())

    async def live_in_line(self, line: str, now: int) -> bool:
        """Return whether a key of this chain of rotations still works."""
        statement = select(KeyRow.id).where(KeyRow.tenant_id == self._tenant, *_in_line(line, now))
        return await self._session.scalar(statement.limit(1)) is not None


async def names_of_actors(session: AsyncSession, ids: Collection[str], tenant: TenantId | None) -> dict[str, str]:
    """Return the names of keys and the identities of members, by id, in `tenant` or in all tenants."""
    keys = select(KeyRow.id, KeyRow.name).where(among(session, KeyRow.id, ids), KeyRow.name != "")
    members = select(MemberRow.id, MemberRow.subject).where(among(session, MemberRow.id, ids))
    if tenant is not None:
        keys = keys.where(KeyRow.tenant_id == tenant)
        members = members.where(MemberRow.tenant_id == tenant)
    return {id: name for statement in (keys, members) for id, name in await session.execute(statement)}


async def keys_made_by(session: AsyncSession, maker: str) -> Sequence[KeyRow]:
    """Return the keys that are not revoked and whose lineage goes back to `maker`, locked.

    The keys may be in any tenant, because an operator also makes operators' keys in other tenants.
    """
    statement = select(KeyRow).where(
        KeyRow.revoked_at.is_(None), (KeyRow.lineage + " ").contains(f" {maker} ", autoescape=True)
    )
    return (await session.scalars(statement.order_by(KeyRow.id).with_for_update())).all()


async def owner_of_key(session: AsyncSession, key_id: str) -> TenantRow | None:
    """Return the tenant that has the key, because operators name keys only by id."""
    statement = select(TenantRow).join(KeyRow, KeyRow.tenant_id == TenantRow.id).where(KeyRow.id == key_id)
    return await session.scalar(statement)


class SessionRow(Base):
    """A signed-in browser, or a link that signs a browser in. The row has the MAC of the secret, never the secret."""

    __tablename__ = "console_sessions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        Index("ix_console_sessions_holder", "holder"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    mac: Mapped[bytes] = mapped_column(unique=True)
    kind: Mapped[str]
    """`session`, or `link`: a secret that is exchanged once for a session's secret."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    holder: Mapped[str]
    """The id of the key or the member whose rights the session has. The key or member is looked up on each request."""
    project_id: Mapped[ProjectId]
    is_operator: Mapped[bool]
    """True: the issuer made the member an operator at sign-in. For a session of a key, the key's scopes decide."""
    viewed: Mapped[str]
    """Names of the tenants that the operator looks at, separated by spaces."""
    created_at: Mapped[int]
    used_at: Mapped[int]
    """The time of the last use, which is written at most once a minute."""
    expires_at: Mapped[int]


class SessionRepository(Repository):
    """Sessions by the MAC of their secret."""

    async def add(self, row: SessionRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def find(self, mac: bytes, kind: str) -> SessionRow | None:
        """Return the session or link with this MAC."""
        return await self._session.scalar(select(SessionRow).where(SessionRow.mac == mac, SessionRow.kind == kind))

    async def take(self, mac: bytes, kind: str) -> SessionRow | None:
        """Delete the session or link with this MAC and return it. Of two simultaneous calls only one gets the row."""
        statement = delete(SessionRow).where(SessionRow.mac == mac, SessionRow.kind == kind).returning(SessionRow)
        return (await self._session.scalars(statement)).one_or_none()

    async def touch(self, id: str, at: int) -> None:
        """Store the time of the session's last use."""
        await self._session.execute(update(SessionRow).where(SessionRow.id == id).values(used_at=at))

    async def view(self, id: str, viewed: str) -> None:
        """Store the tenants that the operator looks at."""
        await self._session.execute(update(SessionRow).where(SessionRow.id == id).values(viewed=viewed))

    async def count(self, holder: str) -> int:
        """Return the number of sessions and links of a key or a member."""
        statement = select(func.count()).where(SessionRow.holder == holder)
        return await self._session.scalar(statement) or 0

    async def remove_of(self, holder: str) -> int:
        """Delete all sessions and links of a key or a member; return their number."""
        result = await self._session.execute(delete(SessionRow).where(SessionRow.holder == holder))
        assert isinstance(result, CursorResult)
        return result.rowcount

    async def remove_expired(self, now: int, idle_since: int) -> None:
        """Delete sessions and links that have ended, and sessions without use since `idle_since`."""
        idle = (SessionRow.kind == "session") & (SessionRow.used_at <= idle_since)
        ended = (SessionRow.expires_at <= now) | idle
        await self._session.execute(delete(SessionRow).where(ended))

    async def tenant(self, name: str, project: str) -> CallerTenant | None:
        """Return a tenant by name, with its tier and one of its projects."""
        statement = select(*_TENANT).select_from(_OWN).where(TenantRow.name == name, ProjectRow.name == project)
        row = (await self._session.execute(statement)).one_or_none()
        return None if row is None else CallerTenant(**row._mapping)
