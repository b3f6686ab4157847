"""Credentials: API keys, sessions of the web console, and the sign-in links that open sessions. Rows and statements.

Only MACs of secrets are stored. `CredentialRepository` finds the verified tenant of a secret's MAC or of a person. A
session stores no rights: it names a key or a member, and has the rights of that key or member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    CursorResult,
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
from sqlalchemy.engine import Row
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


class CredentialRepository(Repository):
    """Lookups of the tenant for a secret's MAC or a person's identity, each in one statement."""

    async def key(self, mac: bytes) -> Row[KeyRow, TenantRow, TierRow, ProjectRow] | None:
        """Return the key with this MAC unless it is revoked, with its tenant, tier and project."""
        return (await self._session.execute(_KEY_OF_MAC, {"mac": mac})).one_or_none()

    async def key_of_id(self, tenant: TenantId, id: str) -> Row[KeyRow, TenantRow, TierRow, ProjectRow] | None:
        """Return the tenant's key of that id unless it is revoked, with its tenant, tier and project."""
        statement = _keys().where(KeyRow.tenant_id == tenant, KeyRow.id == id, KeyRow.revoked_at.is_(None))
        return (await self._session.execute(statement)).one_or_none()

    async def newest_key(
        self, tenant: TenantId, line: str, now: int
    ) -> Row[KeyRow, TenantRow, TierRow, ProjectRow] | None:
        """Return the newest working key of a chain of rotations; `line` is the id of its first key."""
        statement = _keys().where(KeyRow.tenant_id == tenant, *_in_line(line, now))
        newest = statement.order_by(KeyRow.created_at.desc(), KeyRow.id.desc()).limit(1)
        return (await self._session.execute(newest)).one_or_none()

    async def member(
        self, tenant: TenantId, id: str, project: ProjectId
    ) -> Row[MemberRow, TenantRow, TierRow, ProjectRow] | None:
        """Return a member of the tenant with that project, unless the project is archived."""
        statement = _members().where(
            MemberRow.tenant_id == tenant,
            MemberRow.id == id,
            ProjectRow.id == project,
            ProjectRow.archived_at.is_(None),
        )
        return (await self._session.execute(statement)).one_or_none()

    async def person(
        self, issuer: str, subject: str, project: str
    ) -> Sequence[Row[MemberRow, TenantRow, TierRow, ProjectRow]]:
        """Return the memberships of this person in tenants that have an open project of that name."""
        statement = (
            _members()
            .where(MemberRow.issuer == issuer, MemberRow.subject == subject)
            .where(ProjectRow.name == project, ProjectRow.archived_at.is_(None))
            .order_by(TenantRow.name)
        )
        return (await self._session.execute(statement)).all()

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


def _keys() -> Select[KeyRow, TenantRow, TierRow, ProjectRow]:
    return (
        select(KeyRow, TenantRow, TierRow, ProjectRow)
        .join(TenantRow, TenantRow.id == KeyRow.tenant_id)
        .join(TierRow, TierRow.name == TenantRow.tier)
        .join(ProjectRow, (ProjectRow.tenant_id == KeyRow.tenant_id) & (ProjectRow.id == KeyRow.project_id))
    )


_KEY_OF_MAC = _keys().where(KeyRow.mac == bindparam("mac"), KeyRow.revoked_at.is_(None))
"""Every request executes it, so it is built once."""


def _members() -> Select[MemberRow, TenantRow, TierRow, ProjectRow]:
    return (
        select(MemberRow, TenantRow, TierRow, ProjectRow)
        .join(TenantRow, TenantRow.id == MemberRow.tenant_id)
        .join(TierRow, TierRow.name == TenantRow.tier)
        .join(ProjectRow, ProjectRow.tenant_id == TenantRow.id)
    )


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

    async def tenant(self, name: str, project: str) -> Row[TenantRow, TierRow, ProjectRow] | None:
        """Return a tenant by name, with its tier and one of its projects."""
        statement = (
            select(TenantRow, TierRow, ProjectRow)
            .join(TierRow, TierRow.name == TenantRow.tier)
            .join(ProjectRow, (ProjectRow.tenant_id == TenantRow.id) & (ProjectRow.name == project))
            .where(TenantRow.name == name)
        )
        return (await self._session.execute(statement)).one_or_none()
