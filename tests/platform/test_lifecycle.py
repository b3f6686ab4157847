"""What becomes of a revision after its upload: canary, promote, rollback, share, pin, expire, delete, undo."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from shelf import Shelf, digest_of

from loramux.records import Database, Principal
from loramux.registry import (
    AdapterNotFound,
    ChangeConflict,
    InvalidChange,
    ModelNotFound,
    PartNotFound,
    PreconditionFailed,
    Terms,
    TooManyAdapters,
    WeightedRevision,
)
from loramux.tenants import Tenants
from loramux.usage import Claim, ClaimedOnce, IdempotencyMismatch

pytestmark = pytest.mark.anyio
Enrol = Callable[[str], Awaitable[Principal]]


@pytest.fixture
def shelf(database: Database) -> Shelf:
    return Shelf(database, max_aliases=3, max_grants=2, pins_per_tenant=2)


@pytest.fixture
async def acme(enrol: Enrol) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def globex(enrol: Enrol) -> Principal:
    return await enrol("globex")


def weights(**shares: int) -> list[WeightedRevision]:
    """`r3=95` is revision 3 with weight 95."""
    return [WeightedRevision(int(name[1:]), share) for name, share in shares.items()]


# ---- release


async def test_an_alias_shares_its_requests_out_and_sticks(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    info = await shelf.registry.releasing.point(acme, "bot", "default", weights(r2=30, r1=70))
    assert [(alias.name, alias.targets) for alias in info.aliases] == [("default", tuple(weights(r1=70, r2=30)))]
    assert info.revision == 1, "most of it goes there"
    first = {user: await shelf.means(acme, "acme/bot", f"user {user}") for user in range(40)}
    assert set(first.values()) == {"acme/bot@1", "acme/bot@2"}
    assert first == {user: await shelf.means(acme, "acme/bot", f"user {user}") for user in range(40)}


async def test_promote_moves_one_alias(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    await shelf.registry.releasing.promote(acme, "bot", 1, "stable")
    await shelf.registry.releasing.promote(acme, "acme/bot", 1)
    await shelf.registry.releasing.promote(acme, "bot", 2, "next")
    names = {name: await shelf.means(acme, f"acme/bot{name}") for name in ("", ":stable", ":next")}
    assert names == {"": "acme/bot@1", ":stable": "acme/bot@1", ":next": "acme/bot@2"}
    await shelf.registry.releasing.remove(acme, "bot", "next")
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot:next")


async def test_an_upload_that_is_not_promoted_moves_nothing(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, promote=False)
    await shelf.push(acme, "bot", 2, promote=False)
    assert [await shelf.means(acme, name) for name in ("acme/bot", "acme/bot@2")] == ["acme/bot@1", "acme/bot@2"]


async def test_rolling_back_goes_further_and_further_back(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    releasing = shelf.registry.releasing
    seen = []
    for _ in range(2):
        await releasing.roll_back(acme, "bot", "default", None)
        seen.append(await shelf.means(acme, "acme/bot"))
    assert seen == ["acme/bot@2", "acme/bot@1"]
    with pytest.raises(ChangeConflict) as refusal:
        await releasing.roll_back(acme, "bot", "default", None)
    assert (refusal.value.code, refusal.value.field) == ("nothing_to_roll_back_to", "version")
    await releasing.roll_back(acme, "bot", "default", 3)
    assert await shelf.means(acme, "acme/bot") == "acme/bot@3"
    history = await shelf.registry.reading.history(acme, "bot", "default")
    told = [(one.version, one.targets[0].revision, one.restores) for one in history]
    assert told == [(6, 3, 3), (5, 1, 1), (4, 2, 2), (3, 3, None), (2, 2, None), (1, 1, None)]
    assert {one.changed_by for one in history} == {acme.key_id}


async def test_rolling_back_steps_over_what_was_deleted(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.retiring.delete_revision(acme, "bot", 2)
    await shelf.registry.releasing.roll_back(acme, "bot", "default", None)
    assert await shelf.means(acme, "acme/bot") == "acme/bot@1"
    with pytest.raises(ChangeConflict, match="no version 2 whose revisions are all still there"):
        await shelf.registry.releasing.roll_back(acme, "bot", "default", 2)


REFUSED: dict[str, tuple[str, list[WeightedRevision], type[Exception], str]] = {
    "no target": ("x", [], InvalidChange, "targets"),
    "eleven": ("x", [WeightedRevision(n, 1) for n in range(1, 12)], InvalidChange, "targets"),
    "twice the same": ("x", [WeightedRevision(1, 1), WeightedRevision(1, 2)], InvalidChange, "targets"),
    "weight 0": ("x", weights(r1=1, r2=0), InvalidChange, "targets[1].weight"),
    "weight too large": ("x", weights(r1=1_000_001), InvalidChange, "targets[0].weight"),
    "no such revision": ("b", weights(r9=1), PartNotFound, "revision"),
    "a deleted revision": ("b", weights(r3=1), PartNotFound, "revision"),
    "not a name": ("X y", weights(r1=1), InvalidChange, "alias"),
    "one alias too many": ("d", weights(r1=1), TooManyAdapters, "alias"),
}


async def test_what_an_alias_cannot_be_is_refused_by_field(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    await shelf.push(acme, "bot", 3, promote=False)
    await shelf.registry.retiring.delete_revision(acme, "bot", 3)
    for alias in ("b", "c"):
        await shelf.registry.releasing.promote(acme, "bot", 1, alias)
    before = await shelf.registry.reading.get(acme, "bot")
    for alias, targets, kind, field in REFUSED.values():
        with pytest.raises(kind) as refusal:
            await shelf.registry.releasing.point(acme, "bot", alias, targets)
        assert refusal.value.field == field
    with pytest.raises(ChangeConflict, match="bare name"):
        await shelf.registry.releasing.remove(acme, "bot", "default")
    assert await shelf.registry.reading.get(acme, "bot") == before


# ---- what a caller demands


async def test_a_change_is_made_only_to_what_was_read(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    tag = f'"{(await shelf.registry.reading.get(acme, "bot")).version}"'
    changes = [
        shelf.registry.releasing.promote(acme, "bot", 1, alias, Terms(if_match=f'"0", {tag}')) for alias in ("x", "y")
    ]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, PreconditionFailed)]
    made = [one for one in outcomes if not isinstance(one, BaseException)]
    assert (len(made), len(refused)) == (1, 1), outcomes
    assert f'"{made[0].version}"' in refused[0].message
    await shelf.registry.releasing.promote(acme, "bot", 2, "z", Terms(if_match="*"))


async def test_a_change_that_changes_nothing_keeps_the_etag(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    before = await shelf.registry.reading.get(acme, "bot")
    await shelf.push(acme, "bot", 1)
    assert await shelf.registry.releasing.promote(acme, "bot", 1) == before


def once(principal: Principal, body: str) -> Terms:
    return Terms(once=ClaimedOnce(principal, Claim("key-1", body)))


async def test_a_change_under_an_idempotency_key_is_made_once(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    rolls = [shelf.registry.releasing.roll_back(acme, "bot", "default", None, once(acme, "a")) for _ in range(4)]
    infos = await asyncio.gather(*rolls)
    assert len({msgspec.json.encode(info) for info in infos}) == 1
    assert await shelf.means(acme, "acme/bot") == "acme/bot@2"
    with pytest.raises(IdempotencyMismatch):
        await shelf.registry.releasing.roll_back(acme, "bot", "default", None, once(acme, "b"))


async def test_a_change_that_was_refused_frees_its_idempotency_key(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    with pytest.raises(PartNotFound):
        await shelf.registry.releasing.promote(acme, "bot", 2, "x", once(acme, "a"))
    await shelf.push(acme, "bot", 2, promote=False)
    await shelf.registry.releasing.promote(acme, "bot", 2, "x", once(acme, "a"))
    assert await shelf.means(acme, "acme/bot:x") == "acme/bot@2"


# ---- delete and undo


async def test_a_revision_that_an_alias_needs_stays(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    await shelf.registry.releasing.point(acme, "bot", "canary", weights(r1=1, r2=1))
    with pytest.raises(ChangeConflict, match="is what canary, default points at: promote another") as refusal:
        await shelf.registry.retiring.delete_revision(acme, "bot", 2)
    assert refusal.value.code == "revision_in_use"
    assert await shelf.means(acme, "acme/bot@2") == "acme/bot@2"


async def test_a_deleted_revision_comes_back_until_its_time_is_over(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    gone = await shelf.registry.retiring.delete_revision(acme, "bot", 1)
    assert (gone.state, gone.purge_at) == ("deleted", (gone.deleted_at or 0) + 3600 * 1_000_000)
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot@1")
    assert await shelf.registry.contents.departed() == {digest_of(1)}
    await shelf.registry.retiring.undelete_revision(acme, "bot", 1)
    assert await shelf.means(acme, "acme/bot@1") == "acme/bot@1"
    assert await shelf.registry.contents.departed() == frozenset()
    await shelf.registry.retiring.delete_revision(acme, "bot", 1)
    shelf.pass_time(3599)
    assert await shelf.registry.contents.purge() == 0
    shelf.pass_time(1)
    assert await shelf.registry.contents.purge() == 1
    assert shelf.blobs.removed == [digest_of(1)]
    with pytest.raises(PartNotFound, match="whose content is still there"):
        await shelf.registry.retiring.undelete_revision(acme, "bot", 1)
    assert [one.number for one in await shelf.registry.reading.revisions(acme, "bot")] == [2]


async def test_a_deleted_adapter_comes_back_as_it_was(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.retiring.delete_revision(acme, "bot", 1)
    await shelf.registry.releasing.point(acme, "bot", "canary", weights(r2=1, r3=9))
    await shelf.registry.sharing.grant(acme, "bot", "globex")
    await shelf.registry.pinning.pin(acme, "bot", 3)
    shelf.pass_time(1)
    before = await shelf.registry.reading.get(acme, "bot")
    was, digests = await shelf.registry.retiring.delete(acme, "bot")
    assert (was, digests) == (before, {digest_of(2), digest_of(3)})
    for principal in (acme, globex):
        with pytest.raises(ModelNotFound):
            await shelf.means(principal, "acme/bot")
    shelf.pass_time(3598)
    assert await shelf.registry.contents.purge() == 0
    after = await shelf.registry.retiring.undelete(acme, "bot")
    assert (after.aliases, after.id) == (before.aliases, before.id)
    assert after.version > before.version
    assert await shelf.means(globex, "acme/bot@2") == "acme/bot@2"
    assert await shelf.registry.pinning.standing(()) == []
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot@1")
    with pytest.raises(AdapterNotFound):
        await shelf.registry.retiring.undelete(acme, "bot")


async def test_too_late_to_undelete(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.retiring.delete(acme, "bot", undo_seconds=0)
    shelf.pass_time(60)
    await shelf.registry.contents.purge()
    with pytest.raises(AdapterNotFound):
        await shelf.registry.retiring.undelete(acme, "bot")


async def test_a_name_that_is_uploaded_again_has_nothing_of_the_deleted_one(
    shelf: Shelf, acme: Principal, globex: Principal
) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.releasing.promote(acme, "bot", 1, "prod")
    await shelf.registry.sharing.grant(acme, "bot", "globex")
    await shelf.registry.retiring.set_ttl(acme, "bot", 60)
    await shelf.registry.retiring.delete(acme, "bot")
    await shelf.push(acme, "bot", 2)
    info = await shelf.registry.reading.get(acme, "bot")
    assert (info.revision, [alias.name for alias in info.aliases], info.expires_at) == (2, ["default"], None)
    with pytest.raises(ModelNotFound):
        await shelf.means(globex, "acme/bot")
    await shelf.registry.retiring.undelete_revision(acme, "bot", 1)
    assert await shelf.means(acme, "acme/bot@1") == "acme/bot@1"


# ---- expiry


async def test_an_adapter_deletes_itself(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.retiring.set_ttl(acme, "bot", 60)
    shelf.pass_time(50)
    assert await shelf.registry.retiring.expire() == 0
    await shelf.registry.retiring.set_ttl(acme, "bot", 60)
    shelf.pass_time(59)
    assert await shelf.registry.retiring.expire() == 0
    shelf.pass_time(1)
    assert await shelf.registry.retiring.expire() == 1
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot")
    await shelf.registry.retiring.undelete(acme, "bot")
    assert await shelf.registry.retiring.expire() == 0
    for ttl in (0, -1, 10**9):
        with pytest.raises(InvalidChange, match="ttl_s is 1 to"):
            await shelf.registry.retiring.set_ttl(acme, "bot", ttl)


async def test_aliases_go_on_without_a_revision_that_deletes_itself(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.releasing.point(acme, "bot", "canary", weights(r2=5, r3=95))
    await shelf.registry.releasing.promote(acme, "bot", 3, "only")
    await shelf.registry.retiring.set_revision_ttl(acme, "bot", 3, 60)
    shelf.pass_time(60)
    assert await shelf.registry.retiring.expire() == 1
    info = await shelf.registry.reading.get(acme, "bot")
    targets = {alias.name: alias.targets for alias in info.aliases}
    assert targets == {"canary": tuple(weights(r2=5)), "default": tuple(weights(r2=100))}
    for number in (1, 2):
        await shelf.registry.retiring.set_revision_ttl(acme, "bot", number, 1)
    shelf.pass_time(1)
    assert await shelf.registry.retiring.expire() == 2
    with pytest.raises(AdapterNotFound):
        await shelf.registry.reading.get(acme, "bot")


# ---- sharing


async def test_a_grant_lets_another_tenant_call_and_nothing_else(
    shelf: Shelf, acme: Principal, globex: Principal
) -> None:
    await shelf.push(acme, "bot", 1, 2)
    every = ("acme/bot", "acme/bot:default", "acme/bot@1")

    async def refusals() -> set[str]:
        told = set()
        for model in (*every, "acme/absent"):
            with pytest.raises(ModelNotFound) as refusal:
                await shelf.means(globex, model)
            told.add(str(refusal.value).replace(model, "M"))
        return told

    before = await refusals()
    assert len(before) == 1
    await shelf.registry.sharing.grant(acme, "bot", "globex")
    assert [await shelf.means(globex, model) for model in every] == ["acme/bot@2", "acme/bot@2", "acme/bot@1"]
    assert [name for name, _ in await shelf.registry.reading.granted(globex)] == ["acme/bot"]
    narrow = msgspec.structs.replace(globex, models=frozenset({"tiny"}))
    with pytest.raises(ModelNotFound):
        await shelf.means(narrow, "acme/bot")
    assert await shelf.registry.reading.granted(narrow) == []
    for name in ("bot", "acme/bot"):
        with pytest.raises(AdapterNotFound):
            await shelf.registry.releasing.promote(globex, name, 1)
    await shelf.registry.sharing.revoke(acme, "bot", "globex")
    assert await refusals() == before
    with pytest.raises(PartNotFound):
        await shelf.registry.sharing.revoke(acme, "bot", "globex")


async def test_a_grant_does_not_tell_who_is_a_customer(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    there = await shelf.registry.sharing.grant(acme, "bot", "globex")
    absent = await shelf.registry.sharing.grant(acme, "bot", "nobody")
    blank = {"tenant": "", "granted_at": 0}
    assert msgspec.structs.replace(there, **blank) == msgspec.structs.replace(absent, **blank)
    assert await shelf.registry.sharing.grant(acme, "bot", "globex") == there
    with pytest.raises(TooManyAdapters, match="max_grants"):
        await shelf.registry.sharing.grant(acme, "bot", "third")
    for name in ("acme", "No name"):
        with pytest.raises(InvalidChange):
            await shelf.registry.sharing.grant(acme, "bot", name)


# ---- pins


async def test_pins_are_counted_and_end(shelf: Shelf, acme: Principal, database: Database) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    pinning = shelf.registry.pinning
    for number in (1, 2, 2):
        await pinning.pin(acme, "bot", number)
    with pytest.raises(TooManyAdapters, match="pins_per_tenant") as refusal:
        await pinning.pin(acme, "bot", 3)
    assert refusal.value.code == "too_many_pins"
    info = await shelf.registry.reading.revision(acme, "bot", 2)
    assert info.pin is not None
    assert info.pin.pinned_by == acme.key_id
    await pinning.unpin(acme, "bot", 2)
    with pytest.raises(PartNotFound):
        await pinning.unpin(acme, "bot", 2)
    await pinning.pin(acme, "bot", 3)
    await shelf.registry.retiring.delete_revision(acme, "bot", 1)
    assert [pin.number for pin in await pinning.standing(())] == [3]


async def test_idle_pins_are_let_go(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    for number in (1, 2):
        await shelf.registry.pinning.pin(acme, "bot", number)
    shelf.pass_time(3000)
    await shelf.means(acme, "acme/bot@2")
    assert len(await shelf.registry.pinning.standing(shelf.registry.take_used())) == 2
    assert shelf.registry.take_used() == frozenset()
    shelf.pass_time(1000)
    assert [pin.number for pin in await shelf.registry.pinning.standing(())] == [2]


# ---- what is left behind


async def test_every_change_is_in_the_audit_log(shelf: Shelf, acme: Principal, tenants: Tenants) -> None:
    await shelf.push(acme, "bot", 1, 2)
    registry = shelf.registry
    changes: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("alias.put acme/bot:x", lambda: registry.releasing.promote(acme, "bot", 1, "x")),
        ("alias.put acme/bot:x", lambda: registry.releasing.promote(acme, "bot", 2, "x")),
        ("alias.rollback acme/bot:x", lambda: registry.releasing.roll_back(acme, "bot", "x", None)),
        ("alias.remove acme/bot:x", lambda: registry.releasing.remove(acme, "bot", "x")),
        ("grant.put acme/bot globex", lambda: registry.sharing.grant(acme, "bot", "globex")),
        ("grant.remove acme/bot globex", lambda: registry.sharing.revoke(acme, "bot", "globex")),
        ("pin.put acme/bot@1", lambda: registry.pinning.pin(acme, "bot", 1)),
        ("pin.remove acme/bot@1", lambda: registry.pinning.unpin(acme, "bot", 1)),
        ("revision.update acme/bot@1", lambda: registry.retiring.set_revision_ttl(acme, "bot", 1, 9999)),
        ("revision.delete acme/bot@1", lambda: registry.retiring.delete_revision(acme, "bot", 1)),
        ("revision.undelete acme/bot@1", lambda: registry.retiring.undelete_revision(acme, "bot", 1)),
        ("adapter.update acme/bot", lambda: registry.retiring.set_ttl(acme, "bot", 9)),
        ("adapter.delete acme/bot", lambda: registry.retiring.delete(acme, "bot")),
        ("adapter.undelete acme/bot", lambda: registry.retiring.undelete(acme, "bot")),
    ]
    for _, change in changes:
        await change()
    entries = await tenants.audit.read(tenant=acme.tenant, limit=len(changes))
    assert [f"{entry.action} {entry.object_id}" for entry in reversed(entries)] == [told for told, _ in changes]
    assert {entry.actor for entry in entries} == {acme.key_id}
    assert all(entry.before or entry.after for entry in entries)
    moved = entries[len(changes) - 2]
    assert moved.before is not None
    assert moved.after is not None
    assert b'"revision":1' in bytes(moved.before)
    assert b'"revision":2' in bytes(moved.after)
