"""A server process: granian in this process's event loop, a drain on SIGTERM, an end when the engine dies.

SIGTERM or SIGINT: new requests get 503 and Retry-After, running ones end (for `server.drain_seconds` at most), then the
exit code is 0. An engine that dies takes the process with it, with exit code 1: running streams get an error event,
/health/ready says 503, and whoever supervises the process (systemd, Kubernetes) starts a fresh one. Restarting the
engine in place would keep a process whose GPU or memory may be the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from granian.constants import HTTPModes, Interfaces
from granian.log import LogLevels
from granian.server.embed import Server
from litestar import Litestar

from loramux.gateway import EngineClient, Platform
from loramux.settings import ServerSettings, Settings, SettingsError
from loramux_api.app import create_app

logger = logging.getLogger(__name__)

BACKLOG = 1024
MAX_CONNECTIONS = 16_384
"""Streams are held open by the thousand; granian's own default would make the 129th wait."""
FLUSH_SECONDS = 5.0
"""For clients to read what is already written to them."""
ENGINE_POLL_SECONDS = 0.5


def serve(settings: Settings, on_serving: Callable[[Platform], None]) -> int:
    """Serve until told to stop; returns the exit code.

    Calls `on_serving` once requests are answered. Raises what `open_platform` raises, and SettingsError where the
    address cannot be had.
    """
    demand_free(settings.server)
    try:
        return asyncio.run(_serve(settings, on_serving))
    except TimeoutError:
        return 0  # told to stop while the model was being loaded


def demand_free(address: ServerSettings) -> None:
    """Raise SettingsError where somebody listens already, before the model is loaded: granian would share the port."""
    try:
        with socket.create_server((address.host, address.port), family=_family(address.host)):
            pass
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise SettingsError(
            f"server.host, server.port: cannot listen on {address.host}:{address.port} ({why}); "
            "choose another with --host and --port"
        ) from None


async def _serve(settings: Settings, on_serving: Callable[[Platform], None]) -> int:
    app = create_app(settings)
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(None) as startup:
            _on_signals(lambda: startup.reschedule(0.0))
            await stack.enter_async_context(app.lifespan())
        told_to_stop = asyncio.Event()
        _on_signals(told_to_stop.set)
        return await _answer(app, settings.server, told_to_stop, on_serving)


async def _answer(
    app: Litestar, address: ServerSettings, told_to_stop: asyncio.Event, on_serving: Callable[[Platform], None]
) -> int:
    """Answer requests until told to stop or the engine dies; then drain."""
    platform = app.state.platform
    server = _granian(app, address)
    serving = asyncio.create_task(server.serve())
    await _until_answering(address)
    on_serving(platform)
    told, died = asyncio.create_task(told_to_stop.wait()), asyncio.create_task(_until_dead(platform.engine))
    await asyncio.wait({serving, told, died}, return_when=asyncio.FIRST_COMPLETED)
    if died.done():
        logger.error("the engine has died; this process ends, for its supervisor to start it again")
    await platform.completions.drain(address.drain_seconds)
    server.stop()
    with suppress(TimeoutError):
        await asyncio.wait_for(serving, FLUSH_SECONDS)
    return 0 if told.done() and not died.done() else 1


def _granian(app: Litestar, address: ServerSettings) -> Server:
    """Without a lifespan of its own: the application's has been entered already, where its errors can be told."""
    return Server(
        app,
        address=address.host,
        port=address.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_CONNECTIONS,
        log_level=LogLevels.error,
    )


def _on_signals(act: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, act)


async def _until_answering(address: ServerSettings) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(address.host, address.port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


async def _until_dead(engine: EngineClient) -> None:
    while engine.alive:  # noqa: ASYNC110  an engine is asked; it calls nobody
        await asyncio.sleep(ENGINE_POLL_SECONDS)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
