"""A base is changed under the customers of a real server: twenty adapters under load, three of which do not fit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
import transformers
from peft_uploads import form, make_adapter
from server_process import Child, Place, served
from tiny_base import make_base

ADAPTERS, MISFITS = 20, 3
TENANTS = ("acme", "globex")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Site:
    """A server's place, its customers' keys and its operator's."""

    place: Place
    keys: dict[str, str]
    operator: str

    def call(self, server: Child, key: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, server.url + path, headers=headers, timeout=180, **arguments)

    def admin(self, server: Child, method: str, path: str, **arguments: Any) -> Any:
        answer = self.call(server, self.operator, method, f"/admin/{path}", **arguments)
        assert answer.is_success, answer.text
        return answer.json()

    def ask(self, server: Child, model: str) -> list[int]:
        body = {"model": model, "prompt": "the same prompt", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        key = self.keys[model.partition("/")[0]]
        answer = self.call(server, key, "POST", "/v1/completions", json=body | {"return_token_ids": True})
        assert answer.status_code == 200, (model, answer.text)
        return list(answer.json()["choices"][0]["token_ids"])


def misfit(base: Path, folder: Path, seed: int) -> Path:
    """An adapter of a linear whose shape the bases do not share."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def upload_all(site: Site, server: Child, base: Path, folder: Path) -> list[str]:
    models = []
    for number in range(ADAPTERS):
        tenant = TENANTS[number % len(TENANTS)]
        make = misfit if number < MISFITS else make_adapter
        adapter = make(base, folder / f"adapter-{number}", seed=number)
        answer = site.call(server, site.keys[tenant], "POST", "/v1/adapters", **form(adapter, f"a{number}"))
        assert answer.status_code == 201, answer.text
        models.append(f"{tenant}/a{number}")
    return models


@contextmanager
def load(site: Site, server: Child, models: list[str]) -> Iterator[dict[str, set[tuple[int, ...]]]]:
    """Four clients that send requests to all models in turn, and every answer; any failure fails the block."""
    ended, answers = threading.Event(), {model: set[tuple[int, ...]]() for model in models}

    def client(number: int) -> None:
        while not ended.is_set():
            for model in models[number::4]:
                answers[model].add(tuple(site.ask(server, model)))
                if ended.is_set():
                    return

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, number) for number in range(4)]
        try:
            yield answers
        finally:
            ended.set()
        for one in clients:
            one.result()


def until(happened: Callable[[], Any], seconds: float = 600.0) -> Any:
    for _ in range(int(seconds / 0.2)):
        if found := happened():
            return found
        threading.Event().wait(0.2)
    raise AssertionError("it did not happen")


def ended(site: Site, server: Child, id: str) -> Any:
    found = site.admin(server, "GET", f"migrations/{id}")
    return found if found["status"] != "running" else None


def make_site(folder: Path, base: Path) -> Site:
    place = Place(folder, base).prepare()
    config = place.config.read_text().replace("[model]\n", '[model]\ndtype = "float32"\n').replace("parity = false", "")
    place.config.write_text(config)
    keys = {tenant: place.key_of(tenant) for tenant in TENANTS}
    return Site(place, keys, place.loramux("key", "create", "--tenant", "acme", "--scope", "operator")["key"])


def test_twenty_adapters_migrate_under_load_with_a_kill_and_move_back(tmp_path: Path) -> None:
    old = make_base(tmp_path / "tiny-1b", context=512)
    new = make_base(tmp_path / "next-1b", context=512, seed=1, intermediate=48)
    site = make_site(tmp_path, old)
    place, keys = site.place, site.keys
    with served(place) as server:
        models = upload_all(site, server, old, tmp_path)
        fitting = models[MISFITS:]
        before = {model: site.ask(server, model) for model in models}
        added = {"name": "next", "path": str(new), "dtype": "float32"}
        site.admin(server, "POST", "bases", json=added)
        with load(site, server, models) as answers:
            until(lambda: state(site, server, "next") == "serving")
            id = site.admin(server, "POST", "migrations", json={"source": "tiny", "target": "next"})["id"]
            until(lambda: decided(site, server, id) >= 4)
        assert all(seen <= {tuple(before[model])} for model, seen in answers.items()), "nothing served has changed"
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
    with served(place) as server:
        assert state(site, server, "next") == "serving", "a restart keeps the wanted set"
        with load(site, server, models):
            report = until(lambda: ended(site, server, id))
        assert (report["status"], report["outcomes"]) == ("completed", {"fits": 17, "needs_retraining": 3})
        items = site.admin(server, "GET", f"migrations/{id}/items")["data"]
        assert {item["adapter"]: item["outcome"] for item in items} == {
            model: "fits" if model in fitting else "needs_retraining" for model in models
        }
        assert all(item["code"] == "shape_mismatch" for item in items if item["outcome"] != "fits")
        for model in fitting:
            revisions = site.call(server, keys[model[: model.index("/")]], "GET", f"/v1/adapters/{model}/revisions")
            assert [one["revision"] for one in revisions.json()["data"]] == [2, 1], (
                "exactly one for each, over the kill"
            )
        expected = {model: site.ask(server, f"{model}@2") for model in fitting}
        with load(site, server, models) as answers:
            site.admin(server, "POST", f"migrations/{id}/promote", json={"weight": 10})
            moved = site.admin(server, "POST", f"migrations/{id}/promote", json={})["data"]
        assert [one["error"] for one in moved] == [None] * 17
        for model, seen in answers.items():
            assert seen <= {tuple(before[model]), tuple(expected.get(model, before[model]))}, "never a third answer"
        assert {model: site.ask(server, model) for model in models} == before | expected
        with load(site, server, models):
            site.admin(server, "POST", f"migrations/{id}/rollback", json={"tenant": "acme"})
        back = {model: before[model] for model in models if model.startswith("acme/")}
        assert {model: site.ask(server, model) for model in models} == before | expected | back
        site.admin(server, "POST", f"migrations/{id}/promote", json={"tenant": "acme"})

        retire(site, server, "tiny")
        assert {model: site.ask(server, model) for model in fitting} == expected
        assert server.metric("loramux_ledger_drift_tokens") == 0
        with suppress(ProcessLookupError):
            server.process.terminate()
        assert server.process.wait(120) == 0
    assert place.loramux("usage", "reconcile")["drift_tokens"] == 0
    with served(place) as server:
        assert {model: site.ask(server, model) for model in fitting} == expected, "without the old base"


def retire(site: Site, server: Child, name: str) -> None:
    """Retire the base that the misfits stay on; they are told what to use."""
    refused = site.call(server, site.operator, "POST", "/admin/bases/retire", json={"name": name})
    assert (refused.status_code, refused.json()["code"]) == (409, "base_in_use")
    site.admin(server, "POST", "bases/retire", json={"name": name, "force": True})
    until(lambda: state(site, server, name) == "retired")
    asked = {"model": "acme/a0", "prompt": "x", "max_tokens": 1}
    gone = site.call(server, site.keys["acme"], "POST", "/v1/completions", json=asked)
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "base_model_retired")
    assert "upload one for `next`" in gone.json()["error"]["message"], "the target of its migration"


def state(site: Site, server: Child, name: str) -> str:
    bases = site.admin(server, "GET", "bases")["data"]
    return next(one["state"] for one in bases if one["name"] == name)


def decided(site: Site, server: Child, id: str) -> int:
    outcomes = site.admin(server, "GET", f"migrations/{id}")["outcomes"]
    return sum(count for outcome, count in outcomes.items() if outcome != "pending")
