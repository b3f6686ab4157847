"""Tenants, tiers, projects, members, keys and audit entries as callers see them. Times in microseconds, UTC."""

from __future__ import annotations

import msgspec

from loramux.records import ProjectId, TenantId
from loramux.records.audit import AuditRow
from loramux.records.keys import KeyRow
from loramux.records.tenants import MemberRow, ProjectRow, TenantRow, TierRow
from loramux.tenants.authority import Role


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
    """The only models that it may name; None: all of the tenant's."""
    hint: str
    """The secret's last four characters."""
    created_by: str
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    """Written in batches: up to some seconds behind."""
    replaced_by: str | None
    revoked_at: int | None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change; `before` and `after` are what was changed, as these entities."""

    sequence: int
    at: int
    tenant: TenantId | None
    actor: str
    source: str
    request_id: str
    action: str
    object_id: str
    before: msgspec.Raw | None
    after: msgspec.Raw | None


def tenant_of(row: TenantRow) -> Tenant:
    """Return the entity of the row."""
    return Tenant(
        id=row.id,
        name=row.name,
        tier=row.tier,
        created_at=row.created_at,
        suspended_at=row.suspended_at,
        zero_retention=bool(row.zero_retention),
        allow_judges=bool(row.allow_judges),
    )


def tier_of(row: TierRow) -> Tier:
    """Return the entity of the row."""
    allowed = tuple(row.service_tiers.split())
    return Tier(name=row.name, service_class=row.service_class, weight=row.weight, service_tiers=allowed)


def project_of(row: ProjectRow) -> Project:
    """Return the entity of the row."""
    return Project(
        id=row.id, tenant=row.tenant_id, name=row.name, created_at=row.created_at, archived_at=row.archived_at
    )


def member_of(row: MemberRow) -> Member:
    """Return the entity of the row."""
    return Member(
        id=row.id,
        tenant=row.tenant_id,
        issuer=row.issuer,
        subject=row.subject,
        role=Role(row.role),
        created_at=row.created_at,
    )


def key_of(row: KeyRow) -> Key:
    """Return the entity of the row, without the MAC."""
    return Key(
        id=row.id,
        tenant=row.tenant_id,
        project=row.project_id,
        name=row.name,
        scopes=frozenset(row.scopes.split()),
        models=None if row.models is None else frozenset(row.models.splitlines()),
        hint=row.hint,
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        replaced_by=row.replaced_by,
        revoked_at=row.revoked_at,
    )


def entry_of(row: AuditRow) -> AuditEntry:
    """Return the entity of the row."""
    return AuditEntry(
        sequence=row.sequence,
        at=row.at,
        tenant=row.tenant_id,
        actor=row.actor,
        source=row.source,
        request_id=row.request_id,
        action=row.action,
        object_id=row.object_id,
        before=None if row.before is None else msgspec.Raw(row.before.encode()),
        after=None if row.after is None else msgspec.Raw(row.after.encode()),
    )
