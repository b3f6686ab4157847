"""Metrics and feedback of an adapter's revisions, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site

from loramux.common.identity import TenantId
from loramux.common.jobs import TenantSlots
from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.data.records.revision_metrics import FIRST_TOKENS, RevisionHour, RevisionMetricsRepository
from loramux.engine.messages import EngineFault, Request, ServiceClass
from loramux.money.billing.catalog import PlanPrices, PlanTariff, PricePlan, Subscriptions
from loramux.money.pricing import Currency, Price, PriceStep
from loramux.releases import judges
from loramux.releases.evaluations import Evaluation, Evaluations
from loramux.releases.metrics import HOUR

RATED = "/v1/adapters/acme/rated"


@pytest.fixture(scope="module")
def client(site: Site, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Two revisions of acme/rated."""
    with site.http() as client:
        for seed in (3, 4):
            folder = make_adapter(base_dir, tmp_path_factory.mktemp("adapter"), seed=seed)
            assert client.post("/v1/adapters", **form(folder, "rated")).status_code == 201
        yield client
        client.delete(RATED, params={"undo_s": 0})


def reports(site: Site, client: httpx.Client, **params: str) -> dict[str, dict[str, Any]]:
    """Return the report after all counts were written."""
    flushed = site.server.app.state.programs.revision_metrics.flush()
    asyncio.run_coroutine_threadsafe(flushed, site.server.loop).result(120)
    answer = client.get(f"{RATED}/metrics", params=params)
    assert answer.status_code == 200, answer.text
    return {one["model"]: one for one in answer.json()["data"]}


