"""A server with tenants, keys and a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from peft_uploads import form
from running_server import Running
from scripted_engine import ScriptedEngine

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.authority import CUSTOMER_SCOPES, TENANT_SCOPES, Role
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.settings.file import Settings
from loramux.common.settings.server import (
    BatchSettings,
    IssuerSettings,
    RecordsSettings,
    ServerSettings,
    TrainingSettings,
    WebhookSettings,
)
from loramux.common.settings.serving import (
    AdapterLimits,
    EngineSettings,
    ModelSettings,
    PushSettings,
    ValidationSettings,
)
from loramux.server.platform import open_tenants

TENANTS = ("acme", "globex")
PATIENCE = 120.0
"""Seconds for one answer: on a machine that runs much else, seconds pass before a thread has its turn."""


@dataclass
class Site:
    """A server, its engine, and a key for each tenant."""

    server: Running
    engine: ScriptedEngine
    settings: Settings
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.server.url

    def http(self, tenant: str = "acme", **headers: str) -> httpx.Client:
        """A client with the tenant's key; header names are written with underscores."""
        sent = {"Authorization": f"Bearer {self.keys[tenant]}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Client(base_url=self.url, headers=sent, timeout=PATIENCE)

    def enrol(self, scopes: Iterable[str] = CUSTOMER_SCOPES) -> str:
        """Make a tenant that no other test knows, with a key; return its name."""
        name = f"newcomer-{len(self.keys)}"

        async def make() -> str:
            async with open_tenants(self.settings) as tenants:
                await tenants.create(name)
                return (await tenants.create_key(name, scopes=scopes))[1]

        self.keys[name] = asyncio.run(make())
        return name

    @contextmanager
    def unanswered(self, tenant: str, body: dict[str, Any], **headers: str) -> Iterator[None]:
        """Ask for a completion; its client leaves at the end of the block, whether or not it has an answer."""
        url, content = httpx.URL(self.url), httpx.Request("POST", self.url, json=body).read()
        lines = {"Host": url.netloc.decode(), "Authorization": f"Bearer {self.keys[tenant]}"} | headers
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + content)
            yield

    def openai(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=PATIENCE)


def make_settings(base_dir: Path, folder: Path, issuers: Sequence[str] = ()) -> Settings:
    for place in ("local", "pushes"):
        (folder / place).mkdir(exist_ok=True)
    return Settings(
        issuers=tuple(
            IssuerSettings(issuer=issuer, audience="loramux", operators=("loramux-operators",)) for issuer in issuers
        ),
        model=ModelSettings(path=str(base_dir), served_model_name="tiny"),
        engine=EngineSettings(in_process=True),
        server=ServerSettings(max_upload_bytes=2 << 20, drain_seconds=5),
        adapters=AdapterLimits(local_root=f"{folder}/local"),
        pushes=PushSettings(root=f"{folder}/pushes", shared_memory=True, keep=3, series_per_tenant=2),
        webhooks=WebhookSettings(allow_private_addresses=True),
        batches=BatchSettings(max_file_bytes=16 << 20, allow_private_judges=True, judge_seconds=5),
        training=TrainingSettings(local_trainer=False, unfinished_per_tenant=3),
        records=RecordsSettings(
            url=f"sqlite:///{folder}/records.sqlite3",
            blobs=f"{folder}/blobs",
            cache=f"{folder}/cache",
            pepper_file=f"{folder}/pepper",
        ),
        validation=ValidationSettings(parity=False),  # loads PEFT for every server; it has separate tests
    )


def leave_things(site: Site, adapter: Path) -> None:
    """Leave what a test may leave, for each tenant: so no test passes because it is the first one."""
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}'
    for tenant in TENANTS:
        with site.http(tenant) as http:
            for name in ("left-over", "deleted-before"):
                http.post("/v1/adapters", **form(adapter, name)).raise_for_status()
            http.delete("/v1/adapters/deleted-before").raise_for_status()
            for model in ("tiny", f"{tenant}/left-over"):
                http.post("/v1/completions", json={"model": model, "prompt": "x"}).raise_for_status()
            sent = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("left.jsonl", line)})
            batch = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": sent.json()["id"]}
            id = http.post("/v1/batches", json=batch).raise_for_status().json()["id"]
            until = time.monotonic() + PATIENCE
            while http.get(f"/v1/batches/{id}").json()["status"] != "completed":
                assert time.monotonic() < until
                time.sleep(0.02)


def make_keys(settings: Settings) -> dict[str, str]:
    async def make() -> dict[str, str]:
        async with open_tenants(settings) as tenants:
            keys = {}
            for name in TENANTS:
                await tenants.create(name)
                keys[name] = (await tenants.create_key(name))[1]
            keys |= await make_odd_keys(tenants)
            for issuer in settings.issuers:
                members = (await tenants.account("acme")).members
                for role in Role:
                    await members.add(issuer.issuer, f"the {role}", role)
            return keys

    return asyncio.run(make())


async def make_odd_keys(tenants: Tenants) -> dict[str, str]:
    """A key without scopes of a tenant's, one with all, and those that do not count any more."""
    acme = await tenants.account("acme")
    everything = TENANT_SCOPES | {"operator"}
    keys = {"no-scopes": (await tenants.create_key("acme", scopes=["operator"]))[1]}
    keys["all-scopes"] = (await acme.keys.create(KeyRequest(scopes=everything)))[1]
    nothing = KeyRequest(scopes=everything, models=frozenset({"acme/nothing"}))
    keys["no-models"] = (await acme.keys.create(nothing))[1]
    revoked, keys["revoked"] = await acme.keys.create(KeyRequest(scopes=everything))
    await tenants.revoke_key(revoked.id)
    expired, keys["expired"] = await acme.keys.create(KeyRequest(scopes=everything))
    await acme.keys.rotate(expired.id, 0)
    await tenants.create("initech")
    keys["suspended"] = (await tenants.create_key("initech", scopes=everything))[1]
    await tenants.suspend("initech")
    return keys
