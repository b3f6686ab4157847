"""Canary, promote, rollback, and what a caller demands of a change."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from fake_registry import NamesOnly, Shelf, digest_of, weights

from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.entities import WeightedRevision
from loramux.catalog.registry.errors import (
    ChangeConflict,
    InvalidChange,
    ModelNotFound,
    PartNotFound,
    PreconditionFailed,
    TooManyAdapters,
)
from loramux.common.identity import Principal
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.database import Database
from loramux.money.usage.errors import IdempotencyMismatch
from loramux.money.usage.idempotency import AnswerStorage, IdempotencyGuard

pytestmark = pytest.mark.anyio

ANSWERS = AnswerStorage(b"p" * 32)


async def test_an_alias_shares_its_requests_out_and_sticks(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    info = await shelf.registry.aliases.point(acme, "bot", "default", weights(r2=30, r1=70))
    assert [(alias.name, alias.targets) for alias in info.aliases] == [("default", tuple(weights(r1=70, r2=30)))]
    assert info.revision == 1, "most of it goes there"
    first = {user: await shelf.means(acme, "acme/bot", f"user {user}") for user in range(40)}
    assert set(first.values()) == {"acme/bot@1", "acme/bot@2"}
    assert first == {user: await shelf.means(acme, "acme/bot", f"user {user}") for user in range(40)}


async def test_promote_moves_one_alias(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    await shelf.registry.aliases.promote(acme, "bot", 1, "stable")
    await shelf.registry.aliases.promote(acme, "acme/bot", 1)
    await shelf.registry.aliases.promote(acme, "bot", 2, "next")
    names = {name: await shelf.means(acme, f"acme/bot{name}") for name in ("", ":stable", ":next")}
    assert names == {"": "acme/bot@1", ":stable": "acme/bot@1", ":next": "acme/bot@2"}
    await shelf.registry.aliases.remove(acme, "bot", "next")
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot:next")


async def test_an_upload_that_is_not_promoted_moves_nothing(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, promote=False)
    await shelf.push(acme, "bot", 2, promote=False)
    assert [await shelf.means(acme, name) for name in ("acme/bot", "acme/bot@2")] == ["acme/bot@1", "acme/bot@2"]


async def test_rolling_back_goes_further_and_further_back(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    releasing = shelf.registry.aliases
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
    history = await shelf.registry.queries.history(acme, "bot", "default")
    told = [(one.version, one.targets[0].revision, one.restores) for one in history]
    assert told == [(6, 3, 3), (5, 1, 1), (4, 2, 2), (3, 3, None), (2, 2, None), (1, 1, None)]
    assert {one.changed_by for one in history} == {acme.key_id}


async def test_rolling_back_steps_over_what_was_deleted(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.deletion.delete_revision(acme, "bot", 2)
    await shelf.registry.aliases.roll_back(acme, "bot", "default", None)
    assert await shelf.means(acme, "acme/bot") == "acme/bot@1"
    with pytest.raises(ChangeConflict, match="no version 2 whose revisions are all still there"):
        await shelf.registry.aliases.roll_back(acme, "bot", "default", 2)


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
    await shelf.registry.deletion.delete_revision(acme, "bot", 3)
    for alias in ("b", "c"):
        await shelf.registry.aliases.promote(acme, "bot", 1, alias)
    before = await shelf.registry.queries.get(acme, "bot")
    for alias, targets, kind, field in REFUSED.values():
        with pytest.raises(kind) as refusal:
            await shelf.registry.aliases.point(acme, "bot", alias, targets)
        assert refusal.value.field == field
    with pytest.raises(ChangeConflict, match="bare name"):
        await shelf.registry.aliases.remove(acme, "bot", "default")
    assert await shelf.registry.queries.get(acme, "bot") == before


async def test_a_change_is_made_only_to_what_was_read(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    tag = f'"{(await shelf.registry.queries.get(acme, "bot")).version}"'
    changes = [
        shelf.registry.aliases.promote(acme, "bot", 1, alias, Preconditions(if_match=f'"0", {tag}'))
        for alias in ("x", "y")
    ]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, PreconditionFailed)]
    made = [one for one in outcomes if not isinstance(one, BaseException)]
    assert (len(made), len(refused)) == (1, 1), outcomes
    assert f'"{made[0].version}"' in refused[0].message
    await shelf.registry.aliases.promote(acme, "bot", 2, "z", Preconditions(if_match="*"))


async def test_a_change_that_changes_nothing_keeps_the_etag(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    before = await shelf.registry.queries.get(acme, "bot")
    await shelf.push(acme, "bot", 1)
    assert await shelf.registry.aliases.promote(acme, "bot", 1) == before


def once(principal: Principal, body: str) -> Preconditions:
    return Preconditions(idempotency=IdempotencyGuard(principal, IdempotencyClaim("key-1", body), ANSWERS))


async def test_a_change_under_an_idempotency_key_is_made_once(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    rolls = [shelf.registry.aliases.roll_back(acme, "bot", "default", None, once(acme, "a")) for _ in range(4)]
    infos = await asyncio.gather(*rolls)
    assert len({msgspec.json.encode(info) for info in infos}) == 1
    assert await shelf.means(acme, "acme/bot") == "acme/bot@2"
    with pytest.raises(IdempotencyMismatch):
        await shelf.registry.aliases.roll_back(acme, "bot", "default", None, once(acme, "b"))


async def test_a_change_that_was_refused_frees_its_idempotency_key(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    with pytest.raises(PartNotFound):
        await shelf.registry.aliases.promote(acme, "bot", 2, "x", once(acme, "a"))
    await shelf.push(acme, "bot", 2, promote=False)
    await shelf.registry.aliases.promote(acme, "bot", 2, "x", once(acme, "a"))
    assert await shelf.means(acme, "acme/bot:x") == "acme/bot@2"


async def test_adapters_are_listed_in_pages(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    for number, name in enumerate("dbace"):
        await shelf.push(acme, name, number)
    await shelf.push(globex, "z", 9)
    queries = shelf.registry.queries
    first, more = await queries.page(acme, limit=2)
    assert ([one.name for one in first], more) == (["acme/a", "acme/b"], True)
    await shelf.registry.deletion.delete(acme, "b")
    second, more = await queries.page(acme, first[-1].id, 2)
    assert ([one.name for one in second], more) == (["acme/c", "acme/d"], True), "the cursor outlives its adapter"
    assert [one.name for one in (await queries.page(acme, second[-1].id, 2))[0]] == ["acme/e"]
    everything, more = await queries.page(acme)
    assert ([one.name for one in everything], more) == (["acme/a", "acme/c", "acme/d", "acme/e"], False)
    other = (await queries.all(globex))[0].id
    assert await queries.page(acme, other) == ([], False), "another tenant's id is no cursor"
    narrow = msgspec.structs.replace(acme, models=frozenset({"acme/c", "acme/e", "globex/z"}))
    assert [one.name for one in (await queries.page(narrow, limit=1))[0]] == ["acme/c"]
    assert [one.name for one in await queries.all(narrow)] == ["acme/c", "acme/e"]


class SlowStore(NamesOnly):
    """A store that holds nothing ready, and whose fetches wait."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.fetching: list[str] = []

    def known_directory(self, digest: str) -> None:  # type: ignore[override]
        return None

    def directory(self, digest: str) -> Path:
        self.fetching.append(digest)
        assert self.release.wait(60)
        return Path("/contents") / digest


async def test_one_tenants_cold_adapters_delay_no_other_tenants(
    database: Database, acme: Principal, globex: Principal
) -> None:
    store = SlowStore()
    shelf = Shelf(database, store)
    for number in range(20):
        await shelf.push(acme, f"a{number}", number)
    await shelf.push(globex, "bot", 99)
    slow = [asyncio.create_task(shelf.means(acme, f"acme/a{number}")) for number in range(20)]
    other = asyncio.create_task(shelf.means(globex, "globex/bot"))
    async with asyncio.timeout(30):
        while digest_of(99) not in store.fetching:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(store.fetching) <= 5, "four of acme's, and globex's"
    assert await asyncio.to_thread(lambda: 7) == 7, "the default executor is free"
    store.release.set()
    assert await other == "globex/bot@1"
    assert len(await asyncio.gather(*slow)) == 20
