"""Bring the ledger to sinks: in order, in batches that stay the same until they are over, by one server at a time.

What a sink gets twice, it must know again by its id; sinks do so for a while only (`Sink.window`). A batch whose fate
is unknown for longer than that is parked: a person decides, since sending it again could bill it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from loramux.exports.events import MeterEvent, meter_events
from loramux.records import Database
from loramux.records.identity import new_id
from loramux.records.ledger import LedgerEntry, LedgerRepository
from loramux.records.sinks import Parked, SinkRepository, SinkState
from loramux.records.tenants import TenantRepository

logger = logging.getLogger(__name__)

SECOND = 1_000_000
LEASE = 120 * SECOND
"""Longer than any sink may take for a batch."""


class NotDelivered(Exception):
    """The sink surely has not taken the batch: it may be tried again at any time."""


class Unknown(Exception):
    """The sink may have taken the batch, or a part of it: trying again is safe within its window only."""


class Refusal(msgspec.Struct, frozen=True):
    """An event that the sink will never take."""

    event: MeterEvent
    reason: str


class Sink(Protocol):
    """Somebody who is told what is used."""

    name: str
    window: int
    """Microseconds for which the sink knows an event again."""
    max_entries: int
    """Ledger entries in a batch."""

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:
        """Deliver; what it will never take comes back. Raises NotDelivered or Unknown."""
        ...


class Delivery:
    """One server's hand at the sinks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = new_id("delivery")

    async def run(self, sink: Sink) -> int:
        """Deliver until the sink has everything, does not answer, or is somebody else's; the number of entries."""
        delivered = 0
        try:
            while done := await self._batch(sink):
                delivered += done
        except (NotDelivered, Unknown) as error:
            logger.warning("sink %s: %s; it is tried again", sink.name, error)
        finally:
            async with self._database.begin() as session:
                await SinkRepository(session, sink.name, self._holder).release()
        return delivered

    async def parked(self, sink_name: str) -> list[Parked]:
        """What a sink did not take."""
        async with self._database.read() as session:
            return await SinkRepository(session, sink_name, self._holder).parked()

    async def _batch(self, sink: Sink) -> int:
        now = self._database.now()
        async with self._database.begin() as session:
            sinks = SinkRepository(session, sink.name, self._holder)
            state = await sinks.lease(now, now + LEASE)
            entries = [] if state is None else await _entries(LedgerRepository(session), state, sink)
            if state is None or not entries:
                return 0
            tenants = {row.id: row.name for row in await TenantRepository(session).all()}
            if state.trying_since is None:
                await sinks.trying(entries[-1].sequence, now)
        events = meter_events(entries, tenants)
        if state.trying_since is not None and now - state.trying_since > sink.window:
            told = "nobody knows whether the sink has it, and it no longer knows it again"
            refused = [Refusal(event, told) for event in events]
        else:
            refused = await self._send(sink, events, entries[-1].sequence, now)
        return len(entries) if await self._conclude(sink, entries[-1].sequence, refused) else 0

    async def _send(self, sink: Sink, events: list[MeterEvent], until: int, now: int) -> list[Refusal]:
        try:
            return await sink.send(events, now) if events else []
        except NotDelivered:
            async with self._database.begin() as session:
                await SinkRepository(session, sink.name, self._holder).trying(until, None)
            raise

    async def _conclude(self, sink: Sink, until: int, refused: Sequence[Refusal]) -> bool:
        now = self._database.now()
        async with self._database.begin() as session:
            sinks = SinkRepository(session, sink.name, self._holder)
            if not await sinks.advance(until):
                return False
            await sinks.park([_parked(sink.name, refusal, now) for refusal in refused])
        return True


async def _entries(ledger: LedgerRepository, state: SinkState, sink: Sink) -> list[LedgerEntry]:
    """The batch that is under way, or else the next one."""
    return await ledger.after(state.cursor, sink.max_entries, state.trying_until)


def _parked(sink: str, refusal: Refusal, now: int) -> Parked:
    event = refusal.event
    return Parked(sink=sink, event_id=event.id, sequence=event.sequence, reason=refusal.reason, parked_at=now)
