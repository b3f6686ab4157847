"""Who else may call an adapter, who keeps it in the pool, and what is noted of all changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from shelf import Shelf

from loramux.records import Principal
from loramux.registry import (
    AdapterNotFound,
    InvalidChange,
    ModelNotFound,
    PartNotFound,
    TooManyAdapters,
)
from loramux.tenants import Tenants

pytestmark = pytest.mark.anyio


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


async def test_pins_are_counted_and_end(shelf: Shelf, acme: Principal) -> None:
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
