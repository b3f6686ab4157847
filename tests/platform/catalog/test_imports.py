"""Imports that the server fetches: from listed places only, at one commit, bounded, and never redirected elsewhere."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fake_hub import Answer, Hub, hub_double
from s3_server import S3
from upload_harness import CONFIG, upload_harness

from loramux.catalog.uploads import imports as imports_module
from loramux.catalog.uploads.errors import InvalidUpload, UploadRejected
from loramux.catalog.uploads.imports import BucketSource, HubSource, Importer, Source, check_source
from loramux.catalog.uploads.sessions import UploadRequest
from loramux.common.bundle import SOURCES
from loramux.common.identity import Principal
from loramux.common.settings.serving import BucketSettings, HubSettings, UploadSettings
from loramux.data.records.database import Database
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, open_blobs
from loramux.data.storage.objects import open_objects

pytestmark = pytest.mark.anyio

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = HubSource(hub="local", repo="acme/upper", commit=COMMIT)
MOST = {CONFIG_FILE: 100, WEIGHTS_FILE: 1000}
HERE = ("127.0.0.0/8", "::1/128")


@pytest.fixture
def acme() -> Principal:
    return Principal("t1", "acme", "k", frozenset(), "p")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_double() as hub:
        hub.answers[path_of(CONFIG_FILE)] = Answer(CONFIG)
        hub.answers[path_of(WEIGHTS_FILE)] = Answer(b"weights")
        yield hub


def path_of(name: str) -> str:
    return f"/acme/upper/resolve/{COMMIT}/{name}"


def importer(hub: Hub, **changes: object) -> Importer:
    listed = HubSettings(name="local", url=hub.url, networks=HERE)
    return Importer(UploadSettings(hubs=(msgspec.structs.replace(listed, **changes),)), MOST)


async def refused(importer: Importer, folder: Path, source: Source = SOURCE) -> UploadRejected:
    with pytest.raises(UploadRejected) as refusal:
        await importer.fetch(source, "acme", folder)
    return refusal.value


async def test_both_files_come_from_the_commit(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    hub.answers[path_of(CONFIG_FILE)].headers["X-Repo-Commit"] = COMMIT
    await importer(hub, token_file=str(tmp_path / "token")).fetch(SOURCE, "acme", tmp_path)
    assert (tmp_path / CONFIG_FILE).read_bytes() == CONFIG
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == b"weights"
    assert hub.asked == [
        ("localhost", path_of(name), "Bearer secret") for name in (CONFIG_FILE, WEIGHTS_FILE, *SOURCES)
    ]


@pytest.mark.parametrize("networks", [(), ("10.0.0.0/8",)])
async def test_a_hub_at_a_private_address_is_not_called(hub: Hub, tmp_path: Path, networks: tuple[str, ...]) -> None:
    why = await refused(importer(hub, networks=networks), tmp_path)
    assert why.code == "source_not_allowed"
    assert hub.asked == []


async def test_redirects_are_refused_unless_their_host_is_listed(hub: Hub, tmp_path: Path) -> None:
    elsewhere = hub.url.replace("localhost", "127.0.0.1") + "/blob"
    hub.answers[path_of(CONFIG_FILE)] = Answer(status=302, headers={"Location": elsewhere})
    hub.answers["/blob"] = Answer(CONFIG)
    assert (await refused(importer(hub), tmp_path)).code == "source_not_allowed"
    assert len(hub.asked) == 1
    (tmp_path / "token").write_text("secret")
    await importer(hub, redirects=("127.0.0.1",), token_file=str(tmp_path / "token")).fetch(SOURCE, "acme", tmp_path)
    assert hub.asked[2] == ("127.0.0.1", "/blob", None), "the token is the hub's alone"


async def test_a_redirect_to_a_private_address_is_not_followed(hub: Hub, tmp_path: Path) -> None:
    """The listed host leads, today, to an address that is not public and not listed."""
    hub.answers[path_of(CONFIG_FILE)] = Answer(status=302, headers={"Location": "http://192.168.7.7/latest"})
    why = await refused(importer(hub, redirects=("192.168.7.7",)), tmp_path)
    assert (why.code, "192.168.7.7" in why.message) == ("source_not_allowed", True)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:1/blob",
        "https://127.0.0.1/blob",
        "ftp://127.0.0.1/blob",
        "file:///etc/passwd",
        "//127.0.0.2/blob",
        "http://127.0.0.1@127.0.0.2/blob",
        "http://user:secret@127.0.0.1/blob",
        "http://2130706433/blob",
        "http://0x7f.1/blob",
        "http://[::ffff:127.0.0.1]/blob",
        "http://[::1/blob",
        "http://127.0.0.1:99999/blob",
        "http://xn--0/blob",
        "http:///blob",
        "",
    ],
)
async def test_a_redirect_out_of_the_list_is_not_followed(hub: Hub, tmp_path: Path, location: str) -> None:
    """Another host, port, scheme or spelling than those of the settings, or none at all."""
    hub.answers[path_of(CONFIG_FILE)] = Answer(status=302, headers={"Location": location})
    why = await refused(importer(hub, redirects=("127.0.0.1",)), tmp_path)
    assert why.code in ("source_not_allowed", "source_unavailable")
    assert hub.asked == [("localhost", path_of(CONFIG_FILE), None)]


async def test_a_hub_that_drips_is_given_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports_module, "WINDOW_SECONDS", 0.05)
    hub.answers[path_of(WEIGHTS_FILE)] = Answer(b"x", length=900, stalls=True)
    assert "too slowly" in (await refused(importer(hub), tmp_path)).message


async def test_redirects_end(hub: Hub, tmp_path: Path) -> None:
    hub.answers[path_of(CONFIG_FILE)] = Answer(status=302, headers={"Location": path_of(CONFIG_FILE)})
    assert (await refused(importer(hub, redirects=("localhost",)), tmp_path)).code == "source_unavailable"
    assert len(hub.asked) == 4


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Answer(status=404), "source_not_found"),
        (Answer(status=401), "source_unavailable"),
        (Answer(status=500), "source_unavailable"),
        (Answer(bytes(1001)), "too_large"),
        (Answer(b"half", length=900), "source_unavailable"),
        (Answer(b"x", headers={"Content-Encoding": "gzip"}), "source_unavailable"),
        (Answer(b"weights", headers={"X-Repo-Commit": "f" * 40}), "commit_mismatch"),
    ],
)
async def test_what_a_hub_may_not_answer(hub: Hub, tmp_path: Path, answer: Answer, code: str) -> None:
    hub.answers[path_of(WEIGHTS_FILE)] = answer
    assert (await refused(importer(hub), tmp_path)).code == code


SAVED = {
    "in two folders": (
        ["README.md", "sql/adapter_config.json", "sql/adapter_model.safetensors", "chat/adapter_config.json"],
        ["'chat', 'sql'", "`source.subfolder`"],
    ),
    "in a folder by PEFT's name": (["default/adapter_config.json"], ["'default'", "`source.subfolder`"]),
    "in checkpoints": (
        [f"run/checkpoint-{step}/adapter_config.json" for step in range(100, 900, 100)],
        ["'run/checkpoint-100'", "and 3 more"],
    ),
    "in shards": (
        ["adapter_config.json", *(f"adapter_model-0000{part}-of-00002.safetensors" for part in (1, 2))],
        ["sharded", "save_pretrained"],
    ),
    "with an index": (["adapter_config.json", "adapter_model.safetensors.index.json"], ["sharded", "save_pretrained"]),
    "as a pickle": (["adapter_config.json", "adapter_model.bin"], ["pickle", "save_pretrained"]),
    "by mlx-lm": (["adapter_config.json", "adapters.safetensors"], ["mlx-lm", "lora_alpha"]),
    "by litgpt": (["model_config.yaml", "lit_model.pth.lora"], ["litgpt", "train the adapter with PEFT"]),
    "merged": (["config.json", "model.safetensors"], ["Save the adapter with save_pretrained"]),
}
"""Files of a repository without an adapter at its root, and what the refusal says of them."""


@pytest.mark.parametrize("saved", SAVED)
async def test_a_repository_without_an_adapter_at_its_root_is_refused_with_what_it_has(
    hub: Hub, tmp_path: Path, saved: str
) -> None:
    names, said = SAVED[saved]
    listing = {"id": "acme/upper", "siblings": [{"rfilename": name} for name in names]}
    hub.answers = {f"/api/models/acme/upper/revision/{COMMIT}": Answer(msgspec.json.encode(listing))}
    if "adapter_config.json" in names:
        hub.answers[path_of(CONFIG_FILE)] = Answer(CONFIG)
    why = await refused(importer(hub), tmp_path)
    assert why.code == "source_not_found"
    assert [one for one in said if one not in why.message] == [], why.message


@pytest.mark.parametrize("subfolder", ["run/sql", "run/sql/", "/run/sql"])
async def test_an_adapter_in_a_folder_of_a_repository_is_fetched(
    hub: Hub, tmp_path: Path, acme: Principal, subfolder: str
) -> None:
    hub.answers = {path_of(f"run/sql/{name}"): Answer(CONFIG) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    source = check_source(msgspec.structs.replace(SOURCE, subfolder=subfolder), acme, LISTED)
    await importer(hub).fetch(source, "acme", tmp_path)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == CONFIG


@pytest.mark.parametrize(
    "listing", [Answer(status=401), Answer(b"no JSON"), Answer(bytes(100), length=5 << 20), Answer(b'{"siblings": 3}')]
)
async def test_a_hub_that_does_not_list_its_files_is_refused_without_them(
    hub: Hub, tmp_path: Path, listing: Answer
) -> None:
    hub.answers = {f"/api/models/acme/upper/revision/{COMMIT}": listing}
    why = await refused(importer(hub), tmp_path)
    assert (why.code, why.message) == (
        "source_not_found",
        "There is no 'adapter_config.json' there, or it is not public.",
    )


async def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    hub = Hub("http://localhost:9")
    assert (await refused(importer(hub), tmp_path)).code == "source_unavailable"


async def test_what_is_not_listed_any_more_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    for source in (SOURCE, BucketSource(url="s3://bucket/acme/")):
        assert (await refused(Importer(UploadSettings(), MOST), tmp_path, source)).code == "source_not_allowed"


LISTED = UploadSettings(
    hubs=(HubSettings(name="local", url="https://hub.example"),),
    buckets=(BucketSettings(url="s3://imports/{tenant}/"), BucketSettings(url="s3://shared/a/")),
)


@pytest.mark.parametrize(
    ("source", "param"),
    [
        (HubSource(hub="other", repo="a/b", commit=COMMIT), "source.hub"),
        (HubSource(hub="local", repo="../b", commit=COMMIT), "source.repo"),
        (HubSource(hub="local", repo="a/b/c", commit=COMMIT), "source.repo"),
        (HubSource(hub="local", repo="a/b?x", commit=COMMIT), "source.repo"),
        (HubSource(hub="local", repo="a/b@host", commit=COMMIT), "source.repo"),
        *(
            (HubSource(hub="local", repo="a/b", commit=COMMIT, subfolder=folder), "source.subfolder")
            for folder in ("..", "a/../b", "a//b", "a b", "a?x", ".git", "a%2f", "a#")
        ),
        (HubSource(hub="local", repo="a/b", commit="main"), "source.commit"),
        (HubSource(hub="local", repo="a/b", commit=COMMIT[:39]), "source.commit"),
        (HubSource(hub="local", repo="a/b", commit=COMMIT.upper()), "source.commit"),
        (BucketSource(url="s3://imports/globex/x/"), "source.url"),
        (BucketSource(url="s3://imports/acme/../globex/"), "source.url"),
        (BucketSource(url="s3://imports/acme-2/"), "source.url"),
        (BucketSource(url="s3://shared/ab/"), "source.url"),
        (BucketSource(url="s3://shared/a//x"), "source.url"),
        (BucketSource(url="s3://shared/a/%2e%2e/"), "source.url"),
        (BucketSource(url="file:///etc/"), "source.url"),
        (BucketSource(url="/etc/"), "source.url"),
    ],
)
def test_places_that_are_not_listed_are_refused(acme: Principal, source: Source, param: str) -> None:
    with pytest.raises(InvalidUpload) as refusal:
        check_source(source, acme, LISTED)
    assert refusal.value.field == param
    with pytest.raises(InvalidUpload):
        check_source(source, acme, UploadSettings())


@pytest.mark.parametrize("url", ["s3://imports/acme/x/v1.0", "s3://imports/acme/", "s3://shared/a/b_c/"])
def test_places_that_are_listed_are_taken(acme: Principal, url: str) -> None:
    assert check_source(BucketSource(url=url), acme, LISTED) == BucketSource(url=url.removesuffix("/") + "/")


async def test_an_import_from_a_bucket_becomes_a_revision(
    database: Database, enrol: Callable[[str], Awaitable[Principal]], s3: S3, tmp_path: Path
) -> None:
    principal = await enrol("acme")
    place = f"{s3.url}/{tmp_path.name}/{{tenant}}/"
    settings = UploadSettings(buckets=(BucketSettings(url=place, options=s3.options),))
    theirs = open_objects(place.replace("{tenant}", "acme").removesuffix("/"), s3.options)
    theirs.put(f"v1/{CONFIG_FILE}", CONFIG)
    theirs.put(f"v1/{WEIGHTS_FILE}", b"weights")
    blobs = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "cache"), {})
    async with upload_harness(database, blobs, principal, settings=settings) as harness:
        said: list[str] = []
        theirs.put(f"runs/sql/{CONFIG_FILE}", CONFIG)
        theirs.put(f"runs/chat/{CONFIG_FILE}", CONFIG)

        async def fetched(folder: str) -> tuple[str, str | None]:
            source = BucketSource(url=place.replace("{tenant}", "acme") + folder)
            upload = await harness.uploads.open(principal, UploadRequest("upper", None, source))
            assert upload.state == "validating"
            end = await harness.end_of(upload.id)
            said.append(end.outcome.error.message if end.outcome.error else "")
            return end.state, end.outcome.error and end.outcome.error.code

        assert await fetched("v1") == ("ready", None)
        assert await fetched("v2/") == ("rejected", "source_not_found")
        assert await fetched("runs/") == ("rejected", "source_not_found")
        assert "'chat', 'sql'" in said[-1]
        assert "`source.url`" in said[-1]
        assert len(blobs.digests()) == 1
    blobs.close()
