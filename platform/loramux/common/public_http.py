"""HTTP calls to other machines: every reply is bounded, and addresses that tenants choose must be public.

A reply is untrusted. A decoder can make hundreds of megabytes from a kilobyte before its caller can count them, because
httpx decodes a chunk before it returns the chunk. So `outside_client` asks for replies without an encoding, refuses
encoded ones, and counts the bytes when they arrive. All calls to outside services use this client.

This module prevents three attacks by addresses. First, a name may resolve to a private address, so every address of a
name is checked. Second, a name may resolve to another address later (DNS rebinding), so the client connects to exactly
the checked address. Third, the lookup of a name may never be answered. So lookups run in separate threads, few for each
kind of work and fewer for each tenant, never in asyncio's default executor, which all other work shares.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import httpx

from loramux.common.jobs import TenantSlots

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str], Sequence[str]]
"""A blocking function that returns the addresses of a name as texts. Raises OSError or UnicodeError."""

TENANT = "loramux_tenant"
"""The request extension that names the tenant on whose behalf the name is looked up."""

# Networks of the IANA special-purpose registries (RFC 6890 and its successors). The lists are written out because
# `is_global` differs between releases of Python.
PRIVATE_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the clouds' metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",  # IETF protocol assignments
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""Everything else is loopback, local, multicast, reserved, or a wrapped IPv4 address."""
PRIVATE_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments; Teredo, which wraps IPv4 addresses, among them
        "2001:db8::/32",
        "2002::/16",  # 6to4, which wraps IPv4 addresses
        "3fff::/20",
    )
)
WRAPPED_V4 = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""Prefixes of wrapped IPv4 addresses: IPv4-mapped, and NAT64's well-known prefix. Such an address is public if the IPv4
address in its last 32 bits is public.
"""

ANYWHERE: tuple[Network, ...] = (ipaddress.IPv4Network("0.0.0.0/0"), ipaddress.IPv6Network("::/0"))
"""Every network: callers with these networks may call private addresses too. Names are still resolved in threads."""

_numeric_label = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\.?", re.IGNORECASE)


MAX_REPLY_BYTES = 256 << 10
MAX_BYTES = "loramux_max_bytes"
"""The request extension with the maximum number of bytes of the reply."""


class ReplyRefused(httpx.DecodingError):
    """A reply is encoded, too long, or a redirect to no address. The request has arrived all the same."""


def outside_client(
    timeout: float, transport: httpx.AsyncBaseTransport | None = None, *, trust_env: bool = False
) -> httpx.AsyncClient:
    """Make a client for one kind of service: `bounded`, without redirects.

    With `trust_env`, the client uses the proxies of the environment.
    """
    return bounded(httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=False, trust_env=trust_env))


def bounded(client: httpx.AsyncClient) -> httpx.AsyncClient:
    """Make the client request replies without encoding, and raise ReplyRefused for a reply that is encoded or too long,
    or that redirects to an address that cannot be read.

    The limit is MAX_REPLY_BYTES, unless a request sets another limit in its extension MAX_BYTES.
    """
    client.headers["Accept-Encoding"] = "identity"
    hooks = client.event_hooks["response"]
    if _bound_reply not in hooks:
        hooks.append(_bound_reply)
    return client


async def _bound_reply(response: httpx.Response) -> None:
    limit = response.request.extensions.get(MAX_BYTES, MAX_REPLY_BYTES)
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    length = response.headers.get("content-length", "")
    reason = None
    if encoding not in ("", "identity"):
        reason = f"its reply is encoded ({encoding[:40]}), which was not asked for"
    elif length.isascii() and length.isdigit() and int(length[:20]) > limit:
        reason = f"its reply has more than {limit} bytes"
    elif response.has_redirect_location and not _is_readable(response.headers["location"], response.request.url):
        reason = "its reply redirects to an address that cannot be read"  # httpx would raise any ValueError
    if reason is not None:
        await response.aclose()
        raise ReplyRefused(reason)
    assert isinstance(response.stream, httpx.AsyncByteStream), "the client is asynchronous"
    response.stream = _BoundedStream(response.stream, limit)


def _is_readable(location: str, base: httpx.URL) -> bool:
    try:
        parse_outside_url(str(base.join(location)))
    except (httpx.InvalidURL, ValueError):
        return False
    return True


class _BoundedStream(httpx.AsyncByteStream):
    """The bytes of a reply, counted."""

    def __init__(self, stream: httpx.AsyncByteStream, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for part in self._stream:
            received += len(part)
            if received > self._max_bytes:
                raise ReplyRefused(f"its reply has more than {self._max_bytes} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def parse_outside_url(text: str) -> httpx.URL:
    """Parse a URL that the operator did not write. Raises httpx.InvalidURL, also if its host cannot be decoded, which
    httpx does only when the host is read.
    """
    try:
        url = httpx.URL(text)
        _ = url.host, url.port
    except ValueError as error:
        raise httpx.InvalidURL(str(error)) from None
    return url


class NotPublic(Exception):
    """The name resolves to no address, or to one that is not public."""


def is_public(address: Address) -> bool:
    """Return whether the address, or the IPv4 address that is wrapped in it, is on the public internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in PRIVATE_V4)
    if any(address in network for network in WRAPPED_V4):
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in GLOBAL_V6 and not any(address in network for network in PRIVATE_V6)


