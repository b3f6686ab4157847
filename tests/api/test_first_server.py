"""`loramux serve MODEL`: how a model is found, which settings are assumed, and that other commands find the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from fake_hub import Answer, Hub, hub_double
from peft_uploads import make_adapter
from running_server import free_port

from loramux.common.settings.file import load_settings
from loramux.serving.checkpoint_files import missing_files
from loramux_api.cli.default_server import default_config, write_default_config
from loramux_api.cli.hub import find_model
from loramux_api.cli.main import main

LORAMUX = (sys.executable, "-m", "loramux_api")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: no settings, no data, no cache of the hub, and no way to the hub."""
    for name in ("LORAMUX_CONFIG", "LORAMUX_URL", "LORAMUX_API_KEY", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LORAMUX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (1, 2), done.output
    return " ".join(done.stderr.split())


def cached(base: Path, home: Path, revision: str, *, main: bool = False, repository: str = "Org/Tiny-1B") -> Path:
    """A snapshot in the hub's cache, as the hub's own client leaves it."""
    root = home / "hf/hub" / f"models--{repository.replace('/', '--')}"
    shutil.copytree(base, root / "snapshots" / revision)
    if main:
        (root / "refs").mkdir()
        (root / "refs/main").write_text(revision)
    return root / "snapshots" / revision


def found(name: str) -> Path:
    return find_model(name, lambda _: None)


def test_model_of_the_hub_is_the_cached_version_that_main_names(base_dir: Path, home: Path) -> None:
    expected = cached(base_dir, home, "aaaa", main=True)
    cached(base_dir, home, "bbbb")
    assert found("Org/Tiny-1B") == expected


def test_folder_goes_before_a_repository_of_the_same_name(base_dir: Path, home: Path) -> None:
    cached(base_dir, home, "aaaa", main=True)
    shutil.copytree(base_dir, home / "Org/Tiny-1B")
    assert found("Org/Tiny-1B") == home / "Org/Tiny-1B"


def test_cached_model_without_all_its_weights_is_not_taken(base_dir: Path, home: Path) -> None:
    snapshot = cached(base_dir, home, "aaaa", main=True)
    weights = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert missing_files(snapshot) == ["model-00002-of-00002.safetensors"]
    assert "cannot be reached" in refused("serve", "Org/Tiny-1B")


def test_serve_of_a_model_that_is_nowhere_says_how_to_bring_it(home: Path) -> None:
    told = refused("serve", "Org/Tiny-1B")
    assert "Org/Tiny-1B is not in the cache" in told
    assert os.environ["HF_ENDPOINT"] in told
    assert "loramux serve FOLDER" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "./nowhere"), "there is no folder ./nowhere"),
        (("serve", "tiny"), "org/name"),
        (("serve", "."), "no config.json"),
        (("serve", "a/b", "--config", "x.toml"), "leave one out"),
        (("serve",), "give a MODEL"),
        (("tenant", "ls"), "loramux serve MODEL"),
        (("usage", "close", "--period", "2026-01"), "loramux serve MODEL"),
    ],
)
def test_first_command_that_lacks_something_says_what(arguments: tuple[str, ...], told: str) -> None:
    assert told in refused(*arguments)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_double() as double:
        monkeypatch.setenv("HF_ENDPOINT", double.url)
        yield double


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (404, "RepoNotFound", "is private"),
        (401, "RepoNotFound", "set HF_TOKEN"),
        (403, "GatedRepo", "accept its terms"),
        (500, "", "answered 500"),
    ],
)
def test_refusal_of_the_hub_is_a_sentence_with_the_way_out(hub: Hub, status: int, code: str, told: str) -> None:
    answer = Answer(b"{}", status, {"X-Error-Code": code} if code else {})
    hub.answers |= {path: answer for path in ("/api/models/Org/Tiny-1B/revision/main", "/api/models/Org/Tiny-1B")}
    assert told in refused("serve", "Org/Tiny-1B")
    assert hub.asked


