"""Authority: scopes, roles, and the rule for the rights that a credential may pass on.

A credential cannot make a key that may do more, or live longer, than the credential itself. `Authority` is the set of
all rights that an actor may pass on. `KeyGrant` is the set of rights that a new key would have.
`Authority.ensure_covers` compares both for new and for rotated keys. A key's *lineage* names the key itself and the
keys or members that made it. Limits on each member of the lineage count the key's requests. If a maker ends, the keys
that it made end too.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from loramux.accounts.tenants.errors import InvalidTenant, NotPermitted
from loramux.common.identity import Origin, Principal, ProjectId

CUSTOMER_SCOPES = frozenset({"inference", "adapters", "usage"})
"""Scopes of a key if its maker names no scopes."""
MANAGEMENT_SCOPES = frozenset({"read", "keys", "projects", "members", "limits", "billing", "audit", "webhooks"})
TENANT_SCOPES = CUSTOMER_SCOPES | MANAGEMENT_SCOPES
TRAINER_SCOPES = frozenset({"push"})
"""Scopes of a trainer, which no role has: an operator decides which tenants may push training adapters."""
SCOPES = TENANT_SCOPES | TRAINER_SCOPES | {"operator"}
IMPLIED = {scope: frozenset({scope, "read"}) for scope in TENANT_SCOPES | TRAINER_SCOPES}
"""Scopes that each scope includes. Every scope of a tenant includes reading: models, adapters, projects, limits."""
WHOLE_TENANT_SCOPES = frozenset({"projects", "members", "limits", "billing", "audit", "webhooks", "operator"})
"""Scopes over a whole tenant, or over all tenants. A key that is limited to a list of models never has them."""
MAX_MAKERS = 8
"""Maximum number of makers in one lineage."""


class Role(StrEnum):
    """A member's role in a tenant."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"


ROLE_SCOPES = {
    Role.OWNER: TENANT_SCOPES,
    Role.ADMIN: TENANT_SCOPES,
    Role.DEVELOPER: frozenset({"inference", "adapters", "usage", "keys", "webhooks", "read"}),
    Role.BILLING: frozenset({"usage", "billing", "limits", "read"}),
    Role.VIEWER: frozenset({"usage", "read"}),
}

APPOINTS = {
    Role.OWNER: frozenset(Role),
    Role.ADMIN: frozenset({Role.DEVELOPER, Role.BILLING, Role.VIEWER}),
}
"""Roles that a role may give and remove. Roles that are not listed may give no roles."""


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a key can do, and until when."""

    scopes: frozenset[str]
    models: frozenset[str] | None
    project: ProjectId
    expires_at: int | None

    @property
    def is_bound_to_project(self) -> bool:
        """Return whether the key, and all keys that it makes, stay in its project."""
        return effective_scopes(self.scopes, self.models).isdisjoint({"projects", "operator"})


class Authority(msgspec.Struct, frozen=True, kw_only=True):
    """All rights that an actor may pass on to keys and members."""

    scopes: frozenset[str]
    roles: frozenset[Role] = frozenset()
    """Roles that the actor may give and take."""
    models: frozenset[str] | None = None
    """The only models that the actor's keys may name; None: any."""
    project: ProjectId | None = None
    """The only project that the actor's keys may be in; None: any."""
    expires_at: int | None = None
    """The latest expiry of the actor's keys, in microseconds since the epoch; None: keys need not expire."""
    lineage: tuple[str, ...] = ()
    """The actor's lineage, which is continued by the keys that the actor makes."""
    over_operators: Authority | None = None
    """An operator's authority over operators' keys. Unlike tenants' keys, operators' keys end with the operator that
    made them.
    """

    def over(self, scopes: frozenset[str]) -> Authority:
        """Return the authority that applies to a key with these scopes."""
        return self.over_operators if self.over_operators is not None and "operator" in scopes else self

    def ensure_covers(self, grant: KeyGrant) -> None:
        """Raise NotPermitted unless the key could do no more, and live no longer, than this actor."""
        if beyond := sorted(grant.scopes - self.scopes):
            raise NotPermitted(f"you cannot give a key scopes that you lack: {', '.join(beyond)}", "scopes")
        if not self._covers_models(grant):
            assert self.models is not None
            allowed = ", ".join(sorted(self.models))[:200]
            raise NotPermitted(f"your key may name only {allowed}, and no key that it makes may name others", "models")
        if self.project not in (None, grant.project):
            raise NotPermitted(
                "your key belongs to one project, and every key that it makes belongs to the same one; "
                "a key with the scope 'projects' may use any",
                "project",
            )
        if self.expires_at is not None and (grant.expires_at is None or grant.expires_at > self.expires_at):
            ends = datetime.fromtimestamp(self.expires_at / 1e6, UTC).isoformat(timespec="seconds")
            raise NotPermitted(f"your key ends at {ends}, and no key that it makes may end later", "expires_in")

    def may_manage(self, grant: KeyGrant) -> bool:
        """Return whether a key has no more rights than the actor. The actor cannot see, rotate or end other keys."""
        is_within_project = self.project is None or (grant.project == self.project and grant.is_bound_to_project)
        return is_within_project and self._covers_models(grant)

    def _covers_models(self, grant: KeyGrant) -> bool:
        return self.models is None or (grant.models is not None and grant.models <= self.models)

    def ensure_appoints(self, role: Role) -> None:
        """Raise NotPermitted unless the actor may give and take `role`."""
        if role not in self.roles:
            raise NotPermitted(f"you may not give or take the role '{role}'; ask an owner", "role")

    def lineage_of(self, key_id: str) -> tuple[str, ...]:
        """Return the lineage of a new key of this actor. Raises InvalidTenant."""
        if len(self.lineage) > MAX_MAKERS:
            raise InvalidTenant(f"keys make keys at most {MAX_MAKERS} levels deep; use a key further up", "name")
        return (key_id, *self.lineage)

    def lineage_of_rotated(self, old: tuple[str, ...]) -> tuple[str, ...]:
        """Return the lineage of a key that replaces `old`: the new key has the old key's limits and the new maker."""
        if self.lineage and self.lineage[0] in old:
            return old
        return self.lineage_of(old[0])


