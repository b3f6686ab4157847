from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from console_fleet import ConsoleFleet, console_fleet
from console_site import completed, ensure_console, launch, upload
from local_issuer import Issuer
from peft_uploads import CONFIG, WEIGHTS, make_adapter
from playwright.sync_api import Browser, sync_playwright
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings
from tiny_base import make_base

from loramux_api.app import create_app


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def folders(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters as PEFT saves them."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base_dir, folder / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def site(base_dir: Path, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server on which acme has two revisions and some traffic, and globex has nothing."""
    ensure_console()
    issuer = Issuer()
    settings = make_settings(base_dir, tmp_path_factory.mktemp("site"), [issuer.url])
    keys = make_keys(settings)
    engine = ScriptedEngine()
    with running(create_app(settings, engine), "granian") as server:
        site = Site(server, engine, settings, keys)
        for folder in folders:
            upload(site, "acme", "support", {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)})
        completed(site, "acme", "acme/support")
        completed(site, "acme", "tiny")
        yield site
    issuer.close()


@pytest.fixture(scope="session")
def long_fleet(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleFleet]:
    ensure_console()
    with console_fleet(base_dir, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield Chromium to one module only: while it runs, Playwright keeps an event loop running in this thread."""
    with sync_playwright() as playwright:
        started = launch(playwright)
        yield started
        started.close()
