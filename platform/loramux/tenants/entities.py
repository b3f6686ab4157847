"""What tenancy is made of, as it is shown. Times in microseconds since the epoch."""

from __future__ import annotations

import msgspec

from loramux.records import Origin, ProjectId, TenantId
from loramux.records.models import KeyRow, TenantRow
from loramux.records.tenancy_models import AuditRow, MemberRow, ProjectRow, TierRow
from loramux.tenants.access import Role


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer."""

    id: TenantId
    name: str
    tier: str
    created_at: int
    suspended_at: int | None


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A level of service: the scheduler's class, and a tenant's weight in it."""

    name: str
    service_class: str
    weight: int


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


class Mandate(msgspec.Struct, frozen=True):
    """Who acts, and what they may give away."""

    actor: str
    origin: Origin
    may_grant: frozenset[str]
    may_appoint: frozenset[Role] = frozenset()
    may_allow: frozenset[str] | None = None
    """The only models that its keys may name; None: any."""


def tenant_of(row: TenantRow) -> Tenant:
    """The row, as it is shown."""
    return Tenant(id=row.id, name=row.name, tier=row.tier, created_at=row.created_at, suspended_at=row.suspended_at)


def tier_of(row: TierRow) -> Tier:
    """The row, as it is shown."""
    return Tier(name=row.name, service_class=row.service_class, weight=row.weight)


def project_of(row: ProjectRow) -> Project:
    """The row, as it is shown."""
    return Project(
        id=row.id, tenant=row.tenant_id, name=row.name, created_at=row.created_at, archived_at=row.archived_at
    )


def member_of(row: MemberRow) -> Member:
    """The row, as it is shown."""
    return Member(
        id=row.id,
        tenant=row.tenant_id,
        issuer=row.issuer,
        subject=row.subject,
        role=Role(row.role),
        created_at=row.created_at,
    )


def key_of(row: KeyRow) -> Key:
    """The row, without its MAC."""
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
    """The row, as it is shown."""
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
