"""The server's address without a path."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_settings

from loramux_api.app import create_app
from loramux_api.controllers.console import ConsoleFiles

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def built(tmp_path: Path) -> ConsoleFiles:
    (tmp_path / "index.html").write_text("<html>")
    return ConsoleFiles(tmp_path)


def test_root_leads_a_browser_to_the_console(site: Site, built: ConsoleFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.server.app.state, "console_files", built)
    led = httpx.get(site.url, headers=BROWSER)
    assert (led.status_code, led.headers["location"]) == (307, "/console/")
    assert httpx.get(site.url + led.headers["location"], headers=BROWSER).status_code == 200
    assert httpx.get(site.url).json() == {
        "service": "loramux",
        "api": "/v1",
        "console": "/console/",
        "schema": "/schema",
        "health": "/health/ready",
    }


def test_root_says_why_there_is_no_console(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.server.app.state, "console_files", ConsoleFiles(tmp_path))
    told = httpx.get(site.url, headers=BROWSER).json()
    assert told["console"] is None
    assert "make console" in told["console_problem"]


def test_root_without_a_console_leads_nowhere_that_does_not_answer(base_dir: Path, tmp_path: Path) -> None:
    plain = make_settings(base_dir, tmp_path)
    settings = msgspec.structs.replace(plain, console=msgspec.structs.replace(plain.console, enabled=False))
    with running(create_app(settings, ScriptedEngine()), "granian") as server:
        told = httpx.get(server.url, headers=BROWSER).json()
        assert (told["console"], "console.enabled" in told["console_problem"]) == (None, True)
        for where in (told["schema"], told["health"]):
            assert httpx.get(server.url + where).status_code == 200
