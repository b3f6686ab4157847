from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from running_server import Running, running
from scripted_engine import ScriptedEngine
from tiny_base import make_base

from loramux.gateway import open_tenants
from loramux.settings import ModelSettings, RecordsSettings, ServerSettings, Settings
from loramux_api.app import create_app

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

    def http(self, tenant: str | None = "acme", **kwargs) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, **kwargs)

    def openai(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=20)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def make_settings(base_dir: Path, folder: Path) -> Settings:
    return Settings(
        model=ModelSettings(path=str(base_dir), served_model_name="tiny"),
        server=ServerSettings(max_upload_bytes=1 << 20, drain_seconds=5),
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


@pytest.fixture(scope="module", params=["granian", "uvicorn"])
def site(request: pytest.FixtureRequest, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both servers: everything that is seen on the wire is tested on each."""
    settings = make_settings(base_dir, tmp_path_factory.mktemp("site"))
    engine = ScriptedEngine()
    keys = make_keys(settings)
    with running(create_app(settings, engine), request.param) as server:
        yield Site(server, engine, settings, keys)


@pytest.fixture(autouse=True)
def fresh_engine(request: pytest.FixtureRequest) -> None:
    """Every test finds an engine that echoes at once."""
    if "site" in request.fixturenames:
        engine = request.getfixturevalue("site").engine
        blank = ScriptedEngine()
        engine.script, engine.pause, engine.fault = blank.script, blank.pause, blank.fault
        engine.requests.clear()
        engine.cancelled.clear()
        engine.retired.clear()
