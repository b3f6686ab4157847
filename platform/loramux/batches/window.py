"""How many lines of batches are in the engine at a time.

A line's first step is a prefill that everything beside it waits for, so each line under way costs interactive requests
a little of their first token. While other requests run, few lines do; an idle engine takes many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from loramux.settings import BatchSettings
from loramux.threads import TenantSlots

LOOK_SECONDS = 0.2
"""How soon lines that wait notice that the other requests have ended."""


class Window:
    """Places for lines in one server's engine."""

    def __init__(self, settings: BatchSettings, is_shared: Callable[[], bool]) -> None:
        """`is_shared` says whether requests run that are no lines of batches."""
        self._slots = TenantSlots(settings.max_in_flight, settings.max_in_flight_per_tenant)
        self._beside_others = settings.max_in_flight_beside_others
        self._is_shared = is_shared
        self._taken = 0

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place while the block runs; wait for it first."""
        async with self._slots.slot(tenant):
            while self._taken >= self._beside_others and self._is_shared():  # noqa: ASYNC110  nothing tells of an end
                await asyncio.sleep(LOOK_SECONDS)
            self._taken += 1
            try:
                yield
            finally:
                self._taken -= 1
