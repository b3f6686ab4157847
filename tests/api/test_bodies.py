"""Hostile bodies: none stops the server for others, none is a 500, and none is read for a caller that may not ask."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listening import until_true
from site_fixture import Site

from loramux.serving.errors import ServingError
from loramux_api import bodies
from loramux_api.bodies import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    MIN_BODY_BYTES,
    StrictJSON,
    check_shape,
    look_through,
)
from loramux_api.schemas.sampling import MAX_CHOICES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = "[" * 100_000 + "]" * 100_000


def joined(head: str, item: str, count: int, tail: str) -> bytes:
    return (head + ",".join([item] * count) + tail).encode()


BOMBS = {
    "messages": joined('{"model":"x","messages":[', '{"role":"user","content":""}', MAX_CONTAINERS, "]}"),
    "parts": joined('{"messages":[{"role":"user","content":[', '{"type":"text"}', MAX_CONTAINERS, "]}]}"),
    "lists": joined('{"messages":[{"role":"user","content":"","annotations":[', "[]", MAX_CONTAINERS, "]}]}"),
    "token ids": joined('{"model":"x","prompt":[', "1", MAX_VALUES + 2, "]}"),
    "texts": joined('{"model":"x","prompt":[', '""', MAX_STRINGS, "]}"),
    "names": joined('{"model":"x","metadata":{', '"a":1', MAX_STRINGS, "}}"),
    "separators in a text": b'{"prompt":"' + b"{,[" * MAX_CONTAINERS + b'","logit_bias":{' + b'"":0,' * MAX_STRINGS,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_body_with_too_many_values_is_refused_before_it_is_decoded(bomb: str) -> None:
    with pytest.raises(ServingError, match="more than") as refusal:
        asyncio.run(check_shape(BOMBS[bomb]))
    assert refusal.value.code == "request_too_large"


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": 'a {"quoted": ["text"]}, ' * 50_000}).encode(),
        json.dumps({"prompt": [[1] * 1000] * MAX_CHOICES}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a, b"}] * 4096}).encode(),
        b'{"prompt": "no end \\" ' + b"{" * (MAX_CONTAINERS + 1),
    ],
    ids=["text of quotes and braces", "prompts of token ids", "messages", "string without an end"],
)
def test_body_within_the_bounds_passes_whatever_its_texts_hold(body: bytes) -> None:
    asyncio.run(check_shape(body))


JSON = st.recursive(
    st.integers() | st.text('a"\\{[,é', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,}', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Return the numbers of strings, of containers, and of commas between values."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(one) for one in (value if isinstance(value, list) else [*value, *value.values()])]
    strings, containers, commas = (sum(one) for one in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return strings, containers + 1, commas + max(len(value) - 1, 0)


@given(JSON, st.sampled_from([1, 2, 3, 5, 17, 1000]), st.booleans())
def test_values_are_counted_exactly_wherever_the_body_is_cut(value: Any, slice_bytes: int, is_ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":")).encode()
    names = ("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SLICE_BYTES", slice_bytes)
        for name, count in zip(names, counts(value), strict=True):
            patch.setattr(bodies, name, count)
        asyncio.run(check_shape(data))
        for name, count in zip(names, counts(value), strict=True):
            patch.setattr(bodies, name, count - 1)
            with pytest.raises(ServingError, match="more than"):
                asyncio.run(check_shape(data))
            patch.setattr(bodies, name, count)


def test_check_of_a_large_body_gives_way_to_others() -> None:
    body = joined('{"a":[', '"\\"\\"\\""', MAX_STRINGS - 10, "]}")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        other = asyncio.create_task(count())
        await check_shape(body)
        other.cancel()

    asyncio.run(run())
    assert turns >= len(body) // bodies.SLICE_BYTES - 2


class LargeBody(bytes):
    def count(self, *_: Any) -> int:
        raise AssertionError("22 MB are counted in 20 ms, which no other request gets")


@pytest.mark.parametrize("end", ['"', '\\"', '\\"]}', '\\\\", "b": {}}'])
@pytest.mark.parametrize("filler", ["A", "\\\\", "é"])
def test_long_string_is_passed_over_in_a_few_turns(filler: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = '{"a": ["x", "'
    body = LargeBody((head + filler * 100_000 + end).encode())
    monkeypatch.setattr(bodies, "SLICE_BYTES", 1000)
    turns = sum(1 for _ in look_through(body))
    assert turns < 10 or filler == "\\\\", "the middle is not read"
    monkeypatch.setattr(bodies, "MAX_CONTAINERS", 2)
    refused = pytest.raises(ServingError, match="objects and lists") if "{}" in end else nullcontext()
    with refused:
        asyncio.run(check_shape(body))


@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/"])
def test_body_over_the_limit_of_the_context_is_413_on_every_inference_route(site: Site, path: str) -> None:
    with site.http() as client:
        whole = client.post(path, content=b" " * (MIN_BODY_BYTES + 1), headers={"content-type": "application/json"})
    assert whole.status_code == 413
    assert str(MIN_BODY_BYTES) in whole.text
    assert not site.engine.requests


def test_byte_order_mark_before_a_body_is_ignored(site: Site) -> None:
    body = b'\xef\xbb\xbf{"model": "tiny", "prompt": "x", "frobnicate": 1}'
    with site.http() as client:
        answer = client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.headers["x-loramux-ignored-fields"]) == (200, "frobnicate")


def test_chunked_body_over_the_limit_is_413(site: Site) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MIN_BODY_BYTES // 65536 + 1):
            yield b" " * 65536

    with site.http() as client:
        assert client.post(CHAT, content=chunks()).status_code == 413


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": ""}] * 4097}),
        (TEXT, {"model": "tiny", "prompt": "hi", "stop": ["a"] * 17}),
        (TEXT, {"model": "tiny", "prompt": "hi", "stop_token_ids": [1] * 129}),
        (TEXT, {"model": "tiny", "prompt": "hi", "logit_bias": {str(i): 0 for i in range(1025)}}),
        (TEXT, {"model": "tiny", "prompt": "hi", "metadata": {str(i): "" for i in range(17)}}),
        (TEXT, {"model": "tiny", "prompt": ["hi"] * (MAX_CHOICES + 1)}),
        (TEXT, {"model": "tiny", "prompt": [1] * 257}),
    ],
    ids=["messages", "stop", "stop_token_ids", "logit_bias", "metadata", "prompts", "token ids"],
)
def test_list_or_name_over_its_bound_is_400(site: Site, path: str, body: dict[str, Any]) -> None:
    with site.http() as client:
        assert client.post(path, json=body).status_code == 400
    assert not site.engine.requests


def json_routes(site: Site) -> Iterator[tuple[str, str]]:
    """Every route with a body that is decoded: all of them by StrictJSON."""
    for route in site.server.app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if getattr(handler, "parsed_data_field", None) is not None:
                assert issubclass(handler.resolve_data_dto(), StrictJSON)
                yield next(iter(handler.http_methods)), route.path


def test_deeply_nested_body_is_400_on_every_route(site: Site) -> None:
    routes = list(json_routes(site))
    assert len(routes) > 20
    with site.http("all-scopes") as client:
        for method, path in routes:
            for body in (DEEP, f'{{"model": {DEEP}}}', f'{{"no_such_field": {DEEP}}}'):
                answer = client.request(method, path.replace("{", "").replace("}", ""), content=body)
                assert answer.status_code < 500, (method, path, answer.text)


@pytest.mark.parametrize(
    "field", ["model", "messages", "stop", "metadata", "tools", "audio", "prediction", "logit_bias", "user", "x"]
)
def test_deeply_nested_field_is_400(site: Site, field: str) -> None:
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "hi"}}], "{field}": {DEEP}}}'
    with site.http() as client:
        assert client.post(CHAT, content=body).status_code == 400
    assert not site.engine.requests


@pytest.mark.parametrize("field", ["content", "annotations", "tool_calls", "function_call", "audio"])
def test_deeply_nested_field_of_a_message_is_400(site: Site, field: str) -> None:
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "{field}": {DEEP}}}]}}'
    with site.http() as client:
        assert client.post(CHAT, content=body).status_code == 400


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("chat_template_kwargs", '"chat_template_kwargs": {"a": %s}'),
        ("tools", '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": %s}}}]'),
    ],
)
def test_body_with_deeply_nested_values_for_the_template_is_refused(site: Site, field: str, more: str) -> None:
    """A template, and transformers' own preparation of its values, call themselves for each level."""
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "hi"}}], {more % nested(500)}}}'
    with site.http() as client:
        answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_body_with_values_for_the_template_of_some_depth_is_taken(site: Site) -> None:
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": %s}}'
    with site.http() as client:
        answer = client.post(CHAT, content=body % nested(90), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_body_with_deeply_nested_arguments_of_a_call_is_refused(site: Site) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {nested(500)}}}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "hi"}]
    with site.http() as client:
        answer = client.post(CHAT, json={"model": "tiny", "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text


def raw_head(site: Site, key: str, length: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def connect(site: Site) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(site.url.rsplit(":", 1)[1])), timeout=120)


def test_caller_without_a_request_left_is_refused_before_its_body_is_read(site: Site) -> None:
    with site.http("all-scopes") as client:
        made = client.post("/v1/keys", json={"name": "none", "scopes": ["inference"]}).json()
        limit = client.put(f"/v1/limits/{made['id']}/requests_per_minute", json={"value": 0})
        assert limit.status_code == 200, limit.text
    with connect(site) as connection:
        connection.sendall(raw_head(site, made["key"], 900_000))  # and nothing of the body
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 429"), answer


def test_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    site: Site, caplog: pytest.LogCaptureFixture, read_parts: list[bytes]
) -> None:
    caplog.set_level(logging.DEBUG, "loramux_api")
    with connect(site) as connection:
        connection.sendall(raw_head(site, site.keys["acme"], 1000) + b'{"model": ')
        until_true(lambda: b"".join(read_parts) == b'{"model": ')
    deadline = time.monotonic() + 60
    while not any("left" in record.message for record in caplog.records) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any("left" in record.message for record in caplog.records)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert httpx.get(f"{site.url}/health/live").status_code == 200


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_client_that_leaves_in_the_middle_of_its_body_gives_its_memory_back(site: Site, encoding: str) -> None:
    body = os.urandom(300_000)
    sent = gzip.compress(body) if encoding == "gzip" else body
    head = raw_head(site, site.keys["acme"], len(sent)).replace(
        b"Host", f"Content-Encoding: {encoding}\r\nHost".encode()
    )
    deadline = time.monotonic() + 60
    with connect(site) as connection:
        connection.sendall(head + sent[:200_000])
        while incoming(site) < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert incoming(site) >= 100_000
    while incoming(site) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert incoming(site) == 0


