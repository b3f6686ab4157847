"""Release policies over HTTP: a revision takes most of an alias's requests only if it passes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site

from loramux.engine.messages import EngineFault, Request

numbers = itertools.count()


@dataclass
class Gated:
    """An adapter with revision 1, which is released, and revision 2, without requests so far."""

    site: Site
    http: httpx.Client
    name: str

    @property
    def path(self) -> str:
        return f"/v1/adapters/acme/{self.name}"

    @property
    def policy(self) -> str:
        return f"{self.path}/aliases/default/policy"


@pytest.fixture
def gated(site: Site, base_dir: Path, tmp_path: Path) -> Iterator[Gated]:
    """A new adapter for each test, because a revision's counts stay with its name."""
    script = site.engine.script
    with site.http() as http:
        gated = Gated(site, http, f"gated-{next(numbers)}")
        for number in (31, 32):
            folder = make_adapter(base_dir, tmp_path / str(number), seed=number)
            made = http.post("/v1/adapters", **form(folder, gated.name))
            assert made.status_code == 201, made.text
        assert http.post(f"{gated.path}/promote", json={"revision": 1}).status_code == 200
        yield gated
        http.delete(gated.path, params={"undo_s": 0})
    site.engine.script = script


def put(gated: Gated, **policy: Any) -> None:
    answer = gated.http.put(gated.policy, json={"policy": policy})
    assert answer.status_code == 200, answer.text
    assert answer.json()["policy"].keys() == policy.keys()


def promoted(gated: Gated, revision: int = 2) -> httpx.Response:
    return gated.http.post(f"{gated.path}/promote", json={"revision": revision})


def flush(gated: Site) -> None:
    """Write what was counted of revisions."""
    writing = gated.site.server.app.state.programs.revision_metrics.flush()
    asyncio.run_coroutine_threadsafe(writing, gated.site.server.loop).result(20)


def evaluated(gated: Gated, questions: int) -> dict[str, Any]:
    """Evaluate revision 2 against revision 1 on questions whose answer is `yes`."""
    lines = [json.dumps({"prompt": f"question {n}", "expected": "yes"}) for n in range(questions)]
    file = gated.site.openai().files.create(file=("set.jsonl", "\n".join(lines).encode()), purpose="evals")
    asked = {"adapter": gated.name, "revision": 2, "against": 1, "file_id": file.id, "grader": {"type": "exact"}}
    id = gated.http.post("/v1/evaluations", json=asked).json()["id"]
    deadline = time.monotonic() + 60
    while True:
        tending = gated.site.server.app.state.programs.evaluations.tend()
        asyncio.run_coroutine_threadsafe(tending, gated.site.server.loop).result(20)
        found: dict[str, Any] = gated.http.get(f"/v1/evaluations/{id}").json()
        if found["status"] != "running":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def answers(gated: Gated, good: str, revision: int) -> None:
    """Let `revision` answer every question with `good`, the other one with `yes` to half of them."""
    digest = gated.http.get(f"{gated.path}/revisions/{revision}").json()["digest"]

    def script(request: Request) -> list[int | EngineFault]:
        assert request.adapter is not None
        knows = request.adapter.digest.startswith(digest) or request.prompt_token_ids[-1] % 2 == 0
        return [*(good.encode() if knows else b"no"), EOS]

    gated.site.engine.script = script


def test_promote_of_a_worse_revision_is_refused_with_the_numbers(gated: Gated) -> None:
    put(gated, evaluation={"margin": 0.05, "min_questions": 20})
    refused = promoted(gated)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "release_policy")
    assert "none of @2 against @1 is completed" in refused.json()["error"]["message"]
    answers(gated, "yes", revision=1)
    assert evaluated(gated, 40)["status"] == "completed"
    refused = promoted(gated)
    message = refused.json()["error"]["message"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "revision")
    assert "@2 scores 0.500, @1 1.000 on 40 questions" in message
    assert "the difference is -0.500" in message
    assert gated.http.get(gated.path).json()["revision"] == 1
    assert (
        gated.http.put(f"{gated.path}/aliases/default", json={"targets": [{"revision": 2, "weight": 1}]}).status_code
        == 409
    )
    shares = [{"revision": 1, "weight": 90}, {"revision": 2, "weight": 10}]
    assert gated.http.put(f"{gated.path}/aliases/default", json={"targets": shares}).status_code == 200, (
        "a canary is no release"
    )
    shares = [{"revision": 1, "weight": 50}, {"revision": 2, "weight": 50}]
    assert gated.http.put(f"{gated.path}/aliases/default", json={"targets": shares}).status_code == 409


