"""Tenants, their tiers, projects and members, and the audit log of all changes: rows and statements.

The audit log is append-only: triggers refuse every UPDATE and DELETE.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, false, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.records.base import Base, Repository, TenantScoped, insert_new


class TierRow(Base):
    """A level of service: the scheduler's class, the tenant's weight in the class, and the allowed service tiers."""

    __tablename__ = "tiers"
    __table_args__ = (
        CheckConstraint("service_class IN ('interactive', 'standard', 'batch')", name="service_class"),
        CheckConstraint("weight BETWEEN 1 AND 1000", name="weight"),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    service_class: Mapped[str]
    weight: Mapped[int]
    service_tiers: Mapped[str] = mapped_column(server_default=text("'batch flex'"))
    """The service tiers of `data.entities.CHOSEN` that requests may name, sorted, separated by spaces."""
    created_at: Mapped[int]


class TenantRow(Base):
    """A tenant: the boundary of isolation, fairness and billing."""

    __tablename__ = "tenants"

    id: Mapped[TenantId] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    tier: Mapped[str] = mapped_column(ForeignKey("tiers.name"))
    created_at: Mapped[int]
    suspended_at: Mapped[int | None]
    zero_retention: Mapped[bool] = mapped_column(server_default=false())
    """True: no prompt and no answer of the tenant's requests is stored."""
    allow_judges: Mapped[bool] = mapped_column(server_default=false())
    """True: the tenant's evaluations may send prompts and answers to judges, which are third parties."""


class ProjectRow(Base):
    """A tenant's own grouping of keys and requests, to which limits and costs are attributed."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "id"))

    id: Mapped[ProjectId] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    created_at: Mapped[int]
    archived_at: Mapped[int | None]


class MemberRow(Base):
    """A person in a tenant, with the identity that an OIDC issuer gives. The audit log keeps removed members."""

    __tablename__ = "members"
    __table_args__ = (
        UniqueConstraint("tenant_id", "issuer", "subject"),
        CheckConstraint("role IN ('owner', 'admin', 'developer', 'billing', 'viewer')", name="role"),
        Index("ix_members_issuer_subject", "issuer", "subject"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    issuer: Mapped[str]
    subject: Mapped[str]
    role: Mapped[str]
    created_at: Mapped[int]


class TierRepository(Repository):
    """Tiers."""

    async def put(self, row: TierRow) -> None:
        """Insert the row, or replace the row with its name."""
        await self._put(row)

    async def named(self, name: str) -> TierRow | None:
        """Return the tier of that name."""
        return await self._session.get(TierRow, name)

    async def all(self) -> Sequence[TierRow]:
        """Return every tier, by name."""
        return (await self._session.scalars(select(TierRow).order_by(TierRow.name))).all()

    async def used(self, name: str) -> int:
        """Return the number of tenants that have the tier."""
        statement = select(func.count()).select_from(TenantRow).where(TenantRow.tier == name)
        return await self._session.scalar(statement) or 0

    async def remove(self, row: TierRow) -> None:
        """Delete the row."""
        await self._delete(row)


class TenantRepository(Repository):
    """Tenants."""

    async def add(self, row: TenantRow) -> bool:
        """Insert the row; return False if the name is taken, even by a concurrent transaction."""
        values = {"id": row.id, "name": row.name, "tier": row.tier, "created_at": row.created_at}
        return await insert_new(self._session, TenantRow, [values]) == 1

    async def named(self, name: str) -> TenantRow | None:
        """Return the tenant of that name."""
        return await self._session.scalar(select(TenantRow).where(TenantRow.name == name))

    async def locked(self, name: str) -> TenantRow | None:
        """Return the tenant of that name, locked until this transaction ends."""
        return await self._session.scalar(select(TenantRow).where(TenantRow.name == name).with_for_update())

    async def has_zero_retention(self, id: TenantId) -> bool:
        """Return whether prompts and answers of the tenant's requests must not be stored."""
        return bool(await self._session.scalar(select(TenantRow.zero_retention).where(TenantRow.id == id)))

    async def may_use_judges(self, id: TenantId) -> bool:
        """Return whether the tenant's evaluations may show prompts and answers to judges."""
        return bool(await self._session.scalar(select(TenantRow.allow_judges).where(TenantRow.id == id)))

    async def all(self) -> Sequence[TenantRow]:
        """Return every tenant, by name."""
        return (await self._session.scalars(select(TenantRow).order_by(TenantRow.name))).all()


async def lock_tenant(session: AsyncSession, tenant: TenantId) -> None:
    """Lock the tenant until this transaction ends. Under this lock, rows can be counted before a row is added."""
    await session.execute(select(TenantRow.id).where(TenantRow.id == tenant).with_for_update(key_share=True))


