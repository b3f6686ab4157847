"""Uploads become revisions, names become revisions, deletions remove them, and no tenant sees another's."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from upload_harness import upload_folder, upload_services

from loramux.catalog.registry.entities import AdapterInfo, WeightedRevision
from loramux.catalog.registry.errors import (
    AdapterNotFound,
    InvalidName,
    ModelNotFound,
    RevisionUnavailable,
    TooManyAdapters,
)
from loramux.catalog.registry.registry import Registry, open_registry
from loramux.catalog.registry.resolver import BaseModel, BaseModels, engine_key
from loramux.catalog.uploads.errors import InvalidUpload, UploadRejected
from loramux.catalog.uploads.sessions import UploadSessions
from loramux.catalog.validation.validator import BaseValidators, Validator
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import AdapterLimits, ModelSettings, ValidationSettings
from loramux.common.units import TokenCounts
from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.aliases import AliasRow
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, BlobStore, content_digest, open_blobs
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement
from loramux_adapters.base import BaseDescription, describe_base

pytestmark = pytest.mark.anyio

Enrol = Callable[[str], Awaitable[Principal]]
HIDDEN, SERVED = 32, "globex/base"
CHECKED = Settings(
    model=ModelSettings(path="/nowhere", served_model_name=SERVED), validation=ValidationSettings(parity=False)
)


def describe(folder: Path, hidden_size: int = HIDDEN) -> BaseDescription:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}
    LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2).save_pretrained(folder)
    return describe_base(folder)


def write_adapter(folder: Path, seed: int = 0, rank: int = 4, fill: float | None = None) -> Path:
    """A LoRA on q_proj of both layers; `fill` takes the place of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for name, shape in (("lora_A", (rank, HIDDEN)), ("lora_B", (HIDDEN, rank))):
            tensor = torch.randn(shape, generator=generator) if fill is None else torch.full(shape, fill)
            tensors[f"{stem}.{name}.weight"] = tensor
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseDescription:
    return describe(tmp_path_factory.mktemp("base"))


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[BlobStore]:
    blobs = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "cache"), {})
    yield blobs
    blobs.close()


@pytest.fixture(scope="module")
def validators(base: BaseDescription) -> Iterator[BaseValidators]:
    with closing(BaseValidators(CHECKED, {SERVED: Validator(CHECKED, base, "float32")})) as validators:
        yield validators


LIMITS = AdapterLimits(max_rank=16, max_adapters_per_tenant=3, undo_seconds=0)


@pytest.fixture
async def services(
    database: Database, blobs: BlobStore, base: BaseDescription, validators: BaseValidators
) -> AsyncIterator[tuple[Registry, UploadSessions]]:
    made = upload_services(database, blobs, validators=validators, base=base, served_model_name=SERVED, limits=LIMITS)
    yield made
    await made[1].worker.jobs.stop()


@pytest.fixture
def registry(services: tuple[Registry, UploadSessions]) -> Registry:
    return services[0]


@pytest.fixture
def uploads(services: tuple[Registry, UploadSessions]) -> UploadSessions:
    return services[1]


@pytest.fixture
def pass_time(database: Database) -> Callable[[int], None]:
    """Put the database's clock on by so many seconds."""

    def pass_time(seconds: int) -> None:
        before = database.now
        database.now = lambda: before() + seconds * 1_000_000

    return pass_time


@pytest.fixture
async def acme(enrol: Enrol) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def globex(enrol: Enrol) -> Principal:
    return await enrol("globex")


@pytest.fixture
def push(uploads: UploadSessions, tmp_path: Path) -> Callable[..., Awaitable[AdapterInfo]]:
    async def push(principal: Principal, name: str, **content: Any) -> AdapterInfo:
        return await upload_folder(uploads, principal, name, write_adapter(tmp_path / "source", **content))

    return push


Push = Callable[..., Awaitable[AdapterInfo]]


def staged(tmp_path: Path) -> list[Path]:
    return [path for part in ("blobs", "cache") for path in (tmp_path / part / "incoming").glob("*/*")]


async def rows(database: Database) -> tuple[int, int, int]:
    async with database.read() as session:
        counts = [
            await session.scalar(sa.select(sa.func.count()).select_from(t)) for t in (AdapterRow, RevisionRow, AliasRow)
        ]
    return counts[0] or 0, counts[1] or 0, counts[2] or 0


