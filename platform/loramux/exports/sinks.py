"""Sinks: OpenMeter (CloudEvents), Stripe and Lago meters, and signed webhooks, each as its own documentation has it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loramux.exports.delivery import NotDelivered, Refusal, Sink, Unknown
from loramux.exports.errors import ExportError
from loramux.exports.events import MeterEvent
from loramux.settings import SinkSettings
from loramux.webhooks.signing import read_secret, signed

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
FOREVER = 1 << 62
SENT_AND_LOST = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.WriteError, httpx.WriteTimeout)
"""The request may have arrived."""


class HttpSink:
    """What all sinks share: a client, and what its failures mean."""

    window = FOREVER
    max_entries = 100

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, customers: Mapping[str, str]) -> None:
        self.name = name
        self._client = client
        self._url = url.rstrip("/")
        self._customers = customers

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        """Raises NotDelivered or Unknown unless the sink has answered for good."""
        try:
            response = await self._client.post(self._url + path, **body)
        except SENT_AND_LOST as error:
            raise Unknown(f"no answer ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise NotDelivered(f"cannot be reached ({type(error).__name__})") from error
        if response.status_code in (401, 403, 404, 408, 429):
            raise NotDelivered(f"answered {response.status_code}")
        if response.status_code >= 500:
            raise Unknown(f"answered {response.status_code}")
        return response

    def _known(self, events: Sequence[MeterEvent]) -> tuple[list[MeterEvent], list[Refusal]]:
        """The events of tenants that the sink has a name for, and the others."""
        known = [event for event in events if event.tenant_name in self._customers]
        told = "the sink's settings name no customer for this tenant"
        return known, [Refusal(event, told) for event in events if event.tenant_name not in self._customers]


class OpenMeterSink(HttpSink):
    """A batch of CloudEvents 1.0 to POST /api/v1/events. OpenMeter knows (source, id) again for 32 days."""

    window = 31 * DAY

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:  # noqa: ARG002  Sink's signature
        """All or none are taken."""
        content = msgspec.json.encode([cloud_event(event) for event in events])
        headers = {"Content-Type": "application/cloudevents-batch+json"}
        response = await self._post("/api/v1/events", content=content, headers=headers)
        return [] if response.is_success else [Refusal(event, _why(response)) for event in events]


class StripeSink(HttpSink):
    """One POST /v1/billing/meter_events an event. Stripe knows an identifier again for 24 hours, and takes events
    that are at most 35 days old; the meter's name is the event_name.
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
            return "Stripe's meters take no negative values: make a credit note"
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
        if response.is_success or "duplicate" in response.text or "already exists" in response.text:
            return None
        return _why(response)


class LagoSink(HttpSink):
    """Batches of at most 100 to POST /api/v1/events/batch; Lago knows a transaction_id again for ever.

    A batch with one bad event is refused whole; it is sent again without those that Lago names.
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


class WebhookSink(HttpSink):
    """Batches as JSON, signed as standardwebhooks.com says; the receiver knows `webhook-id` again for as long as it
    likes, and every event by its own id.
    """

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, secret: str) -> None:
        super().__init__(name, client, url, {})
        self._secret = read_secret(secret)

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:
        """All or none are taken; a receiver that says no is asked again, since only it knows what is wrong."""
        id = "msg_" + hashlib.sha256(f"{events[0].id}:{events[-1].id}".encode()).hexdigest()[:32]
        await self.tell("usage.recorded", id, {"events": events}, now)
        return []

    async def tell(self, kind: str, id: str, data: Any, now: int) -> None:
        """Deliver one message. Raises NotDelivered or Unknown."""
        message = signed(self._secret, id, {"type": kind, "data": data}, now)
        response = await self._post("", content=message.body, headers=message.headers)
        if not response.is_success:
            raise NotDelivered(f"answered {response.status_code}")


KINDS: dict[str, type[OpenMeterSink | StripeSink | LagoSink]] = {
    "openmeter": OpenMeterSink,
    "stripe": StripeSink,
    "lago": LagoSink,
}


def cloud_event(event: MeterEvent) -> dict[str, Any]:
    """CloudEvents 1.0, with the fields that OpenMeter's meters sum and group by in `data`."""
    moment = datetime.fromtimestamp(event.occurred_at // SECOND, UTC)
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": "loramux",
        "type": f"loramux.{event.meter}",
        "subject": event.tenant_name,
        "time": moment.isoformat().replace("+00:00", "Z"),
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
