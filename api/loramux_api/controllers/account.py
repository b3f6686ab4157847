"""/v1/keys, /v1/projects, /v1/members and /v1/audit: a tenant manages its own access."""

from __future__ import annotations

from litestar import delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.accounts.tenants.account import Account
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux_api.auth import requires
from loramux_api.bodies import DocumentRequest
from loramux_api.openapi import ApiController
from loramux_api.parameters import MAX_PAGE, BeforeSequence, OptionalText, PageLimit, PathName
from loramux_api.schemas.batches import Cursored, page_of
from loramux_api.schemas.tenancy import (
    AuditObject,
    KeyBody,
    KeyObject,
    Listing,
    MemberBody,
    MemberObject,
    ProjectBody,
    ProjectObject,
    RoleBody,
    RotateBody,
    audit_object,
    key_object,
    member_object,
    project_object,
)


class KeyController(ApiController):
    """API keys. A key never has more permissions than the credential that created it."""

    path = "/v1/keys"
    tags = ("Keys",)
    guards = (requires("keys"),)

    @post(summary="Create a key", request_class=DocumentRequest)
    async def create(self, data: JSONBody[KeyBody], account: NamedDependency[Account]) -> KeyObject:
        """Create a key. Only this answer has its secret, in `key`."""
        return key_object(*await account.keys.create(data.request()))

    @get(summary="List keys")
    async def list_keys(
        self, account: NamedDependency[Account], after: OptionalText = None, limit: PageLimit = MAX_PAGE
    ) -> Cursored[KeyObject]:
        """List the tenant's keys, oldest first, including revoked keys; `after` is the last id of the previous page."""
        found = await account.keys.after(after, limit + 1)
        return page_of([key_object(key) for key in found], limit, [key.id for key in found])

    @post("/{key_id:str}/rotate", summary="Rotate a key")
    async def rotate(
        self, key_id: PathName, data: JSONBody[RotateBody], account: NamedDependency[Account]
    ) -> KeyObject:
        """Create a key with the same permissions. The old key ends after `overlap_seconds`."""
        return key_object(*await account.keys.rotate(key_id, data.overlap_seconds))

    @delete("/{key_id:str}", status_code=200, summary="Revoke a key")
    async def revoke(self, key_id: PathName, account: NamedDependency[Account]) -> KeyObject:
        """Revoke a key at once. This cannot be undone."""
        return key_object(await account.keys.revoke(key_id))


class ProjectController(ApiController):
    """Projects."""

    path = "/v1/projects"
    tags = ("Projects",)

    @post(guards=[requires("projects")], summary="Create a project")
    async def create(self, data: JSONBody[ProjectBody], account: NamedDependency[Account]) -> ProjectObject:
        """Create a project, or restore an archived one with its keys that are neither revoked nor expired."""
        return project_object(await account.projects.create(data.name))

    @get(guards=[requires("read")], summary="List projects")
    async def list_projects(self, account: NamedDependency[Account]) -> Listing[ProjectObject]:
        """List the tenant's projects by name, including archived projects."""
        return Listing(data=[project_object(project) for project in await account.projects.all()])

    @delete("/{name:str}", status_code=200, guards=[requires("projects")], summary="Archive a project")
    async def archive(self, name: PathName, account: NamedDependency[Account]) -> ProjectObject:
        """Archive a project: its keys are refused from their next request on, until the project is restored."""
        return project_object(await account.projects.archive(name))


class MemberController(ApiController):
    """Members: people with a role in the tenant."""

    path = "/v1/members"
    tags = ("Members",)
    guards = (requires("members"),)

    @post(summary="Add a member")
    async def add(self, data: JSONBody[MemberBody], account: NamedDependency[Account]) -> MemberObject:
        """Add a person, known by an OIDC issuer, in a role that you may assign."""
        return member_object(await account.members.add(data.issuer, data.subject, data.role))

    @get(summary="List members")
    async def list_members(self, account: NamedDependency[Account]) -> Listing[MemberObject]:
        """List the members, oldest first."""
        return Listing(data=[member_object(member) for member in await account.members.all()])

    @patch("/{member_id:str}", summary="Change a role")
    async def change_role(
        self, member_id: PathName, data: JSONBody[RoleBody], account: NamedDependency[Account]
    ) -> MemberObject:
        """Change a role. Applies from the member's next request on. The last owner stays an owner."""
        return member_object(await account.members.change_role(member_id, data.role))

    @delete("/{member_id:str}", status_code=200, summary="Remove a member")
    async def remove(self, member_id: PathName, account: NamedDependency[Account]) -> MemberObject:
        """Remove a member at once. The last owner cannot be removed."""
        return member_object(await account.members.remove(member_id))


class AuditController(ApiController):
    """The audit log of the tenant."""

    path = "/v1/audit"
    tags = ("Audit",)
    guards = (requires("audit"),)

    @get(summary="Read the audit log")
    async def read(
        self,
        principal: NamedDependency[Principal],
        tenants: NamedDependency[Tenants],
        before: BeforeSequence = None,
        limit: PageLimit = 100,
    ) -> Listing[AuditObject]:
        """List changes, newest first. `before` is the last sequence number of the previous page."""
        entries = await tenants.audit.read(tenant=principal.tenant, before=before, limit=limit)
        return Listing(data=[audit_object(entry) for entry in entries])
