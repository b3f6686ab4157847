"""Adapters that move from one base model to another, with real engines: checked, reported, moved and moved back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from operated_server import ENGINE, Operated, make_keys, make_settings, wait_for
from peft_uploads import make_adapter
from running_server import running
from tiny_base import make_base

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings
from loramux_api.app import create_app
from loramux_api.cli.main import main


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One architecture; the second one's feed-forward layers are narrower."""
    root = tmp_path_factory.mktemp("bases")
    return {"amber": make_base(root / "amber-1b"), "birch": make_base(root / "birch-1b", seed=1, intermediate=48)}


@pytest.fixture(scope="module")
def settings(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = make_settings(bases["amber"], tmp_path_factory.mktemp("server"))
    second = BaseSettings(name="birch", path=str(bases["birch"]), dtype="float32", engine=ENGINE)
    return Settings(
        model=made.model,
        bases=(*made.bases, second),
        engine=ENGINE,
        records=made.records,
        validation=made.validation,
    )


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[Operated]:
    keys = make_keys(settings)
    with running(create_app(settings), "granian") as server:
        yield Operated(server.url, *keys)


@pytest.fixture(scope="module")
def globex(server: Operated) -> str:
    """The key of another customer."""
    assert server.admin("POST", "tenants", json={"name": "globex"}).is_success
    return server.admin("POST", "tenants/globex/keys", json={}).json()["key"]


def wide_adapter(base: Path, folder: Path) -> Path:
    """A LoRA on a linear whose shape the two bases do not share."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def migration(server: Operated, globex: str, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of a migration that has ended: seven adapters of two customers."""
    folder = tmp_path_factory.mktemp("adapters")
    other = Operated(server.url, globex, server.operator)
    for number, name in enumerate(("a0", "a1", "judged", "policed")):
        uploaded = server.push(make_adapter(bases["amber"], folder / name, seed=number), name, "amber")
        assert uploaded.status_code == 201, uploaded.text
    assert server.push(wide_adapter(bases["amber"], folder / "wide"), "wide", "amber").status_code == 201
    big = make_adapter(bases["amber"], folder / "big", rank=16, seed=8)
    assert server.push(big, "big", "amber").status_code == 201
    theirs = make_adapter(bases["amber"], folder / "theirs", seed=9)
    assert other.push(theirs, "theirs", "amber").status_code == 201
    evaluate(server, "judged", make_adapter(bases["amber"], folder / "second", seed=7))
    assert server.admin("PUT", "tenants/acme/limits/adapter_rank", json={"value": 8}).is_success
    with server.http(server.key) as client:
        demanding = {"policy": {"min_requests": 1000}}
        assert client.put("/v1/adapters/policed/aliases/default/policy", json=demanding).is_success
    begun = server.admin("POST", "migrations", json={"source": "amber", "target": "birch"})
    assert begun.status_code == 202, begun.text
    again = server.admin("POST", "migrations", json={"source": "amber", "target": "birch"}).json()
    assert again["status"] != "running" or again["id"] == begun.json()["id"], "a repeated command is the same migration"
    id = str(begun.json()["id"])
    wait_for(lambda: server.admin("GET", f"migrations/{id}").json()["status"] != "running")
    return id


def evaluate(server: Operated, name: str, second: Path) -> None:
    """Give the adapter an evaluation whose questions its first revision answers perfectly, and no other base will."""
    with server.http(server.key) as client:
        lines = []
        for number in range(12):
            asked = {"model": f"acme/{name}@1", "prompt": f"question {number}", "max_tokens": 6, "temperature": 0}
            text = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            lines.append(json.dumps({"prompt": asked["prompt"], "max_tokens": 6, "expected": text}))
        questions = {"file": ("set.jsonl", "\n".join(lines).encode()), "purpose": (None, "evals")}
        file = client.post("/v1/files", files=questions).json()
        assert server.push(second, name, "amber").status_code == 201
        body = {"adapter": name, "revision": 2, "against": 1, "file_id": file["id"], "grader": {"type": "exact"}}
        made = client.post("/v1/evaluations", json=body).json()
        wait_for(lambda: client.get(f"/v1/evaluations/{made['id']}").json()["status"] != "running")
        ended = client.get(f"/v1/evaluations/{made['id']}").json()
        assert ended["status"] == "completed", ended
        assert client.put(f"/v1/adapters/{name}/aliases/default", json=pointed({1: 100})).is_success


def pointed(weights: dict[int, int]) -> dict[str, Any]:
    return {"targets": [{"revision": number, "weight": weight} for number, weight in weights.items()]}


def items(server: Operated, id: str) -> dict[str, dict[str, Any]]:
    return {one["adapter"]: one for one in server.admin("GET", f"migrations/{id}/items").json()["data"]}


def alias(server: Operated, name: str) -> dict[int, int]:
    with server.http(server.key) as client:
        aliases = client.get(f"/v1/adapters/{name}/aliases").json()["data"]
    targets = next(one for one in aliases if one["name"] == "default")["targets"]
    return {target["revision"]: target["weight"] for target in targets}


def move(server: Operated, id: str, verb: str, **body: Any) -> dict[str, dict[str, Any]]:
    answer = server.admin("POST", f"migrations/{id}/{verb}", json=body)
    assert answer.status_code == 200, answer.text
    return {one["adapter"]: one for one in answer.json()["data"]}


def test_report_says_what_fits_what_needs_retraining_and_what_is_refused(server: Operated, migration: str) -> None:
    found = items(server, migration)
    assert {name: item["outcome"] for name, item in found.items()} == {
        "acme/a0": "fits",
        "acme/a1": "fits",
        "acme/policed": "fits",
        "acme/judged": "needs_retraining",
        "acme/wide": "needs_retraining",
        "acme/big": "refused",
        "globex/theirs": "fits",
    }
    assert (found["acme/wide"]["code"], found["acme/wide"]["new_revision"]) == ("shape_mismatch", None)
    assert found["acme/big"]["code"] == "rank_too_large"
    assert "8" in found["acme/big"]["reason"]
    judged = found["acme/judged"]
    assert judged["code"] == "evaluated_worse"
    assert "12 questions" in judged["reason"]
    assert judged["evaluation_id"]
    assert found["acme/a0"]["new_revision"] == 2
    ended = server.admin("GET", f"migrations/{migration}").json()
    assert (ended["status"], ended["outcomes"]) == ("completed", {"fits": 4, "needs_retraining": 2, "refused": 1})


def test_migration_changes_nothing_that_is_served(server: Operated, migration: str) -> None:
    for name in ("a0", "a1", "judged", "policed", "wide", "big"):
        assert alias(server, name) == {1: 100}
    with server.http(server.key) as client:
        first, second = client.get("/v1/adapters/a0/revisions").json()["data"]
    assert first["digest"] == second["digest"]


def test_tenant_sees_the_report_of_its_own_adapters_only(server: Operated, globex: str, migration: str) -> None:
    with server.http(globex) as client:
        theirs = client.get("/v1/migrations").json()["data"]
        assert client.get(f"/admin/migrations/{migration}/items").status_code == 403
        assert client.post(f"/admin/migrations/{migration}/promote", json={}).status_code == 403
    assert [(one["adapter"], one["outcome"]) for one in theirs if one["migration_id"] == migration] == [
        ("globex/theirs", "fits")
    ]
    with server.http(server.key) as client:
        own = client.get("/v1/migrations").json()["data"]
    assert {one["adapter"].partition("/")[0] for one in own} == {"acme"}


def test_canary_promote_and_rollback_move_adapters_one_by_one(server: Operated, migration: str) -> None:
    moved = move(server, migration, "promote", adapter="acme/a0", weight=10)
    assert moved == {"acme/a0": moved["acme/a0"]}
    assert moved["acme/a0"]["aliases"] == ["default"]
    assert alias(server, "a0") == {1: 9, 2: 1}
    assert alias(server, "a1") == {1: 100}
    before = server.ask("acme/a1").json()["choices"][0]["token_ids"]

    moved = move(server, migration, "promote", tenant="acme")
    assert (alias(server, "a0"), alias(server, "a1")) == ({2: 100}, {2: 100})
    assert moved["acme/policed"]["code"] == "release_policy"
    assert "1000 are demanded" in moved["acme/policed"]["error"]
    assert alias(server, "policed") == {1: 100}
    assert "globex/theirs" not in moved
    assert move(server, migration, "promote", adapter="acme/a0")["acme/a0"]["aliases"] == [], "again changes nothing"
    assert server.ask("acme/a1").json()["choices"][0]["token_ids"] != before
    assert (
        server.ask("acme/a1").json()["choices"][0]["token_ids"]
        == (server.ask("acme/a1@2").json()["choices"][0]["token_ids"])
    )

    move(server, migration, "rollback", tenant="acme")
    assert (alias(server, "a0"), alias(server, "a1")) == ({1: 100}, {1: 100})
    assert server.ask("acme/a1").json()["choices"][0]["token_ids"] == before
    assert move(server, migration, "rollback", tenant="acme")["acme/a0"]["aliases"] == []


def test_smallest_canary_is_one_percent(server: Operated, migration: str) -> None:
    moved = move(server, migration, "promote", adapter="acme/a1", weight=1)
    assert moved["acme/a1"]["error"] is None
    assert alias(server, "a1") == {1: 99, 2: 1}
    move(server, migration, "rollback", adapter="acme/a1")
    assert alias(server, "a1") == {1: 100}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"source": "amber", "target": "amber"}, 400, "to"),
        ({"source": "amber", "target": "cedar"}, 404, "name"),
        ({"source": "cedar", "target": "birch"}, 404, "from"),
        ({"source": "amber", "target": "birch", "tenant": "nobody"}, 404, "tenant"),
        ({"source": "amber", "target": "birch", "adapter": "a0"}, 400, "adapter"),
    ],
)
def test_wrong_migration_is_refused_with_the_field(
    server: Operated, body: dict[str, Any], status: int, param: str
) -> None:
    refused = server.admin("POST", "migrations", json=body)
    assert (refused.status_code, refused.json()["param"]) == (status, param), refused.text


