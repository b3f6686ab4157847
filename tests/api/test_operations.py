"""Health, metrics, request ids, usage and the API's own description."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from site_fixture import Site

TEXT = {"model": "tiny", "prompt": "hi"}


def metrics(site: Site) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"{site.url}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_pages(site: Site) -> None:
    before = metrics(site)
    with site.http() as client:
        client.post("/v1/completions", json=TEXT)
    after = metrics(site)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grown("loramux_tokens_total", kind="prompt") == 3
    assert grown("loramux_tokens_total", kind="completion") == 3
    assert grown("loramux_completions_total", status="completed") == 1
    assert grown("loramux_http_responses_total", method="POST", route="/v1/completions", status="200") == 1
    assert grown("loramux_first_token_seconds_count", base_model="tiny", service_tier="default") == 1
    assert grown("loramux_inter_token_seconds_count", base_model="tiny", service_tier="default") == 2
    assert grown("loramux_engine_steps_total", base_model="tiny", engine="tiny-0") == 1
    tiny = (("base_model", "tiny"), ("engine", "tiny-0"))
    assert after["loramux_engine_pages_free", tiny] == 64
    assert after["loramux_engine_up", tiny] == 1


def test_metrics_labels_contain_no_client_text(site: Site) -> None:
    with site.http(x_request_id="written-by-me") as client:
        client.get("/written-by-me")
        client.get("/v1/models/written-by-me")
        client.request("WRITTEN-BY-ME", "/v1/models")
        client.post("/v1/completions", json=TEXT | {"model": "written-by-me", "user": "written-by-me"})
    text = httpx.get(f"{site.url}/metrics").text
    assert "written-by-me" not in text.lower()
    assert "acme" not in text
    assert 'route="unknown"' in text


def test_health_needs_no_key(site: Site) -> None:
    assert httpx.get(f"{site.url}/health/live").json() == {"status": "live"}
    assert httpx.get(f"{site.url}/health/ready").json()["status"] == "ready"


@pytest.mark.parametrize("id", ["abc", "trace:0af7651916cd43dd8448eb211c80319c", "x" * 128])
def test_request_id_valid_is_kept(site: Site, id: str) -> None:
    assert httpx.get(f"{site.url}/health/live", headers={"x-request-id": id}).headers.get_list("x-request-id") == [id]


@pytest.mark.parametrize("id", ["x" * 129, "a b", "<script>", "é".encode().decode("latin-1")])
def test_request_id_invalid_is_replaced(site: Site, id: str) -> None:
    answer = httpx.get(f"{site.url}/nowhere", headers={"x-request-id": id.encode("latin-1")})
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


def test_internal_error_shows_only_its_request_id(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(site.server.app.state.platform.adapters.queries, "page", broken)
    with site.http(x_request_id="find-me") as client:
        answer = client.get("/v1/adapters")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "find-me" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_openapi_describes_every_route(site: Site) -> None:
    document = httpx.get(f"{site.url}/schema/openapi.json", timeout=60).json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/adapters", "/v1/models", "/health/ready", "/metrics"):
        assert path in document["paths"]
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["temperature"]["maximum"] == 2
    upload = document["paths"]["/v1/adapters"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert upload["required"] == ["name", "adapter_config.json", "adapter_model.safetensors"]
    errors = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"400", "401", "404", "503"} <= set(errors)
    assert errors["404"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "start_time"),
        ({"start_time": "yesterday"}, "start_time"),
        ({"start_time": "-1"}, "start_time"),
        ({"start_time": "5", "end_time": "5"}, "end_time"),
        ({"start_time": "5", "bucket_width": "1y"}, "bucket_width"),
        ({"start_time": "5", "limit": "0"}, "limit"),
        ({"start_time": "5", "limit": "x"}, "limit"),
        ({"start_time": "5", "page": "2"}, "page"),
        ({"start_time": "5", "group_by": "colour"}, "group_by"),
        ({"start_time": "5", "user_ids": "a\nb"}, "user_ids"),
    ],
)
def test_usage_query_invalid_names_the_parameter(site: Site, query: dict[str, str], param: str) -> None:
    with site.http() as client:
        answer = client.get("/v1/organization/usage/completions", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_usage_contains_only_the_callers_tenant(site: Site) -> None:
    since = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by[]": "model"}

    def used(tenant: str) -> int:
        with site.http(tenant) as client:
            page: dict[str, Any] = client.get("/v1/organization/usage/completions", params=since).json()
        return sum(result["output_tokens"] for bucket in page["data"] for result in bucket["results"])

    before = used("acme"), used("globex")
    with site.http() as client:
        client.post("/v1/completions", json=TEXT | {"prompt": "hello"})
    assert (used("acme"), used("globex")) == (before[0] + 6, before[1])
