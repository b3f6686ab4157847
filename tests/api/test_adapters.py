"""Adapters over HTTP: accepted and refused uploads, and the data that each tenant sees."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from listening import until_true
from peft_uploads import CONFIG, WEIGHTS, altered, form, make_adapter
from site_fixture import Site


@pytest.fixture(scope="session")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(autouse=True)
def clean(site: Site) -> Iterator[None]:
    """No adapters before a test, and no half-received files after it."""
    for tenant in ("acme", "globex"):
        with site.http(tenant) as client:
            for one in client.get("/v1/adapters").json()["data"]:
                assert client.delete(f"/v1/adapters/{one['name']}").status_code == 200
    site.engine.retired.clear()
    yield
    folders = [Path(folder) for folder in (site.settings.records.blobs, site.settings.records.cache)]
    deadline = time.monotonic() + 30  # an upload's parts are removed after its answer
    while left := [path for folder in folders for path in folder.glob("incoming/*/*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def upload(site: Site, content: dict[str, Any], status: int = 201, tenant: str = "acme") -> dict[str, Any]:
    with site.http(tenant) as client:
        response = client.post("/v1/adapters", **content)
    assert response.status_code == status, response.text
    return response.json() if status == 201 else response.json()["error"]


def digest_of(folder: Path) -> str:
    """Return the output of `sha256sum adapter_config.json adapter_model.safetensors | sha256sum`."""
    lines = [f"{hashlib.sha256((folder / f).read_bytes()).hexdigest()}  {f}\n" for f in (CONFIG, WEIGHTS)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def test_an_upload_becomes_a_model_that_its_owner_can_name(site: Site, adapter: Path) -> None:
    made = upload(site, form(adapter, "upper"))
    assert (made["name"], made["revision"], made["state"], made["rank"]) == ("acme/upper", 1, "ready", 4)
    assert made["digest"] == digest_of(adapter)
    client = site.openai()
    assert [model.id for model in client.models.list()] == ["tiny", "acme/upper"]
    assert client.models.retrieve("acme/upper").owned_by == "acme"
    for name in ("acme/upper", "acme/upper@1", "acme/upper:default"):
        assert client.completions.create(model=name, prompt="x").model == "acme/upper@1"
    sent = site.engine.requests[-1].adapter
    assert sent is not None
    assert content_of(sent.digest) == made["digest"]
    assert (Path(sent.path) / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()


def test_the_same_files_again_change_nothing_and_others_make_a_revision(
    site: Site, base_dir: Path, adapter: Path, tmp_path: Path
) -> None:
    first = upload(site, form(adapter, "upper"))
    assert upload(site, form(adapter, "acme/upper")) == first
    second = upload(site, form(make_adapter(base_dir, tmp_path, seed=1), "upper"))
    assert (second["revision"], second["id"]) == (2, first["id"])
    client = site.openai()
    assert client.completions.create(model="acme/upper", prompt="x").model == "acme/upper@2"
    assert client.completions.create(model="acme/upper@1", prompt="x").model == "acme/upper@1"


def test_another_tenant_sees_and_reaches_nothing(site: Site, adapter: Path) -> None:
    upload(site, form(adapter, "upper"))
    client = site.openai("globex")
    assert [model.id for model in client.models.list()] == ["tiny"]
    with site.http("globex") as http:
        assert http.get("/v1/adapters").json()["data"] == []
        answers = [http.request(m, f"/v1/adapters/acme/{n}") for m in ("GET", "DELETE") for n in ("upper", "absent")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text.replace("absent", "upper") for answer in answers}) == 1
    with pytest.raises(openai.NotFoundError) as owned:
        client.completions.create(model="acme/upper", prompt="x")
    with pytest.raises(openai.NotFoundError) as absent:
        client.completions.create(model="acme/absent", prompt="x")
    assert str(owned.value).replace("upper", "absent") == str(absent.value)
    refusal = upload(site, form(adapter, "acme/upper"), 400, "globex")
    assert refusal["param"] == "name"


def test_a_deleted_adapter_is_gone_here_and_in_the_engine(site: Site, adapter: Path) -> None:
    made = upload(site, form(adapter, "upper"))
    with site.http() as client:
        assert client.get("/v1/adapters/upper").json() == made
        assert client.get("/v1/adapters/acme%2Fupper").json() == made
        answer = client.delete("/v1/adapters/acme/upper").json()
        assert client.get("/v1/adapters/upper").status_code == 404
    assert answer == {"id": made["id"], "name": "acme/upper", "object": "adapter.deleted", "deleted": True}
    assert made["digest"] in [content_of(key) for key in site.engine.retired]
    with pytest.raises(openai.NotFoundError):
        site.openai().completions.create(model="acme/upper", prompt="x")


def content_of(engine_key: str) -> str:
    """The digest of the weights that the engine knows under this key."""
    return engine_key.partition("/")[0]


def test_tenants_with_the_same_files_load_them_separately(site: Site, adapter: Path) -> None:
    """Else the loads in a tenant's usage, and its first token's time, would say that another has the same adapter."""
    upload(site, form(adapter, "upper"))
    mine = upload(site, form(adapter, "mine"), tenant="globex")
    keys = []
    for tenant, model in (("acme", "acme/upper"), ("acme", "acme/upper@1"), ("globex", "globex/mine")):
        site.openai(tenant).completions.create(model=model, prompt="x")
        sent = site.engine.requests[-1].adapter
        assert sent is not None
        assert content_of(sent.digest) == mine["digest"]
        keys.append(sent.digest)
    assert keys[0] == keys[1] != keys[2]
    with site.http() as client:
        client.delete("/v1/adapters/upper")
    # The background sweep may name what earlier tests deleted as well.
    assert keys[0] in site.engine.retired
    assert keys[2] not in site.engine.retired, "the other tenant's weights stay"


def nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "v_proj.lora_A" in name)
    tensors[name] = tensors[name].T.contiguous()


def rename(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.7")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "told"),
    [(nan, "lora"), (transpose, "v_proj"), (rename, "layers"), (lambda tensors: tensors.popitem(), "lora")],
    ids=["NaN", "wrong shape", "wrong base", "missing tensor"],
)
def test_weights_that_cannot_be_served_are_refused_by_name(
    site: Site, adapter: Path, change: object, told: str
) -> None:
    error = upload(site, form(adapter, "upper", weights=altered(adapter, change)), 400)
    assert told in error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    "weights",
    [pickle.dumps({"a": 1}), b"", b"\0" * 100, (1 << 62).to_bytes(8, "little") + b"{}"],
    ids=["pickle", "empty", "zeros", "endless header"],
)
def test_files_that_are_no_safetensors_are_refused(site: Site, adapter: Path, weights: bytes) -> None:
    assert upload(site, form(adapter, "upper", weights=weights), 400)["message"]


def test_a_truncated_file_is_refused(site: Site, adapter: Path) -> None:
    assert upload(site, form(adapter, "upper", weights=(adapter / WEIGHTS).read_bytes()[:-100]), 400)["code"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_qalora": True}, "qalora"),
        ({"bias": "sometimes"}, "bias"),
    ],
)
def test_methods_that_are_not_served_are_refused_by_field(
    site: Site, adapter: Path, changes: dict[str, Any], told: str
) -> None:
    config = json.dumps(json.loads((adapter / CONFIG).read_bytes()) | changes).encode()
    error = upload(site, form(adapter, "upper", config=config), 400)
    assert told in error["message"].lower()
    assert told in error["param"]


@pytest.mark.parametrize("config", [b"{", b"[]", b"\xff", b'{"r": 1e400}'])
def test_a_configuration_that_is_no_json_is_refused(site: Site, adapter: Path, config: bytes) -> None:
    assert upload(site, form(adapter, "upper", config=config), 400)["message"]


@pytest.mark.parametrize("name", ["", "Upper", "a/b/c", "../x", "globex/upper", "x" * 64, "x" * 2000, "é"])
def test_names_that_cannot_be_are_refused(site: Site, adapter: Path, name: str) -> None:
    assert upload(site, form(adapter, name), 400)["param"] == "name"


@pytest.mark.parametrize(("part", "missing"), [("config", CONFIG), ("weights", WEIGHTS)])
def test_a_missing_part_is_named(site: Site, adapter: Path, part: str, missing: str) -> None:
    assert upload(site, form(adapter, "upper", **{part: None}), 400)["param"] == missing


def test_files_are_known_by_their_file_names_too(site: Site, adapter: Path) -> None:
    files = [("files", (file, (adapter / file).read_bytes())) for file in (WEIGHTS, CONFIG)]
    assert upload(site, {"data": {"name": "upper"}, "files": files})["name"] == "acme/upper"


def test_pickled_weights_are_refused_before_they_are_read(site: Site, adapter: Path) -> None:
    content = form(adapter, "upper", weights=None)
    content["files"]["adapter_model.bin"] = ("adapter_model.bin", pickle.dumps({}))
    assert "safetensors" in upload(site, content, 400)["message"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ((CONFIG, b"{}"), "twice"),
        (("../../x", b"x"), "not a part"),
        (("checkpoint-2/../x", b"x"), "not a part"),
        (("/etc/x", b"x"), "not a part"),
        (("adapter_model-00001-of-00002.safetensors", b"x"), "sharded"),
    ],
)
def test_parts_that_do_not_belong_are_refused(site: Site, adapter: Path, extra: tuple[str, bytes], told: str) -> None:
    content = form(adapter, "upper")
    content["files"] = [*content["files"].items(), (extra[0], extra)]
    assert told in upload(site, content, 400)["message"]


@pytest.mark.parametrize(
    "content",
    [
        {"json": {"name": "upper"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"--b\r\nno header\r\n--b--", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=b"}},
    ],
    ids=["json", "no boundary", "no header", "cut off", "empty"],
)
def test_bodies_that_are_no_form_are_refused(site: Site, content: dict[str, Any]) -> None:
    assert upload(site, content, 400)["code"] == "invalid_form"


def test_an_upload_that_is_too_large_is_refused_early(site: Site, adapter: Path) -> None:
    error = upload(site, form(adapter, "upper", weights=b"x" * (2 << 20)), 413)
    assert str(2 << 20) in error["message"]


def test_a_configuration_file_that_is_too_large_is_refused(site: Site, adapter: Path) -> None:
    error = upload(site, form(adapter, "upper", config=b" " * ((1 << 20) + 1)), 400)
    assert (error["param"], error["code"]) == (CONFIG, "too_large")


def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", int(site.url.rsplit(":", 1)[1]))) as connection:
        head = (
            "POST /v1/adapters HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            f"Authorization: Bearer {site.keys['acme']}\r\nContent-Length: 100000\r\n\r\n"
            f'--b\r\nContent-Disposition: form-data; name="{WEIGHTS}"; filename="{WEIGHTS}"\r\n\r\n'
        )
        connection.sendall(head.encode() + b"x" * 1000)
    with site.http() as client:
        assert client.get("/v1/adapters").json()["data"] == []


def test_adapters_are_listed_in_pages_as_openai_lists(site: Site, adapter: Path) -> None:
    made = [upload(site, form(adapter, name))["id"] for name in ("a", "b", "c")]
    with site.http("acme") as client:
        everything = client.get("/v1/adapters").json()
        assert (everything["has_more"], [one["id"] for one in everything["data"]]) == (False, made)
        first = client.get("/v1/adapters?limit=2").json()
        assert (first["object"], first["has_more"]) == ("list", True)
        assert (first["first_id"], first["last_id"]) == (made[0], made[1])
        second = client.get(f"/v1/adapters?limit=2&after={first['last_id']}").json()
        assert (second["has_more"], [one["id"] for one in second["data"]]) == (False, [made[2]])
        assert client.get("/v1/adapters?limit=0").status_code == 400


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error(
    site: Site, adapter: Path, caplog: pytest.LogCaptureFixture, read_parts: list[bytes]
) -> None:
    caplog.set_level(logging.DEBUG, "loramux_api")
    host = httpx.URL(site.server.url)
    head = (
        "POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: {kind}\r\n"
        "Content-Length: 100000\r\n\r\n"
    )
    kinds = {"adapters": "multipart/form-data; boundary=b", "completions": "application/json"}
    for path, kind in kinds.items():
        for _ in range(10):
            with socket.create_connection((host.host, host.port)) as connection:
                connection.sendall(head.format(path=path, key=site.keys["acme"], kind=kind).encode() + b"--b\r\n")
                until_true(lambda: b"--b\r\n" in read_parts)
            read_parts.clear()
    with site.http("acme") as client:
        assert client.get("/v1/adapters").status_code == 200
    deadline = time.monotonic() + 120
    while sum("client left" in record.message for record in caplog.records) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum("client left" in record.message for record in caplog.records) == 20
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