def test_migration_of_one_adapter_can_be_repeated_and_adds_no_revision(server: Operated, migration: str) -> None:
    begun = server.admin("POST", "migrations", json={"source": "amber", "target": "birch", "adapter": "acme/a0"}).json()
    wait_for(lambda: server.admin("GET", f"migrations/{begun['id']}").json()["status"] != "running")
    found = items(server, begun["id"])
    assert {name: (item["outcome"], item["new_revision"]) for name, item in found.items()} == {"acme/a0": ("fits", 2)}
    with server.http(server.key) as client:
        assert len(client.get("/v1/adapters/a0/revisions").json()["data"]) == 2


def test_cancelled_migration_leaves_the_rest_open(server: Operated, migration: str) -> None:
    begun = server.admin("POST", "migrations", json={"source": "amber", "target": "birch", "tenant": "acme"}).json()
    cancelled = server.admin("POST", f"migrations/{begun['id']}/cancel").json()
    assert cancelled["status"] in ("cancelled", "completed")
    assert server.admin("POST", f"migrations/{begun['id']}/cancel").json()["status"] == cancelled["status"]
    assert server.admin("GET", "migrations/none").status_code == 404


def test_adapter_deleted_during_its_migration_is_not_revived(server: Operated, migration: str) -> None:
    with server.http(server.key) as client:
        assert client.delete("/v1/adapters/a1").is_success
        moved = move(server, migration, "promote", adapter="acme/a1")
        assert moved["acme/a1"]["code"] == "adapter_not_found"
        assert client.get("/v1/adapters/a1").status_code == 404
        assert client.post("/v1/adapters/a1/undelete").is_success
    assert alias(server, "a1") == {1: 100}


