"""Customers, their projects, members and keys: the one place where a secret becomes a verified tenant."""

from loramux.records import Origin, Principal
from loramux.records.requests import ALLOWED_AT_FIRST, CHOSEN
from loramux.tenants.account import Account, KeyRequest
from loramux.tenants.authentication import Credential
from loramux.tenants.authority import CUSTOMER_SCOPES, ROLE_SCOPES, SCOPES, TENANT_SCOPES, Role, actor_of
from loramux.tenants.entities import AuditEntry, AuditLog, Change, Changes, Key, Member, Project, Tenant, Tier
from loramux.tenants.errors import (
    AlreadyExists,
    InvalidKey,
    InvalidTenant,
    KeyNotFound,
    MemberNotFound,
    NotFound,
    NotPermitted,
    PepperError,
    ProjectNotFound,
    SeveralTenants,
    SignInRefused,
    StillNeeded,
    TenantExists,
    TenantNotFound,
    TenantsError,
    TenantSuspended,
    TierNotFound,
    TooManyFailures,
)
from loramux.tenants.secrets import open_pepper, replace_pepper
from loramux.tenants.sessions import SIGN_IN_SECONDS, Callback, Session
from loramux.tenants.tenants import SERVICE_CLASSES, Tenants, system_principal

__all__ = [
    "ALLOWED_AT_FIRST",
    "CHOSEN",
    "CUSTOMER_SCOPES",
    "ROLE_SCOPES",
    "SCOPES",
    "SERVICE_CLASSES",
    "SIGN_IN_SECONDS",
    "TENANT_SCOPES",
    "Account",
    "AlreadyExists",
    "AuditEntry",
    "AuditLog",
    "Callback",
    "Change",
    "Changes",
    "Credential",
    "InvalidKey",
    "InvalidTenant",
    "Key",
    "KeyNotFound",
    "KeyRequest",
    "Member",
    "MemberNotFound",
    "NotFound",
    "NotPermitted",
    "Origin",
    "PepperError",
    "Principal",
    "Project",
    "ProjectNotFound",
    "Role",
    "Session",
    "SeveralTenants",
    "SignInRefused",
    "StillNeeded",
    "Tenant",
    "TenantExists",
    "TenantNotFound",
    "TenantSuspended",
    "Tenants",
    "TenantsError",
    "Tier",
    "TierNotFound",
    "TooManyFailures",
    "actor_of",
    "open_pepper",
    "replace_pepper",
    "system_principal",
]
