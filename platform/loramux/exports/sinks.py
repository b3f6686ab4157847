"""Sinks: OpenMeter (CloudEvents), Stripe and Lago meters, each as its own documentation has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loramux.exports.delivery import NotDelivered, Refusal, Sink, Unknown
from loramux.exports.errors import ExportError
from loramux.exports.events import MeterEvent
from loramux.exports.http_sink import HttpSink
from loramux.exports.webhook_sink import WebhookSink
from loramux.settings import SinkSettings
from loramux.webhooks.messages import rfc3339

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR


class OpenMeterSink(HttpSink):
    """A batch of CloudEvents 1.0 to POST /api/v1/events: https://openmeter.io/docs/metering/events/usage-events.

    OpenMeter knows (source, id) again for as long as it is configured to (`dedupe.config.expiration`, a day unless
    set otherwise: https://github.com/openmeterio/openmeter).
    """

    window = 23 * HOUR

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:  # noqa: ARG002  Sink's signature
        """All or none are taken."""
        content = msgspec.json.encode([cloud_event(event) for event in events])
        headers = {"Content-Type": "application/cloudevents-batch+json"}
        response = await self._post("/api/v1/events", content=content, headers=headers)
        return [] if response.is_success else [Refusal(event, _why(response)) for event in events]


class StripeSink(HttpSink):
    """One POST /v1/billing/meter_events an event; the meter's name is the event_name.

    Stripe knows an identifier (at most 100 characters) again for at least 24 hours, takes events that are at most 35
    days old, whole numbers only, and one call at a time for each customer and meter:
    https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api,
    https://docs.stripe.com/api/billing/meter-event/create.
    """

    window = 23 * HOUR
    max_entries = 20
    max_age = 34 * DAY

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:
        """One by one."""
        known, refused = self._known(events)
        for number, event in enumerate(known):
            with _after(number):
                if reason := self._impossible(event, now) or await self._send(event):
                    refused.append(Refusal(event, reason))
        return refused

    def _impossible(self, event: MeterEvent, now: int) -> str | None:
        if event.quantity < 0:
            return "a correction: Stripe would forget it if its cycle is invoiced already; make a credit note"
        return "Stripe takes no events this old" if now - event.occurred_at > self.max_age else None

    async def _send(self, event: MeterEvent) -> str | None:
        form = {
            "event_name": event.meter,
            "identifier": event.id,
            "timestamp": str(event.occurred_at // SECOND),
            "payload[stripe_customer_id]": self._customers[event.tenant_name],
            "payload[value]": str(event.quantity),
        }
        response = await self._post("/v1/billing/meter_events", data=form)
        if response.is_success or "already exists with identifier" in response.text:
            return None
        return _why(response)


class LagoSink(HttpSink):
    """Batches of at most 100 to POST /api/v1/events/batch: https://docs.getlago.com/api-reference/events/batch.

    Lago knows a transaction_id again for ever. A batch with one bad event, or one that it knows, is refused whole
    (https://github.com/getlago/lago-api/issues/3049); it is sent again without those that Lago names.
    """

    max_batch = 100

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:  # noqa: ARG002  Sink's signature
        """Batch by batch."""
        known, refused = self._known(events)
        for start in range(0, len(known), self.max_batch):
            with _after(start):
                refused += await self._send(known[start : start + self.max_batch])
        return refused

    async def _send(self, events: list[MeterEvent]) -> list[Refusal]:
        refused: list[Refusal] = []
        while events:
            response = await self._post("/api/v1/events/batch", json={"events": [self._event(one) for one in events]})
            if response.is_success:
                return refused
            wrong = _lago_errors(response)
            if not wrong:
                return refused + [Refusal(event, _why(response)) for event in events]
            refused += [Refusal(events[i], why) for i, why in wrong.items() if "already_exist" not in why]
            events = [event for i, event in enumerate(events) if i not in wrong]
        return refused

    def _event(self, event: MeterEvent) -> dict[str, Any]:
        return {
            "transaction_id": event.id,
            "external_subscription_id": self._customers[event.tenant_name],
            "code": event.meter,
            "timestamp": f"{event.occurred_at // SECOND}.{event.occurred_at % SECOND // 1000:03}",
            "properties": {"quantity": str(event.quantity), "model": event.model, "tier": event.tier},
        }


KINDS: dict[str, type[OpenMeterSink | StripeSink | LagoSink]] = {
    "openmeter": OpenMeterSink,
    "stripe": StripeSink,
    "lago": LagoSink,
}


def cloud_event(event: MeterEvent) -> dict[str, Any]:
    """CloudEvents 1.0, with the fields that OpenMeter's meters sum and group by in `data`."""
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": "loramux",
        "type": f"loramux.{event.meter}",
        "subject": event.tenant_name,
        "time": rfc3339(event.occurred_at),
        "datacontenttype": "application/json",
        "data": {
            "quantity": event.quantity,
            "model": event.model,
            "base_model": event.base_model,
            "tier": event.tier,
            "project_id": event.project_id,
            "api_key_id": event.api_key_id,
            "tags": event.tags,
        },
    }


def make_sink(settings: SinkSettings, client: httpx.AsyncClient) -> Sink:
    """The sink that the settings describe. Raises ExportError where its secret cannot be read."""
    secret = _secret(settings)
    if settings.kind == "webhook":
        return WebhookSink(settings.name, client, settings.url, secret)
    client.headers["Authorization"] = f"Bearer {secret}"
    kind = KINDS[settings.kind]
    return kind(settings.name, client, settings.url, settings.customers)


@contextmanager
def _after(delivered: int) -> Iterator[None]:
    """What surely was not delivered does not undo what was delivered before it."""
    try:
        yield
    except NotDelivered as error:
        if delivered:
            raise Unknown(str(error)) from error
        raise


def _secret(settings: SinkSettings) -> str:
    try:
        return Path(settings.secret_file).read_text().strip()
    except OSError as error:
        raise ExportError(f"sinks.{settings.name}.secret_file: {settings.secret_file}: {error.strerror}") from None


def _lago_errors(response: httpx.Response) -> dict[int, str]:
    """What Lago finds wrong, by the event's place in the batch."""
    try:
        details = response.json()["error_details"]
        return {int(place): str(why) for place, why in details.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}


def _why(response: httpx.Response) -> str:
    return f"the sink answered {response.status_code}: {response.text[:500]}"
