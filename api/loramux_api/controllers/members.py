"""/v1/members."""

from __future__ import annotations

from litestar import Controller, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.tenants import Account
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing, MemberBody, MemberObject, RoleBody, member_object


class MemberController(Controller):
    """The tenant's people."""

    path = "/v1/members"
    tags = ("Members",)
    guards = (requires("members"),)

    @post(dto=StrictJSON[MemberBody], return_dto=None, summary="Add a member", responses=REFUSALS)
    async def add(self, data: JSONBody[MemberBody], account: NamedDependency[Account]) -> MemberObject:
        """Somebody whom an OIDC issuer knows, in a role that you may give."""
        return member_object(await account.members.add(data.issuer, data.subject, data.role))

    @get(summary="List members", responses=REFUSALS)
    async def list_members(self, account: NamedDependency[Account]) -> Listing[MemberObject]:
        """Everybody, oldest first."""
        return Listing(data=[member_object(member) for member in await account.members.all()])

    @patch("/{member_id:str}", dto=StrictJSON[RoleBody], return_dto=None, summary="Change a role", responses=REFUSALS)
    async def change_role(
        self, member_id: FromPath[str], data: JSONBody[RoleBody], account: NamedDependency[Account]
    ) -> MemberObject:
        """Counts from the member's next request on. The last owner stays one."""
        return member_object(await account.members.change_role(member_id, data.role))

    @delete("/{member_id:str}", status_code=200, summary="Remove a member", responses=REFUSALS)
    async def remove(self, member_id: FromPath[str], account: NamedDependency[Account]) -> MemberObject:
        """End a membership, at once. The last owner stays."""
        return member_object(await account.members.remove(member_id))
