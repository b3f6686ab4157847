"""Customers, their projects, members and keys: the one place where a secret becomes a verified tenant."""

from loramux.records import Origin, Principal, ProjectId, TenantId
from loramux.tenants.access import CUSTOMER_SCOPES, ROLE_SCOPES, SCOPES, TENANT_SCOPES, Role
from loramux.tenants.audit import AuditLog, Change, Changes
from loramux.tenants.authentication import Credential
from loramux.tenants.entities import AuditEntry, Key, Mandate, Member, Project, Tenant, Tier
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
    StillNeeded,
    TenantExists,
    TenantNotFound,
    TenantsError,
    TenantSuspended,
    TierNotFound,
)
from loramux.tenants.keys import KeyRequest, Keys
from loramux.tenants.members import Members
from loramux.tenants.pepper import load_or_create_pepper
from loramux.tenants.projects import Projects
from loramux.tenants.tenants import Account, Tenants, house_of
from loramux.tenants.tiers import SERVICE_CLASSES, Tiers

__all__ = [
    "CUSTOMER_SCOPES",
    "ROLE_SCOPES",
    "SCOPES",
    "SERVICE_CLASSES",
    "TENANT_SCOPES",
    "Account",
    "AlreadyExists",
    "AuditEntry",
    "AuditLog",
    "Change",
    "Changes",
    "Credential",
    "InvalidKey",
    "InvalidTenant",
    "Key",
    "KeyNotFound",
    "KeyRequest",
    "Keys",
    "Mandate",
    "Member",
    "MemberNotFound",
    "Members",
    "NotFound",
    "NotPermitted",
    "Origin",
    "PepperError",
    "Principal",
    "Project",
    "ProjectId",
    "ProjectNotFound",
    "Projects",
    "Role",
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
    "house_of",
    "load_or_create_pepper",
]
