"""Sessions of the web console, and the sign-in links that open them: row and statements."""

from __future__ import annotations

from sqlalchemy import CursorResult, ForeignKey, ForeignKeyConstraint, Index, delete, func, select, update
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.identity import ProjectId, TenantId
from loramux.records.tenants import ProjectRow, TenantRow, TierRow


class SessionRow(Base):
    """A browser that is signed in, or a link that signs one in: the MAC of its secret, never the secret."""

    __tablename__ = "console_sessions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        Index("ix_console_sessions_holder", "holder"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    mac: Mapped[bytes] = mapped_column(unique=True)
    kind: Mapped[str]
    """session, or link: a secret that is exchanged once for that of a session."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    holder: Mapped[str]
    """The id of the key or the member whose rights it has. Neither is copied: both are looked up on each request."""
    project_id: Mapped[ProjectId]
    is_operator: Mapped[bool]
    """A member's, by the issuer's word at sign-in; a key's own scopes say it."""
    viewed: Mapped[str]
    """Names of the tenants that the operator looks at, separated by spaces."""
    created_at: Mapped[int]
    used_at: Mapped[int]
    """Written at most once a minute."""
    expires_at: Mapped[int]


class SessionRepository:
    """Sessions by their secret's MAC."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: SessionRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def find(self, mac: bytes, kind: str) -> SessionRow | None:
        """Return the session or link with this MAC."""
        return await self._session.scalar(select(SessionRow).where(SessionRow.mac == mac, SessionRow.kind == kind))

    async def take(self, mac: bytes, kind: str) -> SessionRow | None:
        """Delete the session or link with this MAC and return it: of two that ask at once, one gets it."""
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
        """Delete sessions and links that have ended, and sessions that were not used since `idle_since`."""
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