def test_model_of_the_hub_is_downloaded_once(hub: Hub, base_dir: Path, home: Path) -> None:
    """Other forms of the weights are not downloaded."""
    files = [file for file in base_dir.iterdir() if file.is_file()]
    other = ["onnx/model.onnx", "consolidated.safetensors", "pytorch_model.bin"]
    commit = "0123456789abcdef0123456789abcdef01234567"
    siblings = [{"rfilename": name} for name in [*(file.name for file in files), *other]]
    facts = json.dumps({"id": "Org/Tiny-1B", "sha": commit, "siblings": siblings}).encode()
    tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
    tree += [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in other]
    for path in ("/api/models/Org/Tiny-1B/revision/main", f"/api/models/Org/Tiny-1B/revision/{commit}"):
        hub.answers[path] = Answer(facts, headers={"Content-Type": "application/json"})
    for query in ("?recursive=true&expand=false", "?recursive=True&expand=False", ""):
        path = f"/api/models/Org/Tiny-1B/tree/{commit}{query}"
        hub.answers[path] = Answer(json.dumps(tree).encode(), headers={"Content-Type": "application/json"})
    for file in files:
        headers = {"ETag": f'"{file.name}"', "X-Repo-Commit": commit}
        hub.answers[f"/Org/Tiny-1B/resolve/{commit}/{file.name}"] = Answer(file.read_bytes(), headers=headers)
    notes: list[str] = []
    folder = find_model("Org/Tiny-1B", notes.append)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {f.name: f.read_bytes() for f in files}
    assert notes == [f"downloading Org/Tiny-1B from {hub.url} to {home}/hf/hub"]
    hub.asked.clear()
    assert found("Org/Tiny-1B") == folder
    assert hub.asked == []


def test_init_writes_what_serve_assumes(base_dir: Path, home: Path) -> None:
    assumed = load_settings(write_default_config(base_dir, None, None))
    done = CliRunner().invoke(main, ("init", "mine.toml", "--model", str(base_dir)))
    assert done.exit_code == 0, done.output
    assert load_settings(home / "mine.toml") == assumed
    folder = home / "data"
    assert assumed.records.url == f"sqlite:///{folder}/loramux.sqlite3"
    places = (assumed.records.blobs, assumed.records.cache, assumed.records.pepper_file)
    assert places == (f"{folder}/blobs", f"{folder}/cache", f"{folder}/pepper")
    assert default_config() == folder / "loramux.toml"


def test_model_in_a_folder_with_odd_letters_is_written_as_it_is(base_dir: Path, home: Path) -> None:
    odd = home / 'my "model" \\ 7%'
    odd.mkdir()
    settings = load_settings(write_default_config(odd, "0.0.0.0", 8123))
    assert (settings.model.path, settings.model.served_model_name) == (str(odd), "my-model-7")
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8123)


def test_serve_model_to_the_first_answer_of_an_adapter(base_dir: Path, home: Path) -> None:
    """Commands of a new user, each without --config, against a real server."""
    shutil.copytree(base_dir, home / "model")
    adapter = make_adapter(base_dir, home / "adapter")
    port = free_port()
    command = [*LORAMUX, "serve", "./model", "--port", str(port), "--json"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=home)
    assert server.stdout is not None
    try:
        said = server.stdout.readline()
        assert said, (home / "server.log").read_text()
        serving = json.loads(said)
        assert serving["data"] == str(home / "data")

        def run(line: str, **environment: str) -> dict:
            arguments = [*LORAMUX, *line.split()[1:], "--json"]
            done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=os.environ | environment)
            return json.loads(done.stdout)

        _, key = [run(line) for line in serving["next"]]
        run(f"loramux adapter push {adapter} --name mine", LORAMUX_API_KEY=key["key"])
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            headers={"Authorization": f"Bearer {key['key']}"},
            json={"model": "acme/mine", "prompt": "a", "max_tokens": 2},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        assert sorted(path.name for path in (home / "data").iterdir() if "sqlite" not in path.name) == [
            "blobs",
            "cache",
            "loramux.toml",
            "pepper",
        ]
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()
