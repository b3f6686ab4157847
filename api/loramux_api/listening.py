"""The addresses that a server answers on: reserved before the model is loaded, with TLS whose certificate may change.

A server has one public address, and with `server.internal_port` a second one for probes, metrics and the API's
description. All answer with the same application.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.log import LogLevels
from granian.net import SocketHolder
from granian.server.embed import Server
from litestar.types import ASGIApp, Receive, Scope, Send
from litestar.utils.path import normalize_path

from loramux.common.settings.file import SettingsError
from loramux.common.settings.server import ServerSettings

logger = logging.getLogger(__name__)

BACKLOG = 1024
MAX_CONNECTIONS = 16_384
"""Maximum number of connections. Thousands of streams stay open; with granian's default the 129th would wait."""
RESERVED_FILES = 512
"""Descriptors that are needed for the database, files, uploads and webhooks, in addition to the connections."""
MIN_CONNECTIONS = 64
MAX_FILES = 1 << 20
"""Descriptors that a process asks for, if its hard limit has so many. granian ends a TLS handshake after 10 seconds,
but does not count it as a connection, and under TLS it stops listening for good when no descriptor is left.
"""
CERTIFICATE_POLL_SECONDS = 2.0
INTERNAL_PATHS = ("/metrics", "/health", "/schema")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, as files that may be replaced while the server runs."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise SettingsError unless both files can be read and belong together."""
        try:
            # An encrypted key is refused. Without a password, openssl would ask for one in the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # SSLError is a subclass; it names no file
            why = error.strerror if error.filename or not isinstance(error, ssl.SSLError) else error.reason
            raise SettingsError(
                f"server.tls_certificate, server.tls_key: {self.certificate} and {self.key} cannot be used ({why}); "
                "they are PEM files of one certificate and its key"
            ) from None

    def version(self) -> tuple[int, ...]:
        """Return a value that changes with the files; empty if one is absent, for example in the middle of a
        replacement.
        """
        try:
            return tuple(value for path in (self.certificate, self.key) for value in _identity(path))
        except OSError:
            return ()


@dataclass(frozen=True, slots=True)
class Address:
    """A bound socket that does not listen yet, and the set of paths that it serves."""

    socket: socket.socket
    certificate: Certificate | None = None
    internal: bool | None = None
    """Paths of the address. True: only INTERNAL_PATHS; False: all others; None: every path."""
    root_path: str = ""
    """Prefix under which every path is also found."""


@contextmanager
def reserved_addresses(settings: ServerSettings) -> Iterator[list[Address]]:
    """Reserve the addresses of the settings until the block ends. Raises SettingsError."""
    certificate = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        certificate = Certificate(Path(settings.tls_certificate), Path(settings.tls_key))
        certificate.check()
    with ExitStack() as reserved:
        public = reserved.enter_context(reserved_socket(settings.host, settings.port, "server.host, server.port"))
        if settings.internal_port is None:
            yield [Address(public, certificate, root_path=settings.root_path)]
            return
        host = settings.internal_host or settings.host
        internal = reserved.enter_context(
            reserved_socket(host, settings.internal_port, "server.internal_host, server.internal_port")
        )
        yield [
            Address(public, certificate, internal=False, root_path=settings.root_path),
            Address(internal, internal=True),
        ]