def test_revision_metrics_count_requests_tokens_and_opinions(site: Site, client: httpx.Client) -> None:
    asked = site.openai()
    answers = [asked.completions.create(model="acme/rated@1", prompt="hello", max_tokens=100) for _ in range(3)]
    cut = asked.completions.create(model="acme/rated@2", prompt="hello", max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    for answer, score in zip(answers, (1, 0.5, 0), strict=True):
        said = client.post(f"/v1/requests/{answer.id}/feedback", json={"score": score, "label": "tone"})
        assert (said.status_code, said.json()["model"]) == (200, "acme/rated@1")
    client.post(f"/v1/requests/{answers[2].id}/feedback", json={"score": 0.9})  # in place of the 0
    found = reports(site, client, window="1h")
    assert list(found) == ["acme/rated@2", "acme/rated@1"]
    first, second = found["acme/rated@1"], found["acme/rated@2"]
    assert (first["requests"], first["completed"], first["failed"], first["refused"]) == (3, 3, 0, 0)
    assert (first["finish_reasons"]["stop"], second["finish_reasons"]["length"]) == (3, 1)
    used = [answer.usage for answer in answers if answer.usage is not None]
    assert first["prompt_tokens"] == sum(one.prompt_tokens for one in used) > 0
    assert first["output_tokens"] == sum(one.completion_tokens for one in used) > 0
    assert first["first_token_seconds"]["p50"] <= first["first_token_seconds"]["p99"]
    assert first["tokens_per_second"] > 0
    assert first["feedback"] == {"count": 3, "mean_score": pytest.approx(0.8), "labels": {"tone": 2}}
    assert second["feedback"] == {"count": 0, "mean_score": None, "labels": {}}


def test_key_of_a_project_sees_and_rates_the_answers_of_its_project_alone(site: Site, client: httpx.Client) -> None:
    project = f"team-{time.time_ns()}"
    with site.http("all-scopes") as owner:
        owner.post("/v1/projects", json={"name": project}).raise_for_status()
        body = {"scopes": ["inference", "usage", "read"], "project": project}
        secret = owner.post("/v1/keys", json=body).json()["key"]
    text = {"model": "acme/rated@1", "prompt": "hello", "max_tokens": 2}
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {secret}"}, timeout=60) as bound:
        other, own = (one.post("/v1/completions", json=text).json()["id"] for one in (client, bound))
        client.post(f"/v1/requests/{other}/feedback", json={"score": 0, "label": "others"}).raise_for_status()
        refused = bound.post(f"/v1/requests/{other}/feedback", json={"score": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        bound.post(f"/v1/requests/{own}/feedback", json={"score": 1, "label": "own"}).raise_for_status()
        [seen] = reports(site, bound).values()
        assert (seen["requests"], seen["feedback"]["labels"]) == (1, {"own": 1})
        [levels] = bound.get("/v1/organization/service_levels").json()["data"]
        assert (levels["model"], levels["requests"]) == ("acme/rated@1", 1)
        path = f"{RATED}/aliases/default/history/metrics"
        of_versions = [one for version in bound.get(path).json()["data"] for one in version["revisions"]]
        assert all(one["requests"] == 1 for one in of_versions)
    with site.http("all-scopes") as owner:
        everything = reports(site, owner)["acme/rated@1"]
    assert everything["requests"] >= 2
    assert everything["feedback"]["labels"].keys() >= {"own", "others"}


def test_revision_metrics_count_refused_and_failed_requests(site: Site, client: httpx.Client) -> None:
    before = reports(site, client).get("acme/rated@1", {"refused": 0})["refused"]
    with site.http("all-scopes") as admin:
        limit = "/admin/tenants/acme/limits/tokens_per_minute"
        assert admin.put(limit, json={"value": 1}).status_code == 200
        try:
            with pytest.raises(openai.BadRequestError):
                site.openai().completions.create(model="acme/rated@1", prompt="hello", max_tokens=9)
        finally:
            assert admin.delete(limit).status_code == 200
    assert reports(site, client)["acme/rated@1"]["refused"] == before + 1


def test_revision_metrics_and_feedback_are_the_tenants_alone(site: Site, client: httpx.Client) -> None:
    answer = site.openai().completions.create(model="acme/rated@1", prompt="hello")
    with site.http("globex") as other:
        assert other.get(f"{RATED}/metrics").status_code == 404
        refused = other.post(f"/v1/requests/{answer.id}/feedback", json={"score": 0})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize(
    ("body", "field"),
    [({"score": 2}, "score"), ({"score": 1, "label": "a b"}, "label"), ({"label": "x"}, "score"), ({}, "score")],
)
def test_feedback_out_of_range_is_refused(site: Site, client: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = site.openai().completions.create(model="acme/rated@1", prompt="hello")
    refused = client.post(f"/v1/requests/{answer.id}/feedback", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_feedback_on_the_base_or_on_nothing_is_not_found(site: Site, client: httpx.Client) -> None:
    answer = site.openai().completions.create(model="tiny", prompt="hello")
    for id in (answer.id, "cmpl-absent"):
        assert client.post(f"/v1/requests/{id}/feedback", json={"score": 1}).status_code == 404


def evaluate(site: Site, client: httpx.Client, questions: list[dict[str, Any]], **changes: Any) -> httpx.Response:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in questions)
    file = site.openai().files.create(file=("set.jsonl", data), purpose="evals")
    asked = {"adapter": "rated", "revision": 2, "against": 1, "file_id": file.id, "grader": {"type": "exact"}}
    return client.post("/v1/evaluations", json=asked | changes)


def digest_of(request: Request) -> str:
    assert request.adapter is not None
    return request.adapter.digest


def ended(site: Site, client: httpx.Client, id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        asyncio.run_coroutine_threadsafe(site.server.app.state.programs.evaluations.tend(), site.server.loop).result(
            120
        )
        found: dict[str, Any] = client.get(f"/v1/evaluations/{id}").json()
        if found["status"] != "running":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_evaluation_finds_the_better_revision_with_an_interval(site: Site, client: httpx.Client) -> None:
    digest = client.get(f"{RATED}/revisions/2").json()["digest"]

    def better_in_revision_2(request: Request) -> list[int | EngineFault]:
        assert request.adapter is not None
        good = request.adapter.digest.startswith(digest) or request.prompt_token_ids[-1] % 2 == 0
        return [*(b"yes" if good else b"no"), EOS]

    site.engine.script = better_in_revision_2
    made = evaluate(site, client, [{"prompt": f"question {n}", "expected": "yes"} for n in range(40)])
    assert made.status_code == 200, made.text
    assert made.json()["models"] == ["acme/rated@2", "acme/rated@1"]
    found = ended(site, client, made.json()["id"])
    assert found["status"] == "completed", found
    result = found["result"]
    assert (result["questions"], result["better"], result["worse"]) == (40, 20, 0)
    assert (result["candidate"]["score"]["mean"], result["against"]["score"]["mean"]) == (1.0, 0.5)
    assert 0.3 < result["difference"]["low"] < 0.5 < result["difference"]["high"] < 0.7
    assert result["candidate"]["errors"] == 0
    assert result["against"]["output_tokens"] > 0
    listed = client.get("/v1/evaluations", params={"adapter": "rated", "limit": 1}).json()
    assert listed["data"][0]["id"] == found["id"]
    of_candidate = [
        client.get("/v1/evaluations", params={"adapter": "rated", "revision": revision}).json()["data"]
        for revision in (2, 1)
    ]
    assert (found["id"] in [one["id"] for one in of_candidate[0]], of_candidate[1]) == (True, [])
    assert {request.service_class for request in site.engine.requests} == {ServiceClass.BATCH}


def test_evaluation_has_latency_of_answers_and_their_exact_cost(
    site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def price(meter: str, tier: str, nanos: int) -> Price:
        steps = (PriceStep(0, nanos),)
        return Price(id=f"{meter}-{tier}", plan_id="plan", meter=meter, tier=tier, valid_from=0, steps=steps)

    batch = [price("input_uncached", "*/batch", 10**6), price("input_cached", "*/batch", 10**6)]
    prices = (*batch, price("output", "*/batch", 10**7), price("output", "*", 10**9))
    plan = PricePlan(id="plan", name="measured", currency=Currency.of("EUR"), minimum=0, prices=prices)

    async def tariff(_: PlanPrices, session: object, tenants: list[TenantId]) -> PlanTariff:
        return PlanTariff({tenant: Subscriptions(((0, plan),)) for tenant in tenants}, time.time_ns() // 1000)

    monkeypatch.setattr(PlanPrices, "tariff", tariff)
    site.engine.script = lambda _: [*b"yes", EOS]
    made = evaluate(site, client, [{"prompt": f"question {n}", "expected": "yes"} for n in range(5)])
    for side in (found := ended(site, client, made.json()["id"]))["result"]["candidate"], found["result"]["against"]:
        nanos = side["prompt_tokens"] * 10**6 + side["output_tokens"] * 10**7
        assert side["cost"] == {"amount": f"{nanos / 10**9:.9f}", "currency": "EUR"}
        assert (side["output_tokens"], side["latency"]["answers"]) == (5 * 4, 5)
        assert 0 <= side["latency"]["first_token_seconds"]["p50"] <= side["latency"]["first_token_seconds"]["p99"]
        assert side["latency"]["tokens_per_second"] > 0


@pytest.fixture
def judge(site: Site) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A judge on this machine, which likes the answer `yes`, and what it was sent; acme may use judges."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body | {"key": self.headers["Authorization"]})
            case = json.loads(body["messages"][1]["content"])
            verdict = json.dumps({"score": 0.9 if case["answer"] == "yes" else 0.1})
            text = "no verdict" if case["answer"] == "lie" else verdict
            data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with site.http("all-scopes") as admin:
        allowed = admin.patch("/admin/tenants/acme", json={"allow_judges": True})
        assert allowed.json()["allow_judges"] is True, allowed.text
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
        admin.patch("/admin/tenants/acme", json={"allow_judges": False})
    server.shutdown()
    server.server_close()


def test_evaluation_by_a_judge_has_its_scores_and_never_shows_its_key(
    site: Site, client: httpx.Client, judge: tuple[str, list[dict[str, Any]]]
) -> None:
    url, seen = judge
    digest = client.get(f"{RATED}/revisions/2").json()["digest"]
    site.engine.script = lambda request: [*(b"yes" if digest_of(request).startswith(digest) else b"no"), EOS]
    grader = {"type": "judge", "url": url, "model": "strict"}
    made = evaluate(site, client, [{"prompt": "x", "expected": "yes"}], grader=grader, judge_api_key="sk-secret")
    found = ended(site, client, made.json()["id"])
    assert found["status"] == "completed", found
    assert (found["result"]["candidate"]["score"]["mean"], found["result"]["against"]["score"]["mean"]) == (0.9, 0.1)
    assert "sk-secret" not in made.text + json.dumps(found)
    assert {(one["key"], one["model"]) for one in seen} == {("Bearer sk-secret", "strict")}


def test_evaluation_whose_judge_lies_fails_and_keeps_the_answers(
    site: Site, client: httpx.Client, judge: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "FIRST_PAUSE", 0.0)
    site.engine.script = lambda _: [*b"lie", EOS]
    made = evaluate(site, client, [{"prompt": "x"}], grader={"type": "judge", "url": judge[0], "model": "m"})
    found = ended(site, client, made.json()["id"])
    assert (found["status"], found["result"]) == ("failed", None)
    assert "no score for question 1 in 3 attempts" in found["error"]
    output = site.openai().batches.retrieve(found["batch_id"]).output_file_id
    assert output is not None
    assert site.openai().files.content(output).text.count('"lie"') == 2


def test_evaluation_by_a_judge_needs_the_operators_leave(site: Site, client: httpx.Client) -> None:
    grader = {"type": "judge", "url": "https://example.com/v1", "model": "m"}
    refused = evaluate(site, client, [{"prompt": "x"}], grader=grader)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "judges_not_allowed")


def test_evaluations_of_one_tenant_wait_for_its_share_of_memory(
    site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets and answers are in memory until the last score; a share of one byte holds one evaluation at a time."""
    monkeypatch.setattr(site.server.app.state.programs.evaluations, "_memory", TenantSlots(1 << 30, 1))
    held, held_at_once, goes_on = set[str](), dict[str, int](), asyncio.Event()
    read, compared = Evaluations._answers, Evaluations._compared

    async def noted_read(self: Evaluations, evaluation: Evaluation, *files: Any) -> Any:
        held.add(evaluation.id)
        held_at_once[evaluation.id] = len(held)
        return await read(self, evaluation, *files)

    async def slowly_compared(self: Evaluations, evaluation: Evaluation, *answers: Any) -> Any:
        await goes_on.wait()
        result = await compared(self, evaluation, *answers)
        held.discard(evaluation.id)
        return result

    monkeypatch.setattr(Evaluations, "_answers", noted_read)
    monkeypatch.setattr(Evaluations, "_compared", slowly_compared)
    made = [evaluate(site, client, [{"prompt": "x", "expected": "yes"}]).json() for _ in range(3)]
    batches = site.openai().batches
    deadline = time.monotonic() + 120
    while any(batches.retrieve(one["batch_id"]).status != "completed" for one in made):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ours = {one["id"] for one in made}
    while not held:
        asyncio.run_coroutine_threadsafe(site.server.app.state.programs.evaluations.tend(), site.server.loop).result(
            120
        )
        time.sleep(0.05)
    time.sleep(0.5)  # time in which the others would have been read
    site.server.loop.call_soon_threadsafe(goes_on.set)
    assert [ended(site, client, one["id"])["status"] for one in made] == ["completed"] * 3
    # An evaluation of an earlier test may end here too; it waits for the same share.
    assert ours <= held_at_once.keys()
    assert set(held_at_once.values()) == {1}


def test_evaluation_of_one_question_says_nothing_for_certain(site: Site, client: httpx.Client) -> None:
    made = evaluate(site, client, [{"messages": [{"role": "user", "content": "hi"}], "expected": "hi"}])
    difference = ended(site, client, made.json()["id"])["result"]["difference"]
    assert (difference["low"], difference["high"]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("questions", "changes", "field"),
    [
        ([{"prompt": "x", "messages": []}], {}, "file_id"),
        ([{"expected": "x"}], {}, "file_id"),
        ([{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}], {}, "file_id"),
        ([{"prompt": "x"}], {"against": 2}, "against"),
        ([{"prompt": "x"}], {"against": 9}, "model"),
        ([{"prompt": "x"}], {"adapter": "absent"}, "name"),
        ([{"prompt": "x"}], {"grader": {"type": "regex", "pattern": "("}}, "grader.pattern"),
        ([{"prompt": "x"}], {"grader": {"type": "json_schema", "schema": {"$ref": "http://x/y"}}}, "grader.schema"),
        ([{"prompt": "x"}], {"grader": {"type": "magic"}}, "grader.type"),
    ],
)
def test_evaluation_with_wrong_parameters_is_refused(
    site: Site, client: httpx.Client, questions: list[dict[str, Any]], changes: dict[str, Any], field: str
) -> None:
    refused = evaluate(site, client, questions, **changes)
    assert refused.status_code in (400, 404), refused.text
    assert refused.json()["error"]["param"] == field, refused.text


def test_evaluation_of_a_training_file_against_the_base_expects_the_last_messages(
    site: Site, client: httpx.Client
) -> None:
    site.engine.script = lambda request: [*(b"base" if request.adapter is None else b"tuned"), EOS]
    talk = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c?"},
        {"role": "assistant", "content": "tuned"},
    ]
    data = b"".join(json.dumps({"messages": talk}).encode() + b"\n" for _ in range(10))
    file = site.openai().files.create(file=("valid.jsonl", data), purpose="fine-tune")
    made = evaluate(site, client, [{"prompt": "x"}], against="base", file_id=file.id)
    assert made.status_code == 200, made.text
    assert made.json()["models"] == ["acme/rated@2", "tiny"]
    found = ended(site, client, made.json()["id"])
    assert found["status"] == "completed", found
    result = found["result"]
    assert (result["questions"], result["better"], result["worse"]) == (10, 10, 0)
    assert (result["candidate"]["score"]["mean"], result["against"]["score"]["mean"]) == (1.0, 0.0)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"messages": [talk[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    data = b"".join(json.dumps(one).encode() + b"\n" for one in [{"messages": talk}] * 9 + [calls])
    file = site.openai().files.create(file=("calls.jsonl", data), purpose="fine-tune")
    refused = evaluate(site, client, [{"prompt": "x"}], against="base", file_id=file.id)
    assert refused.status_code == 400
    assert "Line 10 is no question: a conversation ends with an assistant's message" in refused.text


def test_evaluation_whose_questions_the_endpoint_refuses_fails_with_the_line(site: Site, client: httpx.Client) -> None:
    made = evaluate(site, client, [{"messages": [{"role": "wizard", "content": "x"}]}])
    found = ended(site, client, made.json()["id"])
    assert found["status"] == "failed"
    assert "wizard" in found["error"]


def test_evaluation_is_the_tenants_alone(site: Site, newcomer: str, client: httpx.Client) -> None:
    made = evaluate(site, client, [{"prompt": "x"}]).json()
    with site.http("globex") as other:
        assert other.get(f"/v1/evaluations/{made['id']}").status_code == 404
        assert made["id"] not in [one["id"] for one in other.get("/v1/evaluations").json()["data"]]
    with site.http(newcomer) as other:
        assert other.get("/v1/evaluations").json()["data"] == []
    ended(site, client, made["id"])


def watched(site: Site, client: httpx.Client) -> list[dict[str, Any]]:
    """Let the guards look, and return the targets of the alias `stage`."""
    reports(site, client)
    asyncio.run_coroutine_threadsafe(site.server.app.state.programs.guards.watch(), site.server.loop).result(120)
    aliases = client.get(f"{RATED}/aliases").json()["data"]
    return next(alias["targets"] for alias in aliases if alias["name"] == "stage")


_hours = itertools.count(1)


@pytest.fixture
def stage(site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new alias with a canary of half the users, in an hour in which no other test has sent requests: guards compare
    whole hours."""
    database, hours = site.server.app.state.platform.database, next(_hours)
    now = database.now
    monkeypatch.setattr(database, "now", lambda: now() + hours * HOUR)
    targets = [{"revision": 1, "weight": 50}, {"revision": 2, "weight": 50}]
    assert client.put(f"{RATED}/aliases/stage", json={"targets": targets}).status_code == 200
    yield f"{RATED}/aliases/stage"
    client.delete(f"{RATED}/aliases/stage")


def test_canary_with_a_planted_fault_is_taken_back_by_its_guard(site: Site, client: httpx.Client, stage: str) -> None:
    digest = client.get(f"{RATED}/revisions/2").json()["digest"]

    def broken_in_revision_2(request: Request) -> list[int | EngineFault]:
        assert request.adapter is not None
        if request.adapter.digest.startswith(digest):
            return [EngineFault("adapter_failed", "its weights cannot be loaded")]
        return [*b"fine", EOS]

    site.engine.script = broken_in_revision_2
    assert client.put(f"{stage}/guard", json={"measures": ["errors"]}).json()["measures"] == ["errors"]
    for user in range(60):
        with suppress(openai.InternalServerError):
            site.openai().completions.create(model="acme/rated:stage", prompt="x", user=f"user-{user}")
    assert watched(site, client) == [{"revision": 1, "weight": 50}]
    events = client.get("/v1/events", params={"adapter": "rated"}).json()["data"]
    event = next(one for one in events if one["type"] == "adapter.canary.rolled_back")
    assert event["data"]["revision"] == 2
    good, total = event["data"]["canary"]["candidate"]
    assert good < total >= 20


def test_canary_of_an_older_revision_is_taken_back_and_the_newer_one_stays(
    site: Site, client: httpx.Client, stage: str
) -> None:
    """Revision 2 has the alias; the older revision 1 is tried next to it and is broken."""
    digest = client.get(f"{RATED}/revisions/1").json()["digest"]

    def broken_in_revision_1(request: Request) -> list[int | EngineFault]:
        broken = digest_of(request).startswith(digest)
        return [EngineFault("internal_error", "planted")] if broken else [*b"yes", EOS]

    site.engine.script = broken_in_revision_1
    client.put(stage, json={"targets": [{"revision": 2, "weight": 100}]}).raise_for_status()
    targets = [{"revision": 2, "weight": 50}, {"revision": 1, "weight": 50}]
    client.put(stage, json={"targets": targets}).raise_for_status()
    client.put(f"{stage}/guard", json={"measures": ["errors"]}).raise_for_status()
    asked = site.openai().with_options(max_retries=0)
    for number in range(120):
        with suppress(openai.InternalServerError):
            asked.completions.create(model=f"acme/rated@{1 + number % 2}", prompt="hello")
    assert [one["revision"] for one in watched(site, client)] == [2]


def test_canary_with_late_first_tokens_is_taken_back_by_its_guard(site: Site, client: httpx.Client, stage: str) -> None:
    """The counts are written as a server would: nothing here depends on how fast this machine is."""
    guard = client.put(f"{stage}/guard", json={"measures": ["latency"], "first_token_seconds": 0.5})
    assert (guard.status_code, guard.json()["first_token_seconds"]) == (200, 0.5), guard.text
    assert client.get(f"{stage}/guard").json()["measures"] == ["latency"]
    platform = site.server.app.state.platform
    hour = platform.database.now() // HOUR * HOUR
    in_time, late = FIRST_TOKENS[FIRST_TOKEN_BOUNDS.index(0.5)], FIRST_TOKENS[FIRST_TOKEN_BOUNDS.index(0.75)]

    async def serve(revision: int, counts: dict[str, int]) -> None:
        tenant = await platform.tenants.named("acme")
        async with platform.database.begin() as session:
            await RevisionMetricsRepository(session).add(
                {RevisionHour(tenant.id, "", f"acme/rated@{revision}", hour): counts}
            )

    for revision, counts in ((1, {in_time: 5000, late: 100}), (2, {in_time: 400, late: 600})):
        asyncio.run_coroutine_threadsafe(serve(revision, counts), site.server.loop).result(20)
    assert watched(site, client) == [{"revision": 1, "weight": 50}]
    events = client.get("/v1/events", params={"adapter": "rated"}).json()["data"]
    numbers = next(one for one in events if one["type"] == "adapter.canary.rolled_back")["data"]["canary"]
    assert numbers["measure"] == "latency"
    assert numbers["candidate"][1] - numbers["candidate"][0] >= 600


@pytest.mark.parametrize(
    "body",
    [
        {"measures": ["latency"]},
        {"measures": ["latency"], "first_token_seconds": 0.3},
        {"measures": ["errors"], "first_token_seconds": 0.5},
    ],
)
def test_guard_of_latency_has_one_of_the_counters_bounds(
    client: httpx.Client, stage: str, body: dict[str, Any]
) -> None:
    refused = client.put(f"{stage}/guard", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "first_token_seconds")


def test_canary_that_is_as_good_or_has_no_guard_stays(site: Site, client: httpx.Client, stage: str) -> None:
    assert client.get(f"{stage}/guard").json()["measures"] == []
    client.put(f"{stage}/guard", json={"measures": ["feedback"]})
    for user in range(60):
        answer = site.openai().completions.create(model="acme/rated:stage", prompt="x", user=f"user-{user}")
        client.post(f"/v1/requests/{answer.id}/feedback", json={"score": user % 2})
    assert [one["revision"] for one in watched(site, client)] == [1, 2]
    assert client.delete(f"{stage}/guard").json()["measures"] == []


def test_release_history_has_the_metrics_of_each_version(site: Site, client: httpx.Client, stage: str) -> None:
    asked = site.openai()
    for number in (1, 2):
        asked.completions.create(model=f"acme/rated@{number}", prompt="hello", max_tokens=3)
    client.put(stage, json={"targets": [{"revision": 1, "weight": 1}]})
    reports(site, client)
    found = client.get(f"{stage}/history/metrics").json()["data"]
    versions = client.get(f"{stage}/history").json()["data"]
    assert [one["version"] for one in found] == [one["version"] for one in versions][:20]
    assert [one["model"] for one in found[0]["revisions"]] == ["acme/rated@1"]
    assert [one["model"] for one in found[1]["revisions"]] == ["acme/rated@2", "acme/rated@1"]
    assert all(one["requests"] > 0 for one in found[1]["revisions"])
    assert found[1]["until"] == found[0]["since"] <= found[0]["until"]
    with site.http("globex") as other:
        assert other.get(f"{stage}/history/metrics").status_code == 404


def test_guard_with_wrong_measures_or_alias_is_refused(site: Site, client: httpx.Client, stage: str) -> None:
    assert client.put(f"{stage}/guard", json={"measures": ["luck"]}).json()["error"]["param"] == "measures"
    assert client.put(f"{RATED}/aliases/none/guard", json={"measures": ["errors"]}).status_code == 404
    with site.http("globex") as other:
        assert other.get(f"{stage}/guard").status_code == 404
