"""One tenant's account: its keys, projects and members, as one actor may change them."""

from __future__ import annotations

from loramux.records import ProjectId, TenantId
from loramux.records.identity import GRAMMAR_IN_WORDS, is_name, new_id
from loramux.records.tenants import MemberRepository, MemberRow, ProjectRepository, ProjectRow
from loramux.tenants.audit import Change, Changes
from loramux.tenants.authority import ROLE_SCOPES, Role, check_role, closure
from loramux.tenants.entities import Member, Project, member_of, project_of
from loramux.tenants.errors import (
    AlreadyExists,
    InvalidTenant,
    MemberNotFound,
    ProjectNotFound,
    StillNeeded,
)
from loramux.tenants.keys import DEFAULT_PROJECT, Keys, revoke_made_by

MAX_LENGTH = 512
MAX_PROJECTS = 1_000
MAX_MEMBERS = 10_000


class Account:
    """One tenant's keys, projects and members, as one actor may change them."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self.tenant = tenant
        self.keys = Keys(changes, tenant, pepper)
        self.projects = Projects(changes, tenant)
        self.members = Members(changes, tenant)


class Projects:
    """The projects of one tenant, as one actor may change them. Every tenant has one called `default`."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def create(self, name: str) -> Project:
        """Create a project, or restore an archived one with its keys. Raises InvalidTenant or AlreadyExists."""
        if not is_name(name):
            raise InvalidTenant(f"a project's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        async with self._changes.begin() as change:
            projects = ProjectRepository(change.session, self._tenant)
            row = await projects.named(name)
            if row is None:
                if await projects.count() >= MAX_PROJECTS:
                    raise StillNeeded(f"a tenant has at most {MAX_PROJECTS} projects; reopen an archived one", "name")
                id = ProjectId(new_id("project"))
                row = ProjectRow(id=id, tenant_id=self._tenant, name=name, created_at=change.now)
                await projects.add(row)
            elif row.archived_at is None:
                raise AlreadyExists(f"there is a project {name!r} already; choose another name", "name")
            row.archived_at = None
            await change.note("project.create", row.id, tenant=self._tenant, after=project_of(row))
        return project_of(row)

    async def all(self) -> list[Project]:
        """Return every project, archived ones too, by name."""
        async with self._changes.database.read() as session:
            return [project_of(row) for row in await ProjectRepository(session, self._tenant).all()]

    async def archive(self, name: str) -> Project:
        """Close a project: no key of it and no member in it is let in until `create` restores it.

        Raises ProjectNotFound, StillNeeded.
        """
        if name == DEFAULT_PROJECT:
            raise StillNeeded("the project `default` cannot be archived; keys without a project belong to it", "name")
        async with self._changes.begin() as change:
            row = await ProjectRepository(change.session, self._tenant).named(name) if is_name(name) else None
            if row is None:
                raise ProjectNotFound(f"there is no project {name[:80]!r}", "name")
            if row.archived_at is None:
                before = project_of(row)
                row.archived_at = change.now
                await change.note("project.archive", row.id, tenant=self._tenant, before=before, after=project_of(row))
        return project_of(row)


class Members:
    """The members of one tenant, as one actor may change them. A tenant that has an owner keeps one."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def add(self, issuer: str, subject: str, role: str) -> Member:
        """Add a member. Raises InvalidTenant, AlreadyExists, NotPermitted."""
        appointed = check_role(role)
        self._changes.actor.authority.ensure_appoints(appointed)
        for field, value in (("issuer", issuer), ("subject", subject)):
            if not 1 <= len(value) <= MAX_LENGTH or not value.isprintable():
                raise InvalidTenant(f"{field} has 1 to {MAX_LENGTH} printable characters", field)
        async with self._changes.begin() as change:
            members = MemberRepository(change.session, self._tenant)
            if await members.known(issuer, subject) is not None:
                raise AlreadyExists(f"{subject[:80]!r} is a member already; change the role instead", "subject")
            if await members.count() >= MAX_MEMBERS:
                raise StillNeeded(f"a tenant has at most {MAX_MEMBERS} members; remove one first", "subject")
            row = MemberRow(
                id=new_id("member"),
                tenant_id=self._tenant,
                issuer=issuer,
                subject=subject,
                role=appointed,
                created_at=change.now,
            )
            await members.add(row)
            await change.note("member.add", row.id, tenant=self._tenant, after=member_of(row))
        return member_of(row)

    async def all(self) -> list[Member]:
        """Return every member, oldest first."""
        async with self._changes.database.read() as session:
            return [member_of(row) for row in await MemberRepository(session, self._tenant).all()]

    async def change_role(self, member_id: str, role: str) -> Member:
        """Give a member another role, and end the keys of its making that can do more than it may now.

        Raises InvalidTenant, MemberNotFound, NotPermitted, StillNeeded."""
        appointed = check_role(role)
        self._changes.actor.authority.ensure_appoints(appointed)
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=appointed is Role.OWNER)
            before = member_of(row)
            row.role = appointed
            await change.note("member.role", row.id, tenant=self._tenant, before=before, after=member_of(row))
            scopes = closure(ROLE_SCOPES[appointed])
            await revoke_made_by(change, row.id, unless=lambda key: closure(key.scopes) <= scopes)
        return member_of(row)

    async def remove(self, member_id: str) -> Member:
        """End a membership and the keys that the member made, at once.

        Raises MemberNotFound, NotPermitted, StillNeeded."""
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=False)
            await MemberRepository(change.session, self._tenant).remove(row)
            await change.note("member.remove", row.id, tenant=self._tenant, before=member_of(row))
            await revoke_made_by(change, row.id)
        return member_of(row)

    async def _leaving(self, change: Change, member_id: str, *, stays: bool) -> MemberRow:
        """Return the member, after checking that the actor may take its role and that it is not the only owner."""
        members = MemberRepository(change.session, self._tenant)
        owners = await members.lock_owners()
        row = await members.get(member_id) if member_id.isprintable() else None
        if row is None:
            raise MemberNotFound(f"there is no member {member_id[:80]!r}", "member_id")
        self._changes.actor.authority.ensure_appoints(Role(row.role))
        if not stays and list(owners) == [row.id]:
            raise StillNeeded("this is the last owner; make another member an owner first", "member_id")
        return row
