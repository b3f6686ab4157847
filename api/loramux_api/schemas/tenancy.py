"""Keys, projects, members and the audit log on the wire. Times in Unix seconds."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.tenants import CUSTOMER_SCOPES, AuditEntry, Key, KeyRequest, Member, Project
from loramux_api.schemas.strict import Body

SECOND = 1_000_000
T = TypeVar("T")

Label = Annotated[str, Meta(min_length=1, max_length=128)]


class Listing(msgspec.Struct, Generic[T], kw_only=True):
    """A whole list."""

    object: Literal["list"] = "list"
    data: list[T]


class KeyBody(Body, forbid_unknown_fields=True):
    """What a new key is to be."""

    name: Label = "default"
    scopes: list[str] = msgspec.field(default_factory=lambda: sorted(CUSTOMER_SCOPES))
    project: str = "default"
    models: list[str] | None = None
    """The only models that it may name: `tenant/adapter`, or the base's name. null: all of the tenant's."""
    expires_in: Annotated[int, Meta(ge=1)] | None = None
    """Seconds."""

    def request(self) -> KeyRequest:
        """As tenancy has it."""
        return KeyRequest(
            name=self.name,
            scopes=frozenset(self.scopes),
            project=self.project,
            models=None if self.models is None else frozenset(self.models),
            expires_in=self.expires_in,
        )


class RotateBody(Body, forbid_unknown_fields=True):
    """How the old key ends."""

    overlap_seconds: Annotated[int, Meta(ge=0)] = 0
    """For so long both keys are good."""


class ProjectBody(Body, forbid_unknown_fields=True):
    """A new project."""

    name: str


class MemberBody(Body, forbid_unknown_fields=True):
    """A new member."""

    issuer: str
    """As the issuer writes itself in `iss`."""
    subject: str
    """What the issuer calls the person, in the claim that the server reads (`sub`, or as its settings say)."""
    role: str


class RoleBody(Body, forbid_unknown_fields=True):
    """Another role."""

    role: str


class KeyObject(msgspec.Struct, kw_only=True):
    """A key; `key` is its secret, which only the answer that made it has."""

    id: str
    object: Literal["key"] = "key"
    name: str
    project_id: str
    scopes: list[str]
    models: list[str] | None
    hint: str
    created_by: str
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    replaced_by: str | None
    revoked_at: int | None
    key: str | UnsetType = UNSET


class ProjectObject(msgspec.Struct, kw_only=True):
    """A project."""

    id: str
    object: Literal["project"] = "project"
    name: str
    created_at: int
    archived_at: int | None


class MemberObject(msgspec.Struct, kw_only=True):
    """A member."""

    id: str
    object: Literal["member"] = "member"
    issuer: str
    subject: str
    role: str
    created_at: int


class AuditObject(msgspec.Struct, kw_only=True):
    """One change; `before` and `after` are what was changed, with times in microseconds as they are recorded."""

    sequence: int
    object: Literal["audit.entry"] = "audit.entry"
    at: int
    tenant_id: str | None
    actor: str
    source: str
    request_id: str
    action: str
    object_id: str
    before: msgspec.Raw | None
    after: msgspec.Raw | None


def key_object(key: Key, secret: str | UnsetType = UNSET) -> KeyObject:
    """The key, as callers see it."""
    return KeyObject(
        id=key.id,
        name=key.name,
        project_id=key.project,
        scopes=sorted(key.scopes),
        models=None if key.models is None else sorted(key.models),
        hint=key.hint,
        created_by=key.created_by,
        created_at=key.created_at // SECOND,
        expires_at=seconds(key.expires_at),
        last_used_at=seconds(key.last_used_at),
        replaced_by=key.replaced_by,
        revoked_at=seconds(key.revoked_at),
        key=secret,
    )


def project_object(project: Project) -> ProjectObject:
    """The project, as callers see it."""
    return ProjectObject(
        id=project.id,
        name=project.name,
        created_at=project.created_at // SECOND,
        archived_at=seconds(project.archived_at),
    )


def member_object(member: Member) -> MemberObject:
    """The member, as callers see it."""
    return MemberObject(
        id=member.id,
        issuer=member.issuer,
        subject=member.subject,
        role=member.role,
        created_at=member.created_at // SECOND,
    )


def audit_object(entry: AuditEntry) -> AuditObject:
    """The entry, as callers see it."""
    return AuditObject(
        sequence=entry.sequence,
        at=entry.at // SECOND,
        tenant_id=entry.tenant,
        actor=entry.actor,
        source=entry.source,
        request_id=entry.request_id,
        action=entry.action,
        object_id=entry.object_id,
        before=entry.before,
        after=entry.after,
    )


def seconds(microseconds: int | None) -> int | None:
    """A time in Unix seconds, where there is one."""
    return None if microseconds is None else microseconds // SECOND