@pytest.mark.parametrize(("length", "closes"), [(900_000, True), (None, True), (2, False)])
def test_answer_before_the_end_of_a_long_body_closes_the_connection(
    site: Site, length: int | None, closes: bool
) -> None:
    """A client that kept the connection would send its next request to a server that has closed it."""
    framing = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    with connect(site) as connection:
        connection.sendall(head.encode() + (b"{}" if length == 2 else b""))
        answer = connection.recv(65536).lower()
    assert answer.startswith(b"http/1.1 401")
    assert (b"\r\nconnection: close" in answer) is closes


def test_unfinished_bodies_of_one_tenant_are_bounded_and_leave_others_theirs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.server.app.state.platform.memory, "per_tenant", 300_000)
    held = []
    for _ in range(2):
        connection = connect(site)
        connection.sendall(raw_head(site, site.keys["acme"], 200_000) + b" " * 140_000)
        held.append(connection)
    deadline = time.monotonic() + 60
    while incoming(site) < 280_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "user": "u" * 500}
    padded = json.dumps(body).encode() + b" " * 100_000
    with site.http() as greedy, site.http("globex") as other:
        assert greedy.post(CHAT, content=padded).status_code == 429
        assert other.post(CHAT, content=padded).status_code == 200
        for connection in held:
            connection.close()
        while incoming(site) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert greedy.post(CHAT, content=padded).status_code == 200


def incoming(site: Site) -> int:
    return site.server.app.state.platform.memory._held.total()


def test_body_that_does_not_arrive_in_time_is_408(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    with connect(site) as connection:
        connection.sendall(raw_head(site, site.keys["acme"], 1000) + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
