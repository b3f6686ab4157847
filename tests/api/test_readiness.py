"""Two bases of which one has lost its engine: readiness, the other base, and requests to the lost one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_server import Running, running
from scripted_engine import ScriptedEngine
from site_fixture import make_keys, make_settings

import loramux_api.app as app_module
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineRange
from loramux.engine.client import EngineDied
from loramux.engine.messages import ModelFacts
from loramux.fleet import member as member_module
from loramux.server.platform import open_platform
from loramux.serving import lifecycle as lifecycle_module

TEXT = {"prompt": "hello", "max_tokens": 8}


class Fleet:
    """The engines of the bases `amber` and `birch`, of which those of `birch` can be kept from starting."""

    def __init__(self, server: Running, keys: dict[str, str], engines: dict[str, ScriptedEngine], broken: set[str]):
        self.server, self.engines, self.broken = server, engines, broken
        self.http = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {keys['acme']}"}, timeout=60)

    def lose(self, base: str) -> None:
        self.broken.add(base)
        self.server.loop.call_soon_threadsafe(self.engines[base].died.set)
        self.until(lambda: self.states().get(base) != "serving")

    def ready(self) -> tuple[int, dict[str, Any]]:
        answer = self.http.get("/health/ready")
        return answer.status_code, answer.json()

    def states(self) -> dict[str, str]:
        return {one["base_model"]: one["state"] for one in self.ready()[1]["bases"]}

    def ask(self, model: str, deadline_ms: int | None = None, stream: bool = False) -> httpx.Response:
        headers = {} if deadline_ms is None else {"x-loramux-deadline-ms": str(deadline_ms)}
        return self.http.post("/v1/completions", json=TEXT | {"model": model, "stream": stream}, headers=headers)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def fleet_of(base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(member_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(member_module, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(lifecycle_module, "FIRST_PAUSE", 0.05)

    @contextmanager
    def open_fleet(ready_when: str = "any", max_wait_s: float = 60.0) -> Iterator[Fleet]:
        engines: dict[str, ScriptedEngine] = {}
        broken: set[str] = set()

        class Engine(ScriptedEngine):
            async def start(self) -> ModelFacts:
                if self.name in broken:
                    raise EngineDied("there is no memory")
                return await super().start()

        def launch(_name: str, settings: Settings) -> ScriptedEngine:
            engine = Engine()
            engine.name = settings.model.served_model_name
            engines[engine.name] = engine
            return engine

        plain = make_settings(base_dir, tmp_path)
        bases = tuple(
            BaseSettings(name=name, path=str(base_dir), engines=EngineRange(max_wait_s=max_wait_s))
            for name in ("amber", "birch")
        )
        server = msgspec.structs.replace(plain.server, ready_when=ready_when)
        settings = msgspec.structs.replace(plain, bases=bases, model=bases[0].model, server=server)
        monkeypatch.setattr(app_module, "open_platform", lambda settings: open_platform(settings, launch))
        keys = make_keys(settings)
        with running(app_module.create_app(settings), "granian") as site:
            fleet = Fleet(site, keys, engines, broken)
            with fleet.http:
                yield fleet

    return open_fleet


def test_server_is_ready_while_one_base_answers_and_says_which_does_not(fleet_of: Callable[..., Any]) -> None:
    with fleet_of() as fleet:
        assert fleet.ready() == (
            200,
            {
                "status": "ready",
                "bases": [
                    {"base_model": "amber", "state": "serving", "engines_ready": 1},
                    {"base_model": "birch", "state": "serving", "engines_ready": 1},
                ],
            },
        )
        fleet.lose("birch")
        status, body = fleet.ready()
        assert (status, body["status"]) == (200, "ready")
        assert body["bases"][1] == {"base_model": "birch", "state": "engine_down", "engines_ready": 0}
        assert fleet.ask("amber").status_code == 200
        fleet.lose("amber")
        assert (fleet.ready()[0], fleet.ready()[1]["status"]) == (503, "engine_down")
        fleet.broken.clear()
        fleet.until(lambda: fleet.states() == {"amber": "serving", "birch": "serving"})


def test_server_that_must_have_all_bases_is_not_ready_without_one(fleet_of: Callable[..., Any]) -> None:
    with fleet_of(ready_when="all") as fleet:
        assert fleet.ready()[0] == 200
        fleet.lose("birch")
        assert (fleet.ready()[0], fleet.ready()[1]["status"]) == (503, "engine_down")


def test_request_to_a_base_that_restarts_is_answered_once_it_serves(fleet_of: Callable[..., Any]) -> None:
    with fleet_of() as fleet:
        fleet.lose("birch")
        fleet.server.loop.call_later(0.5, fleet.broken.clear)
        answered = fleet.ask("birch")
        assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("stream", [False, True])
def test_request_to_a_base_that_restarts_waits_no_longer_than_its_deadline(
    fleet_of: Callable[..., Any], stream: bool
) -> None:
    with fleet_of() as fleet:
        fleet.lose("birch")
        refused = fleet.ask("birch", deadline_ms=100, stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_exceeded")
        assert int(refused.headers["retry-after"]) >= 1


def test_base_whose_engines_cannot_be_started_is_loaded_again_and_the_server_goes_on(
    fleet_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_module, "LONGEST_PAUSE", 0.05)
    with fleet_of(max_wait_s=0.05) as fleet:
        platform = fleet.server.app.state.platform
        fleet.lose("birch")
        fleet.until(lambda: fleet.states()["birch"] in ("loading", "failed"))
        began = time.monotonic()
        refused = fleet.ask("birch")
        assert (refused.status_code, time.monotonic() - began < 30) == (503, True)
        assert int(refused.headers["retry-after"]) >= 1
        assert not platform.lifecycle.has_lost_engines
        assert fleet.ask("amber").status_code == 200
        fleet.broken.clear()
        fleet.until(lambda: fleet.states()["birch"] == "serving")
        assert fleet.ask("birch").status_code == 200


@pytest.mark.parametrize(("ready_when", "lost"), [("all", {"birch"}), ("any", {"amber", "birch"})])
def test_server_ends_when_too_many_bases_have_lost_their_engines(
    fleet_of: Callable[..., Any], ready_when: str, lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_module, "FIRST_PAUSE", 60.0)
    with fleet_of(ready_when=ready_when, max_wait_s=0.05) as fleet:
        platform = fleet.server.app.state.platform
        for base in lost:
            fleet.lose(base)
        fleet.until(lambda: platform.lifecycle.has_lost_engines)