UNLIMITED = Authority(scopes=SCOPES, roles=frozenset(Role))
"""The authority of the command line, on the machine itself."""


class Actor(msgspec.Struct, frozen=True):
    """The author of a change: its name in the audit log, its address, and its authority."""

    name: str
    origin: Origin
    authority: Authority


def actor_of(principal: Principal) -> Actor:
    """Return the caller as the author of changes in its own tenant."""
    return Actor(principal.key_id, principal.origin, _authority_of(principal))


def operator_of(principal: Principal) -> Actor:
    """Return an operator as the author of changes in any tenant, which belong to the tenant and not to the operator."""
    assert "operator" in principal.scopes, "the route has no guard"
    over_operators = Authority(scopes=SCOPES, expires_at=principal.expires_at, lineage=principal.lineage)
    authority = Authority(scopes=SCOPES, roles=frozenset(Role), over_operators=over_operators)
    return Actor(principal.key_id, principal.origin, authority)


def _authority_of(principal: Principal) -> Authority:
    if principal.role is not None:
        # the issuer makes a person an operator only while a token is valid, so a key cannot inherit that role
        roles = APPOINTS.get(Role(principal.role), frozenset())
        return Authority(scopes=principal.scopes - {"operator"}, roles=roles, lineage=principal.lineage)
    project = principal.bound_project
    return Authority(
        scopes=principal.scopes,
        roles=_roles_of_key(principal) if project is None else frozenset(),
        models=principal.models,
        project=project,
        expires_at=principal.expires_at,
        lineage=principal.lineage,
    )


def _roles_of_key(principal: Principal) -> frozenset[Role]:
    """Return the roles that a key may give.

    A key that expires gives no roles, because members do not expire. Other keys give roles as an admin does.
    """
    if principal.expires_at is not None:
        return frozenset()
    return frozenset(role for role in APPOINTS[Role.ADMIN] if closure(ROLE_SCOPES[role]) <= principal.scopes)


def closure(scopes: Iterable[str]) -> frozenset[str]:
    """Return the scopes with all that they imply."""
    return frozenset().union(*(IMPLIED.get(scope, frozenset({scope})) for scope in scopes))


def effective_scopes(scopes: Iterable[str], models: frozenset[str] | None) -> frozenset[str]:
    """Return a key's scopes and the scopes that they imply, without scopes that the key's list of models excludes."""
    granted = closure(scopes)
    return granted if models is None else granted - WHOLE_TENANT_SCOPES


def check_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """Return the scopes of a new key. Raises InvalidTenant."""
    granted = frozenset(scopes)
    unknown = sorted(granted - SCOPES)
    if unknown or not granted:
        wrong = f"unknown: {', '.join(unknown)[:80]}" if unknown else "none given"
        raise InvalidTenant(f"a key has one or more of the scopes {', '.join(sorted(SCOPES))}; {wrong}", "scopes")
    return granted


def check_role(role: str) -> Role:
    """Return the role of that name. Raises InvalidTenant."""
    if role not in list(Role):
        raise InvalidTenant(f"a role is one of {', '.join(Role)}; got {role[:40]!r}", "role")
    return Role(role)
