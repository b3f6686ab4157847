"""Nothing that a credential makes can do more, or live longer, than the credential."""

from __future__ import annotations

import asyncio

import pytest
from manual_clock import ManualClock

from loramux.accounts.tenants.account import Account, KeyRequest
from loramux.accounts.tenants.authority import TENANT_SCOPES, Role
from loramux.accounts.tenants.entities import Key
from loramux.accounts.tenants.errors import InvalidKey, InvalidTenant, KeyNotFound, NotPermitted, ProjectNotFound
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.data.records.database import Database

pytestmark = pytest.mark.anyio

ISSUER = "https://id.example"
KEYS = frozenset({"keys", "inference"})


@pytest.fixture
async def account(tenants: Tenants) -> Account:
    await tenants.create("acme")
    account = await tenants.account("acme")
    await account.projects.create("web")
    return account


async def make(tenants: Tenants, account: Account, **wanted: object) -> tuple[Key, Account, Principal]:
    """A key, the account in its hands, and its principal."""
    key, secret = await account.keys.create(KeyRequest(**({"scopes": KEYS} | wanted)))
    principal = await tenants.authenticator.authenticate(secret)
    return key, tenants.account_of(principal), principal


async def works(tenants: Tenants, secret: str) -> bool:
    try:
        await tenants.authenticator.authenticate(secret)
    except InvalidKey:
        return False
    return True


async def test_child_key_expires_with_its_maker_unless_sooner(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account, expires_in=100)
    assert (await own.keys.create(KeyRequest(scopes=KEYS)))[0].expires_at == maker.expires_at
    assert (await own.keys.create(KeyRequest(scopes=KEYS, expires_in=50)))[0].expires_at < maker.expires_at
    with pytest.raises(NotPermitted, match="ends at 2023-11-14T22:15:00") as refusal:
        await own.keys.create(KeyRequest(scopes=KEYS, expires_in=101))
    assert refusal.value.field == "expires_in"


async def test_expiring_key_rotates_no_key_that_lives_longer(tenants: Tenants, account: Account) -> None:
    lasting, _, _ = await make(tenants, account)
    brief, own, _ = await make(tenants, account, expires_in=100)
    with pytest.raises(NotPermitted, match="ends at"):
        await own.keys.rotate(lasting.id, 0)
    assert (await own.keys.rotate(brief.id, 10))[0].expires_at == brief.expires_at


async def test_child_key_stays_in_its_makers_project(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account, project="web")
    assert (await own.keys.create(KeyRequest(scopes=KEYS)))[0].project == maker.project
    with pytest.raises(NotPermitted, match="belongs to one project") as refusal:
        await own.keys.create(KeyRequest(scopes=KEYS, project="default"))
    assert refusal.value.field == "project"
    with pytest.raises(ProjectNotFound):
        await own.keys.create(KeyRequest(scopes=KEYS, project="absent"))


async def test_key_of_one_project_manages_no_key_that_reaches_beyond_it(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account, project="web")
    sibling, _, _ = await make(tenants, account, project="web")
    other, _, _ = await make(tenants, account)
    wider, _, _ = await make(tenants, account, project="web", scopes=KEYS | {"projects"})
    operator, _, _ = await make(tenants, account, project="web", scopes=frozenset({"operator"}))
    assert {key.id for key in await own.keys.all()} == {maker.id, sibling.id}
    for beyond in (other, wider, operator):
        for attempt in (own.keys.rotate(beyond.id, 0), own.keys.revoke(beyond.id)):
            with pytest.raises(KeyNotFound):
                await attempt
    await own.keys.revoke(sibling.id)
    assert [key.id for key in await account.keys.all() if key.revoked_at] == [sibling.id]


async def test_key_that_manages_projects_manages_keys_in_any(tenants: Tenants, account: Account) -> None:
    other, _, _ = await make(tenants, account, project="web")
    _, own, _ = await make(tenants, account, scopes=KEYS | {"projects"})
    assert other.id in {key.id for key in await own.keys.all()}
    assert (await own.keys.revoke(other.id)).revoked_at is not None


