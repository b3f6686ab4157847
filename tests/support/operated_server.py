"""A server with one base model and real engines, its operator, and one of its customers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from peft_uploads import form

from loramux.common.settings.file import Settings
from loramux.common.settings.server import RecordsSettings
from loramux.common.settings.serving import BaseSettings, EngineSettings, ModelSettings, ValidationSettings
from loramux.server.platform import open_tenants

PROMPT = [257, *b"the same prompt"]
ENGINE = EngineSettings(pool_bytes=1 << 22, max_num_batched_tokens=64, num_threads=1)
PATIENCE = 180.0


@dataclass(frozen=True)
class Operated:
    """A server, its operator, and one of its customers."""

    url: str
    key: str
    operator: str

    def http(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)

    def admin(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        with self.http(self.operator) as client:
            return client.request(method, f"/admin/{path}", **arguments)

    def base(self, name: str) -> dict[str, Any]:
        return next(one for one in self.admin("GET", "bases").json()["data"] if one["name"] == name)

    def until(self, name: str, *states: str) -> dict[str, Any]:
        wait_for(lambda: self.base(name)["state"] in states)
        return self.base(name)

    def ask(self, model: str, length: int = 4) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        with self.http(self.key) as client:
            return client.post("/v1/completions", json=body | {"return_token_ids": True})

    def push(self, adapter: Path, name: str, base: str | None = None) -> httpx.Response:
        body = form(adapter, name)
        if base is not None:
            body["data"]["base_model"] = base
        with self.http(self.key) as client:
            return client.post("/v1/adapters", **body)

    def add(self, name: str, path: Path, **settings: Any) -> httpx.Response:
        return self.admin("POST", "bases", json={"name": name, "path": str(path), "dtype": "float32"} | settings)

    def retire(self, name: str, **how: Any) -> httpx.Response:
        return self.admin("POST", "bases/retire", json={"name": name} | how)


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.05)):
        if happened():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not happen")


def make_settings(base: Path, folder: Path, url: str | None = None) -> Settings:
    first = BaseSettings(name="amber", path=str(base), dtype="float32", engine=ENGINE)
    return Settings(
        model=ModelSettings(path=first.path, served_model_name="amber"),
        bases=(first,),
        engine=ENGINE,
        records=RecordsSettings(
            url=url or f"sqlite:///{folder}/records.sqlite3",
            blobs=f"{folder}/blobs",
            cache=f"{folder}/cache",
            pepper_file=f"{folder}/pepper",
        ),
        validation=ValidationSettings(parity=False),
    )


def make_keys(settings: Settings) -> tuple[str, str]:
    async def make() -> tuple[str, str]:
        async with open_tenants(settings) as tenants:
            await tenants.create("acme")
            key = (await tenants.create_key("acme"))[1]
            return key, (await tenants.create_key("acme", name="operator", scopes=["operator"]))[1]

    return asyncio.run(make())
