"""Tenants' addresses: allowed targets, waits for a slow resolver, and the same address for check and call."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from listening import until

from loramux.common.public_http import TENANT, NotPublic, PublicTransport, Resolver, is_public

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("100.63.255.255", True),
        ("100.128.0.1", True),
        ("198.20.0.1", True),
        ("2001:200::1", True),
        ("10.1.2.3", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("0.0.0.0", False),
        ("0.1.2.3", False),
        ("192.0.0.8", False),
        ("192.0.0.171", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("198.18.0.1", False),
        ("198.19.255.255", False),
        ("198.51.100.1", False),
        ("203.0.113.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::10.0.0.1", False),
        ("::93.184.216.34", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("100::1", False),
        ("5f00::1", False),
        ("2001:db8::1", False),
        ("3fff::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("::ffff:0:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b::169.254.169.254", False),
        ("64:ff9b::93.184.216.34", True),
        ("64:ff9b:1::10.0.0.1", False),
        ("64:ff9b:1:7f00:0:100::", False),
        ("64:ff9b:1::93.184.216.34", False),
        ("2002:0a00:0001::1", False),
        ("2002:7f00:0001::", False),
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", False),
    ],
)
def test_is_public_by_address(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.",
        "127.1",
        "127.0.0.1.",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "2130706433",
        "134744072",
        "fe80::1%eth0",
        "fe80::1%25eth0",
        "93.184.216.34%eth0",
        "no-such-host.invalid",
        "a" * 300,
        "",
    ],
)
async def test_resolver_refuses_every_spelling_of_a_private_address(host: str) -> None:
    with pytest.raises(NotPublic):
        await Resolver("test").addresses(host, "acme")


async def test_resolver_refuses_a_name_with_one_private_address_among_public_ones() -> None:
    resolver = Resolver("test", lookup=lambda _: ["93.184.216.34", "64:ff9b:1::a00:1"])
    with pytest.raises(NotPublic):
        await resolver.addresses("hook.example", "acme")


@pytest.mark.parametrize("found", [[], ["10.0.0.1"], ["8.8.8.8", "fd00::1"]])
async def test_names_without_a_public_address_are_refused_alike(found: list[str]) -> None:
    """Otherwise a tenant could ask which names the operator's own network has, and where they lead."""
    with pytest.raises(NotPublic) as refused:
        await Resolver("test", lookup=lambda _: found).addresses("database.internal", "acme")
    assert str(refused.value) == "database.internal has no public address"


async def test_silent_resolver_delays_only_the_tenant_that_asks() -> None:
    """Names that are never answered take the tenant's own places, never another tenant's or the default executor's."""
    silence = threading.Event()
    asked: list[str] = []

    def lookup(host: str) -> list[str]:
        asked.append(host)
        if host.startswith("silent"):
            silence.wait(30)
        return ["93.184.216.34"]

    resolver = Resolver("test", threads=4, per_tenant=2, timeout_s=0.2, lookup=lookup)
    try:
        silent = [resolver.addresses(f"silent{number}.example", "mallory") for number in range(20)]
        refused = await asyncio.gather(*silent, return_exceptions=True)
        assert all(isinstance(one, NotPublic) for one in refused)
        await until(lambda: len(asked) == 2)
        assert all(host.startswith("silent") for host in asked)
        resolver._timeout_s = 60  # others' threads may take a while to start
        assert await resolver.addresses("quick.example", "acme") == [ipaddress.ip_address("93.184.216.34")]
        assert await asyncio.to_thread(lambda: "free") == "free"
        resolver._timeout_s = 0.2
        with pytest.raises(NotPublic, match="not resolved"):
            await resolver.addresses("quick.example", "mallory")
    finally:
        silence.set()
    resolver._timeout_s = 60
    await until(lambda: not any(thread.name == "resolve-test" for thread in threading.enumerate()))
    assert await resolver.addresses("quick.example", "mallory") == [ipaddress.ip_address("93.184.216.34")]


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.headers["Host"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(302 if self.path == "/redirect" else 204)
            if self.path == "/redirect":
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/private")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    received: list[tuple[str, bytes]] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.received = received  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Answers:
    """A name server whose answers change: one for each question."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)

    def __call__(self, host: str) -> Sequence[str]:
        return self.answers.pop(0)


LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]


async def test_transport_does_not_call_a_private_address(server: HTTPServer) -> None:
    async with httpx.AsyncClient(transport=PublicTransport(Resolver("test"))) as client:
        with pytest.raises(NotPublic):
            await client.post(f"http://127.0.0.1:{server.server_port}/", content=b"x")
    assert server.received == []


async def test_transport_calls_the_checked_address_and_resolves_once(server: HTTPServer) -> None:
    """DNS rebinding: a second question would get another answer. A dead address is passed over."""
    answers = Answers(["127.0.0.2", "127.0.0.1"], ["10.0.0.1"])
    transport = PublicTransport(Resolver("test", lookup=answers), LOOPBACK)
    async with httpx.AsyncClient(transport=transport) as client:
        url = f"http://hook.invalid:{server.server_port}/x"
        answer = await client.post(url, content=b"hello", extensions={TENANT: "acme"})
    assert answer.status_code == 204
    assert server.received == [(f"hook.invalid:{server.server_port}", b"hello")]
    assert answers.answers == [["10.0.0.1"]]


async def test_transport_checks_the_target_of_a_redirect_too(server: HTTPServer) -> None:
    """Even a client that follows redirects is refused: the transport checks every call."""
    transport = PublicTransport(Resolver("test", lookup=Answers(["127.0.0.1"])), LOOPBACK)
    async with httpx.AsyncClient(transport=transport) as client:
        answer = await client.post(f"http://hook.invalid:{server.server_port}/redirect", content=b"x")
    assert answer.status_code == 302
    assert len(server.received) == 1
    public = PublicTransport(Resolver("test"))
    async with httpx.AsyncClient(transport=public, follow_redirects=True) as client:
        with pytest.raises(NotPublic):
            await client.get(answer.headers["Location"])
