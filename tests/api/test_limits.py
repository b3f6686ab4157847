"""Limits and idempotency keys on the wire."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from flat_prices import give_flat_plan
from listening import until_true
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux.data.records.database import Database

TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def tenant(site: Site, request: pytest.FixtureRequest) -> str:
    """A tenant of the test's own, by its key's name."""
    name = f"t{abs(hash((request.node.name, site.url))):x}"
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": name}).raise_for_status()
        made = http.post(f"/admin/tenants/{name}/keys", json={})
        site.keys[name] = made.json()["key"]
    return name


@pytest.fixture(scope="module")
def priced(site: Site) -> Callable[[str], None]:
    """Gives a tenant a price plan, without which it gets no budget."""

    given: set[str] = set()

    async def give(tenant: str) -> None:
        if tenant in given:
            return
        given.add(tenant)
        database = Database(site.settings.records.url)
        await give_flat_plan(database, tenant)
        await database.close()

    return lambda tenant: asyncio.run(give(tenant))


def put(site: Site, path: str, body: dict[str, object]) -> None:
    with site.http("all-scopes") as http:
        answer = http.put(f"/admin/{path}", json=body)
        assert answer.status_code == 200, answer.text


def ask(site: Site, key: str, **changes: object) -> httpx.Response:
    with site.http(key) as http:
        return http.post("/v1/completions", json=TEXT | changes)


def budgets(site: Site, tenant: str) -> list[dict[str, Any]]:
    with site.http("all-scopes") as http:
        found: list[dict[str, Any]] = http.get(f"/admin/tenants/{tenant}/budgets").json()["data"]
    return found


def models(site: Site, key: str) -> int:
    with site.http(key) as http:
        return http.get("/v1/models").status_code


def test_rate_limit_headers_have_the_remaining_amount(site: Site, tenant: str) -> None:
    put(site, f"tenants/{tenant}/limits/requests_per_minute", {"value": 2})
    put(site, f"tenants/{tenant}/limits/tokens_per_minute", {"value": 600})
    with site.http(tenant) as http:
        first = http.post("/v1/completions", json=TEXT)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "600"
        assert first.headers["x-ratelimit-remaining-tokens"] == "593"
        assert first.headers["x-ratelimit-reset-tokens"] == "700ms"
        with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "0"
            stream.read()
        refused = http.post("/v1/completions", json=TEXT)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    with site.openai(tenant) as client, pytest.raises(openai.RateLimitError):
        client.completions.create(**TEXT)


def test_budget_without_prices_is_refused(site: Site, tenant: str, priced: Callable[[str], None]) -> None:
    path = f"/admin/tenants/{tenant}/budgets/month"
    with site.http("all-scopes") as http:
        refused = http.put(path, json={"amount_nano": 10**12})
        assert refused.status_code == 400
        assert "no price plan" in refused.json()["detail"]
        assert "loramux price assign" in refused.json()["detail"]
        priced(tenant)
        assert http.put(path, json={"amount_nano": 10**12}).status_code == 200


def test_budget_made_after_requests_counts_them(site: Site, tenant: str, priced: Callable[[str], None]) -> None:
    priced(tenant)
    tokens = sum(ask(site, tenant).json()["usage"]["total_tokens"] for _ in range(3))
    for period in ("month", "total"):
        put(site, f"tenants/{tenant}/budgets/{period}", {"amount_nano": 10**9})
    found = {one["period"]: (one["spent_nano"], one["held_nano"]) for one in budgets(site, tenant)}
    assert found == dict.fromkeys(("month", "total"), (tokens, 0))
    assert {one["abandoned_nano"] for one in budgets(site, tenant)} == {0}


def test_budget_that_a_tenant_makes_for_a_key_counts_its_requests(site: Site, priced: Callable[[str], None]) -> None:
    priced("acme")
    with site.http("all-scopes") as http:
        made = http.post("/v1/keys", json={}).json()
        site.keys["counted"] = made["key"]
        tokens = ask(site, "counted").json()["usage"]["total_tokens"]
        assert http.put(f"/v1/budgets/{made['id']}/month", json={"amount_nano": 10**9}).status_code == 200
        [budget] = [one for one in http.get("/v1/budgets").json()["data"] if one["subject"] == made["id"]]
    assert budget["spent_nano"] == tokens > 0


def test_budget_counts_an_answer_that_its_client_did_not_wait_for(
    site: Site, tenant: str, priced: Callable[[str], None]
) -> None:
    priced(tenant)
    put(site, f"tenants/{tenant}/budgets/month", {"amount_nano": 10**9})
    site.engine.script, site.engine.pause = lambda request: [120] * 100, 0.05
    with site.unanswered(tenant, TEXT | {"max_tokens": 100}):
        until_true(lambda: any(site.engine.told.get(one.id, 0) > 1 for one in site.engine.requests))
    until_true(lambda: not budgets(site, tenant)[0]["held_nano"])
    budget = budgets(site, tenant)[0]
    assert budget["spent_nano"] == budget["abandoned_nano"] > 0


def test_budget_exceeded_is_not_retryable(site: Site, tenant: str, priced: Callable[[str], None]) -> None:
    priced(tenant)
    put(site, f"tenants/{tenant}/budgets/total", {"amount_nano": 0})
    with site.http(tenant) as http:
        refused = http.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers


def test_queue_limit_refuses_requests(site: Site, tenant: str) -> None:
    put(site, f"tenants/{tenant}/limits/queued_requests", {"value": 1})
    site.engine.pause = 1.5
    first = threading.Thread(target=lambda: ask(site, tenant, max_tokens=1))
    first.start()
    while not site.engine.requests:
        pass
    with site.http(tenant) as http:
        refused = http.post("/v1/completions", json=TEXT)
    first.join()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_limit_exceeded")


def test_tenant_sets_limits_below_itself_only(site: Site, priced: Callable[[str], None]) -> None:
    priced("acme")
    with site.http("all-scopes") as http:
        made = http.post("/v1/keys", json={}).json()
        path = f"/v1/limits/{made['id']}/requests_per_minute"
        assert http.put(path, json={"value": 0}).json()["value"] == 0
        assert http.put(f"/v1/budgets/{made['id']}/day", json={"amount_nano": 5}).json()["thresholds"] == [50, 80, 100]
        assert made["id"] in {one["subject"] for one in http.get("/v1/limits").json()["data"]}
        assert made["id"] in {one["subject"] for one in http.get("/v1/budgets").json()["data"]}
        site.keys["limited"] = made["key"]
        assert ask(site, "limited").status_code == 429
        assert http.delete(path).status_code == 200
        assert http.delete(f"/v1/budgets/{made['id']}/day").status_code == 200
        assert ask(site, "limited").status_code == 200
        own = http.get("/admin/tenants/acme").json()["id"]
        assert http.put(f"/v1/limits/{own}/requests_per_minute", json={"value": 9}).status_code == 403
        assert http.put(f"/v1/budgets/{own}/day", json={"amount_nano": 9}).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_idempotent_request_is_answered_twice_and_billed_once(
    site: Site, tenant: str, path: str, body: dict[str, object], stream: bool
) -> None:
    body = body | {"n": 2, "stream": stream, "seed": 1, "logprobs": 1 if path == "/v1/completions" else True}
    headers = {"Idempotency-Key": f"{path}-{stream}"}
    with site.http(tenant) as http:
        first = http.post(path, json=body, headers=headers)
        asked = len(site.engine.requests)
        again = http.post(path, json=body, headers=headers)
        whole = http.post(path, json=body | {"stream": not stream}, headers=headers)
        used = http.get("/v1/organization/usage/completions", params={"start_time": int(time.time()) - 86_400}).json()
    assert first.status_code == again.status_code == 200
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    if not stream:
        assert again.json() == first.json()
    else:
        assert again.text == first.text
        assert first.text.count("data: ") > 6
    assert whole.status_code == 422
    assert len(site.engine.requests) == asked
    assert sum(result["num_model_requests"] for bucket in used["data"] for result in bucket["results"]) == 1


def test_idempotent_request_in_flight_conflicts(site: Site, tenant: str) -> None:
    site.engine.script, site.engine.pause = lambda request: [120] * 100, 0.2
    body, headers = TEXT | {"max_tokens": 100}, {"Idempotency-Key": "k"}
    with site.http(tenant) as http:
        with site.unanswered(tenant, body, **headers):
            until_true(lambda: site.engine.running)
        busy = http.post("/v1/completions", json=body, headers=headers)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "idempotency_key_in_use")
        assert busy.headers["retry-after"] == "1"
        site.engine.pause = 0.0
        while busy.status_code == 409:
            busy = http.post("/v1/completions", json=body, headers=headers)
        assert busy.headers["idempotent-replayed"] == "true"
        other = http.post("/v1/completions", json=body | {"seed": 2}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        wrong = http.post("/v1/completions", json=TEXT, headers={"Idempotency-Key": "x" * 256})
        assert wrong.json()["error"]["param"] == "Idempotency-Key"


def test_adapter_limit_refuses_uploads(site: Site, tenant: str, base_dir: Path, tmp_path: Path) -> None:
    small, large = (make_adapter(base_dir, tmp_path / str(rank), rank) for rank in (2, 4))
    with site.http(tenant) as http, site.http("all-scopes") as operator:
        for name, value, told in (
            ("adapters", 0, "you have 0 adapters, the most that is allowed"),
            ("adapter_bytes", 1000, "together they may have 1000 (adapter_bytes)"),
            ("adapter_rank", 3, "rank"),
            ("adapter_file_bytes", 1000, "the maximum is 1000"),
            ("adapter_modules", 3, "changes 4 modules; the maximum is 3"),
        ):
            put(site, f"tenants/{tenant}/limits/{name}", {"value": value})
            refused = http.post("/v1/adapters", **form(large, "large"))
            assert refused.status_code == 400
            assert told in refused.json()["error"]["message"]
            operator.delete(f"/admin/tenants/{tenant}/limits/{name}").raise_for_status()
        put(site, f"tenants/{tenant}/limits/adapter_rank", {"value": 2})
        assert http.post("/v1/adapters", **form(small, "small")).status_code == 201
        assert http.delete("/v1/adapters/small").status_code == 200


def test_admin_errors_are_problem_details(site: Site) -> None:
    with site.http("all-scopes", x_request_id="find-me") as http:
        for path, status in (("/admin/tenants/nobody", 404), ("/admin/audit?limit=x", 400), ("/admin/nothing", 404)):
            answer = http.get(path)
            assert answer.status_code == status
            assert answer.headers["content-type"].startswith("application/problem+json")
            problem = answer.json()
            assert problem["status"] == status
            assert problem["instance"] == "urn:request:find-me"
            assert problem["detail"]
    denied = httpx.get(f"{site.url}/admin/tenants")
    assert (denied.status_code, denied.json()["title"]) == (401, "Unauthorized")


def test_admin_manages_tenants_tiers_and_limits(site: Site, tenant: str) -> None:
    with site.http("all-scopes") as http:
        assert http.put("/admin/tiers/gold", json={"service_class": "interactive", "weight": 4}).status_code == 200
        assert http.patch(f"/admin/tenants/{tenant}", json={"tier": "gold"}).json()["tier"] == "gold"
        put(site, "tiers/gold/limits/concurrent_requests", {"value": 7})
        limits = http.get(f"/admin/tenants/{tenant}/limits").json()["data"]
        assert [(one["subject"], one["value"]) for one in limits] == [("tier:gold", 7)]
        assert ask(site, tenant).status_code == 200
        assert (site.engine.requests[-1].service_class, site.engine.requests[-1].weight) == ("interactive", 4.0)
        assert http.patch(f"/admin/tenants/{tenant}", json={"suspended": True}).json()["suspended_at"]
        assert models(site, tenant) == 403
        assert http.patch(f"/admin/tenants/{tenant}", json={"suspended": False}).json()["suspended_at"] is None
        (key,) = http.get(f"/admin/tenants/{tenant}/keys").json()["data"]
        assert http.delete(f"/admin/keys/{key['id']}").status_code == 200
        assert models(site, tenant) == 401
        actions = [one["action"] for one in http.get("/admin/audit", params={"tenant": tenant}).json()["data"]]
    assert actions[:4] == ["key.revoke", "tenant.resume", "tenant.suspend", "tenant.tier"]