@contextmanager
def reserved_socket(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    """Reserve the address from now on, before the model is loaded. The socket does not listen yet.

    granian binds with SO_REUSEPORT, with which a second server would get half of the connections. A socket that is
    bound and does not listen refuses connections. After SO_REUSEADDR is cleared, no other process can bind to the
    address. (At the bind it is set, because it ignores connections of an earlier process in TIME_WAIT.) Raises
    SettingsError.
    """
    try:
        listener = _bind(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid domain name
        raise _unavailable(setting, host, port, error) from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield listener


def shareable(addresses: list[Address]) -> list[Address]:
    """Let other processes of this user take part in reserved addresses (`joined`). A second server still refuses them,
    because it reserves first.
    """
    for address in addresses:
        address.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return addresses


def joined(address: Address) -> Address:
    """Return a shareable address with a new socket, to which the kernel gives this process's share of the connections.

    Processes that accept from one socket would race for its connections: of 256 that came at once, four workers took
    5, 21, 106 and 125.
    """
    with address.socket as reserved:
        host, port, *_ = reserved.getsockname()
    return replace(address, socket=_bind(host, port, is_shared=True))


def connection_limit() -> int:
    """Return the number of connections that the process can hold, after it has raised its soft limit of open files."""
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MAX_FILES:
        raised = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
        with suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_CONNECTIONS
    limit = max(MIN_CONNECTIONS, soft - RESERVED_FILES)
    logger.warning(
        "at most %d connections are served at a time, because the process may open only %d files; raise it with "
        "`ulimit -n %d` or systemd's LimitNOFILE",
        limit,
        soft,
        wanted,
    )
    return limit


class BoundServer(Server):
    """A granian server on a socket that is already bound."""

    def __init__(self, app: ASGIApp, address: Address, max_connections: int) -> None:
        files = address.certificate
        # This interface has no lifespan: the platform is opened before, so that its errors can be reported.
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=max_connections,
            log_level=LogLevels.error,
            ssl_cert=files and files.certificate,
            ssl_key=files and files.key,
            ssl_protocol_min=SSLProtocols.tls12,
        )
        self._listener = address.socket

    def _init_shared_socket(self) -> None:
        """Replace granian's own bind. granian uses SocketHolder to hand a descriptor to its worker processes."""
        self._ssp = None
        self._sfd = os.dup(self._listener.fileno())  # granian closes it
        self._shd = SocketHolder(self._sfd, False, BACKLOG)


class Listener:
    """An address that answers. With TLS it follows the certificate's files: new connections get the new certificate.

    granian reads a certificate only once. So a changed certificate gets a new granian on the same socket. The old one
    accepts no more connections, and ends when its last connection does.
    """

    def __init__(self, app: ASGIApp, address: Address, max_connections: int) -> None:
        app = app if address.internal is None else paths_of(app, internal=address.internal)
        self._app = below(app, address.root_path) if address.root_path else app
        self._address, self._max_connections = address, max_connections
        self._servers: dict[asyncio.Task[None], BoundServer] = {}
        self._closed = False

    def listen(self) -> None:
        """Accept connections from now on. Raises SettingsError."""
        listener = self._address.socket
        host, port, *_ = listener.getsockname()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # listen() checks for TIME_WAIT again
            listener.listen(BACKLOG)
        except OSError as error:
            raise _unavailable("server.host, server.port", host, port, error) from None

    async def serve(self) -> None:
        """Answer until `close` is called and the last connection has ended."""
        certificate = self._address.certificate
        version = certificate and certificate.version()
        self._start()
        while self._servers:
            done, _ = await asyncio.wait(
                self._servers,
                timeout=CERTIFICATE_POLL_SECONDS if certificate else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                del self._servers[task]
                task.result()
            if (
                certificate
                and self._address.socket.fileno() >= 0
                and (now := certificate.version()) not in ((), version)
            ):
                version = now
                self._replace(certificate)

    def close(self) -> None:
        """Refuse connections from now on, and close the existing ones when they are idle."""
        self._closed = True
        self._address.socket.close()
        for server in self._servers.values():
            server.stop()

    def _start(self) -> None:
        server = BoundServer(self._app, self._address, self._max_connections)
        self._servers[asyncio.create_task(server.serve())] = server

    def _replace(self, certificate: Certificate) -> None:
        """Serve new connections with the current certificate. If it cannot be used, keep the old one."""
        try:
            certificate.check()
        except SettingsError as error:
            logger.error("the certificate has changed and cannot be used; the one before stays in use: %s", error)
            return
        before = list(self._servers.values())
        self._start()
        for server in before:
            server.stop()
        logger.info("new connections use the certificate that %s holds now", certificate.certificate)


def _bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family, kind, protocol, _, resolved = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        # Linux's connections inherit it. Without it an event waits until the client has acknowledged the last
        # one, and clients wait up to 40 ms with that.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind(resolved)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _unavailable(setting: str, host: str, port: int, error: OSError | UnicodeError) -> SettingsError:
    if isinstance(error, UnicodeError):
        why = "no host has such a name"
    elif isinstance(error, socket.gaierror):
        why = str(error)
    else:
        why = os.strerror(error.errno or errno.EADDRNOTAVAIL)
    way_out = "choose another in the settings, or with --host and --port"
    return SettingsError(f"{setting}: cannot listen on {host}:{port} ({why}); {way_out}")


def below(app: ASGIApp, root_path: str) -> ASGIApp:
    """Return the application that also answers every path below `root_path`."""

    async def shortened(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(f"{root_path}/"):
            scope["path"] = path.removeprefix(root_path)
            scope["raw_path"] = scope["raw_path"].removeprefix(root_path.encode())
        await app(scope, receive, send)

    return shortened


def paths_of(app: ASGIApp, *, internal: bool) -> ASGIApp:
    """Return the application for only INTERNAL_PATHS, or for all others. Paths that are not for this address get
    404.
    """

    async def filtered(scope: Scope, receive: Receive, send: Send) -> None:
        path = normalize_path(scope["path"])  # in the form that the routing uses: //metrics is /metrics
        if internal != any(path == one or path.startswith(f"{one}/") for one in INTERNAL_PATHS):
            scope["path"] = f"/not-on-this-port{path}"
        await app(scope, receive, send)

    return filtered


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
