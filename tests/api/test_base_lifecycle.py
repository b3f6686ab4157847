"""Base models added to a running server and retired, with real engines; nothing else that is served changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from operated_server import Operated, make_keys, make_settings, wait_for
from peft_uploads import make_adapter
from running_server import running
from tiny_base import make_base

from loramux.common.settings.file import Settings
from loramux_api.app import create_app


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: make_base(root / f"{name}-1b", seed=seed) for seed, name in enumerate(("amber", "birch"))}


@pytest.fixture(scope="module")
def adapter(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(bases["amber"], tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def settings(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_settings(bases["amber"], tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def keys(settings: Settings) -> tuple[str, str]:
    return make_keys(settings)


@pytest.fixture(scope="module")
def server(settings: Settings, keys: tuple[str, str]) -> Iterator[Operated]:
    with running(create_app(settings), "granian") as server:
        yield Operated(server.url, *keys)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"path": "models/birch"}, "path", "absolute"),
        ({"path": "/no/such/folder"}, "path", "does not exist"),
        ({"name": "two words"}, "name", "letters, digits"),
        ({"name": "amber"}, "name", "with other settings"),
        ({"former_names": ["amber"]}, "name", "'amber' is the name"),
        ({"engines": {"min": 3, "max": 1}}, None, "less than engines.min"),
        ({"engine": {"max_num_seqs": "many"}}, "engine", "max_num_seqs"),
        ({"engine": {"pool_bytes": 1 << 60}}, "engines", "are free on this machine"),
        ({"dtype": "float8"}, "dtype", "float8"),
    ],
)
def test_add_of_a_wrong_base_is_refused_with_the_field(
    server: Operated, bases: dict[str, Path], change: dict[str, Any], field: str | None, says: str
) -> None:
    refused = server.admin("POST", "bases", json={"name": "birch", "path": str(bases["birch"])} | change)
    assert refused.status_code in (400, 409), refused.text
    problem = refused.json()
    assert says in problem["detail"], problem
    assert field is None or problem["param"] == field
    assert [one["name"] for one in server.admin("GET", "bases").json()["data"]] == ["amber"]


def test_add_of_an_architecture_that_is_not_served_is_refused(server: Operated, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused = server.add("odd", tmp_path)
    assert (refused.status_code, refused.json()["param"]) == (400, "path")
    assert "model_type 'no-such-model' has not been shown to give the same tokens" in refused.json()["detail"]


def test_base_that_does_not_load_is_listed_with_the_reason_and_others_are_served(
    server: Operated, bases: dict[str, Path], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bases["birch"], damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights at all")
    assert server.add("damaged", damaged).status_code == 202
    assert server.ask("amber").status_code == 200
    failed = server.until("damaged", "failed")
    assert failed["problem"]
    assert server.ask("amber").status_code == 200
    refused = server.ask("damaged")
    assert refused.status_code == 503
    assert "is being loaded, or cannot be" in refused.json()["error"]["message"]
    retired = server.retire("damaged")
    assert retired.status_code == 202, retired.text
    assert retired.json()["state"] == "retired"


def test_added_base_is_served_and_survives_a_restart(
    settings: Settings, keys: tuple[str, str], bases: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    """The same database under a second life of the server."""
    folder = tmp_path / "life"
    folder.mkdir()
    own = make_settings(bases["amber"], folder)
    keys = make_keys(own)
    with running(create_app(own), "granian") as first:
        server = Operated(first.url, *keys)
        added = server.add("birch", bases["birch"])
        assert added.status_code == 202, added.text
        assert server.until("birch", "serving", "failed")["state"] == "serving"
        assert server.add("birch", bases["birch"]).status_code == 202, "a repeated command changes nothing"
        assert server.push(adapter, "support", "birch").status_code == 201
        expected = [server.ask(model).json()["choices"][0]["token_ids"] for model in ("birch", "acme/support")]
    with running(create_app(own), "granian") as second:
        server = Operated(second.url, *keys)
        again = [server.ask(model).json()["choices"][0]["token_ids"] for model in ("birch", "acme/support")]
        assert again == expected
        audit = [entry["action"] for entry in server.admin("GET", "audit").json()["data"]]
        assert audit.count("base.add") == 1


def test_retired_base_drains_and_answers_410_with_the_way_out(
    server: Operated, bases: dict[str, Path], adapter: Path
) -> None:
    assert server.add("birch", bases["birch"]).status_code == 202
    assert server.until("birch", "serving", "failed")["state"] == "serving"
    for name, base in (("kept", "birch"), ("moved", "birch"), ("moved", "amber")):
        assert server.push(adapter, name, base).status_code == 201
    with server.http(server.key) as client:
        assert client.put("/v1/adapters/moved/aliases/old", json={"targets": [{"revision": 1, "weight": 1}]}).is_success

    in_use = server.retire("birch", successor="amber")
    assert (in_use.status_code, in_use.json()["code"]) == (409, "base_in_use")
    assert "acme/kept, acme/moved" in in_use.json()["detail"]
    unknown = server.retire("birch", successor="cedar", force=True)
    assert (unknown.status_code, unknown.json()["param"]) == (400, "successor")

    with ThreadPoolExecutor(4) as threads:
        running_ones = [threads.submit(server.ask, "acme/kept", 200) for _ in range(4)]
        wait_for(lambda: server.admin("GET", "overview").json()["requests_running"] == 4)
        assert server.retire("birch", successor="amber", force=True).status_code == 202
        gone = server.ask("acme/kept")
        assert [one.result().status_code for one in running_ones] == [200] * 4
    assert server.until("birch", "retired")["engines_ready"] == 0
    error = gone.json()["error"]
    assert (gone.status_code, error["code"]) == (410, "base_model_retired")
    assert "train and upload one for `amber`" in error["message"]

    assert server.ask("birch").status_code == 410
    assert "use `amber`" in server.ask("birch").json()["error"]["message"]
    copied = server.ask("acme/moved:old").json()["error"]["message"]
    assert "`acme/moved@2` is the same adapter for `amber`" in copied
    assert server.ask("acme/moved").status_code == server.ask("amber").status_code == 200
    assert "birch" not in [model["id"] for model in httpx_models(server)]

    refused = server.push(adapter, "late", "birch")
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "base_model_retired")
    assert "upload one for `amber`" in refused.json()["error"]["message"]

    assert server.retire("amber").json()["code"] == "last_base"
    assert server.add("birch", bases["birch"]).status_code == 202
    assert server.until("birch", "serving", "failed")["state"] == "serving"
    assert server.ask("acme/kept").status_code == 200, "a base that is added again serves its adapters again"


def test_upload_that_names_a_retired_base_in_its_files_is_refused(
    server: Operated, bases: dict[str, Path], tmp_path: Path
) -> None:
    """It fits `amber`, and was trained for another base."""
    cedar = make_base(tmp_path / "cedar-1b", seed=5)
    adapter = make_adapter(cedar, tmp_path / "adapter")
    assert server.add("cedar", cedar).status_code == 202
    assert server.retire("cedar").status_code == 202
    refused = server.push(adapter, "claimed")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "base_model_retired")
    assert "names the base model `cedar`" in refused.json()["error"]["message"]


def httpx_models(server: Operated) -> list[dict[str, Any]]:
    with server.http(server.key) as client:
        return client.get("/v1/models").json()["data"]


def test_only_operators_change_bases(server: Operated) -> None:
    with server.http(server.key) as client:
        answers = [client.get("/admin/bases"), client.post("/admin/bases/retire", json={"name": "amber"})]
    assert [answer.status_code for answer in answers] == [403, 403]
