"""Uploads in pieces over HTTP: resumed, completed, refused, given up, and hidden from other tenants."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from listening import until_true
from peft_uploads import CONFIG, WEIGHTS, altered, make_adapter
from site_fixture import Site


@pytest.fixture(scope="session")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("adapter"))


def delete_uploads(client: httpx.Client) -> None:
    for upload in client.get("/v1/uploads", params={"limit": 100}).json()["data"]:
        assert client.delete(f"/v1/uploads/{upload['id']}").status_code == 200


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    """A client of acme, which has no uploads and no adapters."""
    with site.http() as client:
        delete_uploads(client)
        for one in client.get("/v1/adapters").json()["data"]:
            assert client.delete(f"/v1/adapters/{one['name']}").status_code == 200
        yield client
        delete_uploads(client)
    assert [path for path in Path(site.settings.records.blobs).glob("uploads/*/*")] == []


def contents(folder: Path, **changed: bytes) -> dict[str, bytes]:
    return {
        CONFIG: changed.get("config", (folder / CONFIG).read_bytes()),
        WEIGHTS: changed.get("weights", (folder / WEIGHTS).read_bytes()),
    }


def announced(files: dict[str, bytes]) -> dict[str, Any]:
    return {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}


def open_upload(client: httpx.Client, files: dict[str, bytes], adapter: str = "upper", **more: Any) -> dict[str, Any]:
    response = client.post("/v1/uploads", json={"adapter": adapter, "files": announced(files)} | more)
    assert response.status_code == 201, response.text
    return response.json()


def send(client: httpx.Client, id: str, name: str, data: bytes, offset: int = 0) -> httpx.Response:
    return client.put(f"/v1/uploads/{id}/files/{name}", params={"offset": offset}, content=data)


def finish(client: httpx.Client, id: str) -> dict[str, Any]:
    """Complete it, and wait for what becomes of it."""
    completed = client.post(f"/v1/uploads/{id}/complete")
    assert completed.status_code == 202, completed.text
    for _ in range(6000):
        upload = client.get(f"/v1/uploads/{id}").json()
        if upload["state"] != "validating":
            return upload
        time.sleep(0.02)
    raise AssertionError("it was not validated")


def push(client: httpx.Client, files: dict[str, bytes], **more: Any) -> dict[str, Any]:
    upload = open_upload(client, files, **more)
    for name, data in files.items():
        assert send(client, upload["id"], name, data).status_code == 200
    return finish(client, upload["id"])


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_pieces_become_a_revision(site: Site, client: httpx.Client, adapter: Path) -> None:
    files = contents(adapter)
    upload = open_upload(client, files)
    assert (upload["object"], upload["adapter"], upload["state"]) == ("upload", "acme/upper", "uploading")
    assert upload["expires_at"] - upload["created_at"] == 86_400
    for name, data in files.items():
        for start in range(0, len(data), 5000):
            received = send(client, upload["id"], name, data[start : start + 5000], start).json()
            assert received["received"] == min(start + 5000, len(data))
    done = finish(client, upload["id"])
    assert (done["state"], done["revision"], done["error"]) == ("ready", "acme/upper@1", None)
    assert done["report"]["found"]["rank"] == 4
    listed = client.get("/v1/adapters/upper").json()
    assert listed["digest"] == done["digest"]
    assert site.openai().completions.create(model="acme/upper", prompt="x").model == "acme/upper@1"
    assert client.post(f"/v1/uploads/{upload['id']}/complete").json() == done, "completing again changes nothing"


def test_a_revision_that_is_not_promoted_is_there_by_its_number(
    site: Site, client: httpx.Client, base_dir: Path, adapter: Path, tmp_path: Path
) -> None:
    assert push(client, contents(adapter), promote=False)["revision"] == "acme/upper@1", "a first one is the default"
    second = push(client, contents(make_adapter(base_dir, tmp_path, seed=1)), promote=False)
    assert second["revision"] == "acme/upper@2"
    asked = {
        model: site.openai().completions.create(model=model, prompt="x").model
        for model in ("acme/upper", "acme/upper@2")
    }
    assert asked == {"acme/upper": "acme/upper@1", "acme/upper@2": "acme/upper@2"}


def cut_off(site: Site, path: str, data: bytes, sent: int, read_parts: list[bytes]) -> None:
    """Announce all of `data`, send some of it, and leave when the server has read it."""
    head = (
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {site.keys['acme']}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(site.url.rsplit(":", 1)[1]))) as connection:
        read_parts.clear()
        connection.sendall(head.encode() + data[:sent])
        until_true(lambda: b"".join(read_parts) == data[:sent])


def test_what_was_cut_off_goes_on_where_it_ended(
    site: Site, client: httpx.Client, adapter: Path, read_parts: list[bytes]
) -> None:
    files = contents(adapter)
    upload = open_upload(client, files)
    cut_off(site, f"/v1/uploads/{upload['id']}/files/{WEIGHTS}", files[WEIGHTS], 3000, read_parts)

    def received() -> int:
        state = client.get(f"/v1/uploads/{upload['id']}").json()
        return next(file["received"] for file in state["files"] if file["name"] == WEIGHTS)

    until_true(received)
    assert received() == 3000
    wrong = send(client, upload["id"], WEIGHTS, b"x", 3001)
    assert error(wrong, 409)["code"] == "wrong_offset"
    assert wrong.headers["Upload-Offset"] == "3000"
    assert send(client, upload["id"], WEIGHTS, files[WEIGHTS][3000:], 3000).status_code == 200
    assert send(client, upload["id"], CONFIG, files[CONFIG]).status_code == 200
    assert finish(client, upload["id"])["state"] == "ready"


def test_a_file_that_went_on_with_other_bytes_is_rejected(client: httpx.Client, adapter: Path) -> None:
    files = contents(adapter)
    upload = open_upload(client, files)
    send(client, upload["id"], CONFIG, files[CONFIG])
    send(client, upload["id"], WEIGHTS, files[WEIGHTS][:1000])
    send(client, upload["id"], WEIGHTS, bytes(len(files[WEIGHTS]) - 1000), 1000)
    done = finish(client, upload["id"])
    assert (done["state"], done["error"]["code"], done["error"]["param"]) == ("rejected", "hash_mismatch", WEIGHTS)
    assert client.get("/v1/adapters").json()["data"] == []


def test_what_cannot_be_served_is_rejected_with_its_report(client: httpx.Client, adapter: Path, tmp_path: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text()) | {"r": -3}
    done = push(client, contents(adapter, config=json.dumps(config).encode()))
    assert (done["state"], done["revision"], done["error"]["param"]) == ("rejected", None, "r")
    assert done["report"]["refusal"]["field"] == "r"
    (tmp_path / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    broken = altered(tmp_path, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    assert push(client, contents(adapter, weights=broken))["state"] == "rejected"
    events = client.get("/v1/events", params={"adapter": "upper"}).json()["data"]
    assert [event["type"] for event in events[:2]] == ["adapter.revision.rejected"] * 2


def test_an_upload_is_incomplete_until_every_byte_is_there(client: httpx.Client, adapter: Path) -> None:
    files = contents(adapter)
    upload = open_upload(client, files)
    send(client, upload["id"], CONFIG, files[CONFIG])
    send(client, upload["id"], WEIGHTS, files[WEIGHTS][:10])
    refused = error(client.post(f"/v1/uploads/{upload['id']}/complete"), 409)
    assert (refused["code"], refused["param"]) == ("upload_incomplete", WEIGHTS)
    assert "offset=10" in refused["message"]


def test_more_bytes_than_announced_are_refused_and_what_came_before_stays(client: httpx.Client, adapter: Path) -> None:
    files = contents(adapter)
    upload = open_upload(client, files)
    assert error(send(client, upload["id"], CONFIG, files[CONFIG] + b" "), 400)["code"] == "invalid_upload"
    assert send(client, upload["id"], CONFIG, files[CONFIG]).status_code == 200
    assert error(send(client, upload["id"], CONFIG, b"x", len(files[CONFIG])), 400)["code"] == "invalid_upload"


GOOD = {"size": 10, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({CONFIG: GOOD}, "files"),
        ({CONFIG: GOOD, "../../etc/passwd": GOOD}, "files"),
        ({CONFIG: GOOD, WEIGHTS: GOOD, "../../etc/passwd": GOOD}, "files"),
        ({CONFIG: GOOD, WEIGHTS: GOOD, "/etc/passwd": GOOD}, "files"),
        ({CONFIG: GOOD, "adapter_model.bin": GOOD}, "files"),
        ({CONFIG: GOOD, WEIGHTS: GOOD | {"size": 0}}, "files.size"),
        ({CONFIG: GOOD, WEIGHTS: GOOD | {"size": 1 << 62}}, f"files.{WEIGHTS}.size"),
        ({CONFIG: GOOD | {"size": (1 << 20) + 1}, WEIGHTS: GOOD}, f"files.{CONFIG}.size"),
        ({CONFIG: GOOD, WEIGHTS: GOOD | {"sha256": "x" * 64}}, f"files.{WEIGHTS}.sha256"),
    ],
)
def test_announcements_that_cannot_be_taken(client: httpx.Client, files: dict[str, Any], param: str) -> None:
    refused = error(client.post("/v1/uploads", json={"adapter": "upper", "files": files}), 400)
    assert refused["param"] == param


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter_model-00001-of-00002.safetensors", "sharded"),
        ("adapter_model.safetensors.index.json", "sharded"),
        ("default/adapter_config.json", "folders of their own: 'default'. To choose one, announce its files"),
        ("adapters.safetensors", "mlx-lm"),
        ("lit_model.pth.lora", "litgpt"),
        ("value_head.safetensors", "task_type SEQ_CLS"),
    ],
)
def test_announcement_of_another_form_says_which_it_is(client: httpx.Client, name: str, reason: str) -> None:
    refused = error(client.post("/v1/uploads", json={"adapter": "upper", "files": {CONFIG: GOOD, name: GOOD}}), 400)
    assert (refused["code"], refused["param"]) == ("invalid_upload", "files")
    assert reason in refused["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"source": {"url": "s3://bucket/path/"}}, "source.url"),
        ({"source": {"hub": "huggingface", "repo": "a/b", "commit": "0" * 40}}, "source.hub"),
        ({"source": {"hub": "huggingface", "repo": "a/b"}}, "source"),
        ({"source": {}}, "source"),
        ({"source": {"url": "s3://bucket/", "hub": "x"}}, "source"),
        ({"source": {"url": "s3://bucket/", "subfolder": "x"}}, "source"),
        ({"source": {"url": "s3://bucket/"}, "files": {}}, "files"),
        ({}, "files"),
    ],
)
def test_nothing_is_fetched_unless_the_operator_lists_it(
    client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    assert error(client.post("/v1/uploads", json={"adapter": "upper"} | body), 400)["param"] == param


def test_names_are_checked_before_a_byte_is_sent(client: httpx.Client, adapter: Path) -> None:
    body = {"adapter": "globex/upper", "files": announced(contents(adapter))}
    assert error(client.post("/v1/uploads", json=body), 400)["code"] == "invalid_adapter_name"


def test_files_that_were_not_announced_are_refused(client: httpx.Client, adapter: Path) -> None:
    upload = open_upload(client, contents(adapter))
    assert error(send(client, upload["id"], "adapter_model.bin", b"x"), 400)["param"] == "name"


def test_an_upload_is_its_tenants_own(site: Site, client: httpx.Client, adapter: Path) -> None:
    id = open_upload(client, contents(adapter))["id"]
    for key in ("globex", "no-models"):
        with site.http(key) as stranger:
            assert all(not one["adapter"].startswith("acme/") for one in stranger.get("/v1/uploads").json()["data"])
            answers = [
                stranger.get(f"/v1/uploads/{id}"),
                send(stranger, id, CONFIG, b"x"),
                stranger.post(f"/v1/uploads/{id}/complete"),
                stranger.delete(f"/v1/uploads/{id}"),
            ]
            absent = stranger.get("/v1/uploads/upload_0").json()["error"]
            for answer in answers:
                told = error(answer, 404)
                assert told == absent | {"message": absent["message"].replace("upload_0", id)}


def test_a_given_up_upload_is_gone_with_its_bytes(site: Site, client: httpx.Client, adapter: Path) -> None:
    files = contents(adapter)
    id = open_upload(client, files)["id"]
    send(client, id, CONFIG, files[CONFIG])
    assert len(list(Path(site.settings.records.blobs).glob(f"uploads/{id}/*"))) == 1
    assert client.delete(f"/v1/uploads/{id}").json() == {"id": id, "object": "upload.deleted", "deleted": True}
    assert error(client.get(f"/v1/uploads/{id}"), 404)["code"] == "upload_not_found"
    assert list(Path(site.settings.records.blobs).glob(f"uploads/{id}")) == []


def test_uploads_are_listed_newest_first_in_pages(client: httpx.Client, adapter: Path) -> None:
    ids = [open_upload(client, contents(adapter))["id"] for _ in range(5)]
    page = client.get("/v1/uploads", params={"limit": 3}).json()["data"]
    rest = client.get("/v1/uploads", params={"limit": 3, "before": page[-1]["id"]}).json()["data"]
    assert [upload["id"] for upload in page + rest] == ids[::-1]


def test_only_so_many_uploads_are_open_at_a_time(site: Site, client: httpx.Client, adapter: Path) -> None:
    most = site.settings.uploads.open_per_tenant
    for _ in range(most):
        last = open_upload(client, contents(adapter))["id"]
    body = {"adapter": "upper", "files": announced(contents(adapter))}
    assert str(most) in error(client.post("/v1/uploads", json=body), 400)["message"]
    client.delete(f"/v1/uploads/{last}")
    assert client.post("/v1/uploads", json=body).status_code == 201


def test_the_official_client_is_told_as_ever(site: Site) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        site.openai().get("/uploads/upload_0", cast_to=dict)
    assert refusal.value.code == "upload_not_found"