# ---- upload


async def test_an_upload_is_described(push: Push, acme: Principal, tmp_path: Path) -> None:
    info = await push(acme, "upper", rank=4)
    sizes = sum((tmp_path / "source" / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
    assert (info.name, info.revision, info.state, info.rank, info.size_bytes) == ("acme/upper", 1, "ready", 4, sizes)
    assert info.digest.startswith("sha256:")
    assert info.created_at > 1_700_000_000_000_000
    assert staged(tmp_path) == []


async def test_an_upload_resolves_to_its_very_files(
    registry: Registry, push: Push, acme: Principal, tmp_path: Path
) -> None:
    info = await push(acme, "acme/upper")
    model = await registry.resolver.resolve(acme, "acme/upper")
    assert model.name == "acme/upper@1"
    assert model.revision is not None
    assert (model.revision.digest, model.revision.number, model.revision.adapter_id) == (info.digest, 1, info.id)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (model.revision.directory / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


async def test_a_second_upload_is_the_next_revision_and_the_default(
    registry: Registry, push: Push, acme: Principal
) -> None:
    first, second = await push(acme, "upper", seed=1), await push(acme, "upper", seed=2)
    assert (first.revision, second.revision, first.id) == (1, 2, second.id)
    by_name = {
        model: (await registry.resolver.resolve(acme, model)).revision.digest
        for model in ("acme/upper", "acme/upper:default", "acme/upper@1", "acme/upper@2")
    }
    assert by_name == {
        "acme/upper": second.digest,
        "acme/upper:default": second.digest,
        "acme/upper@1": first.digest,
        "acme/upper@2": second.digest,
    }


async def test_the_same_content_again_is_the_same_revision(push: Push, acme: Principal, database: Database) -> None:
    assert await push(acme, "upper", seed=1) == await push(acme, "upper", seed=1)
    assert await rows(database) == (1, 1, 1)


async def test_earlier_content_again_changes_nothing(
    registry: Registry, push: Push, acme: Principal, database: Database
) -> None:
    """A repeated upload of v1 must not take the traffic away from v2."""
    await push(acme, "upper", seed=1)
    second = await push(acme, "upper", seed=2)
    assert await push(acme, "upper", seed=1) == second
    assert (await registry.resolver.resolve(acme, "acme/upper")).name == "acme/upper@2"
    assert [version.version for version in await registry.queries.history(acme, "upper", "default")] == [2, 1]
    assert await rows(database) == (1, 2, 1)


async def test_the_content_of_a_canary_again_leaves_the_canary(registry: Registry, push: Push, acme: Principal) -> None:
    for seed in (1, 2):
        await push(acme, "upper", seed=seed)
    targets = [WeightedRevision(1, 95), WeightedRevision(2, 5)]
    canary = await registry.aliases.point(acme, "upper", "default", targets)
    assert await push(acme, "upper", seed=2) == canary


async def test_deleted_content_again_becomes_the_default_again(
    registry: Registry, push: Push, acme: Principal, database: Database
) -> None:
    """Uploading what was deleted is a new release, not a repetition."""
    first = await push(acme, "upper", seed=1)
    await push(acme, "upper", seed=2)
    await registry.deletion.delete_revision(acme, "upper", 1)
    again = await push(acme, "upper", seed=1)
    assert (again.revision, again.digest) == (1, first.digest)
    assert (await registry.resolver.resolve(acme, "acme/upper")).name == "acme/upper@1"
    assert await rows(database) == (1, 2, 1)


async def test_uploads_at_once_get_numbers_without_a_gap(
    uploads: UploadSessions, acme: Principal, tmp_path: Path, database: Database
) -> None:
    sources = [write_adapter(tmp_path / f"source{seed}", seed=seed % 4) for seed in range(8)]
    infos = await asyncio.gather(*(upload_folder(uploads, acme, "upper", source) for source in sources))
    assert await rows(database) == (1, 4, 1)
    async with database.read() as session:
        numbers = set(await session.scalars(sa.select(RevisionRow.number)))
    assert numbers == {1, 2, 3, 4}
    assert {info.revision for info in infos} <= numbers
    assert staged(tmp_path) == []


async def test_an_uploads_answer_is_of_its_own_transaction(
    uploads: UploadSessions, acme: Principal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two uploads at once is answered with its own revision, though the other is the default by then."""
    sources = [write_adapter(tmp_path / f"source{seed}", seed=seed) for seed in range(2)]
    both, real, waiting = asyncio.Event(), uploads.worker._end, []

    def end(id: str, outcome: Any) -> None:
        """Delay both answers until both are committed."""
        waiting.append((id, outcome))
        if len(waiting) == 2:
            for one in waiting:
                real(*one)
            both.set()

    monkeypatch.setattr(uploads.worker, "_end", end)
    infos = await asyncio.gather(*(upload_folder(uploads, acme, "upper", source) for source in sources))
    assert both.is_set()
    assert {info.revision for info in infos} == {1, 2}
    assert [info.digest for info in infos] == [content_digest(source) for source in sources]


async def test_twenty_clients_upload_to_one_name_and_each_gets_its_own_revision(
    uploads: UploadSessions, acme: Principal, tmp_path: Path, database: Database
) -> None:
    sources = [write_adapter(tmp_path / f"source{seed}", seed=seed) for seed in range(20)]
    infos = await asyncio.gather(*(upload_folder(uploads, acme, "upper", source) for source in sources))
    assert sorted(info.revision for info in infos) == list(range(1, 21))
    assert [info.digest for info in infos] == [content_digest(source) for source in sources]
    assert await rows(database) == (1, 20, 1)
    assert staged(tmp_path) == []


BAD_CONTENT: dict[str, dict[str, Any]] = {
    "nan": {"fill": float("nan")},
    "rank over the limit": {"rank": 32},
}


@pytest.mark.parametrize("content", BAD_CONTENT.values(), ids=BAD_CONTENT)
async def test_a_refused_upload_leaves_nothing(
    push: Push, blobs: BlobStore, acme: Principal, database: Database, tmp_path: Path, content: dict[str, Any]
) -> None:
    with pytest.raises(UploadRejected):
        await push(acme, "upper", **content)
    assert staged(tmp_path) == []
    assert blobs.digests() == []
    assert await rows(database) == (0, 0, 0)


@pytest.mark.parametrize("absent", [CONFIG_FILE, WEIGHTS_FILE])
async def test_a_missing_file_is_refused(uploads: UploadSessions, acme: Principal, tmp_path: Path, absent: str) -> None:
    source = write_adapter(tmp_path / "source")
    (source / absent).unlink()
    with pytest.raises(InvalidUpload, match=absent):
        await upload_folder(uploads, acme, "upper", source)
    assert staged(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", "Upper", "a b", "-a", "a" * 64, "globex/upper", "a/b/c", "upper@1", "upper:x", "acme/", "/upper", "é"]
)
async def test_a_name_that_cannot_be_is_refused_with_the_grammar(push: Push, acme: Principal, name: str) -> None:
    with pytest.raises(InvalidName, match=r"acme/ADAPTER.*1 to 63 of a-z.*\[a-z0-9\]\[a-z0-9._-\]\{0,62\}") as refusal:
        await push(acme, name)
    assert refusal.value.field == "name"


async def test_the_base_models_name_is_taken(push: Push, globex: Principal) -> None:
    with pytest.raises(InvalidName, match="base model's name"):
        await push(globex, "base")


async def test_a_tenant_has_a_limit(registry: Registry, push: Push, acme: Principal, globex: Principal) -> None:
    for number in range(3):
        await push(acme, f"a{number}")
    with pytest.raises(TooManyAdapters, match=r"you have 3 adapters.*delete one first"):
        await push(acme, "a3")
    await push(acme, "a0", seed=9)
    await push(globex, "a3")
    await registry.deletion.delete(acme, "a1")
    await push(acme, "a3")


async def test_the_limit_holds_for_uploads_at_once(
    registry: Registry, uploads: UploadSessions, acme: Principal, tmp_path: Path
) -> None:
    sources = [write_adapter(tmp_path / f"source{seed}", seed=seed) for seed in range(6)]
    pushes = (upload_folder(uploads, acme, f"a{seed}", source) for seed, source in enumerate(sources))
    outcomes = await asyncio.gather(*pushes, return_exceptions=True)
    assert sum(isinstance(outcome, TooManyAdapters) for outcome in outcomes) == 3
    assert len(await registry.queries.all(acme)) == 3


# ---- names


async def test_the_base_model_is_everybodys(registry: Registry, acme: Principal) -> None:
    model = await registry.resolver.resolve(acme, SERVED)
    assert (model.name, model.revision) == (SERVED, None)


async def test_anothers_adapter_is_exactly_as_absent_as_an_absent_one(
    registry: Registry, push: Push, acme: Principal, globex: Principal
) -> None:
    await push(globex, "secret")

    async def refusal(model: str) -> str:
        with pytest.raises(ModelNotFound) as refused:
            await registry.resolver.resolve(acme, model)
        assert (refused.value.code, refused.value.field) == ("model_not_found", "model")
        return str(refused.value).replace(model, "MODEL")

    there = {await refusal(model) for model in ("globex/secret", "globex/secret@1", "globex/secret:default")}
    absent = {await refusal(model) for model in ("globex/other", "acme/secret", "acme/secret@1", "nobody/secret")}
    assert there == absent == {"The model `MODEL` does not exist or you do not have access to it."}
    for question in (registry.queries.get, registry.deletion.delete):
        for name in ("globex/secret", "secret", "acme/secret"):
            with pytest.raises(AdapterNotFound):
                await question(acme, name)
    assert await registry.queries.all(acme) == []
    assert len(await registry.queries.all(globex)) == 1


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("acme/suport-bot", "acme/support-bot"),
        ("suport-bot", "acme/support-bot"),
        ("acme/support-bot:stagin", "acme/support-bot"),
        ("acne/support-bot", "acme/support-bot"),
        ("acme/support-bot@77", "acme/support-bot"),
        ("acme/other", None),
        ("globex/support-bot", None),
        ("x" * 10_000, None),
    ],
)
async def test_unknown_model_is_told_the_callers_own_one_that_is_like_it(
    registry: Registry, push: Push, acme: Principal, globex: Principal, asked: str, meant: str | None
) -> None:
    await push(acme, "support-bot")
    await push(globex, "support-bots")
    with pytest.raises(ModelNotFound) as refused:
        await registry.resolver.resolve(acme, asked)
    suggestion = str(refused.value).partition("Did you mean `")[2].removesuffix("`?")
    assert suggestion == (meant or "")
    limited = msgspec.structs.replace(acme, models=frozenset({"acme/nothing"}))
    with pytest.raises(ModelNotFound) as refused:
        await registry.resolver.resolve(limited, asked)
    assert "Did you mean" not in str(refused.value)


MALFORMED = [
    "",
    "x" * 10_000,
    "uppercase",
    "acme/",
    "acme/upper@0",
    "acme/upper@01",
    "acme/upper@-1",
    "acme/upper:nope",
    "acme/upper@9",
]
MALFORMED += ["acme/upper@1:default", "ACME/upper", "acme/upper ", "acme//upper", "acme/upper@9999999999"]


@pytest.mark.parametrize("model", MALFORMED)
async def test_what_cannot_be_a_model_is_not_found(registry: Registry, push: Push, acme: Principal, model: str) -> None:
    await push(acme, "upper")
    with pytest.raises(ModelNotFound) as refusal:
        await registry.resolver.resolve(acme, model)
    assert len(str(refusal.value)) < 250


async def test_lists_and_gets(registry: Registry, push: Push, acme: Principal) -> None:
    json_, upper = await push(acme, "json"), await push(acme, "upper", seed=2)
    assert await registry.queries.all(acme) == [json_, upper]
    assert await registry.queries.get(acme, "upper") == await registry.queries.get(acme, "acme/upper") == upper


# ---- delete


async def test_a_deleted_adapter_is_gone(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    tmp_path: Path,
    pass_time: Callable[[int], None],
) -> None:
    first, second = await push(acme, "upper", seed=1), await push(acme, "upper", seed=2)
    assert await registry.deletion.delete(acme, "upper") == (second, {first.digest, second.digest})
    assert await registry.blob_gc.purge() == 0, "a request that found it may be on its way"
    pass_time(61)
    assert await registry.blob_gc.purge() == 2
    assert blobs.digests() == []
    assert staged(tmp_path) == []
    assert await registry.queries.all(acme) == []
    for model in ("acme/upper", "acme/upper@1", "acme/upper@2", "acme/upper:default"):
        with pytest.raises(ModelNotFound):
            await registry.resolver.resolve(acme, model)
    with pytest.raises(AdapterNotFound):
        await registry.deletion.delete(acme, "upper")


async def test_content_that_another_tenant_still_has_stays(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    globex: Principal,
    pass_time: Callable[[int], None],
) -> None:
    shared = await push(acme, "upper", seed=1)
    own = await push(acme, "upper", seed=2)
    await push(globex, "copy", seed=1)
    _, digests = await registry.deletion.delete(acme, "upper")
    keys = {engine_key(acme.tenant, one.digest) for one in (own, shared)}
    assert await registry.blob_gc.uncallable(acme.tenant, digests) == keys
    assert await registry.blob_gc.recently_uncallable() == keys
    pass_time(61)
    assert await registry.blob_gc.purge() == 1
    assert blobs.digests() == [shared.digest]
    assert (await registry.resolver.resolve(globex, "globex/copy")).revision.digest == shared.digest


async def test_equal_weights_of_two_tenants_are_loaded_apart(
    registry: Registry, push: Push, acme: Principal, globex: Principal
) -> None:
    """A load that is missing from a tenant's usage would tell that another tenant has the same weights."""
    for tenant in (acme, globex):
        await push(tenant, "upper", seed=1)
    found = [(await registry.resolver.resolve(*asked)).revision for asked in ((acme, "upper"), (globex, "upper"))]
    [mine, theirs] = [revision for revision in found if revision is not None]
    assert mine.digest == theirs.digest
    assert mine.directory == theirs.directory, "the files are stored once"
    assert mine.engine_key != theirs.engine_key


async def test_a_number_names_one_content_for_ever(registry: Registry, push: Push, acme: Principal) -> None:
    first = await push(acme, "upper", seed=1)
    await registry.deletion.delete(acme, "upper")
    second = await push(acme, "upper", seed=2)
    assert second.revision == 2
    with pytest.raises(ModelNotFound):
        await registry.resolver.resolve(acme, "acme/upper@1")
    again = await push(acme, "upper", seed=1)
    assert (again.revision, again.digest, again.id) == (1, first.digest, first.id)
    assert (await registry.resolver.resolve(acme, "acme/upper@1")).revision.digest == first.digest


def opened_request(principal: Principal, digest: str) -> OpenedRequest:
    return OpenedRequest(
        id="r1",
        tenant_id=principal.tenant,
        key_id=principal.key_id,
        model="acme/upper@1",
        adapter_digest=digest,
        prompt_tokens=1,
        max_tokens=1,
    )


async def test_files_of_an_open_request_stay_until_it_ends(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    database: Database,
    pass_time: Callable[[int], None],
) -> None:
    info = await push(acme, "upper")
    usage = UsageService(database)
    await usage.start()
    await usage.open(opened_request(acme, info.digest))
    await registry.deletion.delete(acme, "upper")
    pass_time(61)
    assert await registry.blob_gc.purge() == await registry.blob_gc.sweep() == 0
    assert blobs.digests() == [info.digest]
    await usage.settle(
        Settlement(
            request_id="r1",
            ended_by="completion",
            finish_reason="stop",
            delivered=TokenCounts(prompt=1, output=1),
        )
    )
    assert await registry.blob_gc.purge() == 1
    assert blobs.digests() == []
    await usage.stop()


async def test_uploads_and_deletions_at_once_leave_no_row_without_files(
    registry: Registry,
    uploads: UploadSessions,
    blobs: BlobStore,
    acme: Principal,
    globex: Principal,
    tmp_path: Path,
    pass_time: Callable[[int], None],
) -> None:
    """The same content comes and goes under two tenants; what is listed can always be served."""
    sources = [write_adapter(tmp_path / f"source{number}") for number in range(2)]

    async def come_and_go(principal: Principal, source: Path) -> None:
        for _ in range(6):
            await upload_folder(uploads, principal, "x", source)
            await registry.resolver.resolve(principal, f"{principal.tenant_name}/x")
            await registry.deletion.delete(principal, "x")
            pass_time(61)
            await registry.blob_gc.purge()
        await upload_folder(uploads, principal, "x", source)

    await asyncio.gather(come_and_go(acme, sources[0]), come_and_go(globex, sources[1]))
    assert await registry.resolver.resolve(acme, "acme/x")
    assert await registry.resolver.resolve(globex, "globex/x")
    assert len(blobs.digests()) == 1


# ---- crashes and damage


STEPS = ["seal", "publish"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_upload_that_breaks_registers_nothing(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    when: str,
) -> None:
    real = getattr(blobs, step)

    def breaking(*args: Any) -> Any:
        if when == "after":
            real(*args)
        raise OSError("the disk broke")

    monkeypatch.setattr(blobs, step, breaking)
    with pytest.raises(OSError, match="the disk broke"):
        await push(acme, "upper")
    monkeypatch.undo()
    assert await rows(database) == (0, 0, 0)
    assert staged(tmp_path) == []
    orphans = 1 if (step, when) == ("publish", "after") else 0
    assert len(blobs.digests()) == orphans
    assert await registry.blob_gc.sweep() == orphans
    assert blobs.digests() == []
    assert (await push(acme, "upper")).revision == 1


async def test_a_commit_that_breaks_registers_nothing(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = []

    def publish(folder: Path, digest: str, real: Any = blobs.publish) -> None:
        real(folder, digest)
        published.append(digest)

    def breaking(connection: sa.Connection) -> None:
        if published and not connection.get_execution_options().get("postgresql_readonly"):
            raise OSError("the database broke")

    monkeypatch.setattr(blobs, "publish", publish)
    sa.event.listen(database._writer.sync_engine, "commit", breaking)
    with pytest.raises(OSError, match="the database broke"):
        await push(acme, "upper")
    sa.event.remove(database._writer.sync_engine, "commit", breaking)
    assert await rows(database) == (0, 0, 0)
    assert len(blobs.digests()) == 1
    assert await registry.blob_gc.sweep() == 1
    assert blobs.digests() == []
    assert (await push(acme, "upper")).revision == 1


async def test_a_cancelled_upload_leaves_nothing(
    uploads: UploadSessions,
    registry: Registry,
    blobs: BlobStore,
    acme: Principal,
    database: Database,
    tmp_path: Path,
) -> None:
    source = write_adapter(tmp_path / "source")
    uploading = asyncio.create_task(upload_folder(uploads, acme, "upper", source))
    while uploads.worker.jobs.is_idle:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    while not uploads.worker.jobs.is_idle:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    assert await uploads.before(acme, None, 10) == []
    assert staged(tmp_path) == []
    await registry.blob_gc.sweep()  # the cancellation may come after the blob was published
    assert blobs.digests() == []
    assert await rows(database) == (0, 0, 0)


KILL = """
import asyncio, os, pickle, signal, sys
from pathlib import Path
from loramux.data.records.database import Database
from loramux.common.identity import Principal
from loramux.common.settings.serving import ModelSettings, ValidationSettings
from loramux.common.settings.file import Settings
from loramux.data.storage.blobs import open_blobs
from loramux.catalog.validation.validator import BaseValidators, Validator

url, tenant, key, root, support = sys.argv[1:]
sys.path.append(support)
from upload_harness import upload_folder, upload_services

root = Path(root)
blobs = open_blobs(str(root / "blobs"), str(root / "cache"), {})
publish = blobs.publish

def publish_and_die(*args):
    publish(*args)
    os.kill(os.getpid(), signal.SIGKILL)

blobs.publish = publish_and_die
base = pickle.loads((root / "base").read_bytes())
model = ModelSettings(path="/nowhere", served_model_name="base")
checked = Settings(model=model, validation=ValidationSettings(parity=False))
principal = Principal(tenant, "acme", key, frozenset(), "project_any")

async def main():
    validators = BaseValidators(checked, {"base": Validator(checked, base, "float32")})
    _, uploads = upload_services(Database(url), blobs, validators=validators, base=base)
    await upload_folder(uploads, principal, "upper", root / "source")

asyncio.run(main())
"""


async def test_after_a_kill_nothing_is_half_registered(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    base: BaseDescription,
    url: str,
    database: Database,
    tmp_path: Path,
) -> None:
    """Killed when the files have their final name and no row names them yet."""
    (tmp_path / "base").write_bytes(pickle.dumps(base))
    write_adapter(tmp_path / "source")
    support = str(Path(__file__).parents[2] / "support")
    command = [sys.executable, "-c", KILL, url, acme.tenant, acme.key_id, str(tmp_path), support]
    killed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert await rows(database) == (0, 0, 0)
    assert len(blobs.digests()) == 1
    assert await registry.blob_gc.sweep() == 1
    assert blobs.digests() == []
    assert staged(tmp_path) == []
    assert (await push(acme, "upper")).revision == 1


async def test_damaged_files_are_not_served_and_the_same_upload_repairs_them(
    registry: Registry, push: Push, acme: Principal
) -> None:
    await push(acme, "upper")
    directory = (await registry.resolver.resolve(acme, "acme/upper")).revision.directory
    weights = directory / WEIGHTS_FILE
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(RevisionUnavailable, match=r"acme/upper@1.*damaged.*upload the adapter again"):
        await registry.resolver.resolve(acme, "acme/upper")
    assert (await push(acme, "upper")).revision == 1
    assert await registry.resolver.resolve(acme, "acme/upper")


async def test_the_cache_keeps_its_limit_and_what_runs(
    registry: Registry, push: Push, blobs: BlobStore, acme: Principal, database: Database, tmp_path: Path
) -> None:
    infos = [await push(acme, "upper", seed=seed) for seed in range(3)]
    usage = UsageService(database)
    await usage.start()
    await usage.open(opened_request(acme, infos[0].digest))
    assert await registry.blob_gc.trim_cache(0) == 0, "all of it was asked for only now"
    for age, info in enumerate(infos):
        hour_ago = time.time() - 3600 + age
        os.utime(
            (await registry.resolver.resolve(acme, f"acme/upper@{age + 1}")).revision.directory, (hour_ago, hour_ago)
        )
        assert info.size_bytes == infos[0].size_bytes
    assert await registry.blob_gc.trim_cache(2 * infos[0].size_bytes) == 1
    assert {cached.digest for cached in blobs.cached()} == {infos[0].digest, infos[2].digest}
    assert await registry.blob_gc.trim_cache(1) == 1
    assert [cached.digest for cached in blobs.cached()] == [infos[0].digest]
    assert (await registry.resolver.resolve(acme, "acme/upper@2")).revision.directory.is_dir(), "it is fetched again"
    await usage.stop()


async def test_what_was_deleted_elsewhere_leaves_the_cache(
    registry: Registry,
    push: Push,
    blobs: BlobStore,
    acme: Principal,
    base: BaseDescription,
    tmp_path: Path,
    database: Database,
    pass_time: Callable[[int], None],
) -> None:
    info = await push(acme, "upper")
    there = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "another machine's"), {})
    elsewhere = open_registry(database, there, BaseModels([BaseModel(SERVED, base)]), AdapterLimits(undo_seconds=0))
    await elsewhere.deletion.delete(acme, "upper")
    pass_time(61)
    assert await elsewhere.blob_gc.purge() == 1
    assert [cached.digest for cached in blobs.cached()] == [info.digest]
    for cached in (tmp_path / "cache").glob("sha256/*/*"):
        os.utime(cached, (1, 1))
    assert await registry.blob_gc.trim_cache(1 << 30) == 1
    assert blobs.cached() == []
    there.close()


async def test_a_revision_of_another_base_is_not_served(
    registry: Registry,
    push: Push,
    acme: Principal,
    database: Database,
    blobs: BlobStore,
    tmp_path: Path,
) -> None:
    await push(acme, "upper")
    bases = BaseModels([BaseModel("other", describe(tmp_path / "other", 64))])
    other = open_registry(database, blobs, bases, AdapterLimits())
    with pytest.raises(RevisionUnavailable, match="another base model than other"):
        await other.resolver.resolve(acme, "acme/upper")
    assert await registry.resolver.resolve(acme, "acme/upper")
