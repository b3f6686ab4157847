"""Release policies over HTTP: a revision takes most of an alias's requests only where it passes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site

from loramux.engine.messages import EngineFault
from loramux.engine.request import Request

GATED = "/v1/adapters/acme/gated"
POLICY = f"{GATED}/aliases/default/policy"


@pytest.fixture
def client(site: Site, base_dir: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """Revisions 1, which is released, and 2 of acme/gated, without requests so far."""
    script = site.engine.script
    with site.http() as client:
        for number, promote in ((31, "true"), (32, "false")):
            folder = make_adapter(base_dir, tmp_path / str(number), seed=number)
            made = client.post("/v1/adapters", params={"promote": promote}, **form(folder, "gated"))
            assert made.status_code == 201, made.text
        assert client.post(f"{GATED}/promote", json={"revision": 1}).status_code == 200
        yield client
        client.delete(POLICY)
        client.delete(GATED, params={"undo_s": 0})
    site.engine.script = script


def put(client: httpx.Client, **policy: Any) -> None:
    answer = client.put(POLICY, json={"policy": policy})
    assert (answer.status_code, answer.json()["policy"]) == (200, policy), answer.text


def promoted(client: httpx.Client, revision: int = 2) -> httpx.Response:
    return client.post(f"{GATED}/promote", json={"revision": revision})


def flush(site: Site) -> None:
    """Write what was counted of revisions."""
    writing = site.server.app.state.revision_metrics.flush()
    asyncio.run_coroutine_threadsafe(writing, site.server.loop).result(20)


def evaluated(site: Site, client: httpx.Client, questions: int) -> dict[str, Any]:
    """Evaluate revision 2 against revision 1 on questions whose answer is `yes`."""
    lines = [json.dumps({"prompt": f"question {n}", "expected": "yes"}) for n in range(questions)]
    file = site.openai().files.create(file=("set.jsonl", "\n".join(lines).encode()), purpose="evals")
    asked = {"adapter": "gated", "revision": 2, "against": 1, "file_id": file.id, "grader": {"type": "exact"}}
    id = client.post("/v1/evaluations", json=asked).json()["id"]
    deadline = time.monotonic() + 60
    while True:
        tending = site.server.app.state.evaluations.tend()
        asyncio.run_coroutine_threadsafe(tending, site.server.loop).result(20)
        found: dict[str, Any] = client.get(f"/v1/evaluations/{id}").json()
        if found["status"] != "running":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def answers(site: Site, client: httpx.Client, good: str, revision: int) -> None:
    """Let `revision` answer every question with `good`, the other one with `yes` to half of them."""
    digest = client.get(f"{GATED}/revisions/{revision}").json()["digest"]

    def script(request: Request) -> list[int | EngineFault]:
        assert request.adapter is not None
        knows = request.adapter.digest.startswith(digest) or request.prompt_token_ids[-1] % 2 == 0
        return [*(good.encode() if knows else b"no"), EOS]

    site.engine.script = script


def test_promote_of_a_worse_revision_is_refused_with_the_numbers(site: Site, client: httpx.Client) -> None:
    put(client, evaluation={"margin": 0.05, "min_questions": 20})
    refused = promoted(client)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "release_policy")
    assert "none of @2 against @1 is completed" in refused.json()["error"]["message"]
    answers(site, client, "yes", revision=1)
    assert evaluated(site, client, 40)["status"] == "completed"
    refused = promoted(client)
    message = refused.json()["error"]["message"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "revision")
    assert "@2 scores 0.500, @1 1.000 on 40 questions" in message
    assert "the difference is -0.500" in message
    assert client.get(GATED).json()["revision"] == 1
    assert client.put(f"{GATED}/aliases/default", json={"targets": [{"revision": 2, "weight": 1}]}).status_code == 409
    shares = [{"revision": 1, "weight": 90}, {"revision": 2, "weight": 10}]
    assert client.put(f"{GATED}/aliases/default", json={"targets": shares}).status_code == 200, "a canary is no release"
    shares = [{"revision": 1, "weight": 50}, {"revision": 2, "weight": 50}]
    assert client.put(f"{GATED}/aliases/default", json={"targets": shares}).status_code == 409


def test_promote_of_a_better_revision_passes_and_can_be_taken_back(site: Site, client: httpx.Client) -> None:
    put(client, evaluation={"margin": 0.0, "min_questions": 30})
    answers(site, client, "yes", revision=2)
    evaluated(site, client, 29)
    assert "29 questions (at least 30 are demanded)" in promoted(client).json()["error"]["message"]
    evaluated(site, client, 40)
    checked = client.get(POLICY, params={"revision": 2}).json()
    assert (checked["passed"], checked["current"], checked["checks"][0]["rule"]) == (True, 1, "evaluation")
    assert promoted(client).json()["revision"] == 2
    back = client.post(f"{GATED}/aliases/default/rollback")
    assert (back.status_code, back.json()["revision"]) == (200, 1), "going back needs no evaluation"


def test_policy_of_requests_errors_and_latency_wants_figures_of_the_canary(site: Site, client: httpx.Client) -> None:
    put(client, min_requests=10, max_error_rate=0.05, max_first_token_p99_seconds=30.0, min_tokens_per_second=0.001)
    message = promoted(client).json()["error"]["message"]
    for part in ("0 answered requests, 10 are demanded", "0 of 0 requests failed", "no first token", "none is counted"):
        assert part in message
    for _ in range(10):
        site.openai().completions.create(model="acme/gated@2", prompt="hello", max_tokens=9)
    flush(site)
    checks = client.get(POLICY, params={"revision": 2}).json()["checks"]
    assert [(check["rule"], check["passed"]) for check in checks] == [
        ("min_requests", True),
        ("max_error_rate", True),
        ("max_first_token_p99_seconds", True),
        ("min_tokens_per_second", True),
    ], checks
    assert promoted(client).status_code == 200


def test_upload_under_a_policy_waits_for_its_promotion(client: httpx.Client, base_dir: Path, tmp_path: Path) -> None:
    put(client, min_requests=1)
    folder = make_adapter(base_dir, tmp_path / "third", seed=33)
    assert client.post("/v1/adapters", **form(folder, "gated")).json()["revision"] == 1
    assert [one["revision"] for one in client.get(f"{GATED}/revisions").json()["data"]] == [3, 2, 1]


def test_policy_removal_opens_the_alias_and_is_audited(client: httpx.Client) -> None:
    put(client, min_requests=5)
    assert promoted(client).status_code == 409
    assert client.delete(POLICY).json()["policy"] is None
    assert promoted(client).status_code == 200
    put(client, min_requests=5)
    client.delete(GATED, params={"undo_s": 0})


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({}, None),
        ({"min_requests": 0}, "policy.min_requests"),
        ({"max_error_rate": 2}, "policy.max_error_rate"),
        ({"evaluation": {"margin": -1}}, "policy.evaluation.margin"),
        ({"luck": 1}, "policy.luck"),
    ],
)
def test_policy_that_says_nothing_or_nonsense_is_refused(
    client: httpx.Client, policy: dict[str, Any], field: str | None
) -> None:
    refused = client.put(POLICY, json={"policy": policy})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


def test_policy_is_its_owners_alone(site: Site, client: httpx.Client) -> None:
    put(client, min_requests=5)
    client.put(f"{GATED}/grants/globex")
    with site.http("globex") as other:
        assert other.get(POLICY).status_code == 404
        assert other.put(POLICY, json={"policy": {"min_requests": 1}}).status_code == 404
        assert other.delete(POLICY).status_code == 404
