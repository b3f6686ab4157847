"""/v1/projects."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.tenants import Account
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing, ProjectBody, ProjectObject, project_object


class ProjectController(Controller):
    """The tenant's projects."""

    path = "/v1/projects"
    tags = ("Projects",)

    @post(
        dto=StrictJSON[ProjectBody],
        return_dto=None,
        guards=[requires("projects")],
        summary="Make a project",
        responses=REFUSALS,
    )
    async def create(self, data: JSONBody[ProjectBody], account: NamedDependency[Account]) -> ProjectObject:
        """A new project; one that was archived comes back."""
        return project_object(await account.projects.create(data.name))

    @get(guards=[requires("read")], summary="List projects", responses=REFUSALS)
    async def list_projects(self, account: NamedDependency[Account]) -> Listing[ProjectObject]:
        """All of the tenant's projects, archived ones too, by name."""
        return Listing(data=[project_object(project) for project in await account.projects.all()])

    @delete(
        "/{name:str}",
        status_code=200,
        guards=[requires("projects")],
        summary="Archive a project",
        responses=REFUSALS,
    )
    async def archive(self, name: FromPath[str], account: NamedDependency[Account]) -> ProjectObject:
        """No new keys for it; those that it has go on until they are revoked."""
        return project_object(await account.projects.archive(name))
