"""Delivers the ledger to sinks and budget alerts to webhooks: each event at least once, under an id that never changes.

One server at a time sends the ledger to a sink, in order, in batches. A batch does not change until the sink has
accepted it. A sink recognises a repeated event by its id, but only for a limited time (`Sink.window`). If it is unknown
for longer than this time whether a batch arrived, the batch is parked. An operator then decides, because another
attempt could bill the batch twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from loramux.common.identity import TenantId, new_id
from loramux.common.units import SECOND
from loramux.data.entities import ParkedEvent
from loramux.data.records.base import to_struct
from loramux.data.records.database import Database
from loramux.data.records.ledger import LedgerEntry, LedgerRepository
from loramux.data.records.limits import AlertRepository, AlertRow
from loramux.data.records.sinks import SinkRepository, SinkState
from loramux.data.records.tenants import TenantRepository
from loramux.data.records.usage import meters_of
from loramux.money.pricing import METERS

logger = logging.getLogger(__name__)

LEASE = 120 * SECOND
"""Microseconds of a server's lease on a sink: longer than any sink may take for a batch."""
ALERTS_PER_PAGE = 100
BUDGET_ALERT = "budget.threshold_reached"


class MeterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event: a quantity of one meter. A ledger entry has one event for every meter that it bills."""

    id: str
    """Id of the event, derived from the entry. It is the same on every server and in every attempt."""
    sequence: int
    tenant_id: str
    tenant_name: str
    meter: str
    quantity: int
    """Quantity of the meter; negative in a correction."""
    occurred_at: int
    """Microseconds since the epoch."""
    model: str
    base_model: str
    tier: str
    project_id: str | None
    api_key_id: str
    request_id: str
    corrects: str | None
    tags: dict[str, str]


def metered_quantities(entry: LedgerEntry) -> dict[str, int]:
    """Return the quantities that an entry bills, by meter, without zeros."""
    values = meters_of(entry)
    return {meter: values[meter] for meter in METERS if values[meter]}


def meter_events(entries: Sequence[LedgerEntry], tenants: Mapping[TenantId, str]) -> list[MeterEvent]:
    """Return the events of these entries, in order; `tenants` has every tenant's name by its id."""
    return [
        to_struct(
            MeterEvent,
            entry,
            id=f"{entry.event_id}:{meter}",
            tenant_name=tenants[entry.tenant_id],
            meter=meter,
            quantity=quantity,
            occurred_at=entry.occurred_at or entry.created_at,
            api_key_id=entry.key_id,
            tags=_tags(entry),
        )
        for entry in entries
        for meter, quantity in metered_quantities(entry).items()
    ]


def _tags(entry: LedgerEntry) -> dict[str, str]:
    """Decode an entry's tags. Damaged tags count as no tags, because they must not block the delivery of this and all
    later entries.
    """
    try:
        return msgspec.json.decode(entry.tags, type=dict[str, str]) if entry.tags else {}
    except msgspec.MsgspecError:
        logger.error("the tags of ledger entry %d cannot be read", entry.sequence)
        return {}


class NotDelivered(Exception):
    """The sink certainly has not accepted the batch, which may be sent again at any time."""


class DeliveryUnknown(Exception):
    """The sink may have accepted the batch or a part of it. Another attempt is safe only within the sink's window."""


class RejectedEvent(msgspec.Struct, frozen=True):
    """An event that the sink will never take."""

    event: MeterEvent
    reason: str


class Sink(Protocol):
    """An external system that receives usage."""

    name: str
    window: int
    """Microseconds during which the sink recognises a repeated event."""
    max_entries: int
    """Maximum number of ledger entries in a batch."""

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:
        """Deliver the events; return the events that the sink will never accept. Raises NotDelivered or
        DeliveryUnknown.
        """
        ...


