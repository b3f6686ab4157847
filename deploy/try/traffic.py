"""The demo's traffic on the server of deploy/try.sh, and checks of its traces, metrics and logs.

python traffic.py FOLDER API_URL INTERNAL_URL PROMETHEUS_URL
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from loramux_demo.assets import MODEL_NAME, load_prompts
from loramux_demo.tour import Report, tour

TRACE, PARENT = os.urandom(16).hex(), os.urandom(8).hex()
PHASES = {"admission", "queue", "prefill", "decode", "settlement"}
PATIENCE_SECONDS = 120
T = TypeVar("T")


def main() -> None:
    """Run one check after the other; the first that fails ends the run."""
    folder, api, internal, prometheus = Path(sys.argv[1]), *sys.argv[2:]
    verify = ssl.create_default_context(cafile=str(folder / "tls/ca.pem"))
    keys = json.loads((folder / "keys.json").read_text())
    report = drive(api, internal, keys, verify)
    traced(api, keys["acme"], verify, folder / "spans.jsonl")
    scraped(prometheus, len(report.drive.answers))
    logged(folder / "server.log", report)


def say(line: str) -> None:
    """Print one check that has passed."""
    print(f"    ok  {line}", flush=True)


def eventually(what: str, look: Callable[[], T | None]) -> T:
    """Call `look` again and again until it finds a result, and return it."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if (found := look()) is not None:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {PATIENCE_SECONDS} s")


def drive(api: str, internal: str, keys: dict[str, str], verify: ssl.SSLContext) -> Report:
    """Run the demo's traffic: six adapters and the base, over TLS."""
    for path in ("/metrics", "/health/ready", "/schema/openapi.json"):
        assert httpx.get(api + path, verify=verify).status_code == 404, f"{path} is on the public port"
    say("/metrics, /health and /schema are on the internal port alone")
    report = tour(api, keys, lambda _: None, internal_url=internal, verify=verify)
    assert not report.failures, report.failures
    say(f"{len(report.drive.answers)} requests over TLS, {report.drive.exact:.0%} exact answers")
    say(f"{report.sharing.beside_base} adapters and the base in one step; usage equals the sum of the responses")
    return report


def traced(api: str, key: str, verify: ssl.SSLContext, file: Path) -> None:
    """Send one request with a traceparent and follow it to its settlement."""
    headers = {"Authorization": f"Bearer {key}", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "acme/upper", "prompt": "Q: Who is Halkodel?\nA: ", "max_tokens": 8, "temperature": 0}
    httpx.post(f"{api}/v1/completions", headers=headers, json=body, verify=verify, timeout=60).raise_for_status()

    def spans() -> list[dict[str, str]] | None:
        found = [json.loads(line) for line in file.read_text().splitlines()]
        found = [span for span in found if span["trace"] == TRACE]
        return found if {span["name"] for span in found} >= PHASES else None

    found = eventually("the spans of a request", spans)
    (request,) = [span for span in found if span["parent"] == PARENT]
    known = {span["span"] for span in found}
    assert all(span is request or span["parent"] in known for span in found), "a span hangs in the air"
    assert len({span["span"] for span in found}) == len(found)
    say(f"one trace from the client's traceparent: {request['name']} > {', '.join(sorted(PHASES))}")


def scraped(prometheus: str, requests: int) -> None:
    """Read the scraped metrics and the state of the rules from Prometheus."""

    def value(query: str) -> float | None:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).json()
        return float(answer["data"]["result"][0]["value"][1]) if answer["data"]["result"] else None

    assert eventually("a scrape", lambda: value('up{job="loramux"} == 1')) == 1
    eventually("all requests in Prometheus", lambda: value(f"sum(loramux_completions_total) > {requests}"))
    assert value("sum(abs(loramux_ledger_drift_tokens))") == 0
    assert (value("loramux_certificate_expiry_timestamp_seconds - time()") or 0) > 3600
    rules = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    every = [rule for group in rules for rule in group["rules"]]
    assert every
    assert all(rule["health"] in ("ok", "unknown") for rule in every), every
    firing = [rule["name"] for rule in every if rule.get("state") == "firing"]
    assert not firing, firing
    say(f"Prometheus has {value('sum(loramux_completions_total)'):.0f} requests; {len(every)} rules, none fires")


def logged(file: Path, report: Report) -> None:
    """Every line is JSON; every request's line has its id; the traced one has its trace; none quotes a tenant."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert all(line["request"].startswith("req_") for line in requests)
    completions = [line for line in requests if "outcome" in line]
    assert len(completions) > len(report.drive.answers)
    assert {line["outcome"] for line in completions} == {"completed"}
    (ours,) = [line for line in requests if line.get("trace") == TRACE]
    assert ours["completion_tokens"] == 8
    text = file.read_text()
    for prompt in load_prompts():
        assert prompt.question not in text
        assert prompt.expected not in text
    assert MODEL_NAME in text, "the base is the operator's name"
    say(f"{len(lines)} log lines are JSON; {len(requests)} requests have their ids; nothing of a tenant's text")


if __name__ == "__main__":
    main()