def _look_up(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


class Resolver:
    """Resolves names for one kind of work: in at most `threads` threads, at most `per_tenant` of them for one tenant.

    The system's resolver cannot be interrupted. A lookup that is not answered in time ends with an error, but it keeps
    its thread and its tenant's place until the system ends it too. So names that never answer delay only their own
    tenant.
    """

    def __init__(
        self, kind: str, threads: int = 16, per_tenant: int = 2, timeout_s: float = 5.0, lookup: Lookup = _look_up
    ) -> None:
        self._kind = kind
        self._timeout_s = timeout_s
        self._lookup = lookup
        self._slots = TenantSlots(threads, per_tenant)

    async def addresses(self, host: str, tenant: str, also: Sequence[Network] = ()) -> list[Address]:
        """Return the addresses of `host`, a name or an address.

        Raises NotPublic unless each address is public or in one of the networks `also`. The message is the same for a
        name that does not exist and for a name with a private address: it must not tell a tenant which names the
        operator's network has.
        """
        addresses = [ipaddress.ip_address(host)] if _is_literal(host) else await self._resolve(host, tenant)
        if not all(is_public(one) or any(one in network for network in also) for one in addresses):
            raise _no_public_address(host)
        return addresses

    async def _resolve(self, host: str, tenant: str) -> list[Address]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._in_thread(host, tenant)
        except TimeoutError:
            raise NotPublic(f"the name {host[:120]} was not resolved within {self._timeout_s:g} s") from None
        except (OSError, UnicodeError):
            raise _no_public_address(host) from None
        if not found:
            raise _no_public_address(host)
        return [ipaddress.ip_address(text.partition("%")[0]) for text in found]

    async def _in_thread(self, host: str, tenant: str) -> Sequence[str]:
        await self._slots.acquire(tenant)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def finish(found: Sequence[str] | Exception) -> None:
            self._slots.release(tenant)
            if answer.done():
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def work() -> None:
            found: Sequence[str] | Exception
            try:
                found = self._lookup(host)
            except Exception as error:  # the error is passed to the waiting task
                found = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, found)

        # a daemon thread: a resolver that never answers must not keep the process alive
        threading.Thread(target=work, name=f"resolve-{self._kind}", daemon=True).start()
        return await answer


def _is_literal(host: str) -> bool:
    """Return whether the host is an address. Raises NotPublic if the address is written in an unusual form.

    The system's resolver reads `0x7f.1`, `2130706433` and `0177.0.0.1` as 127.0.0.1. A zone (`fe80::1%eth0`) names an
    interface of this machine.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if "%" in host or ":" in host or _numeric_label.fullmatch(host.rstrip(".").rpartition(".")[2]):
            raise NotPublic(
                f"{host[:120]} is not a public address that can be used; write a name, or an address as 192.0.2.1"
            ) from None
        return False
    if "%" in host:
        raise NotPublic(f"{host[:120]} names a network interface and is not a public address")
    return True


def _no_public_address(host: str) -> NotPublic:
    return NotPublic(f"{host[:120]} has no public address")


class PublicTransport(httpx.AsyncBaseTransport):
    """Connects to the address that was checked, under the name in the URL. Raises NotPublic.

    Connections are not kept. Otherwise a connection could be used under another name of the same address.
    """

    def __init__(
        self, resolver: Resolver, also: Sequence[Network] = (), tenant: str = "", ports: Collection[int] = ()
    ) -> None:
        """`also` are private networks that may be called too. `tenant` is the tenant in whose share the lookups run.

        A request may name another tenant in its extension TENANT. `ports` are the allowed ports; empty: all ports.
        """
        self._ports = ports
        self._resolver = resolver
        self._also = also
        self._tenant = tenant
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer of the first address to which a connection succeeds."""
        host = request.url.host
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        if self._ports and port not in self._ports:
            raise NotPublic(f"the port {port} is not allowed")
        addresses = await self._resolver.addresses(host, str(request.extensions.get(TENANT, self._tenant)), self._also)
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
        raise AssertionError("a name without addresses was refused")

    async def aclose(self) -> None:
        """Close every connection."""
        await self._inner.aclose()
