"""Refusals of tenancy.

TenantsError(code, field, message)
├── InvalidKey           the secret or the token is not valid, or no longer valid: 401
├── TooManyFailures      the address has sent too many invalid credentials: 429
├── TenantSuspended      the key is valid, but its tenant is suspended: 403
├── SignInRefused        a person cannot be signed in to the console: 403
│   ├── SignInExpired    this browser has not begun the sign-in, or too long ago
│   ├── SignInDenied     the identity provider has refused
│   ├── IssuerDown       the identity provider does not answer: 503
│   ├── NotAMember       no tenant has the person as a member
│   └── SeveralTenants   the person has to choose
├── NotPermitted         the caller may not pass on rights that it does not have: 403
├── InvalidTenant        an invalid name, scope, role or number: 400
├── AlreadyExists        the name is taken: 409
│   └── TenantExists
├── StillNeeded          the object is needed: the last owner, the default project: 409
├── NotFound             there is no such object, or it is not the caller's: 404
│   ├── TenantNotFound
│   ├── ProjectNotFound
│   ├── MemberNotFound
│   ├── TierNotFound
│   └── KeyNotFound
└── PepperError          the file with the pepper cannot be used
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError


class TenantsError(LoramuxError):
    """Base of the refusals of tenancy."""

    code = "invalid_request"


class InvalidKey(TenantsError):
    """The key is unknown, revoked or expired. Unknown and revoked keys get the same answer."""

    code = "invalid_api_key"
    status = HTTPStatus.UNAUTHORIZED


class TooManyFailures(TenantsError):
    """The credential is invalid, like many before it from the same address."""

    code = "too_many_failed_authentications"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 10


class TenantSuspended(TenantsError):
    """The operator has suspended the tenant."""

    code = "tenant_suspended"
    status = HTTPStatus.FORBIDDEN


class SignInRefused(TenantsError):
    """The identity provider's answer does not identify a person."""

    code = "sign_in_refused"
    status = HTTPStatus.FORBIDDEN


class SignInExpired(SignInRefused):
    """This browser has not begun the sign-in, or has begun it too long ago."""

    code = "sign_in_expired"


class SignInDenied(SignInRefused):
    """The identity provider, or the person there, has refused."""

    code = "sign_in_denied"


class IssuerDown(SignInRefused):
    """The identity provider does not answer."""

    code = "issuer_unreachable"
    status = HTTPStatus.SERVICE_UNAVAILABLE


class NotAMember(SignInRefused):
    """No tenant has the person as a member."""

    code = "not_a_member"


class SeveralTenants(SignInRefused):
    """The person is a member of several tenants and has to choose one."""

    code = "several_tenants"

    def __init__(self, issuer: str, tenants: list[str]) -> None:
        super().__init__(f"you are a member of {', '.join(tenants)[:200]}: choose one", "tenant")
        self.issuer = issuer
        self.tenants = tenants


class NotPermitted(TenantsError):
    """The caller may not pass on these rights, or may not give or take this role."""

    code = "insufficient_permissions"
    status = HTTPStatus.FORBIDDEN


class InvalidTenant(TenantsError):
    """A name, scope, role or number is not valid."""

    code = "invalid_value"


class AlreadyExists(TenantsError):
    """The name is taken."""

    code = "already_exists"
    status = HTTPStatus.CONFLICT


class TenantExists(AlreadyExists):
    """The name of a tenant is taken."""

    code = "tenant_exists"


class StillNeeded(TenantsError):
    """The object is still in use; the message gives the necessary first step."""

    code = "still_needed"
    status = HTTPStatus.CONFLICT


class NotFound(TenantsError):
    """The object does not exist, or it belongs to another tenant. The answer is the same in both cases."""

    code = "not_found"
    status = HTTPStatus.NOT_FOUND


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
    """The file with the pepper cannot be used; the message names it."""

    code = "pepper_unusable"
