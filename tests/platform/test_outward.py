"""Where strangers' addresses may lead, and that what was checked is what is called."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from loramux import outward
from loramux.outward import NotPublic, PublicTransport, is_public, public_addresses

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("10.1.2.3", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::10.0.0.1", False),
        ("2002:0a00:0001::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f000001", "2130706433", "no-such-host.invalid"])
async def test_every_way_of_writing_this_machine_is_refused(host: str) -> None:
    with pytest.raises(NotPublic):
        await public_addresses(host)


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said.append((self.headers["Host"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    said: list[tuple[str, bytes]] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.said = said  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_a_private_address_is_not_called(server: HTTPServer) -> None:
    async with httpx.AsyncClient(transport=PublicTransport()) as client:
        with pytest.raises(NotPublic):
            await client.post(f"http://127.0.0.1:{server.server_port}/", content=b"x")
    assert server.said == []


async def test_the_address_that_was_checked_is_called_under_the_name(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads nowhere else is reached, so nobody resolves it a second time; a dead address is passed over."""

    async def checked(host: str, also: Sequence[outward.Network]) -> list[outward.Address]:
        assert host == "hook.invalid"
        return [ipaddress.ip_address("127.0.0.2"), ipaddress.ip_address("127.0.0.1")]

    monkeypatch.setattr(outward, "public_addresses", checked)
    async with httpx.AsyncClient(transport=PublicTransport()) as client:
        answer = await client.post(f"http://hook.invalid:{server.server_port}/x", content=b"hello")
    assert answer.status_code == 204
    assert server.said == [(f"hook.invalid:{server.server_port}", b"hello")]
