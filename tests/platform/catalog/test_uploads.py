"""Uploads on both databases: through any server, over cuts, crashes and outages; a half one leaves nothing."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3
from upload_harness import CONFIG, Harness, upload_folder, upload_harness

from loramux.accounts.tenants.entities import AuditLog
from loramux.catalog.registry.entities import RevisionInfo
from loramux.catalog.registry.errors import AdapterNotFound, ModelNotFound
from loramux.catalog.uploads import parts as parts_module
from loramux.catalog.uploads.errors import (
    InvalidUpload,
    TooManyTransfers,
    TooManyUploads,
    UploadClosed,
    UploadNotFound,
    UploadTooSlow,
    WrongOffset,
)
from loramux.catalog.uploads.imports import FolderSource, Source
from loramux.catalog.uploads.parts import paced
from loramux.catalog.uploads.sessions import UploadRequest
from loramux.catalog.validation.jobs import ValidationReport
from loramux.common.identity import Principal
from loramux.common.sandbox.sandbox import SandboxDied
from loramux.common.settings.serving import UploadSettings
from loramux.data.records.database import Database
from loramux.data.records.leases import server_liveness
from loramux.data.records.uploads import UploadJobs
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, BlobStore, open_blobs
from loramux.data.storage.errors import StorageUnavailable

pytestmark = pytest.mark.anyio

Enrol = Callable[[str], Awaitable[Principal]]
Prepare = Callable[..., Awaitable[Harness]]


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[BlobStore]:
    blobs = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "cache"), {})
    yield blobs
    blobs.close()


@pytest.fixture
async def prepare(database: Database, blobs: BlobStore, enrol: Enrol) -> AsyncIterator[Prepare]:
    """Servers over the same database and store."""
    principal = await enrol("acme")
    async with AsyncExitStack() as stack:

        async def prepare(server_id: str = "server_1", store: BlobStore = blobs, **more: Any) -> Harness:
            return await stack.enter_async_context(upload_harness(database, store, principal, server_id, **more))

        yield prepare


@pytest.fixture
async def harness(prepare: Prepare) -> Harness:
    return await prepare()


def small_parts(monkeypatch: pytest.MonkeyPatch, size: int = 4) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", size)


def left_of(blobs: BlobStore) -> tuple[list[str], list[str]]:
    return blobs.digests(), blobs.objects.names("uploads")


async def test_parts_of_any_size_become_the_file(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    weights = bytes(range(37))
    id = (await harness.open(weights)).id
    assert await harness.send(id, WEIGHTS_FILE, weights[:17], cut=3) == 17
    assert len(harness.blobs.objects.names(f"uploads/{id}")) == 3
    assert await harness.send(id, WEIGHTS_FILE, weights[17:], 17, cut=9) == 37
    await harness.send(id, CONFIG_FILE, CONFIG)
    await harness.uploads.complete(harness.principal, id)
    upload = await harness.end_of(id)
    assert (upload.state, upload.outcome.revision) == ("ready", 1)
    resolved = await harness.registry.resolver.resolve(harness.principal, "acme/upper")
    assert (resolved.revision.directory / WEIGHTS_FILE).read_bytes() == weights
    assert left_of(harness.blobs) == ([resolved.revision.digest], [])


async def test_parts_go_through_any_server_of_any_machine(
    database: Database, enrol: Enrol, s3: S3, tmp_path: Path
) -> None:
    """Two servers that share nothing but the database and an S3 bucket."""
    principal = await enrol("acme")
    async with AsyncExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            blobs = open_blobs(f"{s3.url}/{tmp_path.name}", str(tmp_path / name), s3.options)
            stack.callback(blobs.close)
            servers.append(await stack.enter_async_context(upload_harness(database, blobs, principal, name)))
        one, two = servers
        id = (await one.open(b"weights")).id
        assert await two.send(id, WEIGHTS_FILE, b"wei") == 3
        assert await one.send(id, WEIGHTS_FILE, b"ghts", 3) == 7
        await two.send(id, CONFIG_FILE, CONFIG)
        await one.uploads.complete(principal, id)
        assert (await two.end_of(id)).state == "ready"
        revision = (await two.registry.resolver.resolve(principal, "acme/upper")).revision
        assert (revision.directory / WEIGHTS_FILE).read_bytes() == b"weights"
        assert left_of(one.blobs) == ([revision.digest], [])


async def test_two_requests_with_the_same_bytes_store_them_once(harness: Harness) -> None:
    id = (await harness.open()).id
    answers = await asyncio.gather(
        *(harness.send(id, WEIGHTS_FILE, b"weights") for _ in range(6)), return_exceptions=True
    )
    assert sorted(map(str, answers)).count("7") == 1
    others = [answer for answer in answers if answer != 7]
    assert {type(answer) for answer in others} == {WrongOffset}
    assert {answer.received for answer in others} == {7}
    assert len(harness.blobs.objects.names(f"uploads/{id}")) == 1


async def test_completing_twice_at_once_makes_one_revision(harness: Harness) -> None:
    id = (await harness.open()).id
    await harness.send(id, CONFIG_FILE, CONFIG)
    await harness.send(id, WEIGHTS_FILE, b"weights")
    await asyncio.gather(*(harness.uploads.complete(harness.principal, id) for _ in range(4)))
    assert (await harness.end_of(id)).outcome.revision == 1
    with pytest.raises(UploadClosed, match="ready"):
        await harness.send(id, WEIGHTS_FILE, b"x", 7)


async def test_what_is_rejected_leaves_nothing(harness: Harness) -> None:
    id = await harness.upload(b"bad weights")
    upload = await harness.end_of(id)
    assert (upload.state, upload.outcome.error.code) == ("rejected", "weights_invalid")
    assert '"it is bad"' in upload.outcome.report
    assert left_of(harness.blobs) == ([], [])
    with pytest.raises(ModelNotFound):
        await harness.registry.resolver.resolve(harness.principal, "acme/upper")


async def test_a_revision_over_the_limit_leaves_nothing(harness: Harness, sql: Callable[[str], None]) -> None:
    id = (await harness.open()).id
    sql(f"INSERT INTO limits VALUES ('{harness.principal.tenant}', 'adapter_bytes', '{harness.principal.tenant}', 5)")
    await harness.send(id, CONFIG_FILE, CONFIG)
    await harness.send(id, WEIGHTS_FILE, b"weights")
    await harness.uploads.complete(harness.principal, id)
    assert (await harness.end_of(id)).outcome.error.code == "too_many_adapters"
    assert left_of(harness.blobs) == ([], [])


async def test_parts_that_were_lost_are_a_reason(harness: Harness) -> None:
    id = (await harness.open()).id
    await harness.send(id, CONFIG_FILE, CONFIG)
    await harness.send(id, WEIGHTS_FILE, b"weights")
    harness.blobs.objects.delete_under(f"uploads/{id}")
    await harness.uploads.complete(harness.principal, id)
    assert (await harness.end_of(id)).outcome.error.code == "bytes_lost"


async def test_too_many_parts_are_refused(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "SPARE_PARTS", 3)
    id = (await harness.open(bytes(10))).id
    for offset in range(3):
        await harness.send(id, WEIGHTS_FILE, b"\0", offset)
    with pytest.raises(InvalidUpload, match="too many parts"):
        await harness.send(id, WEIGHTS_FILE, b"\0", 3)
    assert len(harness.blobs.objects.names(f"uploads/{id}")) == 3


async def test_open_uploads_are_limited_in_number_and_bytes(prepare: Prepare) -> None:
    harness = await prepare(settings=UploadSettings(open_per_tenant=2, open_bytes_per_tenant=20))
    await harness.open()
    with pytest.raises(TooManyUploads, match="9 bytes and this one 12"):
        await harness.open(bytes(10))
    opened = await asyncio.gather(*(harness.open() for _ in range(4)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in opened) == ["TooManyUploads"] * 3 + ["Upload"]


async def test_an_abandoned_session_expires_with_its_parts(database: Database, prepare: Prepare) -> None:
    harness = await prepare(settings=UploadSettings(session_seconds=60))
    now = database.now()
    id, other = (await harness.open()).id, (await harness.open()).id
    await harness.send(id, WEIGHTS_FILE, b"wei")
    database.now = lambda: now + 59_000_000
    await harness.send(other, WEIGHTS_FILE, b"wei")
    database.now = lambda: now + 62_000_000
    await harness.uploads.worker.tend()
    assert [(await harness.uploads.get(harness.principal, one)).state for one in (id, other)] == [
        "expired",
        "uploading",
    ]
    assert len(harness.blobs.objects.names("uploads")) == 1
    for late in (harness.send(id, WEIGHTS_FILE, b"x", 3), harness.uploads.complete(harness.principal, id)):
        with pytest.raises(UploadClosed, match="expired"):
            await late
    database.now = lambda: now + 31 * 86_400_000_000
    await harness.uploads.worker.sweep()
    with pytest.raises(UploadNotFound):
        await harness.uploads.get(harness.principal, id)


async def test_parts_without_an_upload_are_swept(harness: Harness) -> None:
    id = (await harness.open()).id
    await harness.send(id, WEIGHTS_FILE, b"wei")
    harness.blobs.objects.put("uploads/upload_of_a_dead_server/x", b"x")
    assert await harness.uploads.worker.sweep() == 1
    assert len(harness.blobs.objects.names("uploads")) == 1
    assert await harness.send(id, WEIGHTS_FILE, b"ghts", 3) == 7


def dies(folder: Path, limits: object) -> ValidationReport:
    raise SandboxDied("killed")


async def test_another_server_ends_what_a_dead_one_began(database: Database, prepare: Prepare) -> None:
    dying, living = await prepare("dying", examine=dies), await prepare("living")
    async with server_liveness(database, "dying"):
        id = await dying.upload()
        await dying.at_rest()
        await living.uploads.worker.tend()
        async with database.read() as session:
            assert await UploadJobs(session).of("living") == [], "it is not taken from a living one"
    await living.uploads.worker.tend()
    upload = await living.end_of(id)
    assert (upload.state, upload.outcome.revision) == ("ready", 1)
    entries = await AuditLog(database).read(tenant=dying.principal.tenant)
    authors = [entry.actor for entry in entries if entry.action == "adapter.upload"]
    assert authors == [dying.principal.key_id], "its author is the uploader, whichever server ends it"


async def test_an_upload_under_which_servers_die_is_given_up(database: Database, prepare: Prepare) -> None:
    harness = await prepare("server_0", examine=dies)
    id = await harness.upload()
    for number in range(1, 4):
        await harness.at_rest()
        harness = await prepare(f"server_{number}", examine=dies)
        await harness.uploads.worker.tend()
    upload = await harness.end_of(id)
    assert (upload.state, upload.outcome.error.code) == ("rejected", "validation_failed")


async def test_upload_whose_checks_never_run_is_refused_after_some_attempts(prepare: Prepare) -> None:
    asked = []

    def unavailable(folder: Path, limits: object) -> ValidationReport:
        asked.append(folder)
        raise SandboxDied("killed")

    harness = await prepare("server_0", examine=unavailable)
    id = await harness.upload()
    await harness.at_rest()
    for _ in range(8):
        await harness.uploads.worker.tend()
        await harness.at_rest()
    upload = await harness.end_of(id)
    assert (upload.state, upload.outcome.error.code) == ("rejected", "validation_unavailable")
    assert "5 attempts" in upload.outcome.error.message
    assert len(asked) == 5


async def test_an_outage_is_waited_for(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise StorageUnavailable("no route")

    monkeypatch.setattr(harness.blobs, "publish", broken)
    id = await harness.upload()
    await harness.at_rest()
    assert (await harness.uploads.get(harness.principal, id)).state == "validating"
    with pytest.raises(UploadClosed, match="being validated"):
        await harness.uploads.cancel(harness.principal, id)
    monkeypatch.undo()
    await harness.uploads.worker.tend()
    assert (await harness.end_of(id)).state == "ready"


async def test_a_failure_of_ours_is_told_as_such(prepare: Prepare) -> None:
    def broken(folder: Path, limits: object) -> ValidationReport:
        raise ZeroDivisionError

    harness = await prepare(examine=broken)
    assert (await harness.end_of(await harness.upload())).outcome.error.code == "internal_error"


async def test_many_uploads_at_once(harness: Harness) -> None:
    ids = await asyncio.gather(*(harness.upload(bytes([number])) for number in range(5)))
    ends = [await harness.end_of(id) for id in ids]
    assert {end.state for end in ends} == {"ready"}
    assert sorted(end.outcome.revision for end in ends) == list(range(1, 6))


# ---- slow and parked transfers


async def stalled(*chunks: bytes) -> AsyncIterator[bytes]:
    """A client that sends these chunks and then nothing, with its connection open."""
    for chunk in chunks:
        yield chunk
    await asyncio.Event().wait()


async def test_a_body_that_stalls_is_ended_and_its_bytes_are_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "WINDOW_SECONDS", 0.05)
    id = (await harness.open()).id
    with pytest.raises(UploadTooSlow):
        await harness.uploads.parts.receive(harness.principal, id, WEIGHTS_FILE, 0, stalled(b"wei"))
    assert (await harness.uploads.get(harness.principal, id)).files[1].received == 3
    assert await harness.send(id, WEIGHTS_FILE, b"ghts", 3) == 7


async def test_a_dripping_body_is_ended() -> None:
    async def drips() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.001)
            yield b"x"

    with pytest.raises(UploadTooSlow):
        async for _ in paced(drips(), bytes_per_second=1 << 30, window_s=0.05):
            pass


async def test_a_slow_store_is_not_the_clients_fault() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x"

    async for _ in paced(chunks(), bytes_per_second=1 << 30, window_s=0.02):
        await asyncio.sleep(0.03)


async def test_parked_bodies_hold_no_memory_and_are_limited_by_tenant(harness: Harness) -> None:
    id = (await harness.open(bytes(8 << 20))).id
    chunks = [bytes(1 << 16)] * 112
    tracemalloc.start()
    parked = [
        asyncio.create_task(harness.uploads.parts.receive(harness.principal, id, WEIGHTS_FILE, 0, stalled(*chunks)))
        for _ in range(40)
    ]
    async with asyncio.timeout(60):
        while sum(path.stat().st_size for path in spooled(harness)) < parts_module.TRANSFERS_PER_TENANT * (6 << 20):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 24 << 20, f"{held >> 20} MiB are held for {40 * 7} MiB of bodies"
    async with asyncio.timeout(60):
        while sum(task.done() for task in parked) < 40 - parts_module.TRANSFERS_PER_TENANT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert {type(task.exception()) for task in parked if task.done()} == {TooManyTransfers}
    for task in parked:
        task.cancel()
    await asyncio.gather(*parked, return_exceptions=True)
    assert spooled(harness) == []
    assert await harness.send(id, WEIGHTS_FILE, b"ok") == 2


def spooled(harness: Harness) -> list[Path]:
    return [path for path in harness.blobs._staging._area.glob("*/*") if path.is_file()]


# ---- imports that drip


class Dripping:
    """Stands in for the importer: fetches that never end, until they are released."""

    def __init__(self) -> None:
        self.fetching: list[str] = []
        self.release = asyncio.Event()

    async def fetch(self, source: Source, tenant_name: str, folder: Path) -> None:
        self.fetching.append(tenant_name)
        await self.release.wait()
        (folder / CONFIG_FILE).write_bytes(CONFIG)
        (folder / WEIGHTS_FILE).write_bytes(b"fetched")


@pytest.fixture
def dripping(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Dripping:
    made = Dripping()
    monkeypatch.setattr(harness.uploads.worker, "_importer", made)
    return made


async def import_one(harness: Harness, principal: Principal | None = None) -> str:
    """Open an import, its source unchecked."""
    source = FolderSource(path="/nowhere")
    return (await harness.uploads.open(principal or harness.principal, UploadRequest("upper", None, source))).id


async def test_dripping_imports_delay_no_upload_and_no_other_tenant(
    harness: Harness, dripping: Dripping, enrol: Enrol
) -> None:
    ids = [await import_one(harness) for _ in range(10)]
    assert (await harness.end_of(await harness.upload())).state == "ready", "its checks were not waited for"
    other = await import_one(harness, await enrol("globex"))
    async with asyncio.timeout(30):
        while "globex" not in dripping.fetching:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert dripping.fetching.count("acme") == 2, "a tenant has its share of the fetches"
    dripping.release.set()
    for id in ids:
        assert (await harness.end_of(id)).state == "ready"
    del other


async def test_an_import_can_be_cancelled_while_it_is_fetched(harness: Harness, dripping: Dripping) -> None:
    id = await import_one(harness)
    async with asyncio.timeout(30):
        while not dripping.fetching:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await harness.uploads.cancel(harness.principal, id)
    await harness.at_rest()
    with pytest.raises(UploadNotFound):
        await harness.uploads.get(harness.principal, id)
    assert spooled(harness) == []


# ---- a store that fails


CALLS = ("put_file", "read", "names", "delete", "delete_under")


class Failing:
    """Makes one call of a store fail, counted from the first, or every one from then on."""

    def __init__(self, objects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at = 0
        self.for_ever = False
        for name in CALLS:
            monkeypatch.setattr(objects, name, self._wrap(getattr(objects, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at or (self.for_ever and self.fail_at and self.calls >= self.fail_at):
                raise StorageUnavailable("injected")
            return call(*args)

        return failing


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("way", ["session", "request"])
async def test_a_store_that_fails_at_any_call_leaves_nothing_half(
    harness: Harness,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    way: str,
    for_ever: bool,
) -> None:
    """Every upload ends: with a revision, or with a refusal that its client or its owner can read."""
    failing = Failing(harness.blobs.objects, monkeypatch)
    real_now = database.now
    for fail_at in range(1, 40):
        weights = f"weights {fail_at}".encode()
        failing.calls, failing.fail_at, failing.for_ever = 0, fail_at, for_ever
        id = None
        try:
            if way == "request":
                (tmp_path / CONFIG_FILE).write_bytes(CONFIG)
                (tmp_path / WEIGHTS_FILE).write_bytes(weights)
                await upload_folder(harness.uploads, harness.principal, "upper", tmp_path)
            else:
                id = await harness.upload(weights)
                await harness.at_rest()
        except StorageUnavailable:
            pass
        if failing.calls < fail_at:
            break
        await harness.uploads.worker.tend() if not for_ever else None
        await harness.at_rest()
        if for_ever and id is not None:
            database.now = lambda: real_now() + 3 * 3_600_000_000
            with suppress(StorageUnavailable):
                await harness.uploads.worker.tend()
            await harness.at_rest()
            assert (await harness.uploads.get(harness.principal, id)).state in ("rejected", "ready")
            database.now = real_now
        failing.fail_at = 0
        for upload in await harness.uploads.before(harness.principal, None, 100):
            if upload.state == "uploading":
                await harness.uploads.cancel(harness.principal, upload.id)
            else:
                assert upload.state in ("ready", "rejected"), f"call {fail_at}: {upload}"
        await harness.uploads.worker.sweep()
        await harness.registry.blob_gc.purge()
        await harness.registry.blob_gc.sweep()
        assert harness.blobs.objects.names("uploads") == []
        assert set(harness.blobs.digests()) == {one.digest for one in await revisions(harness)}, (
            f"call {fail_at}: stored contents are those of the revisions"
        )
        assert spooled(harness) == []
    else:
        pytest.fail("an upload makes more calls than were tried")
    assert fail_at > 5


async def revisions(harness: Harness) -> list[RevisionInfo]:
    try:
        return await harness.registry.queries.revisions(harness.principal, "upper")
    except AdapterNotFound:
        return []


async def test_deleting_the_adapter_during_an_upload_leaves_the_upload_whole(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion comes between the check and the registration: the upload begins the adapter anew."""
    harness = await prepare()
    await harness.end_of(await harness.upload(b"first"))
    real = harness.blobs.publish
    loop = asyncio.get_running_loop()

    def publish(folder: Path, digest: str) -> None:
        real(folder, digest)
        deleting = harness.registry.deletion.delete(harness.principal, "upper", undo_seconds=0)
        asyncio.run_coroutine_threadsafe(deleting, loop).result(30)

    monkeypatch.setattr(harness.blobs, "publish", publish)
    upload = await harness.end_of(await harness.upload(b"second"))
    assert (upload.state, upload.outcome.revision) == ("ready", 2)
    assert (await harness.registry.resolver.resolve(harness.principal, "acme/upper")).name == "acme/upper@2"
