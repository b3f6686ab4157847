"""An engine's events of one request as an async iterator, with which tests read them one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from loramux.engine.client import ENGINE_DIED, EngineClient, EngineDied
from loramux.engine.messages import Request, TokenEvent


async def stream(engine: EngineClient, request: Request) -> AsyncIterator[TokenEvent]:
    """Submit, then yield events to the last; closing the iterator early cancels."""
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    engine.submit(request, events.put_nowait)
    finished = False
    try:
        while not finished:
            event = await events.get()
            finished = event.finish_reason is not None
            if event.fault is not None and event.fault.code == ENGINE_DIED:
                raise EngineDied(event.fault.message)
            yield event
    finally:
        if not finished:
            engine.forget(request.id)