class SinkDelivery:
    """Delivers the ledger to sinks for one server."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = new_id("delivery")
        self.counters: Counter[tuple[str, str]] = Counter()
        """Counts by sink: `delivered` ledger entries, `parked` events, and `failed` attempts."""

    async def run(self, sink: Sink) -> int:
        """Deliver until the sink has everything, fails, or is leased by another server; return the number of
        entries."""
        delivered = 0
        try:
            while done := await self._batch(sink):
                delivered += done
        except (NotDelivered, DeliveryUnknown) as error:
            self.counters[sink.name, "failed"] += 1
            logger.warning("sink %s: %s; it is tried again", sink.name, error)
        finally:
            async with self._database.begin() as session:
                await SinkRepository(session, sink.name, self._holder).release()
        return delivered

    async def parked(self, sink_name: str) -> list[ParkedEvent]:
        """List the events that the sink did not take."""
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
            reason = "the sink may have it already, and no longer recognises it"
            rejected = [RejectedEvent(event, reason) for event in events]
        else:
            rejected = await self._send(sink, events, entries[-1].sequence, now)
        if not await self._conclude(sink, entries[-1].sequence, rejected):
            return 0
        self.counters[sink.name, "delivered"] += len(entries)
        self.counters[sink.name, "parked"] += len(rejected)
        return len(entries)

    async def _send(self, sink: Sink, events: list[MeterEvent], until: int, now: int) -> list[RejectedEvent]:
        try:
            return await sink.send(events, now) if events else []
        except NotDelivered:
            async with self._database.begin() as session:
                await SinkRepository(session, sink.name, self._holder).trying(until, None)
            raise

    async def _conclude(self, sink: Sink, until: int, rejected: Sequence[RejectedEvent]) -> bool:
        now = self._database.now()
        async with self._database.begin() as session:
            sinks = SinkRepository(session, sink.name, self._holder)
            if not await sinks.advance(until):
                return False
            await sinks.park([_parked(sink.name, one, now) for one in rejected])
        return True


async def _entries(ledger: LedgerRepository, state: SinkState, sink: Sink) -> list[LedgerEntry]:
    """Return the unfinished batch; if all batches are finished, return the next batch."""
    return await ledger.after(state.cursor, sink.max_entries, state.trying_until)


def _parked(sink: str, rejected: RejectedEvent, now: int) -> ParkedEvent:
    event = rejected.event
    return ParkedEvent(sink=sink, event_id=event.id, sequence=event.sequence, reason=rejected.reason, parked_at=now)


class WebhookMessage(msgspec.Struct, frozen=True):
    """A message to the operator's webhooks: its kind, its permanent id, its time in microseconds, and its data."""

    kind: str
    id: str
    at: int
    data: Any


class MessageReceiver(Protocol):
    """A sink that takes messages in addition to usage."""

    name: str

    async def deliver(self, message: WebhookMessage, now: int) -> None:
        """Deliver one message. Raises NotDelivered or DeliveryUnknown."""
        ...


class AlertDelivery:
    """Delivers budget alerts from the outbox that settlements write, at least once, to the operator's webhooks."""

    def __init__(self, database: Database, webhooks: Sequence[MessageReceiver]) -> None:
        self._database = database
        self._webhooks = webhooks

    async def run(self) -> int:
        """Deliver alerts, oldest first, until a webhook fails to accept one; return the number of delivered alerts."""
        delivered = 0
        while alerts := await self._page():
            for alert in alerts:
                if not await self._send(alert):
                    return delivered
                async with self._database.begin() as session:
                    await AlertRepository(session).delivered(alert.id, self._database.now())
                delivered += 1
        return delivered

    async def _page(self) -> Sequence[AlertRow]:
        async with self._database.read() as session:
            return await AlertRepository(session).undelivered(ALERTS_PER_PAGE)

    async def _send(self, alert: AlertRow) -> bool:
        try:
            for webhook in self._webhooks:
                message = WebhookMessage(BUDGET_ALERT, f"msg_{alert.id}", alert.created_at, _alert_data(alert))
                await webhook.deliver(message, self._database.now())
        except (NotDelivered, DeliveryUnknown) as error:
            logger.warning("webhook %s: %s; the alert is tried again", webhook.name, error)
            return False
        return True


def _alert_data(alert: AlertRow) -> dict[str, Any]:
    return {
        "tenant_id": alert.tenant_id,
        "budget_id": alert.budget_id,
        "subject": alert.subject,
        "period": alert.period,
        "period_start": alert.start // SECOND,
        "percent": alert.percent,
        "amount_nano": alert.amount,
        "spent_nano": alert.spent,
        "at": alert.created_at // SECOND,
    }
