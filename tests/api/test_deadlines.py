"""The deadline header, and what over capacity looks like on the wire."""

from __future__ import annotations

import pytest
from site_fixture import Site

from loramux.engine.messages import EngineFault

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
    assert [request.deadline_ms for request in site.engine.requests] == [2500, None]


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
