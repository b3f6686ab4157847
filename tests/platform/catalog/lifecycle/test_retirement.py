"""Delete, undo, expire."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_registry import Shelf, digest_of, weights

from loramux.catalog.registry.changes import AdapterChange
from loramux.catalog.registry.entities import AliasInfo, WeightedRevision
from loramux.catalog.registry.errors import (
    AdapterNotFound,
    ChangeConflict,
    InvalidChange,
    ModelNotFound,
    PartNotFound,
    TooManyAdapters,
)
from loramux.catalog.registry.resolver import engine_key
from loramux.common.identity import Principal
from loramux.data.records.database import Database

pytestmark = pytest.mark.anyio


async def test_a_revision_that_an_alias_needs_stays(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    await shelf.registry.aliases.point(acme, "bot", "canary", weights(r1=1, r2=1))
    with pytest.raises(ChangeConflict, match="is what canary, default points at: promote another") as refusal:
        await shelf.registry.deletion.delete_revision(acme, "bot", 2)
    assert refusal.value.code == "revision_in_use"
    assert await shelf.means(acme, "acme/bot@2") == "acme/bot@2"


async def test_a_deleted_revision_comes_back_until_its_time_is_over(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2)
    gone = await shelf.registry.deletion.delete_revision(acme, "bot", 1)
    assert (gone.state, gone.purge_at) == ("deleted", (gone.deleted_at or 0) + 3600 * 1_000_000)
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot@1")
    assert await shelf.registry.blob_gc.recently_uncallable() == {engine_key(acme.tenant, digest_of(1))}
    await shelf.registry.deletion.undelete_revision(acme, "bot", 1)
    assert await shelf.means(acme, "acme/bot@1") == "acme/bot@1"
    assert await shelf.registry.blob_gc.recently_uncallable() == frozenset()
    await shelf.registry.deletion.delete_revision(acme, "bot", 1)
    shelf.pass_time(3599)
    assert await shelf.registry.blob_gc.purge() == 0
    shelf.pass_time(1)
    assert await shelf.registry.blob_gc.purge() == 1
    assert shelf.blobs.removed == [digest_of(1)]
    with pytest.raises(PartNotFound, match="whose content is still there"):
        await shelf.registry.deletion.undelete_revision(acme, "bot", 1)
    assert [one.number for one in await shelf.registry.queries.revisions(acme, "bot")] == [2]


async def test_a_deleted_adapter_comes_back_as_it_was(shelf: Shelf, acme: Principal, globex: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.deletion.delete_revision(acme, "bot", 1)
    await shelf.registry.aliases.point(acme, "bot", "canary", weights(r2=1, r3=9))
    await shelf.registry.grants.grant(acme, "bot", "globex")
    await shelf.registry.pins.pin(acme, "bot", 3)
    shelf.pass_time(1)
    before = await shelf.registry.queries.get(acme, "bot")
    was, digests = await shelf.registry.deletion.delete(acme, "bot")
    assert (was, digests) == (before, {digest_of(2), digest_of(3)})
    for principal in (acme, globex):
        with pytest.raises(ModelNotFound):
            await shelf.means(principal, "acme/bot")
    shelf.pass_time(3598)
    assert await shelf.registry.blob_gc.purge() == 0
    after = await shelf.registry.deletion.undelete(acme, "bot")
    assert (after.aliases, after.id) == (before.aliases, before.id)
    assert after.version > before.version
    assert await shelf.means(globex, "acme/bot@2") == "acme/bot@2"
    assert await shelf.registry.pins.active(()) == []
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot@1")
    with pytest.raises(AdapterNotFound):
        await shelf.registry.deletion.undelete(acme, "bot")


async def test_too_late_to_undelete(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.deletion.delete(acme, "bot", undo_seconds=0)
    shelf.pass_time(60)
    await shelf.registry.blob_gc.purge()
    with pytest.raises(AdapterNotFound):
        await shelf.registry.deletion.undelete(acme, "bot")


async def test_a_name_that_is_uploaded_again_has_nothing_of_the_deleted_one(
    shelf: Shelf, acme: Principal, globex: Principal
) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.aliases.promote(acme, "bot", 1, "prod")
    await shelf.registry.grants.grant(acme, "bot", "globex")
    await shelf.registry.deletion.set_ttl(acme, "bot", 60)
    await shelf.registry.deletion.delete(acme, "bot")
    await shelf.push(acme, "bot", 2)
    info = await shelf.registry.queries.get(acme, "bot")
    assert (info.revision, [alias.name for alias in info.aliases], info.expires_at) == (2, ["default"], None)
    with pytest.raises(ModelNotFound):
        await shelf.means(globex, "acme/bot")
    await shelf.registry.deletion.undelete_revision(acme, "bot", 1)
    assert await shelf.means(acme, "acme/bot@1") == "acme/bot@1"


async def test_an_adapter_deletes_itself(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1)
    await shelf.registry.deletion.set_ttl(acme, "bot", 60)
    shelf.pass_time(50)
    assert await shelf.registry.deletion.expire() == 0
    await shelf.registry.deletion.set_ttl(acme, "bot", 60)
    shelf.pass_time(59)
    assert await shelf.registry.deletion.expire() == 0
    shelf.pass_time(1)
    assert await shelf.registry.deletion.expire() == 1
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot")
    await shelf.registry.deletion.undelete(acme, "bot")
    assert await shelf.registry.deletion.expire() == 0
    for ttl in (0, -1, 10**9):
        with pytest.raises(InvalidChange, match="ttl_s is 1 to"):
            await shelf.registry.deletion.set_ttl(acme, "bot", ttl)


async def test_aliases_go_on_without_a_revision_that_deletes_itself(shelf: Shelf, acme: Principal) -> None:
    await shelf.push(acme, "bot", 1, 2, 3)
    await shelf.registry.aliases.point(acme, "bot", "canary", weights(r2=5, r3=95))
    await shelf.registry.aliases.promote(acme, "bot", 3, "only")
    await shelf.registry.deletion.set_revision_ttl(acme, "bot", 3, 60)
    shelf.pass_time(60)
    assert await shelf.registry.deletion.expire() == 1
    info = await shelf.registry.queries.get(acme, "bot")
    targets = {alias.name: alias.targets for alias in info.aliases}
    assert targets == {"canary": tuple(weights(r2=5)), "default": tuple(weights(r2=100))}
    for number in (1, 2):
        await shelf.registry.deletion.set_revision_ttl(acme, "bot", number, 1)
    shelf.pass_time(1)
    assert await shelf.registry.deletion.expire() == 2
    with pytest.raises(AdapterNotFound):
        await shelf.registry.queries.get(acme, "bot")


async def test_revision_stays_while_its_aliases_must_not_move_to_their_other_targets(
    shelf: Shelf, acme: Principal
) -> None:
    allowed: list[int] = []

    async def condition(
        principal: Principal, change: AdapterChange, before: AliasInfo, targets: Sequence[WeightedRevision]
    ) -> None:
        if not {target.revision for target in targets} <= {before.main, *allowed}:
            raise InvalidChange("not this one", "revision")

    await shelf.push(acme, "bot", 1, 2)
    await shelf.registry.aliases.point(acme, "bot", "default", weights(r1=95, r2=5))
    await shelf.registry.deletion.set_revision_ttl(acme, "bot", 1, 60)
    shelf.registry.aliases.require(condition)
    for _ in range(2):
        shelf.pass_time(3600)
        assert await shelf.registry.deletion.expire() == 1
        assert await shelf.registry.deletion.expire() == 0, "no attempt before an hour has passed"
        assert (await shelf.registry.queries.get(acme, "bot")).aliases[0].targets == tuple(weights(r1=95, r2=5))
        assert await shelf.means(acme, "acme/bot@1") == "acme/bot@1"
    allowed.append(2)
    shelf.pass_time(3600)
    await shelf.registry.deletion.expire()
    assert (await shelf.registry.queries.get(acme, "bot")).aliases[0].targets == tuple(weights(r2=5))
    with pytest.raises(ModelNotFound):
        await shelf.means(acme, "acme/bot@1")


async def test_an_adapter_has_so_many_revisions_and_deleting_makes_room(database: Database, acme: Principal) -> None:
    shelf = Shelf(database, max_revisions=2)
    await shelf.push(acme, "bot", 1, 2)
    with pytest.raises(TooManyAdapters, match=r"`bot` has 2 revisions.*max_revisions") as refusal:
        await shelf.ingest().check_name(acme, "bot")
    assert (refusal.value.code, refusal.value.field) == ("too_many_revisions", "name")
    await shelf.registry.deletion.delete_revision(acme, "bot", 1)
    assert await shelf.ingest().check_name(acme, "acme/bot") == "bot"