def test_promote_of_a_better_revision_passes_and_can_be_taken_back(gated: Gated) -> None:
    put(gated, evaluation={"margin": 0.0, "min_questions": 30})
    answers(gated, "yes", revision=2)
    evaluated(gated, 29)
    assert "29 questions (at least 30 are demanded)" in promoted(gated).json()["error"]["message"]
    evaluated(gated, 40)
    checked = gated.http.get(gated.policy, params={"revision": 2}).json()
    assert (checked["passed"], checked["current"], checked["checks"][0]["rule"]) == (True, 1, "evaluation")
    assert promoted(gated).json()["revision"] == 2
    back = gated.http.post(f"{gated.path}/aliases/default/rollback")
    assert (back.status_code, back.json()["revision"]) == (200, 1), "going back needs no evaluation"


def test_policy_of_requests_errors_and_latency_wants_figures_of_the_canary(gated: Gated) -> None:
    put(gated, min_requests=10, max_error_rate=0.05, max_first_token_p99_seconds=30.0, min_tokens_per_second=0.001)
    message = promoted(gated).json()["error"]["message"]
    for part in ("0 answered requests, 10 are demanded", "0 of 0 requests failed", "no first token", "none is counted"):
        assert part in message
    for _ in range(10):
        gated.site.openai().completions.create(model=f"acme/{gated.name}@2", prompt="hello", max_tokens=9)
    flush(gated)
    checks = gated.http.get(gated.policy, params={"revision": 2}).json()["checks"]
    assert [(check["rule"], check["passed"]) for check in checks] == [
        ("min_requests", True),
        ("max_error_rate", True),
        ("max_first_token_p99_seconds", True),
        ("min_tokens_per_second", True),
    ], checks
    assert promoted(gated).status_code == 200


def test_upload_under_a_policy_waits_for_its_promotion(gated: Gated, base_dir: Path, tmp_path: Path) -> None:
    put(gated, min_requests=1)
    folder = make_adapter(base_dir, tmp_path / "third", seed=33)
    assert gated.http.post("/v1/adapters", **form(folder, gated.name)).json()["revision"] == 1
    assert [one["revision"] for one in gated.http.get(f"{gated.path}/revisions").json()["data"]] == [3, 2, 1]


def test_main_revision_that_expires_stays_until_its_canary_passes(gated: Gated) -> None:
    put(gated, min_requests=1)
    shares = [{"revision": 1, "weight": 95}, {"revision": 2, "weight": 5}]
    gated.http.put(f"{gated.path}/aliases/default", json={"targets": shares}).raise_for_status()
    path = f"{gated.path}/revisions/1"
    first = gated.http.patch(path, json={"ttl_s": 1}).json()["expires_at"]
    deadline = time.monotonic() + 60
    while (found := gated.http.get(path).json())["expires_at"] == first and time.monotonic() < deadline:
        expiring = gated.site.server.app.state.platform.adapters.deletion.expire()
        asyncio.run_coroutine_threadsafe(expiring, gated.site.server.loop).result(20)
        time.sleep(0.1)
    assert found["expires_at"] >= first + 3600, found
    assert gated.http.get(gated.path).json()["revision"] == 1


def test_policy_removal_opens_the_alias_and_is_audited(gated: Gated) -> None:
    put(gated, min_requests=5)
    assert promoted(gated).status_code == 409
    assert gated.http.delete(gated.policy).json()["policy"] is None
    assert promoted(gated).status_code == 200
    put(gated, min_requests=5)
    gated.http.delete(gated.path, params={"undo_s": 0})


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
    gated: Gated, policy: dict[str, Any], field: str | None
) -> None:
    refused = gated.http.put(gated.policy, json={"policy": policy})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


def test_policy_is_its_owners_alone(gated: Gated) -> None:
    put(gated, min_requests=5)
    gated.http.put(f"{gated.path}/grants/globex")
    with gated.site.http("globex") as other:
        assert other.get(gated.policy).status_code == 404
        assert other.put(gated.policy, json={"policy": {"min_requests": 1}}).status_code == 404
        assert other.delete(gated.policy).status_code == 404
