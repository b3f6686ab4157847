"""What a server does beside answering: again and again, and never so that it harms the answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

logger = logging.getLogger(__name__)


@asynccontextmanager
async def every(seconds: float, act: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """While the block runs, do `act` at once and then every so many seconds; what it raises is logged."""
    task = asyncio.create_task(_repeat(seconds, act))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _repeat(seconds: float, act: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await act()
        except Exception:
            logger.exception("a chore failed; it is tried again in %g s", seconds)
        await asyncio.sleep(seconds)
