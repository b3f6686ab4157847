"""The log: one line a request, with ids and counts, and nothing that a tenant wrote."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from site_fixture import Site

from loramux.common.logs import set_level

SECRET = "a-word-of-the-prompt"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "loramux_api.request_log"):
        yield caplog


def of_request(lines: pytest.LogCaptureFixture, id: str) -> list[dict]:
    """The request lines with this status, once the server has written one."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = [vars(r) for r in lines.records if r.msg == "request" and vars(r).get("completion", r.name) == id]
        if found:
            return found
        time.sleep(0.02)
    return []


def test_completion_has_one_line_with_counts_and_outcome(site: Site, lines: pytest.LogCaptureFixture) -> None:
    with site.http() as client:
        body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    (line,) = of_request(lines, answer["id"])
    usage = answer["usage"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (line["outcome"], line["base"], line["revision"]) == ("completed", "tiny", None)
    assert line["tenant"].startswith("ten")
    assert line["seconds"] >= line["generation_s"] >= 0
    assert SECRET not in str(line)


def test_stream_whose_client_leaves_has_one_line_after_its_settlement(
    site: Site, lines: pytest.LogCaptureFixture
) -> None:
    site.engine.script = lambda _: [65] * 200
    site.engine.pause = 0.02
    with site.http() as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            first = next(line for line in answer.iter_lines() if line)
    (line,) = of_request(lines, json.loads(first.removeprefix("data: "))["id"])
    assert (line["outcome"], line["status"]) == ("cancelled", 200)
    assert line["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("path", "status", "route", "level"),
    [
        ("/health/live", 200, "/health/live", "DEBUG"),
        ("/v1/nothing/secret-name", 404, "unknown", "INFO"),
        ("/v1/adapters/secret-name", 401, "/v1/adapters/{name}", "INFO"),
    ],
)
def test_other_requests_have_a_line_with_the_routes_template(
    site: Site, lines: pytest.LogCaptureFixture, path: str, status: int, route: str, level: str
) -> None:
    httpx.get(site.url + path)
    (line,) = [vars(record) for record in lines.records if record.msg == "request"]
    assert (line["status"], line["route"], line["levelname"]) == (status, route, level)
    assert "secret-name" not in str(line)


def test_log_level_is_set_by_operators_at_run_time(site: Site, lines: pytest.LogCaptureFixture) -> None:
    try:
        with site.http() as client:
            assert client.put("/admin/log-level", json={"level": "error"}).status_code == 403
        with site.http("no-scopes") as client:
            assert client.put("/admin/log-level", json={"level": "loud"}).status_code == 400
            assert client.put("/admin/log-level", json={"level": "error"}).json() == {"level": "error"}
        assert not logging.getLogger("loramux_api").isEnabledFor(logging.WARNING)
    finally:
        for package in ("loramux", "loramux_api", "loramux_adapters", "loramux_kernels"):
            logging.getLogger(package).setLevel(logging.NOTSET)
        logging.getLogger().setLevel(logging.WARNING)


SCRIPT = """
import logging, sys, structlog
from loramux.common import logs
logs.configure(sys.argv[1], "info")
with structlog.contextvars.bound_contextvars(request="req_1", trace="ab"):
    logging.getLogger("loramux.engine").info("loaded %d", 3, extra={"pages": 7})
    logging.getLogger("loramux").debug("not shown")
    logging.getLogger("somebody.else").info("not shown")
    try:
        raise ZeroDivisionError("seen")
    except ZeroDivisionError:
        logging.getLogger("loramux").exception("failed")
"""


def run(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", "auto"])
def test_log_outside_a_terminal_is_json_with_the_requests_ids(form: str) -> None:
    first, second = (json.loads(line) for line in run(form))
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "loaded 3",
        "level": "info",
        "logger": "loramux.engine",
        "pages": 7,
        "request": "req_1",
        "trace": "ab",
    }
    assert "ZeroDivisionError: seen" in second["exception"]


def test_log_as_text_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = run("text")
    assert "loaded 3" in first
    assert "request=req_1" in first
    assert rest[-1] == "ZeroDivisionError: seen"


def test_libraries_are_logged_from_warning_on() -> None:
    before = logging.getLogger().level
    try:
        set_level("debug")
        assert logging.getLogger("loramux.engine").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        logging.getLogger().setLevel(before)
        for package in ("loramux", "loramux_api", "loramux_adapters", "loramux_kernels"):
            logging.getLogger(package).setLevel(logging.NOTSET)
