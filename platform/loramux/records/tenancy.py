"""Statements about tiers, projects, members and the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import ProjectId, TenantId
from loramux.records.models import TenantRow
from loramux.records.tenancy_models import AuditRow, MemberRow, ProjectRow, TierRow


class TierRepository:
    """Levels of service."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def put(self, row: TierRow) -> None:
        """Insert the row, or let it take the place of the one of its name."""
        await self._session.merge(row)
        await self._session.flush()

    async def named(self, name: str) -> TierRow | None:
        """The tier of that name."""
        return await self._session.get(TierRow, name)

    async def all(self) -> Sequence[TierRow]:
        """Every tier, by name."""
        return (await self._session.scalars(select(TierRow).order_by(TierRow.name))).all()

    async def used(self, name: str) -> int:
        """How many tenants have it."""
        statement = select(func.count()).select_from(TenantRow).where(TenantRow.tier == name)
        return await self._session.scalar(statement) or 0

    async def remove(self, row: TierRow) -> None:
        """Delete the row."""
        await self._session.delete(row)
        await self._session.flush()


class ProjectRepository:
    """One tenant's projects."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, row: ProjectRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def named(self, name: str) -> ProjectRow | None:
        """The project of that name, archived or not."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant, ProjectRow.name == name)
        return await self._session.scalar(statement)

    async def get(self, id: ProjectId) -> ProjectRow | None:
        """The project of that id."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant, ProjectRow.id == id)
        return await self._session.scalar(statement)

    async def all(self) -> Sequence[ProjectRow]:
        """Every project, by name."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant).order_by(ProjectRow.name)
        return (await self._session.scalars(statement)).all()


class MemberRepository:
    """One tenant's members."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, row: MemberRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def known(self, issuer: str, subject: str) -> MemberRow | None:
        """The member that the issuer calls so."""
        statement = select(MemberRow).where(
            MemberRow.tenant_id == self._tenant, MemberRow.issuer == issuer, MemberRow.subject == subject
        )
        return await self._session.scalar(statement)

    async def get(self, id: str) -> MemberRow | None:
        """The member of that id."""
        return await self._session.scalar(
            select(MemberRow).where(MemberRow.tenant_id == self._tenant, MemberRow.id == id)
        )

    async def all(self) -> Sequence[MemberRow]:
        """Every member, oldest first."""
        statement = select(MemberRow).where(MemberRow.tenant_id == self._tenant)
        return (await self._session.scalars(statement.order_by(MemberRow.created_at, MemberRow.id))).all()

    async def lock_owners(self) -> Sequence[str]:
        """The owners' ids, held until this transaction ends, so that two cannot leave at once."""
        statement = select(MemberRow).where(MemberRow.tenant_id == self._tenant, MemberRow.role == "owner")
        return [row.id for row in await self._session.scalars(statement.order_by(MemberRow.id).with_for_update())]

    async def remove(self, row: MemberRow) -> None:
        """Delete the row."""
        await self._session.delete(row)
        await self._session.flush()


class AuditRepository:
    """The audit log, newest first."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: AuditRow) -> None:
        """Append the row."""
        self._session.add(row)
        await self._session.flush()

    async def before(self, sequence: int | None, limit: int, tenant: TenantId | None) -> Sequence[AuditRow]:
        """At most `limit` entries older than `sequence`; of one tenant, or of everybody."""
        statement = select(AuditRow).order_by(AuditRow.sequence.desc()).limit(limit)
        if sequence is not None:
            statement = statement.where(AuditRow.sequence < sequence)
        if tenant is not None:
            statement = statement.where(AuditRow.tenant_id == tenant)
        return (await self._session.scalars(statement)).all()
