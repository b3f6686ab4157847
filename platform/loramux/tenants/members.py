"""One tenant's members: people, by what an OIDC issuer calls them."""

from __future__ import annotations

from loramux.records import TenantId
from loramux.records.identity import new_id
from loramux.records.tenancy import MemberRepository
from loramux.records.tenancy_models import MemberRow
from loramux.tenants.access import Role, check_role
from loramux.tenants.audit import Change, Changes
from loramux.tenants.entities import Member, member_of
from loramux.tenants.errors import AlreadyExists, InvalidTenant, MemberNotFound, NotPermitted, StillNeeded

MAX_LENGTH = 512


class Members:
    """The members of one tenant, in the hands of one mandate. The last owner stays."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def add(self, issuer: str, subject: str, role: str) -> Member:
        """A new member. Raises InvalidTenant, AlreadyExists, NotPermitted."""
        appointed = check_role(role)
        self._demand_may(appointed)
        for field, value in (("issuer", issuer), ("subject", subject)):
            if not 1 <= len(value) <= MAX_LENGTH or not value.isprintable():
                raise InvalidTenant(f"{field} has 1 to {MAX_LENGTH} printable characters", field)
        async with self._changes.begin() as change:
            members = MemberRepository(change.session, self._tenant)
            if await members.known(issuer, subject) is not None:
                raise AlreadyExists(f"{subject[:80]!r} is a member already; change the role instead", "subject")
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
        """Every member, oldest first."""
        async with self._changes.database.read() as session:
            return [member_of(row) for row in await MemberRepository(session, self._tenant).all()]

    async def change_role(self, member_id: str, role: str) -> Member:
        """Give a member another part. Raises InvalidTenant, MemberNotFound, NotPermitted, StillNeeded."""
        appointed = check_role(role)
        self._demand_may(appointed)
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=appointed is Role.OWNER)
            before = member_of(row)
            row.role = appointed
            await change.note("member.role", row.id, tenant=self._tenant, before=before, after=member_of(row))
        return member_of(row)

    async def remove(self, member_id: str) -> Member:
        """End a membership, at once. Raises MemberNotFound, NotPermitted, StillNeeded."""
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=False)
            await MemberRepository(change.session, self._tenant).remove(row)
            await change.note("member.remove", row.id, tenant=self._tenant, before=member_of(row))
        return member_of(row)

    async def _leaving(self, change: Change, member_id: str, *, stays: bool) -> MemberRow:
        """The member, whose role the mandate may take away and who is not the only owner."""
        members = MemberRepository(change.session, self._tenant)
        owners = await members.lock_owners()
        row = await members.get(member_id) if member_id.isprintable() else None
        if row is None:
            raise MemberNotFound(f"there is no member {member_id[:80]!r}", "member_id")
        self._demand_may(Role(row.role))
        if not stays and list(owners) == [row.id]:
            raise StillNeeded("this is the last owner; make another member an owner first", "member_id")
        return row

    def _demand_may(self, role: Role) -> None:
        if role not in self._changes.mandate.may_appoint:
            raise NotPermitted(f"you may not give or take the role '{role}'; ask an owner", "role")
