"""Replies from outside: an encoded or endless reply of any sender is refused before it takes memory."""

from __future__ import annotations

import ast
import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

import loramux
import loramux_api
from loramux.accounts.tenants.authentication import IssuerKeys, IssuerUnreachable
from loramux.common.identity import TenantId
from loramux.common.public_http import MAX_REPLY_BYTES, ReplyRefused, Resolver, bounded
from loramux.common.settings.server import BatchSettings
from loramux.money.exports.delivery import DeliveryUnknown
from loramux.money.exports.sinks import HttpSink
from loramux.releases import judges as judges_module
from loramux.releases.comparison import Answered, Question
from loramux.releases.graders import Judge
from loramux.releases.judges import JudgeFailed, Judges

DECODED = 64 << 20
BOMB = gzip.compress(gzip.compress(bytes(DECODED)))
MOST_MEMORY = 4 << 20
MAKING_CLIENTS = {
    "loramux/common/public_http.py": "it makes the bounded client",
    "loramux/accounts/webhooks/dispatcher.py": "it reads the status of a reply, never its body",
    "loramux_api/cli/front_cost.py": "a command that calls the server that it has started",
}
"""The modules that make clients of httpx, and why they may."""


class Body(httpx.AsyncByteStream):
    """A body that is sent part by part, as often as it is asked for."""

    def __init__(self, part: bytes, times: int = 1) -> None:
        self._part, self._times = part, times
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._times):
            self.sent += len(self._part)
            yield self._part


ENCODINGS = ["gzip, gzip", "gzip", "deflate", "br", "zstd", "x-unknown"]


def client_of(body: Body, encoding: str | None = None) -> httpx.AsyncClient:
    async def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx.Response(200, stream=body, headers={"Content-Encoding": encoding} if encoding else {})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


async def ask_judge(client: httpx.AsyncClient) -> None:
    judges = Judges(client, Resolver("test"), BatchSettings(judge_seconds=5))
    judge = Judge(url="https://judge.example/v1", model="m")
    with pytest.raises(JudgeFailed, match=r"encoded|more than"):
        await judges.scores(
            judge, None, TenantId("t"), [Question(prompt="q", expected="a")], [Answered("1", "a", None)]
        )


async def ask_issuer(client: httpx.AsyncClient) -> None:
    with pytest.raises(IssuerUnreachable):
        await IssuerKeys("https://issuer.example", client).current()


class Sink(HttpSink):
    window = 1

    async def send(self, events: object, now: int) -> list[object]:  # type: ignore[override]
        await self._post("/events", json={})
        return []


async def send_usage(client: httpx.AsyncClient) -> None:
    with pytest.raises(DeliveryUnknown):
        await Sink("test", client, "https://sink.example", {}).send([], 0)


ROADS: dict[str, Callable[[httpx.AsyncClient], Awaitable[None]]] = {
    "judge": ask_judge,
    "issuer": ask_issuer,
    "sink": send_usage,
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges_module, "FIRST_PAUSE", 0.0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("road", ROADS)
def test_an_encoded_reply_is_refused_and_takes_no_memory(road: str, encoding: str) -> None:
    assert len(BOMB) < 1000
    tracemalloc.start()
    try:
        asyncio.run(ROADS[road](client_of(Body(BOMB), encoding)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY, f"{peak >> 20} MiB"


@pytest.mark.parametrize("road", ROADS)
def test_an_endless_reply_is_read_up_to_its_bound(road: str) -> None:
    body = Body(bytes(64 << 10), times=100_000)
    asyncio.run(ROADS[road](client_of(body)))
    attempts = judges_module.ATTEMPTS if road == "judge" else 1
    assert body.sent <= attempts * (MAX_REPLY_BYTES + (128 << 10))


def test_a_reply_within_the_bound_is_read() -> None:
    async def run() -> bytes:
        async with bounded(client_of(Body(b"x" * 1000, times=10), "identity")) as client:
            return (await client.get("https://service.example")).content

    assert asyncio.run(run()) == b"x" * 10_000


def test_a_reply_of_an_announced_length_over_the_bound_is_not_read() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Length": str(MAX_REPLY_BYTES + 1)}, stream=Body(b""))

    async def run() -> None:
        async with bounded(httpx.AsyncClient(transport=httpx.MockTransport(answer))) as client:
            with pytest.raises(ReplyRefused, match="more than"):
                await client.get("https://service.example")

    asyncio.run(run())


@pytest.mark.parametrize("location", ["https://xn--0/", "https://[::1", "https://a:port/", "http://\u0080/"])
def test_a_redirect_to_no_address_is_a_refused_reply(location: str) -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers=[(b"Location", location.encode())])

    async def run() -> None:
        async with bounded(httpx.AsyncClient(transport=httpx.MockTransport(answer))) as client:
            with pytest.raises(ReplyRefused, match="redirects"):
                await client.get("https://service.example")

    asyncio.run(run())


def test_clients_for_services_outside_are_made_in_one_place() -> None:
    """A client that is made elsewhere has no bound on what it decodes."""
    found: set[str] = set()
    for package in (loramux, loramux_api):
        root = Path(package.__path__[0])
        for file in root.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN:
                    found.add(f"{root.name}/{file.relative_to(root)}")
    assert found == set(MAKING_CLIENTS)


FORBIDDEN = {
    *(f"httpx.{name}" for name in ("AsyncClient", "Client", "get", "post", "put", "request", "stream", "delete")),
    *(f"requests.{name}" for name in ("get", "post", "request", "Session")),
    *("urllib.request.urlopen", "request.urlopen", "urlopen", "http.client.HTTPSConnection", "aiohttp.ClientSession"),
}
