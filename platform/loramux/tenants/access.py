"""What keys and members may do: scopes, and the roles that are sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from loramux.tenants.errors import InvalidTenant

CUSTOMER_SCOPES = frozenset({"inference", "adapters", "usage"})
"""What a key has unless it is said otherwise."""
MANAGEMENT_SCOPES = frozenset({"read", "keys", "projects", "members", "limits", "billing", "audit", "webhooks"})
TENANT_SCOPES = CUSTOMER_SCOPES | MANAGEMENT_SCOPES
SCOPES = TENANT_SCOPES | {"operator"}
IMPLIED = {scope: frozenset({scope, "read"}) for scope in TENANT_SCOPES}
"""Every scope of a tenant lets its holder see what it works with: models, adapters, projects, limits."""


class Role(StrEnum):
    """A member's part in a tenant."""

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
"""Which roles a role may give and take; the others none."""


def closure(scopes: Iterable[str]) -> frozenset[str]:
    """The scopes with all that they imply."""
    return frozenset().union(*(IMPLIED.get(scope, frozenset({scope})) for scope in scopes))


def check_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """The scopes of a key to be; raises InvalidTenant."""
    granted = frozenset(scopes)
    unknown = sorted(granted - SCOPES)
    if unknown or not granted:
        wrong = f"unknown: {', '.join(unknown)[:80]}" if unknown else "none given"
        raise InvalidTenant(f"a key has one or more of the scopes {', '.join(sorted(SCOPES))}; {wrong}", "scopes")
    return granted


def check_role(role: str) -> Role:
    """The role of that name; raises InvalidTenant."""
    if role not in list(Role):
        raise InvalidTenant(f"a role is one of {', '.join(Role)}; got {role[:40]!r}", "role")
    return Role(role)
