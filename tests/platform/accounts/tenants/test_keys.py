"""Keys: projects, allow-lists, expiry, rotation, and when they were last used."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from manual_clock import ManualClock

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.errors import (
    InvalidKey,
    InvalidTenant,
    KeyNotFound,
    NotPermitted,
    ProjectNotFound,
    StillNeeded,
    TenantSuspended,
)
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.units import SECOND
from loramux.data.records.database import Database

pytestmark = pytest.mark.anyio


async def test_key_belongs_to_one_project(tenants: Tenants) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    web = await account.projects.create("web")
    key, secret = await account.keys.create(KeyRequest(project="web"))
    assert key.project == web.id == (await tenants.authenticator.authenticate(secret)).project
    with pytest.raises(ProjectNotFound, match="'absent'"):
        await account.keys.create(KeyRequest(project="absent"))


async def test_archived_project_refuses_its_keys_until_it_is_restored(tenants: Tenants) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    await account.projects.create("web")
    _, secret = await account.keys.create(KeyRequest(project="web"))
    revoked, revoked_secret = await account.keys.create(KeyRequest(project="web"))
    _, beside = await account.keys.create(KeyRequest())
    await account.keys.revoke(revoked.id)
    await account.projects.archive("web")
    with pytest.raises(ProjectNotFound, match="'web'"):
        await account.keys.create(KeyRequest(project="web"))
    with pytest.raises(InvalidKey, match=r"project 'web' of this API key is archived.*restored"):
        await tenants.authenticator.authenticate(secret)
    assert (await tenants.authenticator.authenticate(beside)).tenant_name == "acme"
    web = await account.projects.create("web")
    assert (await tenants.authenticator.authenticate(secret)).project == web.id
    with pytest.raises(InvalidKey, match="unknown or was revoked"):
        await tenants.authenticator.authenticate(revoked_secret)


async def test_allow_list_is_part_of_the_principal(tenants: Tenants) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    _, secret = await account.keys.create(KeyRequest(models=frozenset({"acme/upper", "tiny"})))
    principal = await tenants.authenticator.authenticate(secret)
    assert [principal.may_use(model) for model in ("acme/upper", "tiny", "acme/json")] == [True, True, False]
    for wrong in (frozenset(), frozenset({""}), frozenset({"a\nb"}), frozenset({"x" * 201})):
        with pytest.raises(InvalidTenant, match="tenant/adapter, or the base's name"):
            await account.keys.create(KeyRequest(models=wrong))


async def test_key_expires_to_the_microsecond_and_says_when(tenants: Tenants, clock: ManualClock[int]) -> None:
    await tenants.create("acme")
    _, secret = await (await tenants.account("acme")).keys.create(KeyRequest(expires_in=60))
    clock.now += 60 * SECOND - 1
    await tenants.authenticator.authenticate(secret)
    clock.now += 1
    with pytest.raises(InvalidKey, match=r"has expired \(2023-11-14T22:14:20"):
        await tenants.authenticator.authenticate(secret)


@pytest.mark.parametrize("seconds", [0, -1, 10**12])
async def test_key_lifetime_out_of_range_is_refused(tenants: Tenants, seconds: int) -> None:
    await tenants.create("acme")
    with pytest.raises(InvalidTenant, match="expires_in is 1 to"):
        await (await tenants.account("acme")).keys.create(KeyRequest(expires_in=seconds))


async def test_rotation_keeps_both_keys_valid_during_the_overlap(tenants: Tenants, clock: ManualClock[int]) -> None:
    await tenants.create("acme")
    keys = (await tenants.account("acme")).keys
    old, old_secret = await keys.create(
        KeyRequest(name="ci", scopes=frozenset({"usage"}), models=frozenset({"tiny"}), expires_in=10_000)
    )
    made, secret = await keys.rotate(old.id, 3600)
    inherited = ("name", "scopes", "models", "project", "expires_at")
    assert [getattr(made, name) for name in inherited] == [getattr(old, name) for name in inherited]
    await tenants.authenticator.authenticate(old_secret)
    clock.now += 3600 * SECOND
    with pytest.raises(InvalidKey, match="expired"):
        await tenants.authenticator.authenticate(old_secret)
    await tenants.authenticator.authenticate(secret)
    assert [(key.id, key.replaced_by) for key in await keys.all() if key.id == old.id] == [(old.id, made.id)]
    with pytest.raises(InvalidTenant, match="has ended"):
        await keys.rotate(old.id, 0)


async def test_rotation_never_extends_the_expiry(tenants: Tenants, clock: ManualClock[int]) -> None:
    await tenants.create("acme")
    keys = (await tenants.account("acme")).keys
    old, secret = await keys.create(KeyRequest(expires_in=60))
    await keys.rotate(old.id, 3600)
    clock.now += 60 * SECOND
    with pytest.raises(InvalidKey, match="expired"):
        await tenants.authenticator.authenticate(secret)


async def test_key_passes_on_no_scope_that_it_lacks(tenants: Tenants) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    rich, _ = await account.keys.create(KeyRequest(scopes=frozenset({"keys", "members"})))
    _, secret = await account.keys.create(KeyRequest(scopes=frozenset({"keys", "usage"})))
    own = tenants.account_of(await tenants.authenticator.authenticate(secret))
    made, _ = await own.keys.create(KeyRequest(scopes=frozenset({"usage", "read"})))
    assert made.created_by != rich.created_by
    for beyond in ("inference", "operator"):
        with pytest.raises(NotPermitted, match=beyond):
            await own.keys.create(KeyRequest(scopes=frozenset({"usage", beyond})))
    with pytest.raises(NotPermitted, match="members"):
        await own.keys.rotate(rich.id, 0)


async def test_key_with_an_allow_list_makes_no_wider_keys(tenants: Tenants) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    wide, _ = await account.keys.create(KeyRequest(scopes=frozenset({"usage"})))
    narrow = KeyRequest(scopes=frozenset({"keys", "usage"}), models=frozenset({"acme/a", "tiny"}))
    own = tenants.account_of(await tenants.authenticator.authenticate((await account.keys.create(narrow))[1]))
    made, _ = await own.keys.create(KeyRequest(scopes=frozenset({"usage"}), models=frozenset({"tiny"})))
    await own.keys.rotate(made.id, 0)
    for models in (None, frozenset({"tiny", "acme/b"})):
        with pytest.raises(NotPermitted, match="may name only acme/a, tiny"):
            await own.keys.create(KeyRequest(scopes=frozenset({"usage"}), models=models))
    with pytest.raises(KeyNotFound):
        await own.keys.rotate(wide.id, 0)


async def test_key_of_another_tenant_is_not_found(tenants: Tenants) -> None:
    for name in ("acme", "globex"):
        await tenants.create(name)
    theirs, secret = await tenants.create_key("globex")
    keys = (await tenants.account("acme")).keys
    for attempt in (keys.revoke(theirs.id), keys.rotate(theirs.id, 0)):
        with pytest.raises(KeyNotFound):
            await attempt
    assert theirs not in await keys.all()
    await tenants.authenticator.authenticate(secret)


async def test_suspended_tenant_is_refused_until_it_is_resumed(tenants: Tenants) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    await tenants.suspend("acme")
    with pytest.raises(TenantSuspended, match="'acme' is suspended"):
        await tenants.authenticator.authenticate(secret)
    await tenants.resume("acme")
    await tenants.authenticator.authenticate(secret)


async def test_last_use_is_written_in_batches(tenants: Tenants, clock: ManualClock[int]) -> None:
    await tenants.create("acme")
    keys = (await tenants.account("acme")).keys
    secrets = [(await keys.create(KeyRequest()))[1] for _ in range(3)]
    for secret in secrets[:2]:
        await tenants.authenticator.authenticate(secret)
    assert [key.last_used_at for key in await keys.all()] == [None] * 3
    await tenants.last_use.flush()
    assert sorted(key.last_used_at or 0 for key in await keys.all()) == [0, clock.now, clock.now]
    later = clock.now
    clock.now -= SECOND
    await tenants.authenticator.authenticate(secrets[0])
    await tenants.last_use.flush()
    assert max(key.last_used_at or 0 for key in await keys.all()) == later


async def test_tier_change_applies_from_the_next_request(tenants: Tenants) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    principal = await tenants.authenticator.authenticate(secret)
    assert (principal.tier, principal.service_class, principal.weight) == ("standard", "standard", 1)
    await tenants.tiers.put("gold", "interactive", 4)
    await tenants.move("acme", "gold")
    principal = await tenants.authenticator.authenticate(secret)
    assert (principal.tier, principal.service_class, principal.weight) == ("gold", "interactive", 4)
    await tenants.tiers.put("gold", "batch", 2)
    assert (await tenants.authenticator.authenticate(secret)).service_class == "batch"


async def test_key_entity_holds_no_secret(tenants: Tenants) -> None:
    await tenants.create("acme")
    key, secret = await tenants.create_key("acme")
    assert secret not in msgspec.json.encode(key).decode()
    assert secret not in msgspec.json.encode(await tenants.audit.read()).decode()


async def test_audit_entries_name_actor_and_origin(
    tenants: Tenants, sql: Callable[[str], None], database: Database
) -> None:
    await tenants.create("acme")
    key, _ = await tenants.create_key("acme")
    await tenants.revoke_key(key.id)
    await tenants.revoke_key(key.id)
    log = await tenants.audit.read()
    assert [entry.action for entry in log] == ["key.revoke", "key.create", "project.create", "tenant.create"]
    revoked = log[0]
    assert revoked.actor.startswith("local:")
    assert revoked.object_id == key.id
    before, after = (msgspec.json.decode(state) for state in (revoked.before, revoked.after))
    assert {name for name in before if before[name] != after[name]} == {"revoked_at"}
    assert [e.action for e in await tenants.audit.read(before=log[1].sequence, limit=1)] == ["project.create"]
    for change in ("UPDATE audit_entries SET actor = 'x'", "DELETE FROM audit_entries"):
        with pytest.raises(Exception, match="append-only"):
            sql(change)


async def test_audit_entries_of_a_tenant_are_numbered_without_those_of_other_tenants(tenants: Tenants) -> None:
    """A gap would tell a tenant how many changes the others make."""
    for name in ("acme", "globex"):
        await tenants.create(name)
    for _ in range(3):
        await tenants.create_key("globex")
        await tenants.create_key("acme")
    acme = (await tenants.named("acme")).id
    log = await tenants.audit.read(tenant=acme)
    assert [entry.sequence for entry in log] == [5, 4, 3, 2, 1]
    assert [entry.at for entry in log] == sorted((entry.at for entry in log), reverse=True)
    pages = [await tenants.audit.read(tenant=acme, before=before, limit=2) for before in (None, 4, 2, 1)]
    assert [entry for page in pages for entry in page] == log
    assert len(await tenants.audit.read()) == 10


async def test_failed_change_leaves_no_audit_entry(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be noted does not happen."""
    await tenants.create("acme")
    before = await tenants.audit.read()
    account = await tenants.account("acme")
    with pytest.raises(ProjectNotFound):
        await account.keys.create(KeyRequest(project="nowhere"))
    assert await tenants.audit.read() == before

    async def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("loramux.accounts.tenants.entities.Change.note", fail)
    with pytest.raises(ZeroDivisionError):
        await account.keys.create(KeyRequest())
    assert await account.keys.all() == []


async def test_number_of_keys_projects_and_members_is_bounded(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_LIVE_KEYS", "MAX_PROJECTS", "MAX_MEMBERS"):
        monkeypatch.setattr(f"loramux.accounts.tenants.account.{name}", 2)
    await tenants.create("acme")
    account = await tenants.account("acme")
    first, _ = await account.keys.create(KeyRequest())
    second, _ = await account.keys.create(KeyRequest())
    await account.projects.create("web")
    for subject in ("a", "b"):
        await account.members.add("https://id.example", subject, "viewer")
    for attempt in (
        lambda: account.keys.create(KeyRequest()),
        lambda: account.projects.create("mobile"),
        lambda: account.members.add("https://id.example", "c", "viewer"),
    ):
        with pytest.raises(StillNeeded, match="at most 2"):
            await attempt()
    await account.keys.rotate(first.id, 0)
    await account.keys.revoke(second.id)
    await account.keys.create(KeyRequest())
