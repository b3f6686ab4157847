"""One tenant's projects."""

from __future__ import annotations

from loramux.records import ProjectId, TenantId
from loramux.records.identity import new_id
from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.records.tenancy import ProjectRepository
from loramux.records.tenancy_models import ProjectRow
from loramux.tenants.audit import Changes
from loramux.tenants.entities import Project, project_of
from loramux.tenants.errors import AlreadyExists, InvalidTenant, ProjectNotFound, StillNeeded
from loramux.tenants.keys import DEFAULT_PROJECT


class Projects:
    """The projects of one tenant, in the hands of one mandate. Every tenant has one that is called `default`."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def create(self, name: str) -> Project:
        """A new project; one that was archived comes back. Raises InvalidTenant or AlreadyExists."""
        if not is_name(name):
            raise InvalidTenant(f"a project's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        async with self._changes.begin() as change:
            projects = ProjectRepository(change.session, self._tenant)
            row = await projects.named(name)
            if row is None:
                id = ProjectId(new_id("project"))
                row = ProjectRow(id=id, tenant_id=self._tenant, name=name, created_at=change.now)
                await projects.add(row)
            elif row.archived_at is None:
                raise AlreadyExists(f"there is a project {name!r} already; choose another name", "name")
            row.archived_at = None
            await change.note("project.create", row.id, tenant=self._tenant, after=project_of(row))
        return project_of(row)

    async def all(self) -> list[Project]:
        """Every project, archived ones too, by name."""
        async with self._changes.database.read() as session:
            return [project_of(row) for row in await ProjectRepository(session, self._tenant).all()]

    async def archive(self, name: str) -> Project:
        """No new keys and no calls in person for it; its keys go on until they are revoked. Raises ProjectNotFound."""
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
