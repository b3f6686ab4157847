"""Stored responses: chains, bounds, expiry, isolation and zero retention, on both databases."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import sqlalchemy as sa

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal, ProjectId
from loramux.common.settings.server import PrivacySettings
from loramux.common.units import SECOND
from loramux.data.records.database import Clock, Database
from loramux.data.records.responses import ResponseRow
from loramux.serving.errors import InvalidRequest, NotAllowed, PreviousResponseNotFound, ResponseNotFound
from loramux.serving.stored_responses import MAX_BYTES, ResponseStore, ResponseText

pytestmark = pytest.mark.anyio

Enrol = Callable[[str], Awaitable[Principal]]
PEPPER = b"p" * 32
DAY = 86_400
ENOUGH = 1 << 20
ticks = itertools.count()


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1_000_000

    def __call__(self) -> int:
        return self.seconds * SECOND


@pytest.fixture
def clock() -> Clock:
    return Time()


@pytest.fixture
async def acme(enrol: Enrol) -> Principal:
    return await enrol("acme")


@pytest.fixture
def store(database: Database) -> ResponseStore:
    return store_of(database)


def store_of(database: Database, **settings: int) -> ResponseStore:
    return ResponseStore(database, PEPPER, PrivacySettings(**{"response_seconds": DAY} | settings))  # type: ignore[arg-type]


async def add(
    store: ResponseStore, principal: Principal, items: bytes = b"items", previous: str | None = None, **fields: int
) -> str:
    """Store a response; each is a second newer than the one before."""
    id = f"resp_{uuid.uuid4().hex}"
    created = fields.get("created", 1_000_000 + next(ticks))
    assert await store.add(principal, id, previous, ResponseText(items, b"content"), created=created)
    return id


async def test_chain_is_returned_oldest_first(store: ResponseStore, acme: Principal) -> None:
    first = await add(store, acme, b"one")
    second = await add(store, acme, b"two", first)
    third = await add(store, acme, b"three", second)
    await add(store, acme, b"another branch", first)
    assert await store.history(acme, third, ENOUGH) == [b"one", b"two", b"three"]
    assert await store.history(acme, second, ENOUGH) == [b"one", b"two"]
    assert await store.items(acme, [first, third, "resp_gone"], ENOUGH) == {first: b"one", third: b"three"}


async def test_chain_without_one_of_its_responses_names_the_missing_one(store: ResponseStore, acme: Principal) -> None:
    first = await add(store, acme)
    second = await add(store, acme, previous=first)
    third = await add(store, acme, previous=second)
    await store.delete(acme, first)
    for id in (first, second, third):
        with pytest.raises(PreviousResponseNotFound, match=first):
            await store.history(acme, id, ENOUGH)
    assert (await store.get(acme, third)).items == b"items"
    with pytest.raises(ResponseNotFound, match=first):
        await store.delete(acme, first)


async def test_chain_that_leads_back_to_itself_ends(
    store: ResponseStore, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.serving.stored_responses.MAX_TURNS", 5)
    id = f"resp_{uuid.uuid4().hex}"
    assert await store.add(acme, id, id, ResponseText(b"x", b"y"), created=1)
    with pytest.raises(InvalidRequest, match="more than 5 responses"):
        await store.history(acme, id, ENOUGH)


async def test_history_beyond_its_bytes_is_refused(store: ResponseStore, acme: Principal) -> None:
    first = await add(store, acme, b"x" * 600)
    second = await add(store, acme, b"x" * 600, first)
    assert len(await store.history(acme, first, 1000)) == 1
    for read in (store.history(acme, second, 1000), store.items(acme, [first, second], 1000)):
        with pytest.raises(InvalidRequest, match="the most is 1000") as refused:
            await read
        assert refused.value.code == "context_length_exceeded"


async def test_response_past_its_expiry_is_gone_and_swept(
    database: Database, store: ResponseStore, acme: Principal, clock: Time
) -> None:
    first = await add(store, acme)
    clock.seconds += DAY - 1
    second = await add(store, acme, previous=first)
    assert len(await store.history(acme, second, ENOUGH)) == 2
    clock.seconds += 1
    with pytest.raises(ResponseNotFound):
        await store.get(acme, first)
    with pytest.raises(ResponseNotFound):
        await store.delete(acme, first)
    with pytest.raises(PreviousResponseNotFound, match=first):
        await store.history(acme, second, ENOUGH)
    assert await store.items(acme, [first], ENOUGH) == {}
    await store.forget_expired()
    assert await ids(database) == {second}


async def test_oldest_are_deleted_beyond_the_number_of_responses(database: Database, acme: Principal) -> None:
    store = store_of(database, responses_per_tenant=3)
    made = [await add(store, acme) for _ in range(5)]
    assert await ids(database) == set(made[2:])


async def test_oldest_are_deleted_beyond_the_bytes_of_responses(database: Database, acme: Principal) -> None:
    store = store_of(database, response_bytes_per_tenant=2500)
    made = [await add(store, acme, b"x" * 1000) for _ in range(4)]
    assert await ids(database) == set(made[2:])


async def test_bounds_of_one_tenant_delete_nothing_of_another(
    database: Database, acme: Principal, enrol: Enrol
) -> None:
    store, globex = store_of(database, responses_per_tenant=1), await enrol("globex")
    theirs = await add(store, globex, created=1)
    await add(store, acme)
    mine = await add(store, acme)
    assert await ids(database) == {theirs, mine}


async def test_response_that_is_too_large_is_not_stored(
    database: Database, store: ResponseStore, acme: Principal
) -> None:
    text = ResponseText(b"x" * MAX_BYTES, b"y")
    assert not await store.add(acme, "resp_large", None, text, created=1)
    assert await ids(database) == set()


async def test_responses_of_other_tenants_and_projects_are_not_there(
    store: ResponseStore, acme: Principal, enrol: Enrol
) -> None:
    id = await add(store, acme)
    rotated = msgspec.structs.replace(acme, key_id="key_new", models=frozenset({"tiny"}), lineage=(acme.owner,))
    assert (await store.get(rotated, id)).items == b"items"
    globex = await enrol("globex")
    others = [
        globex,
        msgspec.structs.replace(globex, project=acme.project),
        msgspec.structs.replace(acme, project=ProjectId("project_other")),
        msgspec.structs.replace(acme, key_id="key_other", models=frozenset({"tiny"}), lineage=()),
    ]
    for other in others:
        for attempt in (store.get(other, id), store.delete(other, id)):
            with pytest.raises(ResponseNotFound):
                await attempt
        with pytest.raises(PreviousResponseNotFound):
            await store.history(other, id, ENOUGH)
        assert await store.items(other, [id], ENOUGH) == {}
    assert (await store.get(acme, id)).items == b"items"


async def test_response_that_the_database_refuses_is_not_stored(store: ResponseStore, acme: Principal) -> None:
    gone = msgspec.structs.replace(acme, project=ProjectId("project_gone"))
    assert not await store.add(gone, "resp_late", None, ResponseText(b"x", b"y"), created=1)


async def test_chain_does_not_lead_into_another_tenant(store: ResponseStore, acme: Principal, enrol: Enrol) -> None:
    globex = await enrol("globex")
    theirs = await add(store, globex, b"secret")
    mine = await add(store, acme, previous=theirs)
    with pytest.raises(PreviousResponseNotFound, match=theirs):
        await store.history(acme, mine, ENOUGH)


async def test_texts_are_encrypted_for_their_row(database: Database, store: ResponseStore, acme: Principal) -> None:
    first, second = await add(store, acme, b"a secret"), await add(store, acme, b"a secret")
    async with database.begin() as session:
        rows = (await session.scalars(sa.select(ResponseRow))).all()
        assert not any(b"secret" in row.items or b"content" in row.content for row in rows)
        by_id = {row.id: row for row in rows}
        by_id[first].items = by_id[second].items
    with pytest.raises(ResponseNotFound):
        await store.get(acme, first)
    with pytest.raises(PreviousResponseNotFound):
        await store.history(acme, first, ENOUGH)
    with pytest.raises(ResponseNotFound):
        await ResponseStore(database, b"q" * 32, PrivacySettings(response_seconds=DAY)).get(acme, second)


async def test_zero_retention_deletes_what_is_stored_and_stores_no_more(
    database: Database, store: ResponseStore, acme: Principal, tenants: Tenants, enrol: Enrol
) -> None:
    await add(store, acme)
    theirs = await add(store, await enrol("globex"))
    await tenants.set_zero_retention("acme", True)
    assert await ids(database) == {theirs}
    # a request that was admitted before
    assert not await store.add(acme, "resp_late", None, ResponseText(b"x", b"y"), created=1)
    assert await ids(database) == {theirs}
    bound = msgspec.structs.replace(acme, zero_retention=True)
    assert not store.stores(bound, None)
    with pytest.raises(NotAllowed) as refused:
        store.stores(bound, True)
    assert (refused.value.code, refused.value.field) == ("zero_retention", "store")


@pytest.mark.parametrize(
    ("seconds", "asked", "stores"), [(DAY, None, True), (DAY, True, True), (DAY, False, False), (0, None, False)]
)
async def test_response_is_stored_unless_the_request_or_the_setting_says_not(
    database: Database, acme: Principal, seconds: int, asked: bool | None, stores: bool
) -> None:
    assert store_of(database, response_seconds=seconds).stores(acme, asked) is stores


async def ids(database: Database) -> set[str]:
    async with database.read() as session:
        return set(await session.scalars(sa.select(ResponseRow.id)))
