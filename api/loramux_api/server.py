"""A server process: granian in this process's event loop, with a drain on SIGTERM, and an end when a base has no engine
left.

SIGTERM or SIGINT stops the server in four phases, each of which is logged:

1. Lame duck: for `server.lame_duck_seconds`, /health/ready answers 503, so that load balancers send their requests to
   other servers. Requests are still served. A second signal ends this phase.
2. Drain: new requests get 503 and Retry-After. Running requests finish within `server.drain_seconds`.
3. The listener and the idle connections close.
4. The platform closes in reverse order of its start. The exit code is 0.

Before the server can answer its first request, a signal ends the process at once with its usual exit code (130, 143).

An engine that dies is restarted in a new process (`loramux.fleet`). If none of a base's engines can be started, the
server ends with exit code 1, so that its supervisor (systemd, Kubernetes) can act: the machine may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from litestar import Litestar

from loramux.common.garbage import freeze_garbage
from loramux.common.settings.file import Settings
from loramux.common.settings.server import ServerSettings
from loramux.fleet.member import LaunchEngine
from loramux.server.platform import Platform, open_platform
from loramux_api.app import Application, attached, create_app
from loramux_api.listening import Address, Listener, connection_limit, reserved_addresses
from loramux_api.process import Signals, exit_now, ignore_signals

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Time in seconds that clients have to read data that was already written."""
ENGINE_POLL_SECONDS = 0.5
SWITCH_SECONDS = 0.001
"""Time for which a thread keeps the interpreter while the event loop waits for it. Python's default is 5 ms. Checks of
tenants' files are Python on threads, and would delay every token of other tenants by as much.
"""


def serve(settings: Settings, on_serving: Callable[[Platform], None]) -> int:
    """Serve until a signal or the engine's death, and return the exit code.

    Calls `on_serving` when the server answers requests. Raises the errors of `open_platform`, and SettingsError if the
    address is not available.
    """
    os.umask(0o077)  # only the server's own user may read the files that it writes (rows, blobs, staged files)
    max_connections = connection_limit()
    with reserved_addresses(settings.server) as addresses:
        return asyncio.run(_serve(settings, addresses, max_connections, on_serving))


async def _serve(
    settings: Settings, addresses: list[Address], max_connections: int, on_serving: Callable[[Platform], None]
) -> int:
    signals = Signals()
    signals.listen()
    code = await run_server(create_app(settings), settings, addresses, max_connections, signals, on_serving)
    ignore_signals()
    return code


async def run_server(
    app: Application,
    settings: Settings,
    addresses: list[Address],
    max_connections: int,
    signals: Signals,
    on_serving: Callable[[Platform], None],
    launch: LaunchEngine | None = None,
    may_listen: Callable[[], Awaitable[object]] | None = None,
) -> int:
    """Serve `app` at `addresses` as `serve` does. `launch` makes each engine; if it is None, the settings decide.
    `may_listen` is awaited when the platform is open.
    """
    async with _cancellable_start(settings, signals, launch) as platform, attached(app, platform):
        freeze_garbage()
        sys.setswitchinterval(SWITCH_SECONDS)
        listeners = [Listener(app, address, max_connections) for address in addresses]
        if may_listen is not None:
            await may_listen()
        return await _answer(app, settings.server, listeners, signals, on_serving)


@asynccontextmanager
async def _cancellable_start(
    settings: Settings, signals: Signals, launch: LaunchEngine | None
) -> AsyncIterator[Platform]:
    """Open the platform. A signal during this time ends the process."""
    manager = open_platform(settings, launch)
    try:
        async with asyncio.timeout(None) as startup:
            signals.on_first(lambda: startup.reschedule(0.0))
            platform = await manager.__aenter__()
    except TimeoutError:
        if signals.number is None:
            raise
        logger.info("stopped before the model was loaded")
        exit_now(128 + signals.number)
    signals.on_first(None)
    try:
        yield platform
    finally:
        await manager.__aexit__(None, None, None)


async def _answer(
    app: Litestar,
    address: ServerSettings,
    listeners: list[Listener],
    signals: Signals,
    on_serving: Callable[[Platform], None],
) -> int:
    """Answer requests until a signal or the engine's death; then stop in order."""
    platform: Platform = app.state.platform
    for listener in listeners:
        listener.listen()
    serving = asyncio.gather(*(listener.serve() for listener in listeners))
    on_serving(platform)
    stop_requested, died = asyncio.create_task(signals.first.wait()), asyncio.create_task(_until_dead(platform))
    endings: set[asyncio.Future[Any]] = {serving, stop_requested, died}
    await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    app.state.stopping = True
    if died.done():
        logger.error("a base has no engine left; the server stops, for its supervisor to start it again")
    elif stop_requested.done():
        await _lame_duck(address, signals, died)
    logger.info("draining: new requests get 503, %d running ones finish", platform.completions.running)
    await platform.completions.drain(address.drain_seconds)
    logger.info("closing the connections")
    for listener in listeners:
        listener.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(serving, FLUSH_SECONDS)
    logger.info("closing the engine and the database")
    for task in (stop_requested, died):
        task.cancel()
    return 0 if stop_requested.done() and not died.done() else 1


async def _lame_duck(address: ServerSettings, signals: Signals, died: asyncio.Task[None]) -> None:
    """Keep serving while load balancers learn that the server is not ready. A second signal or an engine's death ends
    this phase.
    """
    logger.info("stopping: /health/ready answers 503, requests are served for %g s more", address.lame_duck_seconds)
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({second, died}, timeout=address.lame_duck_seconds, return_when=asyncio.FIRST_COMPLETED)
    second.cancel()


async def _until_dead(platform: Platform) -> None:
    while not platform.lifecycle.has_lost_engines:  # noqa: ASYNC110  a poll watches all bases at once
        await asyncio.sleep(ENGINE_POLL_SECONDS)
