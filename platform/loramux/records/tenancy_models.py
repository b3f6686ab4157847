"""The tables of tenancy beside tenants and keys: tiers, projects, members, and the audit log."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import ProjectId, TenantId
from loramux.records.models import Base


class TierRow(Base):
    """A level of service: the scheduler's class and a tenant's weight in it."""

    __tablename__ = "tiers"
    __table_args__ = (
        CheckConstraint("service_class IN ('interactive', 'standard', 'batch')", name="service_class"),
        CheckConstraint("weight BETWEEN 1 AND 1000", name="weight"),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    service_class: Mapped[str]
    weight: Mapped[int]
    created_at: Mapped[int]


class ProjectRow(Base):
    """A tenant's own grouping, for limits and cost attribution."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "id"))

    id: Mapped[ProjectId] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    created_at: Mapped[int]
    archived_at: Mapped[int | None]


class MemberRow(Base):
    """A person in a tenant, known by what an OIDC issuer calls them. Gone when removed: the audit log remembers."""

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


class AuditRow(Base):
    """One change: who, from where, before, after. Triggers refuse every UPDATE and DELETE."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index("ix_audit_entries_tenant_id_sequence", "tenant_id", "sequence"),)

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[int]
    tenant_id: Mapped[TenantId | None] = mapped_column(ForeignKey("tenants.id"))
    """Whose house was changed; null for what belongs to none, such as a tier."""
    actor: Mapped[str]
    """A key's or a member's id, or `local:USER`."""
    source: Mapped[str]
    request_id: Mapped[str]
    action: Mapped[str]
    object_id: Mapped[str]
    before: Mapped[str | None]
    """JSON."""
    after: Mapped[str | None]
