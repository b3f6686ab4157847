"""Members, projects and tiers: rights to appoint, and rows that are still needed."""

from __future__ import annotations

import asyncio

import pytest

from loramux.accounts.tenants.account import Account
from loramux.accounts.tenants.authority import ROLE_SCOPES, Role
from loramux.accounts.tenants.errors import (
    AlreadyExists,
    InvalidTenant,
    MemberNotFound,
    NotPermitted,
    ProjectNotFound,
    StillNeeded,
    TierNotFound,
)
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal

pytestmark = pytest.mark.anyio

ISSUER = "https://id.example"


@pytest.fixture
async def account(tenants: Tenants) -> Account:
    await tenants.create("acme")
    return await tenants.account("acme")


async def as_role(tenants: Tenants, account: Account, role: Role) -> Account:
    member = await account.members.add(ISSUER, f"the {role}", role)
    project = (await account.projects.all())[0]
    return tenants.account_of(Principal(account.tenant, "acme", member.id, ROLE_SCOPES[role], project.id, role))


MAY = {
    Role.OWNER: set(Role),
    Role.ADMIN: {Role.DEVELOPER, Role.BILLING, Role.VIEWER},
    Role.DEVELOPER: set(),
    Role.BILLING: set(),
    Role.VIEWER: set(),
}


@pytest.mark.parametrize("role", list(Role))
async def test_role_may_appoint_and_dismiss_only_its_own_list(tenants: Tenants, account: Account, role: Role) -> None:
    await account.members.add(ISSUER, "first owner", "owner")
    own = await as_role(tenants, account, role)
    for other in Role:
        somebody = await account.members.add(ISSUER, f"some {other}", other)
        allowed = other in MAY[role]
        attempts = [lambda: own.members.add(ISSUER, f"new {other}", other), lambda: own.members.remove(somebody.id)]  # noqa: B023
        for attempt in attempts:
            if allowed:
                await attempt()
            else:
                with pytest.raises(NotPermitted, match=other):
                    await attempt()


async def test_role_change_beyond_the_actors_own_is_refused(tenants: Tenants, account: Account) -> None:
    owner = await account.members.add(ISSUER, "first owner", "owner")
    admin = await as_role(tenants, account, Role.ADMIN)
    viewer = await account.members.add(ISSUER, "v", "viewer")
    assert (await admin.members.change_role(viewer.id, "billing")).role is Role.BILLING
    for target, role in ((viewer.id, "owner"), (owner.id, "viewer")):
        with pytest.raises(NotPermitted):
            await admin.members.change_role(target, role)


async def test_last_owner_cannot_be_removed(account: Account) -> None:
    first, second = [await account.members.add(ISSUER, name, "owner") for name in ("a", "b")]
    outcomes = await asyncio.gather(
        account.members.remove(first.id), account.members.change_role(second.id, "viewer"), return_exceptions=True
    )
    assert sum(isinstance(outcome, StillNeeded) for outcome in outcomes) == 1, outcomes
    assert [member.role for member in await account.members.all()].count(Role.OWNER) == 1


async def test_member_is_identified_by_issuer_and_subject(tenants: Tenants, account: Account) -> None:
    member = await account.members.add(ISSUER, "alice", "owner")
    with pytest.raises(AlreadyExists):
        await account.members.add(ISSUER, "alice", "viewer")
    await account.members.add("https://other.example", "alice", "viewer")
    await tenants.create("globex")
    globex = await tenants.account("globex")
    await globex.members.add(ISSUER, "alice", "viewer")
    for nobody in (member.id, "member_x", "member\0"):
        with pytest.raises(MemberNotFound):
            await globex.members.remove(nobody)


@pytest.mark.parametrize(
    ("issuer", "subject", "role", "field"),
    [("", "s", "owner", "issuer"), (ISSUER, "a\nb", "owner", "subject"), (ISSUER, "s", "king", "role")],
)
async def test_malformed_member_is_refused_by_field(
    account: Account, issuer: str, subject: str, role: str, field: str
) -> None:
    with pytest.raises(InvalidTenant) as refusal:
        await account.members.add(issuer, subject, role)
    assert refusal.value.field == field


async def test_project_lifecycle_create_archive_reopen(tenants: Tenants, account: Account) -> None:
    assert [project.name for project in await account.projects.all()] == ["default"]
    web = await account.projects.create("web")
    with pytest.raises(AlreadyExists):
        await account.projects.create("web")
    assert (await account.projects.archive("web")).archived_at is not None
    assert (await account.projects.create("web")).id == web.id
    with pytest.raises(StillNeeded):
        await account.projects.archive("default")
    with pytest.raises(ProjectNotFound):
        await account.projects.archive("nowhere")
    with pytest.raises(InvalidTenant, match="1 to 63"):
        await account.projects.create("We b")
    await tenants.create("globex")
    with pytest.raises(ProjectNotFound):
        await (await tenants.account("globex")).projects.archive("web")


async def test_tier_in_use_cannot_be_removed(tenants: Tenants) -> None:
    assert [tier.name for tier in await tenants.tiers.all()] == ["batch", "interactive", "standard"]
    await tenants.tiers.put("gold", "interactive", 4)
    await tenants.create("acme", "gold")
    for needed in ("gold", "standard"):
        with pytest.raises(StillNeeded):
            await tenants.tiers.remove(needed)
    await tenants.move("acme", "standard")
    await tenants.tiers.remove("gold")
    for attempt in (tenants.move("acme", "gold"), tenants.create("globex", "gold"), tenants.tiers.remove("gold")):
        with pytest.raises(TierNotFound):
            await attempt
    for name, service_class, weight in (("G", "batch", 1), ("g", "royal", 1), ("g", "batch", 0), ("g", "batch", 1001)):
        with pytest.raises(InvalidTenant):
            await tenants.tiers.put(name, service_class, weight)
