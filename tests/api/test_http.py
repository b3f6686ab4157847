"""HTTP below the API: framing, HEAD, encoded bodies, origins, the headers of keys and of timing."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.common.settings.server import ServerSettings
from loramux_api.app import create_app
from loramux_api.bodies import MIN_BODY_BYTES
from loramux_api.http_layer import PIECE, GzipBody

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
JSON = {"content-type": "application/json"}


def exchange(site: Site, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are, and return the status, the headers and the body of the answer."""
    where = urlsplit(site.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(request)
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def test_request_of_both_lengths_is_refused_or_read_by_its_chunks_and_closed(site: Site) -> None:
    """granian hands on no length next to chunks, and closes the connection; else the application refuses."""
    status, headers, body = exchange(
        site,
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nSMUGGLED",
    )
    assert headers["connection"] == "close"
    if status == 400:
        assert json.loads(body)["error"]["code"] == "invalid_http_request"
    else:
        assert status == 200
        assert b"HTTP/1.1" not in body


@pytest.mark.parametrize("hosts", [b"", b"Host: \r\n", b"Host: a\r\nHost: b\r\n"])
def test_request_without_one_host_is_refused(site: Site, hosts: bytes) -> None:
    status, _, _ = exchange(site, b"GET /health/live HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
    assert status == 400


def test_request_of_http_1_0_needs_no_host(site: Site) -> None:
    assert exchange(site, b"GET /health/live HTTP/1.0\r\n\r\n")[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health/live", "/v1/models/nothing", CHAT])
def test_head_is_answered_as_get_without_a_body(site: Site, path: str) -> None:
    with site.http() as http:
        head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code
    assert head.headers.get("content-length") == get.headers.get("content-length")
    assert head.content == b""


def test_head_keeps_the_connection_for_the_next_request(site: Site) -> None:
    with site.http() as http:
        http.head("/v1/models").raise_for_status()
        assert http.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("encoding", ["gzip", "X-Gzip", "identity, gzip"])
def test_body_of_gzip_is_decoded(site: Site, encoding: str) -> None:
    with site.http() as http:
        sent = gzip.compress(json.dumps(BODY).encode())
        response = http.post(CHAT, content=sent, headers=JSON | {"content-encoding": encoding})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "compress"])
def test_body_of_another_encoding_is_refused(site: Site, encoding: str) -> None:
    with site.http() as http:
        response = http.post(CHAT, content=b"x", headers=JSON | {"content-encoding": encoding})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize(
    "sent",
    [
        b"{}",
        gzip.compress(b"{}")[:-4],
        gzip.compress(b"{}") + b"{}",
        gzip.compress(b"{}") + gzip.compress(b"{}"),
        b"",
    ],
    ids=["plain", "cut", "more", "twice", "empty"],
)
def test_body_that_is_no_whole_gzip_stream_is_refused(site: Site, sent: bytes) -> None:
    with site.http() as http:
        response = http.post(CHAT, content=sent, headers=JSON | {"content-encoding": "gzip"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize("path", [CHAT, "/v1/batches"])
def test_gzip_bomb_is_refused_at_the_bound_of_its_route(site: Site, path: str) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    with site.http() as http:
        response = http.post(path, content=bomb, headers=JSON | {"content-encoding": "gzip"})
    assert response.status_code == 413, response.text


def test_encoded_body_is_decoded_no_further_than_it_is_asked_for() -> None:
    asked = 0

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": gzip.compress(b" " * MIN_BODY_BYTES), "more_body": False}

    async def read() -> list[int]:
        body = GzipBody(receive)
        return [len((await body())["body"]) for _ in range(3)]

    assert asyncio.run(read()) == [PIECE] * 3
    assert asked == 1


def test_body_cut_at_every_byte_is_decoded_whole() -> None:
    whole = gzip.compress(b"hello")
    pieces = [whole[i : i + 1] for i in range(len(whole))]

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def read() -> bytes:
        body, found = GzipBody(receive), b""
        while (message := await body())["more_body"]:
            found += message["body"]
        return found

    assert asyncio.run(read()) == b"hello"


def test_client_that_leaves_within_an_encoded_body_is_reported() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def read() -> Any:
        return await GzipBody(receive)()

    assert asyncio.run(read()) == {"type": "http.disconnect"}


@pytest.mark.parametrize("header", ["api-key", "x-api-key"])
def test_key_comes_in_azures_header_and_in_anthropics(site: Site, header: str) -> None:
    with httpx.Client(base_url=site.url, headers={header: site.keys["acme"]}, trust_env=False) as http:
        assert http.post(CHAT, json=BODY).status_code == 200
    with httpx.Client(base_url=site.url, headers={header: "sk-wrong"}, trust_env=False) as http:
        assert http.post(CHAT, json=BODY).status_code == 401


@pytest.mark.parametrize(("user", "password"), [("", "KEY"), ("ada", "KEY"), ("KEY", "")])
def test_key_comes_in_the_credentials_of_a_url(site: Site, user: str, password: str) -> None:
    def status(key: str) -> int:
        pair = (user.replace("KEY", key), password.replace("KEY", key))
        return httpx.post(f"{site.url}{CHAT}", json=BODY, auth=pair, trust_env=False).status_code

    assert (status(site.keys["acme"]), status("sk-wrong")) == (200, 401)


@pytest.mark.parametrize("value", ["Basic", "Basic !", "Basic /w==", "Basic Og==", "Digest a", ""])
def test_authorization_without_a_key_is_refused(site: Site, value: str) -> None:
    refused = httpx.post(f"{site.url}{CHAT}", json=BODY, headers={"Authorization": value}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_how_long_it_took(site: Site, stream: bool) -> None:
    with site.http() as http:
        response = http.post(CHAT, json=BODY | {"stream": stream})
        assert 0 <= int(response.headers["openai-processing-ms"]) < 60_000
        assert "openai-processing-ms" not in http.get("/health/live").headers


def test_no_origin_may_ask_unless_the_settings_name_it(site: Site) -> None:
    with site.http(Origin="https://app.example") as http:
        assert "access-control-allow-origin" not in http.get("/v1/models").headers


@pytest.mark.parametrize(("origins", "allowed"), [(["https://app.example"], "https://app.example"), (["*"], "*")])
def test_pages_of_the_origins_in_the_settings_may_ask(
    base_dir: Path, tmp_path: Path, origins: list[str], allowed: str
) -> None:
    settings = make_settings(base_dir, tmp_path)
    settings = msgspec.structs.replace(
        settings, server=msgspec.structs.replace(settings.server, cors_origins=tuple(origins))
    )
    keys = make_keys(settings)
    with running(create_app(settings, ScriptedEngine()), "granian") as server:
        ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
        ask["access-control-request-headers"] = "authorization, content-type"
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            preflight = http.options(CHAT, headers=ask)
            origin = {"origin": "https://app.example", "authorization": f"Bearer {keys['acme']}"}
            answer = http.post(CHAT, json=BODY, headers=origin)
            refused = http.post(CHAT, json=BODY, headers={"origin": "https://app.example"})
            other = http.options(CHAT, headers=ask | {"origin": "https://other.example"})
    assert preflight.status_code == 204
    for response in (preflight, answer, refused):
        assert response.headers["access-control-allow-origin"] == allowed
        assert "access-control-allow-credentials" not in response.headers
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert refused.status_code == 401
    assert ("access-control-allow-origin" in other.headers) is (allowed == "*")


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://app.example/x", "null", "https://*"]
)
def test_origin_in_the_settings_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        ServerSettings(cors_origins=(origin,))
