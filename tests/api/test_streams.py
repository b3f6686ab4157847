"""Bytes of a stream on the wire, and the effect of a reader that leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import httpx
import pytest
from listening import until_true
from scripted_engine import EOS
from site_fixture import PATIENCE, Site

from loramux_api import http_layer

TEXT = {"model": "tiny", "prompt": "hi"}
STREAM = TEXT | {"stream": True}


def settled(site: Site, tenant: str) -> dict[str, int]:
    """Return the tenant's usage so far."""
    with site.http(tenant) as client:
        page = client.get("/v1/organization/usage/completions", params={"start_time": int(time.time()) - 3600}).json()
    results = [result for bucket in page["data"] for result in bucket["results"]]
    return {key: sum(r[key] for r in results) for key in ("input_tokens", "output_tokens", "num_model_requests")}


def test_events_are_framed_with_lf_and_end_with_done(site: Site) -> None:
    with site.http() as client:
        response = client.post("/v1/completions", json=STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert b"\r" not in response.content
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == ["h", "i", ""]


def test_chunks_arrive_while_the_engine_still_works(site: Site) -> None:
    site.engine.pause = 0.2
    asked = STREAM | {"prompt": "hi" * 50, "max_tokens": 100}
    with site.http() as client, client.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["choices"][0]["text"] == "h"
        assert site.engine.running == 1
        site.engine.pause = 0.0
        assert "".join(lines).endswith("data: [DONE]")


def test_no_chunk_holds_half_a_character_or_part_of_a_stop_string(site: Site) -> None:
    site.engine.script = lambda request: [*"aé€🙂 STOP never".encode(), EOS]
    with site.http() as client:
        response = client.post("/v1/completions", json=STREAM | {"stop": "STOP", "max_tokens": 100})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events] == ["a", "é", "€", "🙂", " ", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_on_request(site: Site, path: str) -> None:
    asked = {"model": "tiny", "return_token_ids": True, "stream": True}
    asked |= {"prompt": "é"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "é"}]}
    with site.http() as client:
        response = client.post(path, json=asked)
        whole = client.post(path, json=asked | {"stream": False}).json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    streamed = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    prompts = [
        p for event in events for p in (event.get("prompt_token_ids"), event["choices"][0].get("prompt_token_ids"))
    ]
    sent = site.engine.requests[0].prompt_token_ids
    assert streamed == whole["choices"][0]["token_ids"] == [*(token for token in sent if token < EOS), EOS]
    assert [prompt for prompt in prompts if prompt] == [sent]
    assert sent in (whole.get("prompt_token_ids"), whole["choices"][0].get("prompt_token_ids"))


@pytest.mark.parametrize("asked", [STREAM, TEXT], ids=["stream", "whole"])
def test_client_disconnect_cancels_the_engine_and_bills_what_was_sent(site: Site, asked: dict[str, Any]) -> None:
    site.engine.script = lambda request: [65] * 200
    site.engine.pause = 0.02
    before = settled(site, "acme")
    with socket.create_connection(("127.0.0.1", int(site.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(raw_post(site, asked | {"max_tokens": 200}))
        until_true(lambda: site.engine.running == 1)
        if asked is STREAM:  # until the client has some of the answer
            received = b""
            while b"data: " not in received:
                received += connection.recv(1 << 16)
    until_true(lambda: site.engine.running == 0)
    assert len(site.engine.cancelled) == 1
    until_true(lambda: settled(site, "acme")["num_model_requests"] == before["num_model_requests"] + 1)
    after = settled(site, "acme")
    billed = (after["input_tokens"] - before["input_tokens"], after["output_tokens"] - before["output_tokens"])
    if asked is STREAM:
        assert billed[0] == 3
        assert 1 <= billed[1] < 200
    else:
        assert billed == (0, 0)


@pytest.mark.parametrize("asked", [STREAM, TEXT], ids=["stream", "whole"])
def test_client_disconnect_before_first_token_is_not_billed(site: Site, asked: dict[str, Any]) -> None:
    site.engine.pause = 60.0
    before = settled(site, "acme")
    with socket.create_connection(("127.0.0.1", int(site.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(raw_post(site, asked))
        until_true(lambda: site.engine.running == 1)
    until_true(lambda: site.engine.running == 0)
    until_true(lambda: settled(site, "acme")["num_model_requests"] == before["num_model_requests"] + 1)
    after = settled(site, "acme")
    assert (after["input_tokens"], after["output_tokens"]) == (before["input_tokens"], before["output_tokens"])


def test_two_hundred_streams_at_once_each_get_their_own_answer(site: Site) -> None:
    site.engine.pause = 0.01

    async def one(client: httpx.AsyncClient, i: int) -> str:
        response = await client.post("/v1/completions", json=STREAM | {"prompt": f"stream {i}", "max_tokens": 20})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    async def all_of_them() -> list[str]:
        headers = {"Authorization": f"Bearer {site.keys['acme']}"}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=site.url, headers=headers, limits=limits, timeout=PATIENCE) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    assert asyncio.run(all_of_them()) == [f"stream {i}" for i in range(200)]
    assert site.engine.running == 0


def test_client_that_takes_nothing_of_a_stream_is_disconnected(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its answer would stay in memory for as long as it keeps the connection."""
    caplog.set_level(logging.INFO, "loramux_api")
    monkeypatch.setattr(http_layer, "READER_SECONDS", 0.4)
    choices, tokens = 128, 200  # together more than the buffers of the sockets hold
    site.engine.script = lambda request: [65] * tokens
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", int(site.url.rsplit(":", 1)[1])))
        silent.sendall(raw_post(site, STREAM | {"n": choices, "max_tokens": tokens}))
        until_true(lambda: len(site.engine.requests) == choices and site.engine.running == 0)
        until_true(lambda: any("took nothing" in record.message for record in caplog.records))
        silent.settimeout(60)
        received = b""
        while (data := silent.recv(1 << 20)) and not received.endswith(b"0\r\n\r\n"):
            received += data
    assert b"[DONE]" not in received
    assert 0 < received.count(b"data: ") < choices * tokens


def test_the_response_of_a_stream_survives_a_keep_alive_connection(site: Site) -> None:
    with site.http() as client:
        texts = [client.post("/v1/completions", json=asked).text for asked in (STREAM, TEXT, STREAM)]
    assert texts[0].endswith("data: [DONE]\n\n")
    assert json.loads(texts[1])["choices"][0]["text"] == "hi"
    assert texts[2].endswith("data: [DONE]\n\n")


def raw_post(site: Site, body: dict[str, Any]) -> bytes:
    """Return a request as bytes, which a test sends on a connection that it drops."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {site.keys['acme']}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
