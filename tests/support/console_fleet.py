"""A server with a fleet of two real engines, on which everything that has a name has one of 60 characters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from flat_prices import give_flat_plan
from peft_uploads import form, make_adapter
from running_server import Running, running
from site_fixture import PATIENCE, make_settings

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.authority import TENANT_SCOPES
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineRange, EngineSettings
from loramux.data.records.database import Database
from loramux.server.platform import open_tenants
from loramux_api.app import create_app

NAMES = {
    kind: f"{kind}-{'w' * (59 - len(kind))}"
    for kind in ("adapter", "base", "tenant", "neighbour", "key", "project", "file", "alias")
}
"""Without a place to break a line, and of a wide letter."""
MEMBER = f"{'w' * 48}@example.com"
WEBHOOK = f"http://127.0.0.1:9/{'w' * 60}"
NOTE = "w" * 60
ENGINE = EngineSettings(pool_bytes=1 << 22, max_num_batched_tokens=64, num_threads=1)


@dataclass
class ConsoleFleet:
    """The server and a key with every right, an operator's included."""

    server: Running
    key: str

    @property
    def url(self) -> str:
        return self.server.url

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=PATIENCE)

    def engines(self) -> list[dict[str, Any]]:
        with self.http() as http:
            return http.get("/admin/engines").raise_for_status().json()["data"]

    def ask(self, number: int = 0) -> None:
        """Ask the base model or the adapter for an answer that takes many steps."""
        model = (NAMES["base"], f"{NAMES['tenant']}/{NAMES['adapter']}")[number % 2]
        body = {"model": model, "prompt": f"{number} is asked", "max_tokens": 100, "ignore_eos": True, "user": NOTE}
        with self.http() as http:
            http.post("/v1/completions", json=body).raise_for_status()


@contextmanager
def console_fleet(base: Path, folder: Path) -> Iterator[ConsoleFleet]:
    """Start the server, and write something of each kind through its API."""
    served = BaseSettings(
        name=NAMES["base"], path=str(base), dtype="float32", engine=ENGINE, engines=EngineRange(min=2, max_wait_s=300)
    )
    settings = msgspec.structs.replace(make_settings(base, folder), bases=(served,), engine=EngineSettings())
    key = asyncio.run(make_tenants(settings))
    with running(create_app(settings), "granian") as server:
        fleet = ConsoleFleet(server, key)
        with fleet.http() as http:
            fill(http, [make_adapter(base, folder / f"adapter-{seed}", seed=seed) for seed in (1, 2)])
        for number in range(8):
            fleet.ask(number)
        yield fleet


async def make_tenants(settings: Settings) -> str:
    async with open_tenants(settings) as tenants:
        for name in (NAMES["tenant"], NAMES["neighbour"]):
            await tenants.create(name)
        account = await tenants.account(NAMES["tenant"])
        asked = KeyRequest(name=NAMES["key"], scopes=TENANT_SCOPES | {"operator"})
        key = (await account.keys.create(asked))[1]
    database = Database(settings.records.url)
    await give_flat_plan(database, NAMES["tenant"])
    await database.close()
    return key


def fill(http: httpx.Client, adapters: list[Path]) -> None:
    """Write one of each: adapter with a canary, evaluation, batch, webhook, project, limit, budget, member."""

    def sent(method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer = http.request(method, path, **arguments)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer.json()

    sent("POST", "/v1/webhooks", json={"url": WEBHOOK})
    name = f"/v1/adapters/{NAMES['adapter']}"
    for adapter in adapters:
        sent("POST", "/v1/adapters", **form(adapter, NAMES["adapter"]))
    for alias in ("default", NAMES["alias"]):
        weights = [{"revision": 1, "weight": 90}, {"revision": 2, "weight": 10}]
        sent("PUT", f"{name}/aliases/{alias}", json={"targets": weights})
        sent("PUT", f"{name}/aliases/{alias}/guard", json={"measures": ["errors", "feedback"]})
        sent(
            "PUT",
            f"{name}/aliases/{alias}/policy",
            json={"policy": {"min_requests": 1_000_000, "max_error_rate": 0.01}},
        )
    project = sent("POST", "/v1/projects", json={"name": NAMES["project"]})
    made = sent(
        "POST", "/v1/keys", json={"name": NAMES["key"], "project": NAMES["project"], "scopes": sorted(TENANT_SCOPES)}
    )
    sent("POST", "/v1/members", json={"issuer": f"https://{NOTE}.example", "subject": MEMBER, "role": "viewer"})
    for subject in (project["id"], made["id"]):
        sent("PUT", f"/v1/limits/{subject}/tokens_per_minute", json={"value": 1_000_000_000})
        sent("PUT", f"/v1/budgets/{subject}/month", json={"amount_nano": 123_456_789_000_000})
    lines = [json.dumps({"prompt": f"question {number}", "expected": NOTE}) for number in range(4)]
    questions = {"file": (f"{NAMES['file']}.jsonl", "\n".join(lines))}
    evals = sent("POST", "/v1/files", data={"purpose": "evals"}, files=questions)
    grader = {"grader": {"type": "exact"}, "file_id": evals["id"]}
    sent("POST", "/v1/evaluations", json={"adapter": NAMES["adapter"], "revision": 2, "against": 1} | grader)
    body = {"model": NAMES["base"], "messages": [{"role": "user", "content": NOTE}], "max_tokens": 2}
    line = json.dumps({"custom_id": NOTE, "method": "POST", "url": "/v1/chat/completions", "body": body})
    for text in (line, "not JSON"):
        file = sent("POST", "/v1/files", data={"purpose": "batch"}, files={"file": (f"{NAMES['file']}.jsonl", text)})
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "metadata": {"note": NOTE}}
        sent("POST", "/v1/batches", json=asked)
