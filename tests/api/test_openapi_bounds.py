"""Every string, list and map that a request may have has a maximum in the API's description, and it is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from site_fixture import Site

from loramux_api.bodies import BODY_BYTES, SMALL_BODY_BYTES, ApiRequest

Schema = dict[str, Any]
LIMITS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


@pytest.fixture(scope="module")
def document(site: Site) -> Schema:
    return httpx.get(f"{site.url}/schema/openapi.json", timeout=120).json()


class Walk:
    """The parts of a schema that hold strings, lists or maps, each with the place where it is."""

    def __init__(self, document: Schema) -> None:
        self._components = document["components"]["schemas"]

    def unbounded(self, schema: Schema, place: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                yield from self.unbounded(self._components[name], name, seen | {name})
            return
        for one in (*schema.get("oneOf", ()), *schema.get("anyOf", ()), *schema.get("allOf", ())):
            # a bound next to the alternatives applies to each of them
            bounds = {limit: schema[limit] for limit in LIMITS.values() if limit in schema}
            yield from self.unbounded(bounds | one, place, seen)
        kinds = schema.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if self._needs_bound(kind, schema) and LIMITS[kind] not in schema:
                yield f"{place}: {kind} without {LIMITS[kind]}"
        if isinstance(schema.get("items"), dict):
            yield from self.unbounded(schema["items"], f"{place}[]", seen)
        if isinstance(schema.get("additionalProperties"), dict):
            yield from self.unbounded(schema["additionalProperties"], f"{place}{{}}", seen)
        for name, one in schema.get("properties", {}).items():
            yield from self.unbounded(one, f"{place}.{name}", seen)

    @staticmethod
    def _needs_bound(kind: str, schema: Schema) -> bool:
        if kind == "string":
            return not {"enum", "const"} & schema.keys() and schema.get("format") != "binary"
        return kind == "array" or (kind == "object" and not schema.get("properties"))


def operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if isinstance(operation, dict):
                yield f"{method} {path}", operation


def test_every_collection_and_string_of_a_request_has_a_maximum(document: Schema) -> None:
    walk, found = Walk(document), list[str]()
    for name, operation in operations(document):
        for media in operation.get("requestBody", {}).get("content", {}).values():
            found += walk.unbounded(media["schema"], f"{name} body")
        for one in operation.get("parameters", ()):
            found += walk.unbounded(one["schema"], f"{name} {one['in']} {one['name']}")
    assert sorted(set(found)) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"oneOf": [{"type": "null"}, {"type": "array", "maxItems": 3, "items": {"type": "string"}}]},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "string"}}}}},
    ],
    ids=["string", "list", "map", "element of a list", "nested field"],
)
def test_the_walk_finds_each_kind(schema: Schema) -> None:
    assert list(Walk({"components": {"schemas": {}}}).unbounded(schema, "x"))


def bodies_of(site: Site) -> Iterator[tuple[str, str, type[ApiRequest]]]:
    """Each route whose handler takes a body of JSON, with its request class."""
    for route in site.server.app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if getattr(handler, "parsed_data_field", None) is not None:
                yield next(iter(handler.http_methods)), route.path, handler.resolve_request_class()


def test_a_body_beyond_its_kinds_limit_is_413_on_every_route(site: Site) -> None:
    """The limit is counted before anything is decoded: what comes is no JSON at all."""
    routes = list(bodies_of(site))
    assert len(routes) > 40
    tried = 0
    for method, path, request_class in routes:
        limit = BODY_BYTES[request_class.body_kind](site.server.app.state.platform)
        url = path.replace("{", "").replace("}", "")
        with site.http("all-scopes") as client:  # a connection whose body is not read is closed
            answer = client.request(method, url, content=b"[" * (limit + 1))
        if answer.status_code in (401, 403, 404):
            continue  # refused before its body is looked at
        assert (answer.status_code, str(limit) in answer.text) == (413, True), (method, path, answer.text[:300])
        tried += 1
    assert tried > 30


def test_routes_without_a_kind_take_64_kib(site: Site) -> None:
    kinds = {path.replace(":str", ""): request_class.body_kind for _, path, request_class in bodies_of(site)}
    assert SMALL_BODY_BYTES == 65_536
    assert kinds["/v1/webhooks"] == kinds["/v1/batches"] == kinds["/v1/budgets/{subject}/{period}"] == "json"
    assert {path for path, kind in kinds.items() if kind == "document"} == {
        "/v1/keys",
        "/admin/tenants/{name}/keys",
        "/v1/uploads",
        "/v1/evaluations",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/keys", {"scopes": ["x"] * 5000}),
        ("/v1/keys", {"models": ["x"] * 5000}),
        ("/v1/webhooks", {"url": "https://example.com", "events": ["x"] * 5000}),
        ("/v1/batches", {"input_file_id": "f", "endpoint": "/v1/x", "metadata": {str(i): "" for i in range(5000)}}),
        ("/v1/uploads", {"adapter": "a", "files": {str(i): {"size": 1, "sha256": ""} for i in range(1001)}}),
    ],
    ids=["scopes", "models", "events", "metadata", "files"],
)
def test_a_list_or_map_over_its_maximum_is_400_and_names_its_field(site: Site, path: str, body: Schema) -> None:
    with site.http("all-scopes") as client:
        answer = client.post(path, content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == list(body)[-1]
    assert "length <=" in answer.json()["error"]["message"]
