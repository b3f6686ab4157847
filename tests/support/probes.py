"""Requests made from the OpenAPI document: each has one identifier in one place of a path, a query or a body.

A new route is covered without a change here, if `SAMPLES` has a valid value for each field that it requires.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

CHAT = [{"role": "user", "content": "hi"}]
SAMPLES: dict[str, Any] = {
    "adapter": "own",
    "against": 2,
    "amount_nano": 10**12,
    "completion_window": "24h",
    "documents": ["hi"],
    "endpoint": "/v1/completions",
    "engine": "tiny-0",
    "grader": {"type": "exact"},
    "input": "hi",
    "inputs": "hi",
    "issuer": "https://id.example",
    "max_output_tokens": 1,
    "max_tokens": 1,
    "measures": ["errors"],
    "messages": CHAT,
    "model": "tiny",
    "policy": {"min_requests": 5},
    "prompt": "hi",
    "query": "hi",
    "requests": [{"custom_id": "x", "params": {"model": "tiny", "max_tokens": 1, "messages": CHAT}}],
    "role": "viewer",
    "service_class": "standard",
    "share": 0.1,
    "start_time": 1_700_000_000,
    "targets": [{"revision": 1, "weight": 1}],
    "text_1": "hi",
    "text_2": "hi",
    "url": "https://1.1.1.1/x",
    "value": 10**7,
    # names in paths
    "alias": "stable",
    "month": "2026-01",
    "name": "own",
    "owner": "globex",
    "period": "month",
    "revision": 1,
    "subject": "globex",
    "tenant": "globex",
}
"""Valid values by the names of fields and parameters; `own` is an adapter of the tenant that sends the requests."""
REFERENCE = re.compile(r"(^|_)(model|adapter|files?|id|name|tenant|project|against|subject|key|owner|source|target)$")
"""Names of fields that refer to an object, or may."""
JSON = "application/json"


@dataclass(frozen=True)
class Probe:
    """A request with one place for an identifier."""

    method: str
    path: str
    place: str
    """Name of the place, such as `path name`, `query after` or `body model`."""
    keys: tuple[str | int, ...] = ()
    """Way to the place within the body."""
    body: Any = None
    query: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}, {self.place}"

    @property
    def is_reference(self) -> bool:
        """Return whether the place, by its name, may refer to an object: in a path, a query, or the top of a body."""
        return len(self.keys) < 2 and (not self.keys or bool(REFERENCE.search(str(self.keys[0]))))

    def send(self, client: httpx.Client, identifier: str) -> httpx.Response:
        """Send the request with this identifier in its place."""
        kind, _, name = self.place.partition(" ")
        names = SAMPLES | ({name: identifier} if kind == "path" else {})
        path = re.sub(r"{(\w+)}", lambda found: quote(str(names.get(found[1], "x")), safe=""), self.path)
        query = dict(self.query or {}) | ({name: identifier} if kind == "query" else {})
        body = _placed(self.body, self.keys, identifier) if kind == "body" else self.body
        return client.request(self.method, path, params=query, json=body)


class Routes:
    """The routes of one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths: dict[str, dict[str, Any]] = document["paths"]
        self._schemas: dict[str, Any] = document["components"]["schemas"]

    def probes(self) -> Iterator[Probe]:
        """Yield one probe for each place for a text, of each route and method."""
        for path, methods in self._paths.items():
            for method, route in methods.items():
                schema = route.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
                body = None if schema is None else self._sample(schema)
                parameters = [one for one in route.get("parameters", []) if one["in"] == "query"]
                query = {
                    one["name"]: self._sample(one["schema"], one["name"]) for one in parameters if one.get("required")
                }
                base = Probe(method.upper(), path, "", body=body, query=query)
                for name in re.findall(r"{(\w+)}", path):
                    yield _of(base, f"path {name}")
                for one in parameters:
                    if any(self._places(one["schema"], ("query",))):
                        yield _of(base, f"query {one['name']}")
                if schema is not None:
                    for keys in dict.fromkeys(self._places(schema)):
                        yield _of(base, f"body {'.'.join(map(str, keys))}", keys)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._resolved(one) for one in schema.get("oneOf", schema.get("anyOf", []))]

    def _sample(self, schema: dict[str, Any], name: str = "") -> Any:
        """Return a value with the required fields only."""
        if name in SAMPLES:
            return SAMPLES[name]
        schema = self._resolved(schema)
        if alternatives := [one for one in self._alternatives(schema) if one.get("type") != "null"]:
            return self._sample(alternatives[0], name)
        if "enum" in schema:
            return schema["enum"][0]
        kind = _types(schema)[0]
        if kind == "object":
            fields = schema.get("properties", {})
            return {key: self._sample(fields[key], key) for key in schema.get("required", [])}
        if kind == "array":
            return [self._sample(schema["items"], name)] if schema.get("minItems") else []
        return {"integer": max(1, int(schema.get("minimum", 1))), "number": 0.5, "boolean": False}.get(kind, "x")

    def _places(
        self, schema: dict[str, Any], keys: tuple[str | int, ...] = (), above: Sequence[int] = ()
    ) -> Iterator[tuple[str | int, ...]]:
        """Yield the way to each place for a text, without the second turn of a schema that contains itself."""
        schema = self._resolved(schema)
        if id(schema) in above or len(keys) > 5:
            return
        within = (*above, id(schema))
        for one in self._alternatives(schema):
            yield from self._places(one, keys, within)
        types = _types(schema)
        if "string" in types and "enum" not in schema and keys:
            yield keys
        for key, field in schema.get("properties", {}).items():
            yield from self._places(field, (*keys, key), within)
        if "object" in types and "properties" not in schema:
            yield (*keys, "key")
        if "array" in types and "items" in schema:
            yield from self._places(schema["items"], (*keys, 0), within)


def _of(base: Probe, place: str, keys: tuple[str | int, ...] = ()) -> Probe:
    return Probe(base.method, base.path, place, keys, base.body, base.query)


def _types(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", "any")
    return kind if isinstance(kind, list) else [kind]


def _placed(body: Any, keys: Sequence[str | int], value: str) -> Any:
    """Return the body with the value at the end of the way; lists and objects on the way are made."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(key, int):
        first = body[0] if isinstance(body, list) and body else None
        return [_placed(first, rest, value)]
    made = copy.copy(body) if isinstance(body, dict) else {}
    made[key] = _placed(made.get(key), rest, value)
    return made
