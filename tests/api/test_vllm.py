"""Routes, messages and bare names of vLLM."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from peft_uploads import make_adapter
from site_fixture import Site

from loramux.accounts.tenants.errors import NotPermitted
from loramux.common.settings.serving import AdapterLimits
from loramux.serving.adapters import LocalFolders


@pytest.fixture(scope="session")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("vllm"), seed=21)


@pytest.fixture
def root(site: Site, adapter: Path) -> Path:
    """The folder that operators may load from, with an adapter in `mine`."""
    root = Path(str(site.settings.adapters.local_root))
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(adapter, root / "mine")
    return root


def post(site: Site, verb: str, **body: Any) -> httpx.Response:
    with site.http("all-scopes") as http:
        return http.post(f"/v1/{verb}_lora_adapter", json=body)


def test_load_ask_by_the_bare_name_and_unload(site: Site, root: Path) -> None:
    loaded = post(site, "load", lora_name="sql-lora", lora_path=str(root / "mine"))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql-lora' added successfully.")
    client = site.openai()
    assert client.completions.create(model="sql-lora", prompt="x").model == "acme/sql-lora@1"
    assert client.completions.create(model="sql-lora@1", prompt="x").model == "acme/sql-lora@1"
    messages: Any = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model="sql-lora", messages=messages).model == "acme/sql-lora@1"
    with pytest.raises(openai.NotFoundError):
        site.openai("globex").completions.create(model="sql-lora", prompt="x")
    again = post(site, "load", lora_name="sql-lora", lora_path="mine")
    assert again.status_code == 400
    assert again.json()["error"] == {
        "message": "The lora adapter 'sql-lora' has already been loaded. "
        "If you want to load the adapter in place, set 'load_inplace' to True.",
        "type": "InvalidUserInput",
        "param": "lora_name",
        "code": 400,
    }
    assert post(site, "load", lora_name="sql-lora", lora_path="mine", load_inplace=True).status_code == 200
    removed = post(site, "unload", lora_name="sql-lora")
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'sql-lora' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="sql-lora", prompt="x")
    gone = post(site, "unload", lora_name="sql-lora")
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("is_3d", [True, False, None])
def test_is_3d_lora_weight_is_accepted_because_the_files_say_it(site: Site, root: Path, is_3d: bool | None) -> None:
    assert post(site, "load", lora_name="moe", lora_path="mine", is_3d_lora_weight=is_3d).status_code == 200
    assert post(site, "unload", lora_name="moe").status_code == 200


def test_an_operator_loads_for_any_tenant_by_name(site: Site, root: Path) -> None:
    assert post(site, "load", lora_name="globex/bot", lora_path=str(root / "mine")).status_code == 200
    assert site.openai("globex").completions.create(model="bot", prompt="x").model == "globex/bot@1"
    with pytest.raises(openai.NotFoundError):
        site.openai("acme").completions.create(model="globex/bot", prompt="x")
    assert post(site, "unload", lora_name="globex/bot").status_code == 200
    assert post(site, "load", lora_name="nobody/bot", lora_path="mine").status_code == 404


def test_a_folder_of_adapters_is_refused_with_their_folders(site: Site, root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root / "mine", elsewhere / "secret")
    shutil.copytree(root / "mine", root / "run" / "sql")
    shutil.copytree(root / "mine", root / "run" / "default")
    (root / "run" / "link").symlink_to(elsewhere, target_is_directory=True)
    refused = post(site, "load", lora_name="bot", lora_path="run")
    message = refused.json()["error"]["message"]
    assert refused.status_code == 404
    assert "'default', 'sql'" in message
    assert "secret" not in message


def test_folders_lead_nowhere_else(site: Site, root: Path, adapter: Path) -> None:
    (root / "link").symlink_to(adapter)
    (root / "half").mkdir()
    (root / "half" / "adapter_config.json").symlink_to(adapter / "adapter_config.json")
    shutil.copy(adapter / "adapter_model.safetensors", root / "half")
    for path in (str(adapter), "../..", "link", "half", "absent", "mine/../../x", "/etc", "a\0b"):
        refused = post(site, "load", lora_name="x", lora_path=path)
        assert refused.status_code == (400 if "\0" in path else 404), path
        assert refused.json()["error"]["param"] == "lora_path"
    (root / "empty").mkdir()
    assert "save_pretrained" in post(site, "load", lora_name="x", lora_path="empty").text


@pytest.mark.parametrize(
    ("verb", "body", "told"),
    [
        ("load", {}, "Both 'lora_name' and 'lora_path' must be provided."),
        ("load", {"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ("unload", {}, "'lora_name' needs to be provided to unload a LoRA adapter."),
        ("load", {"lora_name": "No Name", "lora_path": "mine"}, "no name for an adapter"),
    ],
)
def test_refusals_are_vllms(site: Site, root: Path, verb: str, body: dict[str, Any], told: str) -> None:
    refused = post(site, verb, **body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert told in error["message"]
    assert (error["type"], error["code"]) == ("InvalidUserInput", 400)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_it_is_off_by_default(verb: str) -> None:
    folders = LocalFolders(SimpleNamespace(), SimpleNamespace(), AdapterLimits().local_root)  # type: ignore[arg-type]
    whatever: Any = SimpleNamespace()
    with pytest.raises(NotPermitted, match=r"adapters\.local_root"):
        asyncio.run(folders.load(whatever, "x", "/", False) if verb == "load" else folders.unload(whatever, "x"))
