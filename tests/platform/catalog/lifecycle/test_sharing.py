"""Grants to call an adapter, pins that keep it in the pool, and the audit of all changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from fake_registry import Shelf

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.entities import WeightedRevision
from loramux.catalog.registry.errors import AdapterNotFound, InvalidChange, ModelNotFound, PartNotFound, TooManyAdapters
from loramux.common.identity import Principal

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
    await shelf.registry.grants.grant(acme, "bot", "globex")
    assert [await shelf.means(globex, model) for model in every] == ["acme/bot@2", "acme/bot@2", "acme/bot@1"]
    assert [one.name for one in await shelf.registry.queries.callable(globex)] == ["acme/bot"]
    narrow = msgspec.structs.replace(globex, models=frozenset({"tiny"}))
    with pytest.raises(ModelNotFound):
        await shelf.means(narrow, "acme/bot")
    assert await shelf.registry.queries.callable(narrow) == []
    for name in ("bot", "acme/bot"):
        with pytest.raises(AdapterNotFound):
            await shelf.registry.aliases.promote(globex, name, 1)
    await shelf.registry.grants.revoke(acme, "bot", "globex")
    assert await refusals() == before
    with pytest.raises(PartNotFound):
        await shelf.registry.grants.revoke(acme, "bot", "globex")


async def test_a_grant_does_not_tell_who_is_a_customer(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    there = await shelf.registry.grants.grant(acme, "bot", "globex")
    absent = await shelf.registry.grants.grant(acme, "bot", "nobody")
    blank = {"tenant": "", "granted_at": 0}
    assert msgspec.structs.replace(there, **blank) == msgspec.structs.replace(absent, **blank)
    assert await shelf.registry.grants.grant(acme, "bot", "globex") == there
    with pytest.raises(TooManyAdapters, match="max_grants"):
        await shelf.registry.grants.grant(acme, "bot", "third")
    for name in ("acme", "No name"):
        with pytest.raises(InvalidChange):
            await shelf.registry.grants.grant(acme, "bot", name)


async def test_pins_are_counted_and_end(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    pins = shelf.registry.pins
    for number in (1, 2, 2):
        await pins.pin(acme, "bot", number)
    with pytest.raises(TooManyAdapters, match="pins_per_tenant") as refusal:
        await pins.pin(acme, "bot", 3)
    assert refusal.value.code == "too_many_pins"
    info = await shelf.registry.queries.revision(acme, "bot", 2)
    assert info.pin is not None
    assert info.pin.pinned_by == acme.key_id
    await pins.unpin(acme, "bot", 2)
    with pytest.raises(PartNotFound):
        await pins.unpin(acme, "bot", 2)
    await pins.pin(acme, "bot", 3)
    await shelf.registry.deletion.delete_revision(acme, "bot", 1)
    assert [pin.number for pin in await pins.active(())] == [3]


async def test_idle_pins_are_let_go(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    for number in (1, 2):
        await shelf.registry.pins.pin(acme, "bot", number)
    shelf.pass_time(3000)
    await shelf.means(acme, "acme/bot@2")
    assert len(await shelf.registry.pins.active(shelf.registry.resolver.take_used())) == 2
    assert shelf.registry.resolver.take_used() == frozenset()
    shelf.pass_time(1000)
    assert [pin.number for pin in await shelf.registry.pins.active(())] == [2]


async def test_every_change_is_in_the_audit_log(shelf: Shelf, acme: Principal, tenants: Tenants) -> None:
    await shelf.push(acme, "bot", 1, 2)
    registry = shelf.registry
    changes: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("alias.put acme/bot:x", lambda: registry.aliases.promote(acme, "bot", 1, "x")),
        ("alias.put acme/bot:x", lambda: registry.aliases.promote(acme, "bot", 2, "x")),
        ("alias.rollback acme/bot:x", lambda: registry.aliases.roll_back(acme, "bot", "x", None)),
        ("alias.remove acme/bot:x", lambda: registry.aliases.remove(acme, "bot", "x")),
        ("grant.put acme/bot globex", lambda: registry.grants.grant(acme, "bot", "globex")),
        ("grant.remove acme/bot globex", lambda: registry.grants.revoke(acme, "bot", "globex")),
        ("pin.put acme/bot@1", lambda: registry.pins.pin(acme, "bot", 1)),
        ("pin.remove acme/bot@1", lambda: registry.pins.unpin(acme, "bot", 1)),
        ("revision.update acme/bot@1", lambda: registry.deletion.set_revision_ttl(acme, "bot", 1, 9999)),
        ("revision.delete acme/bot@1", lambda: registry.deletion.delete_revision(acme, "bot", 1)),
        ("revision.undelete acme/bot@1", lambda: registry.deletion.undelete_revision(acme, "bot", 1)),
        ("adapter.update acme/bot", lambda: registry.deletion.set_ttl(acme, "bot", 9)),
        ("adapter.delete acme/bot", lambda: registry.deletion.delete(acme, "bot")),
        ("adapter.undelete acme/bot", lambda: registry.deletion.undelete(acme, "bot")),
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


async def test_another_tenants_requests_do_not_show_in_a_pin(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    """Both have uploaded the same files; only the owner's use keeps its pin from being idle."""
    for principal in (acme, globex):
        await shelf.push(principal, "bot", 1)
    await shelf.registry.pins.pin(acme, "bot", 1)
    before = (await shelf.registry.queries.revision(acme, "bot", 1)).pin
    shelf.pass_time(10)
    await shelf.means(globex, "globex/bot")
    await shelf.registry.pins.active(shelf.registry.resolver.take_used())
    assert (await shelf.registry.queries.revision(acme, "bot", 1)).pin == before


async def test_list_of_callable_adapters_has_the_main_revision_of_each(shelf: Shelf, acme: Principal) -> None:
    for name, numbers in (("bot", (1, 2)), ("ant", (3,)), ("cat", (4, 5))):
        await shelf.push(acme, name, *numbers)
    await shelf.registry.aliases.point(acme, "bot", "default", [WeightedRevision(1, 90), WeightedRevision(2, 10)])
    await shelf.registry.aliases.point(acme, "cat", "default", [WeightedRevision(1, 50), WeightedRevision(2, 50)])
    queries = shelf.registry.queries
    assert [(one.name, one.created_at, one.base_model) for one in await queries.callable(acme)] == [
        (one.name, one.created_at, one.base_model) for one in await queries.all(acme)
    ]
    assert [one.name for one in await queries.callable(acme, search="t", limit=2)] == ["acme/ant", "acme/bot"]
    narrow = msgspec.structs.replace(acme, models=frozenset({"acme/cat", "tiny"}))
    assert [one.name for one in await queries.callable(narrow)] == ["acme/cat"]
