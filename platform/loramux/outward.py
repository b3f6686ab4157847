"""Calls to addresses that strangers chose: to the public internet only, and only where a check found them to lead.

A name that is resolved for the check and again for the call could lead to two places; here the address that was
checked is the one that is called.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotPublic(Exception):
    """The name leads to an address that is not public, or nowhere; the message says which."""


def is_public(address: Address) -> bool:
    """Whether the address, and the IPv4 one that may be wrapped in it, is on the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if wrapped is not None:
            return is_public(wrapped)
    return address.is_global and not address.is_multicast


async def public_addresses(host: str, also: Sequence[Network] = ()) -> list[Address]:
    """Where `host`, a name or an address, leads to.

    Raises NotPublic unless every one of its addresses is public, or in one of the networks `also`.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotPublic(f"the name {host[:120]} leads nowhere") from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    for address in addresses:
        if not is_public(address) and not any(address in network for network in also):
            raise NotPublic(f"the name {host[:120]} leads to {address}, which is not a public address")
    return addresses


class PublicTransport(httpx.AsyncBaseTransport):
    """Calls the address that was checked, under the name that was asked for. Raises NotPublic.

    Connections are not kept: one to an address could else be used under another name that leads there too.
    """

    def __init__(self, also: Sequence[Network] = ()) -> None:
        """`also` are networks that may be called though they are not public."""
        self._also = also
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer of the first of the addresses that can be connected to."""
        host = request.url.host
        addresses = await public_addresses(host, self._also)
        extensions = {**request.extensions, "sni_hostname": host}
        for last, address in enumerate(addresses, 1 - len(addresses)):
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=str(address)),
                headers=request.headers,
                stream=request.stream,
                extensions=extensions,
            )
            try:
                return await self._inner.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if last == 0:
                    raise
        raise AssertionError("a name that leads nowhere was refused")

    async def aclose(self) -> None:
        """Close every connection."""
        await self._inner.aclose()
