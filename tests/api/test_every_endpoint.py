"""No endpoint is free by accident: each that uses the engine is limited, recorded and billed like every other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from site_fixture import Site
from task_adapters import TaskAdapter

from loramux_client import Client

HELLO = [{"role": "user", "content": "hello"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 4},
}
"""Endpoints that answer with generated tokens, and a body for each."""
POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
    "/v1/classify": {"model": "acme/classes", "input": "hello"},
    "/pooling": {"model": "acme/tokens", "input": "hello"},
    "/v1/score": {"model": "tiny", "text_1": "hello", "text_2": "hello"},
    "/v1/rerank": {"model": "tiny", "query": "hello", "documents": ["hello"]},
}
"""Endpoints that answer with numbers for a prompt."""
ALL = GENERATING | POOLING
CLASSIFIERS = {"classes": False, "tokens": True}
"""Classifiers by name, and whether they are of tokens."""
SHORTER = {"/classify", "/score", "/rerank", "/v2/rerank"}
"""Other paths of those."""
COUNTING = {"/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"}
"""They run nothing, and need a request left in the minute: tests/api/test_messages.py, test_responses.py and
test_drop_in.py.
"""
LORAX = {"/", "/generate", "/generate_stream"}
"""They name the model otherwise, and have no idempotency keys: tests/api/test_lorax.py has theirs."""


@pytest.fixture
def tenant(site: Site, request: pytest.FixtureRequest) -> str:
    """A tenant of the test's own, by its key's name."""
    name = f"e{abs(hash((request.node.name, site.url))):x}"
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": name}).raise_for_status()
        site.keys[name] = http.post(f"/admin/tenants/{name}/keys", json={}).json()["key"]
    with site.http() as http:
        for adapter in CLASSIFIERS:
            http.put(f"/v1/adapters/{adapter}/grants/{name}").raise_for_status()
    return name


@pytest.fixture(scope="module", autouse=True)
def classifiers(site: Site, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`acme/classes` and `acme/tokens`, which every tenant of this file may call."""
    with Client(site.url, api_key=site.keys["acme"]) as client:
        for name, of_tokens in CLASSIFIERS.items():
            made = TaskAdapter(base_dir, tmp_path_factory.mktemp(name), 1, num_labels=3, of_tokens=of_tokens)
            client.uploads.push(made.folder, name)
    yield
    with site.http() as http:
        for name in CLASSIFIERS:
            http.delete(f"/v1/adapters/{name}", params={"undo_s": 0})


def limit(site: Site, tenant: str, name: str, value: int) -> None:
    with site.http("all-scopes") as http:
        http.put(f"/admin/tenants/{tenant}/limits/{name}", json={"value": value}).raise_for_status()


def used(site: Site, tenant: str) -> dict[str, int]:
    since = {"start_time": int(time.time()) - 3600}
    with site.http(tenant) as http:
        page = http.get("/v1/organization/usage/completions", params=since).json()
    results = [result for bucket in page["data"] for result in bucket["results"]]
    return {name: sum(r[name] for r in results) for name in ("num_model_requests", "input_tokens", "output_tokens")}


def test_every_inference_route_is_tested_here(site: Site) -> None:
    paths = httpx.get(f"{site.url}/schema/openapi.json", timeout=120).json()["paths"]
    found = {path for path, methods in paths.items() if "Inference" in methods.get("post", {}).get("tags", [])}
    assert found == ALL.keys() | SHORTER | COUNTING | LORAX


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_answer_is_recorded_with_its_tokens(site: Site, tenant: str, path: str, stream: bool) -> None:
    with site.http(tenant) as http:
        http.post(path, json=GENERATING[path] | {"stream": stream}).raise_for_status()
    prompt = len(site.engine.requests[0].prompt_token_ids)
    assert used(site, tenant) == {"num_model_requests": 1, "input_tokens": prompt, "output_tokens": 4}


@pytest.mark.parametrize("path", POOLING)
def test_numbers_are_recorded_with_the_prompts_tokens(site: Site, tenant: str, path: str) -> None:
    with site.http(tenant) as http:
        http.post(path, json=POOLING[path]).raise_for_status()
    prompt = sum(len(request.prompt_token_ids) for request in site.engine.requests)
    assert used(site, tenant) == {"num_model_requests": 1, "input_tokens": prompt, "output_tokens": 0}


@pytest.mark.parametrize("path", POOLING)
def test_idempotent_numbers_are_answered_twice_and_billed_once(site: Site, tenant: str, path: str) -> None:
    with site.http(tenant) as http:
        first, again = (http.post(path, json=POOLING[path], headers={"Idempotency-Key": path}) for _ in range(2))
    assert (first.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert again.text == first.text
    assert len(site.engine.requests) == 1
    assert used(site, tenant)["num_model_requests"] == 1


@pytest.mark.parametrize(("name", "status"), [("requests_per_minute", 429), ("tokens_per_minute", 400)])
@pytest.mark.parametrize("path", ALL)
def test_limit_refuses_before_the_engine_is_asked(site: Site, tenant: str, path: str, name: str, status: int) -> None:
    """More tokens than a minute ever has are the caller's fault."""
    limit(site, tenant, name, 0)
    with site.http(tenant) as http:
        refused = http.post(path, json=ALL[path])
    assert refused.status_code == status, refused.text
    assert not site.engine.requests
    assert used(site, tenant)["num_model_requests"] == 0


@pytest.mark.parametrize("path", ALL)
def test_rate_limits_are_in_the_headers(site: Site, tenant: str, path: str) -> None:
    limit(site, tenant, "requests_per_minute", 2)
    with site.http(tenant) as http:
        assert http.post(path, json=ALL[path]).headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize("path", ALL)
def test_request_of_a_batch_tier_is_scheduled_as_one(site: Site, path: str) -> None:
    with site.http() as http:
        http.post(path, json=ALL[path] | {"service_tier": "flex"}).raise_for_status()
    assert site.engine.requests[0].service_class.name == "BATCH"


@pytest.mark.parametrize("path", ALL)
def test_anothers_model_is_not_there(site: Site, path: str) -> None:
    with site.http() as http:
        answer = http.post(path, json=ALL[path] | {"model": "globex/upper"})
    assert answer.status_code == 404
    assert not site.engine.requests


@pytest.mark.parametrize("path", ALL)
def test_key_without_the_scope_is_refused(site: Site, path: str) -> None:
    with site.http("no-scopes") as http:
        assert http.post(path, json=ALL[path]).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_idempotent_request_is_answered_twice_and_billed_once(site: Site, tenant: str, path: str, stream: bool) -> None:
    headers, body = {"Idempotency-Key": f"{path}{stream}"}, GENERATING[path] | {"stream": stream}
    with site.http(tenant) as http:
        first = http.post(path, json=body, headers=headers)
        again = http.post(path, json=body, headers=headers)
    assert (first.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert again.text == first.text
    assert len(site.engine.requests) == 1
    assert used(site, tenant)["num_model_requests"] == 1


@pytest.mark.parametrize("path", ALL)
def test_deadline_reaches_the_engine(site: Site, path: str) -> None:
    with site.http() as http:
        http.post(path, json=ALL[path], headers={"x-loramux-deadline-ms": "2500"}).raise_for_status()
        first = site.engine.requests[0].deadline_ms
        assert first is not None
        assert 0 < first <= 2500  # without the time in which the prompt was read and the request was admitted
        count = len(site.engine.requests)
        http.post(path, json=ALL[path]).raise_for_status()
    assert site.engine.requests[count].deadline_ms is None
