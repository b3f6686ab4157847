"""A server with tenants, keys and a scripted engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from running_server import Running
from scripted_engine import ScriptedEngine

from loramux.gateway import open_tenants
from loramux.settings import ModelSettings, RecordsSettings, ServerSettings, Settings

TENANTS = ("acme", "globex")


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
        return httpx.Client(base_url=self.url, headers=sent, timeout=20)

    def openai(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=20)


def make_settings(base_dir: Path, folder: Path) -> Settings:
    return Settings(
        model=ModelSettings(path=str(base_dir), served_model_name="tiny"),
        server=ServerSettings(max_upload_bytes=2 << 20, drain_seconds=5),
        records=RecordsSettings(
            url=f"sqlite:///{folder}/records.sqlite3", blobs=f"{folder}/blobs", pepper_file=f"{folder}/pepper"
        ),
    )


def make_keys(settings: Settings) -> dict[str, str]:
    async def make() -> dict[str, str]:
        async with open_tenants(settings) as tenants:
            keys = {}
            for name in TENANTS:
                await tenants.create(name)
                keys[name] = (await tenants.create_key(name))[1]
            keys["no-scopes"] = (await tenants.create_key("acme", scopes=["operator"]))[1]
            return keys

    return asyncio.run(make())
