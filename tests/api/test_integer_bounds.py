"""Integers out of range are refused in every query, path and body, and no list is longer than its documented limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

BEYOND = 2**63
BODIES = [
    ("POST", "/v1/adapters/bounded/undelete", {"revision": BEYOND}, None),
    ("POST", "/v1/adapters/bounded/promote", None, {"revision": BEYOND}),
    ("PUT", "/v1/adapters/bounded/aliases/canary", None, {"targets": [{"revision": BEYOND, "weight": 1}]}),
    ("PUT", "/v1/adapters/bounded/aliases/canary", None, {"targets": [{"revision": 1, "weight": BEYOND}]}),
    ("POST", "/v1/adapters/bounded/aliases/default/rollback", {"version": BEYOND}, None),
    ("DELETE", "/v1/adapters/bounded", {"undo_s": BEYOND}, None),
    ("PATCH", "/v1/adapters/bounded", None, {"ttl_s": BEYOND}),
    ("PUT", "/v1/adapters/bounded/pins/9223372036854775808", None, None),
    ("PUT", "/v1/uploads/none/files/adapter_config.json", {"offset": BEYOND}, None),
    ("PUT", "/v1/uploads/none/files/adapter_config.json", {"offset": -1}, None),
    ("POST", "/v1/keys", None, {"expires_in": BEYOND}),
    ("PUT", "/admin/tenants/acme/limits/requests_per_minute", None, {"value": BEYOND}),
    ("PUT", "/admin/tenants/acme/budgets/month", None, {"amount_nano": BEYOND}),
    ("PUT", "/admin/tenants/acme/budgets/month", None, {"amount_nano": 1, "thresholds": [BEYOND]}),
    ("PUT", "/admin/tiers/bounded", None, {"service_class": "standard", "weight": BEYOND}),
]
PAGES = {
    "/admin/audit",
    "/admin/migrations",
    "/admin/migrations/{migration_id}/items",
    "/admin/tenants/{name}/keys",
    "/v1/adapters",
    "/v1/audit",
    "/v1/batches",
    "/v1/deleted_adapters",
    "/v1/evaluations",
    "/v1/events",
    "/v1/files",
    "/v1/fine_tuning/jobs",
    "/v1/fine_tuning/jobs/{job_id}/checkpoints",
    "/v1/fine_tuning/jobs/{job_id}/events",
    "/v1/keys",
    "/v1/messages/batches",
    "/v1/migrations",
    "/v1/models",
    "/v1/organization/costs",
    "/v1/organization/usage/completions",
    "/v1/requests",
    "/v1/responses/{response_id}/input_items",
    "/v1/uploads",
    "/v1/webhooks/{webhook_id}/deliveries",
}
"""GET routes whose `limit` has a documented maximum."""


@dataclass(frozen=True)
class Integer:
    """An integer parameter of a GET route, and the integers that its schema allows."""

    path: str
    name: str
    place: str
    others: tuple[str, ...]
    minimum: int | None
    maximum: int | None

    def get(self, client: httpx.Client, value: int) -> httpx.Response:
        path = self.path.replace(f"{{{self.name}}}", str(value)) if self.place == "path" else self.path
        query = {other: "1" for other in self.others} | ({self.name: str(value)} if self.place == "query" else {})
        if self.path.endswith("/usage/completions"):
            query["bucket_width"] = "1m"  # the narrowest: wider ones have fewer
        return client.get(re.sub(r"\{[^}]*\}", "bounded", path), params=query)


@pytest.fixture(scope="module")
def client(site: Site, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client that may do everything, and an adapter `bounded`."""
    folder = make_adapter(base_dir, tmp_path_factory.mktemp("adapter"), seed=7)
    with site.http("all-scopes") as client:
        assert client.post("/v1/adapters", **form(folder, "bounded")).status_code == 201
        yield client
        client.delete("/v1/adapters/bounded", params={"undo_s": 0})


@pytest.fixture(scope="module")
def integers(site: Site) -> list[Integer]:
    """Every integer parameter of GET routes in the OpenAPI document."""
    paths = httpx.get(f"{site.url}/schema/openapi.json").json()["paths"]
    return [
        integer for path, operations in paths.items() if "get" in operations for integer in _of(path, operations["get"])
    ]


def test_integers_out_of_range_are_refused(client: httpx.Client, integers: list[Integer]) -> None:
    assert len(integers) > len(PAGES)
    wrong = []
    for integer in integers:
        for value in {-1, BEYOND, BEYOND if integer.maximum is None else integer.maximum + 1}:
            answer = integer.get(client, value)
            if not 400 <= answer.status_code < 500 or answer.status_code in (401, 403):
                wrong.append((integer.path, integer.name, value, answer.status_code))
            elif integer.maximum is not None:  # refused for its value, before anything is looked up
                assert answer.status_code == 400, answer.text
                assert integer.name in answer.text
    assert not wrong


def test_lists_are_as_short_as_documented(client: httpx.Client, integers: list[Integer]) -> None:
    limits = [integer for integer in integers if integer.name == "limit" and integer.maximum is not None]
    assert {integer.path for integer in limits} == PAGES
    for limit in limits:
        assert limit.minimum == 1
        assert limit.maximum is not None
        for value in (1, limit.maximum):
            answer = limit.get(client, value)
            assert answer.status_code in (200, 404), (limit, answer.text)
            if answer.status_code == 200:
                assert len(answer.json()["data"]) <= value
    assert len(client.get("/v1/audit", params={"limit": 1}).json()["data"]) == 1


@pytest.mark.parametrize(("method", "path", "query", "body"), BODIES)
def test_changes_refuse_integers_out_of_range(
    client: httpx.Client, method: str, path: str, query: dict[str, int] | None, body: dict[str, Any] | None
) -> None:
    answer = client.request(method, path, params=query, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.status_code not in (401, 403, 405), answer.text


def test_revisions_in_a_path_are_bounded(client: httpx.Client) -> None:
    for revision in (-1, 0, BEYOND):
        assert client.get(f"/v1/adapters/bounded/revisions/{revision}").status_code == 404


def _of(path: str, operation: dict[str, Any]) -> Iterator[Integer]:
    parameters = operation.get("parameters", [])
    for parameter in parameters:
        schema = parameter["schema"]
        kinds = [schema, *schema.get("oneOf", []), *schema.get("anyOf", [])]
        if parameter["in"] not in ("query", "path") or not any(kind.get("type") == "integer" for kind in kinds):
            continue
        others = tuple(p["name"] for p in parameters if p["in"] == "query" and p.get("required") and p is not parameter)
        bounds = {key: value for kind in kinds for key, value in kind.items() if key in ("minimum", "maximum")}
        yield Integer(path, parameter["name"], parameter["in"], others, bounds.get("minimum"), bounds.get("maximum"))
