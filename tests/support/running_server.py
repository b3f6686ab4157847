"""A loramux application on a real port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server
from litestar import Litestar

from loramux_api.listening import BACKLOG, MAX_CONNECTIONS

Serve = Callable[[], Coroutine[Any, Any, None]]
Stop = Callable[[], None]


@dataclass(frozen=True)
class Running:
    app: Litestar
    url: str
    loop: asyncio.AbstractEventLoop


def _own_ports() -> Iterator[int]:
    """Yield ports below those that the kernel gives to sockets, and that no other worker of pytest-xdist tries."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(10_000 + worker, 32_768, workers)
    first = os.getpid() % len(ports)
    return itertools.cycle([*ports[first:], *ports[:first]])


_PORTS = _own_ports()


def free_port() -> int:
    """Return a port for a server that starts later, and that nothing else takes in the meantime."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


@contextmanager
def running(app: Litestar, server: str, port: int | None = None) -> Iterator[Running]:
    """`app` served by granian or uvicorn until the block ends; then its lifespan ends too."""
    loop = asyncio.new_event_loop()
    port = port or free_port()
    serve, stop = (_granian if server == "granian" else _uvicorn)(app, port)
    thread = threading.Thread(target=_run, args=(loop, serve), name=server)
    thread.start()
    try:
        url = f"http://127.0.0.1:{port}"
        _await_health(url, thread)
        yield Running(app, url, loop)
    finally:
        loop.call_soon_threadsafe(stop)
        thread.join(120)
        assert not thread.is_alive(), "the server did not stop"


def _run(loop: asyncio.AbstractEventLoop, serve: Serve) -> None:
    asyncio.set_event_loop(loop)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serve())


def _granian(app: Litestar, port: int) -> tuple[Serve, Stop]:
    made: list[Server] = []

    async def serve() -> None:
        made.append(
            Server(
                app,
                port=port,
                interface=Interfaces.ASGI,
                http=HTTPModes.http1,
                backlog=BACKLOG,
                backpressure=MAX_CONNECTIONS,
                log_enabled=False,
            )
        )
        await made[0].serve()

    def stop() -> None:
        made[0].stop()

    return serve, stop


def _uvicorn(app: Litestar, port: int) -> tuple[Serve, Stop]:
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="on"))

    def stop() -> None:
        server.should_exit = True

    return server.serve, stop


def _await_health(url: str, thread: threading.Thread) -> None:
    for _ in range(600):
        assert thread.is_alive(), "the server ended while it was starting"
        try:
            if httpx.get(f"{url}/health/live").status_code == 200:
                return
        except httpx.TransportError:
            threading.Event().wait(0.05)
    raise AssertionError("the server did not start")
