"""The deadline header, and what over capacity looks like on the wire."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import PATIENCE, Site, make_keys, make_settings

from loramux.common.settings.serving import ClassDeadlines, SchedulerSettings
from loramux.engine.messages import EngineFault
from loramux.serving.bases import RequestReader
from loramux_api.app import create_app

TEXT = {"model": "tiny", "prompt": "hi"}
BODIES = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_deadline_reaches_the_engine(site: Site, path: str) -> None:
    with site.http() as client:
        client.post(path, json=BODIES[path], headers={"x-loramux-deadline-ms": "2500"})
        client.post(path, json=BODIES[path])
    first, second = (request.deadline_ms for request in site.engine.requests)
    assert 0 < first <= 2500  # without the time in which the prompt was read and the request was admitted
    assert second is None


@pytest.mark.parametrize("value", ["0", "-1", "soon", "3600001"])
def test_invalid_deadline_is_refused(site: Site, value: str) -> None:
    with site.http() as client:
        answer = client.post("/v1/completions", json=TEXT, headers={"x-loramux-deadline-ms": value})
    assert answer.status_code == 400
    assert "x-loramux-deadline-ms" in answer.text
    assert not site.engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["engine_overloaded", "deadline_exceeded"])
def test_over_capacity_is_429_with_retry_after(site: Site, code: str, stream: bool) -> None:
    site.engine.script = lambda _: [EngineFault(code, "expected in 9000 ms", retry_after=7)]
    with site.http() as client:
        answer = client.post("/v1/completions", json=TEXT | {"stream": stream})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    error = answer.json()["error"]
    assert error == {"message": "expected in 9000 ms", "type": "over_capacity_error", "param": None, "code": code}


@dataclass
class Stuck:
    """A reading of prompts that waits, as for a thread or for a process that checks a grammar."""

    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    async def read(self, *_: Any) -> Any:
        self.began.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            self.ended.set()


@pytest.fixture
def stuck(site: Site, monkeypatch: pytest.MonkeyPatch) -> Stuck:
    made = Stuck()
    monkeypatch.setattr(RequestReader, "read", lambda _, *asked: made.read(*asked))
    return made


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "deadline"}], ids=["", "key"])
def test_deadline_ends_the_wait_for_the_admission(site: Site, stuck: Stuck, path: str, headers: dict[str, str]) -> None:
    with site.http() as client:
        answer = client.post(path, json=BODIES[path], headers={"x-loramux-deadline-ms": "100"} | headers)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "over_capacity_error")
    assert error["message"] == (
        "The request's deadline passed while its prompt was read or it waited for its admission, and nothing of it was "
        "run. Retry later, or allow more time."
    )
    assert answer.headers["retry-after"] == "1"
    assert stuck.ended.wait(PATIENCE)
    assert not site.engine.requests


def test_deadline_of_a_class_ends_the_wait_for_the_admission(stuck: Stuck, base_dir: Path, tmp_path: Path) -> None:
    scheduler = SchedulerSettings(deadlines_ms=ClassDeadlines(standard=100))
    settings = msgspec.structs.replace(make_settings(base_dir, tmp_path), scheduler=scheduler)
    key = make_keys(settings)["acme"]
    with running(create_app(settings, cast(Any, ScriptedEngine())), "granian") as server:
        sent = {"url": f"{server.url}/v1/completions", "json": TEXT, "timeout": PATIENCE}
        answer = httpx.post(**sent, headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_exceeded")
    assert stuck.ended.wait(PATIENCE)


def test_disconnect_ends_the_wait_for_the_admission(site: Site, stuck: Stuck) -> None:
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc)
    headers = {"authorization": f"Bearer {site.keys['acme']}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(TEXT), headers)
    assert stuck.began.wait(PATIENCE)
    connection.close()
    assert stuck.ended.wait(PATIENCE / 2), "long before the wait itself ends"
    assert not site.engine.requests
