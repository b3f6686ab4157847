"""A server that is being stopped, and one whose engine dies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.data.records.errors import RecordsUnavailable
from loramux_api.app import create_app

STREAM = {"model": "tiny", "prompt": "hello", "stream": True}


@pytest.fixture(params=["granian", "uvicorn"])
def own_site(request: pytest.FixtureRequest, base_dir: Path, tmp_path: Path) -> Iterator[Site]:
    """A server that a test may ruin."""
    settings = make_settings(base_dir, tmp_path)
    engine = ScriptedEngine(pause=0.1)
    keys = make_keys(settings)
    with running(create_app(settings, engine), request.param) as server:
        yield Site(server, engine, settings, keys)


def act(site: Site, what: object) -> None:
    """Have the server's own event loop do something."""
    done = threading.Event()
    site.server.loop.call_soon_threadsafe(lambda: (what(), done.set()))
    assert done.wait(60)


def test_draining_finishes_streams_and_refuses_new_requests(own_site: Site) -> None:
    completions = own_site.server.app.state.platform.completions
    with own_site.http() as client, client.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        act(own_site, completions.stop_accepting)
        with own_site.http() as other:
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
                refused = other.request(method, path, json=STREAM if method == "POST" else None)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == "server_draining"
            assert other.get("/health/live").status_code == 200
            ready = other.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    assert text == "ello"


def test_engine_death_ends_streams_with_an_error(own_site: Site) -> None:
    with own_site.http() as client, client.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        act(own_site, own_site.engine.died.set)
        events = [line for line in lines if line]
    error = json.loads(events[-2][6:])["error"]
    assert (error["code"], error["type"]) == ("engine_unavailable", "server_error")
    assert events[-1] == "data: [DONE]"
    ready = httpx.get(f"{own_site.url}/health/ready")
    down = {"base_model": "tiny", "state": "engine_down", "engines_ready": 0}
    assert (ready.status_code, ready.json()) == (503, {"status": "engine_down", "bases": [down]})
    with own_site.http() as client:
        refused = client.post("/v1/completions", json=STREAM)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("part", ["tenants", "usage"])
@pytest.mark.parametrize("stream", [False, True])
def test_unavailable_database_is_503_with_retry_after_and_one_log_line(
    own_site: Site, caplog: pytest.LogCaptureFixture, part: str, stream: bool
) -> None:
    async def unavailable(*_: object) -> None:
        raise RecordsUnavailable("the database does not answer: connection refused")

    platform = own_site.server.app.state.platform
    with pytest.MonkeyPatch.context() as patch:
        if part == "tenants":
            patch.setattr(platform.tenants.authenticator, "authenticate", unavailable)
        else:
            patch.setattr(platform.usage, "open", unavailable)
        with own_site.http() as client:
            refused = client.post("/v1/completions", json=STREAM | {"stream": stream})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("database_unavailable", "server_error")
    assert "connection refused" not in error["message"]
    lines = [record for record in caplog.records if "does not answer" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].exc_info is None