async def test_key_that_manages_projects_makes_keys_in_any(tenants: Tenants, account: Account) -> None:
    _, own, _ = await make(tenants, account, scopes=KEYS | {"projects"})
    made, _ = await own.keys.create(KeyRequest(scopes=KEYS, project="web"))
    assert made.project != (await own.keys.create(KeyRequest(scopes=KEYS)))[0].project


@pytest.mark.parametrize(
    ("wanted", "roles"),
    [
        ({"scopes": frozenset({"members"})}, set()),
        ({"scopes": frozenset({"members", "projects"})}, set()),
        ({"scopes": frozenset({"members", "projects", "usage"})}, {Role.VIEWER}),
        ({"scopes": frozenset({"members", "projects", "usage", "billing", "limits"})}, {Role.VIEWER, Role.BILLING}),
        ({"scopes": frozenset({"members", "projects", "usage"}), "expires_in": 100}, set()),
        ({"scopes": frozenset({"members", "projects", "usage"}), "models": frozenset({"acme/a"})}, set()),
    ],
)
async def test_key_appoints_no_member_with_more_than_its_own_scopes(
    tenants: Tenants, account: Account, wanted: dict[str, object], roles: set[Role]
) -> None:
    _, own, _ = await make(tenants, account, **wanted)
    for role in Role:
        if role in roles:
            await own.members.add(ISSUER, f"a {role}", role)
        else:
            with pytest.raises(NotPermitted, match=role):
                await own.members.add(ISSUER, f"a {role}", role)


async def test_key_with_an_allow_list_has_no_scopes_over_the_whole_tenant(tenants: Tenants, account: Account) -> None:
    everything = TENANT_SCOPES | {"operator"}
    _, _, principal = await make(tenants, account, scopes=everything, models=frozenset({"acme/a"}))
    assert principal.scopes == {"inference", "adapters", "usage", "keys", "read"}


async def test_key_with_an_allow_list_manages_keys_within_it_only(tenants: Tenants, account: Account) -> None:
    mine, own, _ = await make(tenants, account, models=frozenset({"acme/a", "acme/b"}))
    within, _, _ = await make(tenants, account, models=frozenset({"acme/b"}))
    for other in (None, frozenset({"acme/secret"})):
        wide, _, _ = await make(tenants, account, models=other)
        for attempt in (own.keys.revoke(wide.id), own.keys.rotate(wide.id, 0)):
            with pytest.raises(KeyNotFound):
                await attempt
    assert {key.id for key in await own.keys.all()} == {mine.id, within.id}
    await own.keys.revoke(within.id)


async def test_revoking_a_key_ends_the_keys_that_it_made(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account)
    child, child_secret = await own.keys.create(KeyRequest(scopes=KEYS))
    grandchild_account = tenants.account_of(await tenants.authenticator.authenticate(child_secret))
    _, grandchild_secret = await grandchild_account.keys.create(KeyRequest(scopes=KEYS))
    _, stranger_secret = await account.keys.create(KeyRequest(scopes=KEYS))
    await account.keys.revoke(maker.id)
    assert not await works(tenants, child_secret)
    assert not await works(tenants, grandchild_secret)
    assert await works(tenants, stranger_secret)
    entries = await tenants.audit.read(tenant=account.tenant, limit=3)
    assert {entry.action for entry in entries} == {"key.revoke"}
    assert child.id in {entry.object_id for entry in entries}


async def test_revoking_a_rotated_key_spares_what_it_made(
    tenants: Tenants, account: Account, clock: ManualClock[int]
) -> None:
    maker, own, _ = await make(tenants, account)
    _, child_secret = await own.keys.create(KeyRequest(scopes=KEYS))
    successor, successor_secret = await own.keys.rotate(maker.id, 3600)
    await account.keys.revoke(maker.id)
    assert await works(tenants, successor_secret)
    assert await works(tenants, child_secret)
    await account.keys.revoke(successor.id)
    assert not await works(tenants, child_secret)


