"""How many lines of batches are in the engine at a time.

A line costs the requests beside it twice: its first step is a prefill that they wait for, and then its row lengthens
every step. So what may begin depends on the others:

    one waits for its first token    one line at a time, so that a batch moves however busy the engine is
    some run, or ran just now        `max_in_flight_beside_others`
    none for QUIET_SECONDS           `max_in_flight`

"Just now" is what sparse traffic needs: between two questions of a conversation nothing runs, and a window that opened
at once would meet the next question with dozens of prefills. For the same reason few lines may wait for *their* first
token at a time, also on an idle engine: the next request waits behind those prefills alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from loramux.jobs import TenantSlots
from loramux.settings import BatchSettings
from loramux.units import QUIET_SECONDS

LOOK_SECONDS = 0.2
"""How soon lines that wait notice that the other requests have ended."""


class Place:
    """A line's place in the engine."""

    def __init__(self, starting: asyncio.Semaphore) -> None:
        self._starting: asyncio.Semaphore | None = starting

    def note_started(self) -> None:
        """The line has its first token, or its end: another one may begin its prefill."""
        if self._starting is not None:
            self._starting.release()
            self._starting = None


class Window:
    """Places for lines in one server's engine."""

    def __init__(
        self, settings: BatchSettings, others_waiting: Callable[[], bool], quiet_seconds: Callable[[], float]
    ) -> None:
        """Of requests that are no lines of batches: do any wait for a first token, and since when has none run?"""
        self._slots = TenantSlots(settings.max_in_flight, settings.max_in_flight_per_tenant)
        self._settings = settings
        self._starting = asyncio.Semaphore(settings.max_in_flight_beside_others)
        self._others_waiting, self._quiet_seconds = others_waiting, quiet_seconds
        self._taken = 0

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[Place]:
        """Hold a place while the block runs; wait for it first."""
        async with self._slots.slot(tenant):
            await self._starting.acquire()
            place = Place(self._starting)
            try:
                while self._taken >= self._allowed():  # noqa: ASYNC110  nothing tells of an end
                    await asyncio.sleep(LOOK_SECONDS)
                self._taken += 1
                try:
                    yield place
                finally:
                    self._taken -= 1
            finally:
                place.note_started()

    def _allowed(self) -> int:
        """Return how many lines may be in the engine now."""
        if self._others_waiting():
            return 1
        if self._quiet_seconds() < QUIET_SECONDS:
            return self._settings.max_in_flight_beside_others
        return self._settings.max_in_flight
