"""Uploads on both databases: through any server, over cuts, crashes and outages; a half one leaves nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3
from upload_house import CONFIG, House, upload_house

from loramux.records import Database, Principal
from loramux.records.locks import alive
from loramux.records.upload_work import UploadWork
from loramux.registry import ModelNotFound
from loramux.settings import UploadSettings
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE, BlobStore, StorageUnavailable, open_blobs
from loramux.uploads import InvalidUpload, TooManyUploads, UploadClosed, UploadNotFound, WrongOffset
from loramux.uploads import pieces as pieces_module
from loramux.uploads import reception as reception_module
from loramux.validation import Report, SandboxDied

pytestmark = pytest.mark.anyio

Enrol = Callable[[str], Awaitable[Principal]]
Furnish = Callable[..., Awaitable[House]]


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[BlobStore]:
    blobs = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "cache"), {})
    yield blobs
    blobs.close()


@pytest.fixture
async def furnish(database: Database, blobs: BlobStore, enrol: Enrol) -> AsyncIterator[Furnish]:
    """Servers over the same database and store."""
    principal = await enrol("acme")
    async with AsyncExitStack() as stack:

        async def furnish(server_id: str = "server_1", store: BlobStore = blobs, **more: Any) -> House:
            return await stack.enter_async_context(upload_house(database, store, principal, server_id, **more))

        yield furnish


@pytest.fixture
async def house(furnish: Furnish) -> House:
    return await furnish()


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int = 4) -> None:
    monkeypatch.setattr(reception_module, "PIECE_BYTES", size)
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", size)


def left_of(blobs: BlobStore) -> tuple[list[str], list[str]]:
    return blobs.digests(), blobs.objects.names("uploads")


async def test_pieces_of_any_size_become_the_file(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    weights = bytes(range(37))
    id = (await house.open(weights)).id
    assert await house.send(id, WEIGHTS_FILE, weights[:17], cut=3) == 17
    assert len(house.blobs.objects.names(f"uploads/{id}")) == 5
    assert await house.send(id, WEIGHTS_FILE, weights[17:], 17, cut=9) == 37
    await house.send(id, CONFIG_FILE, CONFIG)
    await house.uploads.sessions.complete(house.principal, id)
    upload = await house.end_of(id)
    assert (upload.state, upload.outcome.revision) == ("ready", 1)
    resolved = await house.registry.resolve(house.principal, "acme/upper")
    assert (resolved.revision.directory / WEIGHTS_FILE).read_bytes() == weights
    assert left_of(house.blobs) == ([resolved.revision.digest], [])


async def test_pieces_go_through_any_server_of_any_machine(
    database: Database, enrol: Enrol, s3: S3, tmp_path: Path
) -> None:
    """Two servers that share nothing but the database and an S3 bucket."""
    principal = await enrol("acme")
    async with AsyncExitStack() as stack:
        houses = []
        for name in ("one", "two"):
            blobs = open_blobs(f"{s3.url}/{tmp_path.name}", str(tmp_path / name), s3.options)
            stack.callback(blobs.close)
            houses.append(await stack.enter_async_context(upload_house(database, blobs, principal, name)))
        one, two = houses
        id = (await one.open(b"weights")).id
        assert await two.send(id, WEIGHTS_FILE, b"wei") == 3
        assert await one.send(id, WEIGHTS_FILE, b"ghts", 3) == 7
        await two.send(id, CONFIG_FILE, CONFIG)
        await one.uploads.sessions.complete(principal, id)
        assert (await two.end_of(id)).state == "ready"
        revision = (await two.registry.resolve(principal, "acme/upper")).revision
        assert (revision.directory / WEIGHTS_FILE).read_bytes() == b"weights"
        assert left_of(one.blobs) == ([revision.digest], [])


async def test_two_requests_with_the_same_bytes_store_them_once(house: House) -> None:
    id = (await house.open()).id
    answers = await asyncio.gather(
        *(house.send(id, WEIGHTS_FILE, b"weights") for _ in range(6)), return_exceptions=True
    )
    assert sorted(map(str, answers)).count("7") == 1
    others = [answer for answer in answers if answer != 7]
    assert {type(answer) for answer in others} == {WrongOffset}
    assert {answer.received for answer in others} == {7}
    assert len(house.blobs.objects.names(f"uploads/{id}")) == 1


async def test_completing_twice_at_once_makes_one_revision(house: House) -> None:
    id = (await house.open()).id
    await house.send(id, CONFIG_FILE, CONFIG)
    await house.send(id, WEIGHTS_FILE, b"weights")
    await asyncio.gather(*(house.uploads.sessions.complete(house.principal, id) for _ in range(4)))
    assert (await house.end_of(id)).outcome.revision == 1
    with pytest.raises(UploadClosed, match="ready"):
        await house.send(id, WEIGHTS_FILE, b"x", 7)


async def test_what_is_rejected_leaves_nothing(house: House) -> None:
    id = await house.upload(b"bad weights")
    upload = await house.end_of(id)
    assert (upload.state, upload.outcome.error.code) == ("rejected", "weights_invalid")
    assert '"it is bad"' in upload.outcome.report
    assert left_of(house.blobs) == ([], [])
    with pytest.raises(ModelNotFound):
        await house.registry.resolve(house.principal, "acme/upper")


async def test_a_revision_over_the_limit_leaves_nothing(house: House, sql: Callable[[str], None]) -> None:
    id = (await house.open()).id
    sql(f"INSERT INTO limits VALUES ('{house.principal.tenant}', 'adapter_bytes', '{house.principal.tenant}', 5)")
    await house.send(id, CONFIG_FILE, CONFIG)
    await house.send(id, WEIGHTS_FILE, b"weights")
    await house.uploads.sessions.complete(house.principal, id)
    assert (await house.end_of(id)).outcome.error.code == "too_many_adapters"
    assert left_of(house.blobs) == ([], [])


async def test_pieces_that_were_lost_are_a_reason(house: House) -> None:
    id = (await house.open()).id
    await house.send(id, CONFIG_FILE, CONFIG)
    await house.send(id, WEIGHTS_FILE, b"weights")
    house.blobs.objects.delete_under(f"uploads/{id}")
    await house.uploads.sessions.complete(house.principal, id)
    assert (await house.end_of(id)).outcome.error.code == "bytes_lost"


async def test_too_many_pieces_are_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SPARE_PIECES", 3)
    id = (await house.open(bytes(10))).id
    for offset in range(3):
        await house.send(id, WEIGHTS_FILE, b"\0", offset)
    with pytest.raises(InvalidUpload, match="too many pieces"):
        await house.send(id, WEIGHTS_FILE, b"\0", 3)
    assert len(house.blobs.objects.names(f"uploads/{id}")) == 3


async def test_open_uploads_are_limited_in_number_and_bytes(furnish: Furnish) -> None:
    house = await furnish(settings=UploadSettings(open_per_tenant=2, open_bytes_per_tenant=20))
    await house.open()
    with pytest.raises(TooManyUploads, match="9 bytes and this one 12"):
        await house.open(bytes(10))
    opened = await asyncio.gather(*(house.open() for _ in range(4)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in opened) == ["TooManyUploads"] * 3 + ["Upload"]


async def test_an_abandoned_session_expires_with_its_pieces(database: Database, furnish: Furnish) -> None:
    house = await furnish(settings=UploadSettings(session_seconds=60))
    now = database.now()
    id, other = (await house.open()).id, (await house.open()).id
    await house.send(id, WEIGHTS_FILE, b"wei")
    database.now = lambda: now + 59_000_000
    await house.send(other, WEIGHTS_FILE, b"wei")
    database.now = lambda: now + 62_000_000
    await house.uploads.workshop.tend()
    assert [(await house.uploads.sessions.get(house.principal, one)).state for one in (id, other)] == [
        "expired",
        "uploading",
    ]
    assert len(house.blobs.objects.names("uploads")) == 1
    for late in (house.send(id, WEIGHTS_FILE, b"x", 3), house.uploads.sessions.complete(house.principal, id)):
        with pytest.raises(UploadClosed, match="expired"):
            await late
    database.now = lambda: now + 31 * 86_400_000_000
    await house.uploads.workshop.sweep()
    with pytest.raises(UploadNotFound):
        await house.uploads.sessions.get(house.principal, id)


async def test_pieces_of_nobody_are_swept(house: House) -> None:
    id = (await house.open()).id
    await house.send(id, WEIGHTS_FILE, b"wei")
    house.blobs.objects.put("uploads/upload_of_a_dead_server/x", b"x")
    assert await house.uploads.workshop.sweep() == 1
    assert len(house.blobs.objects.names("uploads")) == 1
    assert await house.send(id, WEIGHTS_FILE, b"ghts", 3) == 7


def dies(folder: Path, limits: object) -> Report:
    raise SandboxDied("killed")


async def test_another_server_ends_what_a_dead_one_began(database: Database, furnish: Furnish) -> None:
    dying, living = await furnish("dying", examine=dies), await furnish("living")
    async with alive(database, "dying"):
        id = await dying.upload()
        await dying.at_rest()
        if database.url.get_backend_name() == "postgresql":
            await living.uploads.workshop.tend()
            async with database.read() as session:
                assert await UploadWork(session).jobs("living") == [], "it is not taken from a living one"
    await living.uploads.workshop.tend()
    upload = await living.end_of(id)
    assert (upload.state, upload.outcome.revision) == ("ready", 1)


async def test_an_upload_under_which_servers_die_is_given_up(database: Database, furnish: Furnish) -> None:
    house = await furnish("server_0", examine=dies)
    id = await house.upload()
    for number in range(1, 4):
        await house.at_rest()
        house = await furnish(f"server_{number}", examine=dies)
        await house.uploads.workshop.tend()
    upload = await house.end_of(id)
    assert (upload.state, upload.outcome.error.code) == ("rejected", "validation_failed")


async def test_an_outage_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise StorageUnavailable("no route")

    monkeypatch.setattr(house.blobs, "publish", broken)
    id = await house.upload()
    await house.at_rest()
    assert (await house.uploads.sessions.get(house.principal, id)).state == "validating"
    with pytest.raises(UploadClosed, match="being validated"):
        await house.uploads.sessions.cancel(house.principal, id)
    monkeypatch.undo()
    await house.uploads.workshop.tend()
    assert (await house.end_of(id)).state == "ready"


async def test_a_failure_of_ours_is_told_as_such(furnish: Furnish) -> None:
    def broken(folder: Path, limits: object) -> Report:
        raise ZeroDivisionError

    house = await furnish(examine=broken)
    assert (await house.end_of(await house.upload())).outcome.error.code == "internal_error"


async def test_many_uploads_at_once(house: House) -> None:
    ids = await asyncio.gather(*(house.upload(bytes([number])) for number in range(5)))
    ends = [await house.end_of(id) for id in ids]
    assert {end.state for end in ends} == {"ready"}
    assert sorted(end.outcome.revision for end in ends) == list(range(1, 6))