async def test_removing_a_member_ends_the_keys_that_it_made(tenants: Tenants, account: Account) -> None:
    await account.members.add(ISSUER, "owner", "owner")
    member = await account.members.add(ISSUER, "dev", "developer")
    project = (await account.projects.all())[0].id
    principal = Principal(account.tenant, "acme", member.id, KEYS, project, "developer", lineage=(member.id,))
    own = tenants.account_of(principal)
    _, secret = await own.keys.create(KeyRequest(scopes=KEYS))
    adopted, _ = await own.keys.create(KeyRequest(scopes=KEYS))
    _, adopted_secret = await account.keys.rotate(adopted.id, 0)
    await account.members.change_role(member.id, "viewer")
    assert not await works(tenants, secret)
    assert await works(tenants, adopted_secret)
    await account.members.remove(member.id)
    with pytest.raises(InvalidKey):
        await own.keys.create(KeyRequest(scopes=KEYS))


async def test_key_made_while_its_maker_is_revoked_does_not_survive(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account)
    outcomes = await asyncio.gather(
        *(own.keys.create(KeyRequest(scopes=KEYS)) for _ in range(4)),
        account.keys.revoke(maker.id),
        *(own.keys.create(KeyRequest(scopes=KEYS)) for _ in range(4)),
        return_exceptions=True,
    )
    made = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert all(isinstance(outcome, (tuple, Key, InvalidKey)) for outcome in outcomes), outcomes
    assert not any([await works(tenants, secret) for _, secret in made])
    with pytest.raises(InvalidKey):
        await own.keys.create(KeyRequest(scopes=KEYS))


async def test_keys_make_keys_to_a_bounded_depth(tenants: Tenants, account: Account) -> None:
    _, own, principal = await make(tenants, account)
    for depth in range(2, 10):
        _, secret = await own.keys.create(KeyRequest(scopes=KEYS))
        principal = await tenants.authenticator.authenticate(secret)
        own = tenants.account_of(principal)
        assert len(principal.lineage) == depth
    with pytest.raises(InvalidTenant, match="8 levels deep"):
        await own.keys.create(KeyRequest(scopes=KEYS))


async def test_rotation_keeps_the_lineage(tenants: Tenants, account: Account) -> None:
    maker, own, _ = await make(tenants, account)
    child, _ = await own.keys.create(KeyRequest(scopes=KEYS))
    _, by_maker = await own.keys.rotate(child.id, 0)
    assert (await tenants.authenticator.authenticate(by_maker)).lineage == (child.id, maker.id)
    made, by_operator = await account.keys.rotate((await tenants.authenticator.authenticate(by_maker)).key_id, 0)
    assert (await tenants.authenticator.authenticate(by_operator)).lineage == (child.id,)
    assert made.id != child.id


async def test_operators_key_outlives_no_operator_and_tenants_keys_do(tenants: Tenants, database: Database) -> None:
    await tenants.create("platform")
    operator, secret = await (await tenants.account("platform")).keys.create(
        KeyRequest(scopes=frozenset({"operator"}), expires_in=100)
    )
    admin = tenants.as_operator(await tenants.authenticator.authenticate(secret))
    await admin.create("acme")
    tenant_key, tenant_secret = await admin.create_key("acme")
    assert tenant_key.expires_at is None
    others = [await admin.create_key(tenant, scopes={"operator"}) for tenant in ("platform", "acme")]
    assert {other.expires_at for other, _ in others} == {operator.expires_at}
    await tenants.revoke_key(operator.id)
    assert await works(tenants, tenant_secret)
    for _, other_secret in others:
        assert not await works(tenants, other_secret)
