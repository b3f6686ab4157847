"""JSON objects of keys, projects, members and the audit log. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.accounts.tenants.account import MAX_IDENTITY_LENGTH, MAX_MODELS, KeyRequest
from loramux.accounts.tenants.authority import CUSTOMER_SCOPES, SCOPES
from loramux.accounts.tenants.entities import AuditEntry, Key, Member, Project
from loramux.common.units import SECOND
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name, Url

T = TypeVar("T")

Label = Annotated[str, Meta(min_length=1, max_length=128)]


class Listing(msgspec.Struct, Generic[T], kw_only=True):
    """A complete list."""

    object: Literal["list"] = "list"
    data: list[T]


class KeyBody(Body, forbid_unknown_fields=True):
    """A key to create."""

    name: Label = "default"
    scopes: Annotated[tuple[Name, ...], Meta(max_length=len(SCOPES))] = tuple(sorted(CUSTOMER_SCOPES))
    project: Name | None = None
    """Project of the key; null: the project of the key that creates it, or `default` if that key has no project."""
    models: Annotated[list[Name], Meta(max_length=MAX_MODELS)] | None = None
    """Models that the key may use: `tenant/adapter`, or the base's name. null allows all models of the tenant."""
    expires_in: Annotated[int, Meta(ge=1)] | None = None
    """Seconds until the key expires. null: the key expires together with the key that creates it."""

    def request(self) -> KeyRequest:
        """Return the service's request."""
        return KeyRequest(
            name=self.name,
            scopes=frozenset(self.scopes),
            project=self.project,
            models=None if self.models is None else frozenset(self.models),
            expires_in=self.expires_in,
        )


class RotateBody(Body, forbid_unknown_fields=True):
    """The rotation of a key."""

    overlap_seconds: Annotated[int, Meta(ge=0)] = 0
    """Seconds for which both keys are valid."""


class ProjectBody(Body, forbid_unknown_fields=True):
    """A project to create."""

    name: Name


class MemberBody(Body, forbid_unknown_fields=True):
    """A member to add."""

    issuer: Url
    """The issuer, exactly as in the tokens' `iss`."""
    subject: Annotated[str, Meta(max_length=MAX_IDENTITY_LENGTH)]
    """The person's identity in the claim that the server reads: `sub`, or `identity_claim` of its settings."""
    role: Name


class RoleBody(Body, forbid_unknown_fields=True):
    """A new role."""

    role: Name


class KeyObject(msgspec.Struct, kw_only=True):
    """A key. Only the answer that creates it has its secret, `key`."""

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
    """One change. `before` and `after` are the changed fields as recorded, with times in microseconds."""

    sequence: int
    object: Literal["audit.entry"] = "audit.entry"
    at: int
    tenant_id: str | None
    actor: str
    actor_name: str | None
    """Name of the key or the member; null if it has no name."""
    source: str
    request_id: str
    action: str
    object_id: str
    before: msgspec.Raw
    after: msgspec.Raw
    """Fields after the change; null if there was nothing, or if there is nothing any more."""


def key_object(key: Key, secret: str | UnsetType = UNSET) -> KeyObject:
    """Return the key as a JSON object."""
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
    """Return the project as a JSON object."""
    return ProjectObject(
        id=project.id,
        name=project.name,
        created_at=project.created_at // SECOND,
        archived_at=seconds(project.archived_at),
    )


def member_object(member: Member) -> MemberObject:
    """Return the member as a JSON object."""
    return MemberObject(
        id=member.id,
        issuer=member.issuer,
        subject=member.subject,
        role=member.role,
        created_at=member.created_at // SECOND,
    )


_NULL = msgspec.Raw(b"null")


def audit_object(entry: AuditEntry) -> AuditObject:
    """Return the entry as a JSON object."""
    return AuditObject(
        sequence=entry.sequence,
        at=entry.at // SECOND,
        tenant_id=entry.tenant,
        actor=entry.actor,
        actor_name=entry.actor_name,
        source=entry.source,
        request_id=entry.request_id,
        action=entry.action,
        object_id=entry.object_id,
        before=entry.before or _NULL,
        after=entry.after or _NULL,
    )


def seconds(microseconds: int | None) -> int | None:
    """Convert microseconds to seconds; None stays None."""
    return None if microseconds is None else microseconds // SECOND
