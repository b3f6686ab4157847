from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import httpx
import jsonschema
import psutil

from loramux_demo.assets import LOOKUP, OWNERS
from loramux_demo.drive import FACT

DEMO = (sys.executable, "-m", "loramux_api", "demo")
PATIENCE_SECONDS = 300


def test_demo_once_json_reports_success():
    """The whole product without stubs: two tenants, six adapters and the base in the same batches, and an exact
    bill."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*DEMO, "--once", "--json", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Port {port} is taken" in done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert len(report["answers"]) >= 60
    assert all(answer["ok"] for answer in report["answers"]), [one for one in report["answers"] if not one["ok"]]
    assert 5 <= report["max_distinct_adapters_beside_base"] <= report["max_distinct_adapters_in_a_step"] <= 6
    assert report["usage_equals_responses"]
    calls = [answer["tool_call"] for answer in report["answers"] if answer["tool_call"]]
    assert len(calls) >= 10
    for call in calls:
        assert call["name"] == "lookup"
        jsonschema.validate(json.loads(call["arguments"]), LOOKUP["function"]["parameters"])
    facts = [answer for answer in report["answers"] if "/json@" in answer["model"]]
    assert len(facts) >= 10
    for fact in facts:
        jsonschema.validate(json.loads(fact["text"]), FACT)
    assert report["tenants_isolated"]
    assert {row["tenant"] for row in report["usage"]} == set(OWNERS)
    assert sum(row["requests"] for row in report["usage"]) == len(report["answers"])
    assert sum(row["output_tokens"] for row in report["usage"]) == report["output_tokens"]
    assert report["tokens_per_second"] > 0


@contextmanager
def running_demo(folder) -> Iterator[subprocess.Popen[str]]:
    # If the tests run as a background job they ignore Ctrl-C, and the demo would inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [*DEMO, "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)  # noqa: PLW1509
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_demo_serves_until_ctrl_c_and_its_curl_lines_work(tmp_path):
    with running_demo(tmp_path / "demo") as demo:
        before, _, lines = read_until(demo, "/metrics\n").partition("Try it:")
        assert "distinct adapters and the base model shared one step" in before
        family = psutil.Process(demo.pid).children(recursive=True)
        commands = lines.replace("\\\n", "").strip().splitlines()
        assert len(commands) == len(OWNERS) + 3
        for command in commands:
            assert as_curl_would(command).is_success, command
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE_SECONDS) == 0
        assert_ended(family)
    assert (tmp_path / "demo" / "server.log").exists()


def test_demo_stopped_early_stops_its_server(tmp_path):
    with running_demo(tmp_path / "demo") as demo:
        log = tmp_path / "demo" / "server.log"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        family = psutil.Process(demo.pid).children(recursive=True)
        assert family
        demo.terminate()
        assert demo.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert_ended(family)


def assert_ended(family):
    """No process of the family runs; a zombie, whose parent has not waited for it, counts as ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := [member for member in family if runs(member)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def runs(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def as_curl_would(command):
    words = shlex.split(command)
    options = list(zip(words[2::2], words[3::2], strict=True))
    headers = dict(value.split(": ") for option, value in options if option == "-H")
    data = next((value for option, value in options if option == "-d"), None)
    assert words[0] == "curl"
    return httpx.request("POST" if data else "GET", words[1], headers=headers, content=data, trust_env=False)


def read_until(process, end):
    text = ""
    for line in process.stdout:
        text += line
        if text.endswith(end):
            return text
    raise AssertionError(f"the demo ended before it said {end!r}: {text}")
