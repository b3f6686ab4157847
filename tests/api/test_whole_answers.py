"""Answers in one piece, on real ports: sent at the client's speed, and given up if the client takes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from litestar import Litestar, Response, get
from running_server import Running, running

from loramux.money.limits.definitions import RateLimitStatus
from loramux_api import http_layer
from loramux_api.answering import WholeAnswer

CONTENT = b"".join(b"%07d," % number for number in range(2 << 20))
"""16 MiB: more than the buffers of two sockets."""

ended = threading.Event()


@get("/health/live")
async def live() -> None:
    return


@get("/answer")
async def answer() -> Response[bytes]:
    made = SimpleNamespace(rate_limits=RateLimitStatus(), replayed=False, abandon=ended.set)
    return WholeAnswer(cast(Any, made), CONTENT)


@pytest.fixture(scope="module", params=["granian", "uvicorn"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(Litestar([live, answer]), request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def _begin() -> None:
    ended.clear()


def test_long_whole_answer_arrives_unchanged_and_is_given_up_after_it(server: Running) -> None:
    response = httpx.get(f"{server.url}/answer", timeout=120)
    assert response.content == CONTENT
    assert response.headers["content-length"] == str(len(CONTENT))
    assert ended.wait(60)


def test_client_that_takes_nothing_of_a_whole_answer_is_disconnected(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_layer, "READER_SECONDS", 0.3)
    url = urlsplit(server.url)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((str(url.hostname), int(url.port or 0)))
        silent.sendall(f"GET /answer HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        assert ended.wait(60), "the answer is held for a client that takes nothing"
        silent.settimeout(60)
        received = 0
        try:
            while data := silent.recv(1 << 20):
                received += len(data)
        except ConnectionResetError:
            pass
    assert received < len(CONTENT)
