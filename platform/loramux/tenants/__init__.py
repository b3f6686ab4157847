"""Customers, their projects, members and keys: the one place where a secret becomes a verified tenant."""

from loramux.records import Origin, Principal, ProjectId, TenantId
from loramux.records.service_tiers import ALLOWED_AT_FIRST, CHOSEN
from loramux.tenants.account import Account, Members, Projects
from loramux.tenants.audit import AuditLog, Change, Changes
from loramux.tenants.authentication import Credential
from loramux.tenants.authority import CUSTOMER_SCOPES, ROLE_SCOPES, SCOPES, TENANT_SCOPES, Actor, Role, actor_of
from loramux.tenants.entities import AuditEntry, Key, Member, Project, Tenant, Tier
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
from loramux.tenants.keys import KeyRequest, Keys
from loramux.tenants.secrets import open_pepper, replace_pepper
from loramux.tenants.sessions import OpenedLink, Session, Sessions
from loramux.tenants.sign_in import SIGN_IN_SECONDS, Callback
from loramux.tenants.tenants import SERVICE_CLASSES, Tenants, Tiers, system_principal

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
    "Actor",
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
    "Keys",
    "Member",
    "MemberNotFound",
    "Members",
    "NotFound",
    "NotPermitted",
    "OpenedLink",
    "Origin",
    "PepperError",
    "Principal",
    "Project",
    "ProjectId",
    "ProjectNotFound",
    "Projects",
    "Role",
    "Session",
    "Sessions",
    "SeveralTenants",
    "SignInRefused",
    "StillNeeded",
    "Tenant",
    "TenantExists",
    "TenantId",
    "TenantNotFound",
    "TenantSuspended",
    "Tenants",
    "TenantsError",
    "Tier",
    "TierNotFound",
    "Tiers",
    "TooManyFailures",
    "actor_of",
    "open_pepper",
    "replace_pepper",
    "system_principal",
]