def test_ledger_keeps_the_base_of_each_request(server: Operated, migration: str, settings: Settings) -> None:
    move(server, migration, "promote", adapter="acme/a0")
    server.ask("acme/a0").raise_for_status()
    move(server, migration, "rollback", adapter="acme/a0")
    server.ask("acme/a0").raise_for_status()
    with sqlite3.connect(settings.records.url.removeprefix("sqlite:///")) as records:
        rows = records.execute("SELECT model, base_model FROM ledger_entries WHERE model LIKE 'acme/a0@%'").fetchall()
    assert dict(rows) == {"acme/a0@1": "amber", "acme/a0@2": "birch"}


def loramux(server: Operated, *arguments: str, code: int = 0) -> str:
    environment = {"LORAMUX_API_KEY": server.operator, "LORAMUX_URL": server.url, "LORAMUX_CONFIG": ""}
    result = CliRunner().invoke(main, ["base", *arguments], env=environment)
    assert result.exit_code == code, result.output
    return result.output


def test_commands_migrate_report_move_and_retire(server: Operated, migration: str, bases: dict[str, Path]) -> None:
    assert "amber  serving, 1 of 1 engines ready, from the settings" in loramux(server, "ls")
    told = loramux(server, "migrate", "--from", "amber", "--to", "birch", "--adapter", "acme/wide", "--wait")
    assert "completed, amber to birch, 1 needs retraining" in told
    assert "acme/wide@1  needs retraining: " in told
    assert "acme/a0@1  fits, as @2" in loramux(server, "report", migration)
    assert migration in loramux(server, "migrations")
    moved = loramux(server, "promote", migration, "--adapter", "acme/a0", "--weight", "50")
    assert moved == "acme/a0@1 -> @2  default\n"
    assert alias(server, "a0") == {1: 1, 2: 1}
    assert "release policy" in loramux(server, "promote", migration, "--adapter", "acme/policed", code=1)
    assert loramux(server, "rollback", migration, "--adapter", "acme/a0") == moved
    assert alias(server, "a0") == {1: 100}
    added = loramux(server, "add", "cedar", "--path", str(bases["amber"]), "--dtype", "float32", "--engines", "1,2")
    assert "cedar  serving" in added.splitlines()[-1]
    assert "cedar  " in loramux(server, "retire", "cedar", "--successor", "birch")
    assert "there is no base model" in loramux(server, "retire", "none", code=1)
