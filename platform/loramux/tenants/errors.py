"""What tenancy refuses.

TenantsError(code, field, message)
├── InvalidKey           the secret or the token belongs to nobody (or no longer): 401
├── TenantSuspended      the key is right, and its tenant may not go on: 403
├── NotPermitted         the caller may not give away what it does not have itself: 403
├── InvalidTenant        a name, scope, role or number that cannot be: 400
├── AlreadyExists        the name is taken: 409
│   └── TenantExists
├── StillNeeded          the last owner, the default project: 409
├── NotFound             no such thing, or not the caller's: 404
│   ├── TenantNotFound
│   ├── ProjectNotFound
│   ├── MemberNotFound
│   ├── TierNotFound
│   └── KeyNotFound
└── PepperError          the file with the pepper cannot be used
"""

from __future__ import annotations


class TenantsError(Exception):
    """Base of what this package raises: a stable code, the field that is wrong, and a sentence with the way out."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidKey(TenantsError):
    """The same for a key that never was and one that was revoked; one that expired is told when."""

    code = "invalid_api_key"


class TenantSuspended(TenantsError):
    """The operator has suspended the tenant."""

    code = "tenant_suspended"


class NotPermitted(TenantsError):
    """A scope or a role beyond the caller's own."""

    code = "insufficient_permissions"


class InvalidTenant(TenantsError):
    """A malformed name, or a scope that does not exist."""

    code = "invalid_value"


class AlreadyExists(TenantsError):
    """Names are unique."""

    code = "already_exists"


class TenantExists(AlreadyExists):
    """Of all tenants."""

    code = "tenant_exists"


class StillNeeded(TenantsError):
    """The message says what to do first."""

    code = "still_needed"


class NotFound(TenantsError):
    """The same for what does not exist and what is another tenant's."""

    code = "not_found"


class TenantNotFound(NotFound):
    """No tenant has that name."""

    code = "tenant_not_found"


class ProjectNotFound(NotFound):
    """No project of the tenant has that name."""

    code = "project_not_found"


class MemberNotFound(NotFound):
    """No member of the tenant has that id."""

    code = "member_not_found"


class TierNotFound(NotFound):
    """No tier has that name."""

    code = "tier_not_found"


class KeyNotFound(NotFound):
    """No key has that id."""

    code = "key_not_found"


class PepperError(TenantsError):
    """The message names the file."""

    code = "pepper_unusable"