class ProjectRepository(TenantScoped):
    """One tenant's projects."""

    async def add(self, row: ProjectRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def count(self) -> int:
        """Return the number of projects, including archived ones."""
        statement = select(func.count()).where(ProjectRow.tenant_id == self._tenant)
        return await self._session.scalar(statement) or 0

    async def named(self, name: str) -> ProjectRow | None:
        """Return the project of that name, archived or not."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant, ProjectRow.name == name)
        return await self._session.scalar(statement)

    async def get(self, id: ProjectId) -> ProjectRow | None:
        """Return the project of that id."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant, ProjectRow.id == id)
        return await self._session.scalar(statement)

    async def all(self) -> Sequence[ProjectRow]:
        """Return every project, by name."""
        statement = select(ProjectRow).where(ProjectRow.tenant_id == self._tenant).order_by(ProjectRow.name)
        return (await self._session.scalars(statement)).all()


class MemberRepository(TenantScoped):
    """One tenant's members."""

    async def add(self, row: MemberRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def known(self, issuer: str, subject: str) -> MemberRow | None:
        """Return the member of that issuer and subject."""
        statement = select(MemberRow).where(
            MemberRow.tenant_id == self._tenant, MemberRow.issuer == issuer, MemberRow.subject == subject
        )
        return await self._session.scalar(statement)

    async def get(self, id: str) -> MemberRow | None:
        """Return the member of that id."""
        return await self._session.scalar(
            select(MemberRow).where(MemberRow.tenant_id == self._tenant, MemberRow.id == id)
        )

    async def all(self) -> Sequence[MemberRow]:
        """Return every member, oldest first."""
        statement = select(MemberRow).where(MemberRow.tenant_id == self._tenant)
        return (await self._session.scalars(statement.order_by(MemberRow.created_at, MemberRow.id))).all()

    async def count(self) -> int:
        """Return the number of members."""
        statement = select(func.count()).where(MemberRow.tenant_id == self._tenant)
        return await self._session.scalar(statement) or 0

    async def lock_owners(self) -> Sequence[str]:
        """Return the owners' ids, locked until this transaction ends, so that two owners cannot leave at once."""
        statement = select(MemberRow).where(MemberRow.tenant_id == self._tenant, MemberRow.role == "owner")
        return [row.id for row in await self._session.scalars(statement.order_by(MemberRow.id).with_for_update())]

    async def remove(self, row: MemberRow) -> None:
        """Delete the row."""
        await self._delete(row)


class AuditRow(Base):
    """One change: its actor, its origin, and the object before and after. Triggers refuse every UPDATE and DELETE."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index("ix_audit_entries_tenant_id_sequence", "tenant_id", "sequence"),)

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[int]
    tenant_id: Mapped[TenantId | None] = mapped_column(ForeignKey("tenants.id"))
    """The tenant that was changed; null if the object belongs to no tenant, such as a tier."""
    actor: Mapped[str]
    """A key's or a member's id, or `local:USER`."""
    source: Mapped[str]
    request_id: Mapped[str]
    action: Mapped[str]
    object_id: Mapped[str]
    before: Mapped[str | None]
    """The object before the change, as JSON."""
    after: Mapped[str | None]


class AuditRepository(Repository):
    """The audit log, read newest first."""

    async def add(self, row: AuditRow) -> None:
        """Append the row."""
        await self._insert(row)

    async def before(self, sequence: int | None, limit: int) -> list[tuple[int, AuditRow]]:
        """Return at most `limit` entries of all tenants that are older than `sequence`, with their numbers."""
        statement = select(AuditRow).order_by(AuditRow.sequence.desc()).limit(limit)
        if sequence is not None:
            statement = statement.where(AuditRow.sequence < sequence)
        return [(row.sequence, row) for row in await self._session.scalars(statement)]

    async def of_tenant(self, tenant: TenantId, before: int | None, limit: int) -> list[tuple[int, AuditRow]]:
        """Return at most `limit` entries of one tenant that are older than its number `before`, with their numbers.

        A tenant's entries are numbered from 1. The gaps of `AuditRow.sequence` would tell a tenant how many changes all
        other tenants make. No entry is ever deleted, so a number stays an entry's own.
        """
        is_own = AuditRow.tenant_id == tenant
        count = await self._session.scalar(select(func.count()).select_from(AuditRow).where(is_own)) or 0
        last = count if before is None else max(0, min(before - 1, count))
        first = max(0, last - limit)
        statement = select(AuditRow).where(is_own).order_by(AuditRow.sequence).offset(first).limit(last - first)
        rows = (await self._session.scalars(statement)).all()
        return list(enumerate(rows, first + 1))[::-1]
