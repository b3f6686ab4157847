"""Sinks: OpenMeter (CloudEvents), Stripe and Lago meters, and signed webhooks, each according to its documentation."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loramux.accounts.webhooks.messages import read_secret, rfc3339, sign
from loramux.common.public_http import ReplyRefused, bounded
from loramux.common.settings.server import SinkSettings
from loramux.common.units import DAY, HOUR, SECOND
from loramux.money.billing.reconcile import Checkpoint
from loramux.money.exports.delivery import (
    DeliveryUnknown,
    MeterEvent,
    NotDelivered,
    RejectedEvent,
    Sink,
    WebhookMessage,
)
from loramux.money.exports.tables import ExportError

logger = logging.getLogger(__name__)

FOREVER = 1 << 62
SENT_AND_LOST = (
    httpx.ReadError,
    httpx.ReadTimeout,
    httpx.RemoteProtocolError,
    httpx.WriteError,
    httpx.WriteTimeout,
    ReplyRefused,
)
"""Errors after which the request may have arrived."""


class HttpSink(ABC):
    """Posts to one address; maps tenants to the sink's own customers."""

    window: int
    """Microseconds during which the receiver recognises a repeated event, as in Sink. A value longer than the
    receiver's own would bill events twice."""
    max_entries = 100

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, customers: Mapping[str, str]) -> None:
        self.name = name
        self._client = bounded(client)
        self._url = url.rstrip("/")
        self._customers = customers

    @abstractmethod
    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:
        """Deliver the events, as `Sink.send` describes."""

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        """Post, and return a response that settles the batch. Otherwise raises NotDelivered or DeliveryUnknown."""
        try:
            response = await self._client.post(self._url + path, **body)
        except SENT_AND_LOST as error:
            raise DeliveryUnknown(f"no answer ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise NotDelivered(f"cannot be reached ({type(error).__name__})") from error
        if response.status_code in (401, 403, 404, 408, 429):
            raise NotDelivered(f"answered {response.status_code}")
        if response.status_code >= 500:
            raise DeliveryUnknown(f"answered {response.status_code}")
        return response

    def _known(self, events: Sequence[MeterEvent]) -> tuple[list[MeterEvent], list[RejectedEvent]]:
        """Split off the events of tenants without a customer in the settings."""
        known = [event for event in events if event.tenant_name in self._customers]
        reason = "the sink's settings name no customer for this tenant"
        return known, [RejectedEvent(event, reason) for event in events if event.tenant_name not in self._customers]


class WebhookSink(HttpSink):
    """Sends batches as JSON, signed and with the fields (`type`, `timestamp`, `data`) of Standard Webhooks 1.0.0.

    The receiver decides how long it recognises a `webhook-id`. The receiver can also recognise every event by the
    event's id. https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """

    window = FOREVER

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, secret: str) -> None:
        super().__init__(name, client, url, {})
        self._secret = read_secret(secret)

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:
        """Post one signed batch, of which all events or none are accepted. A refusal is retried, because only the
        receiver knows its reason.
        """
        id = "msg_" + hashlib.sha256(f"{events[0].id}:{events[-1].id}".encode()).hexdigest()[:32]
        await self.deliver(WebhookMessage("usage.recorded", id, events[-1].occurred_at, {"events": events}), now)
        return []

    async def receive_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
        """Deliver a checkpoint of the ledger. If a checkpoint is lost, the next checkpoint covers its entries."""
        data = {"sequence": checkpoint.sequence, "hash": checkpoint.hash, "signature": checkpoint.signature}
        message = WebhookMessage("ledger.checkpoint", f"msg_{checkpoint.hash[:32]}", checkpoint.created_at, data)
        try:
            await self.deliver(message, now)
        except (NotDelivered, DeliveryUnknown) as error:
            logger.warning("sink %s: %s; it misses the checkpoint of entry %d", self.name, error, checkpoint.sequence)

    async def deliver(self, message: WebhookMessage, now: int) -> None:
        """Deliver one message. Raises NotDelivered or DeliveryUnknown."""
        content = {"type": message.kind, "timestamp": rfc3339(message.at), "data": message.data}
        signed = sign(self._secret, message.id, content, now)
        response = await self._post("", content=signed.body, headers=signed.headers)
        if not response.is_success:
            raise NotDelivered(f"answered {response.status_code}")


class OpenMeterSink(HttpSink):
    """A batch of CloudEvents 1.0 to POST /api/v1/events: https://openmeter.io/docs/metering/events/usage-events.

    OpenMeter recognises (source, id) for a configured time (`dedupe.config.expiration`, a day unless set otherwise:
    https://github.com/openmeterio/openmeter).
    """

    window = 23 * HOUR

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:  # noqa: ARG002  Sink's signature
        """Post one batch, of which all events or none are accepted."""
        content = msgspec.json.encode([cloud_event(event) for event in events])
        headers = {"Content-Type": "application/cloudevents-batch+json"}
        response = await self._post("/api/v1/events", content=content, headers=headers)
        return [] if response.is_success else [RejectedEvent(event, _why(response)) for event in events]


class StripeSink(HttpSink):
    """Sends one POST /v1/billing/meter_events per event. The meter's name is the event_name.

    Stripe recognises an identifier (at most 100 characters) for at least 24 hours, accepts events that are at most 35
    days old, only whole numbers, and one call at a time per customer and meter:
    https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api,
    https://docs.stripe.com/api/billing/meter-event/create.
    """

    window = 23 * HOUR
    max_entries = 20
    max_age = 34 * DAY

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:
        """Post one by one."""
        known, refused = self._known(events)
        for number, event in enumerate(known):
            with _after(number):
                if reason := self._impossible(event, now) or await self._send(event):
                    refused.append(RejectedEvent(event, reason))
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
    """Sends batches of at most 100 events to POST /api/v1/events/batch:
    https://docs.getlago.com/api-reference/events/batch.

    Lago recognises a transaction_id for ever. A batch with a bad or repeated event is refused as a whole
    (https://github.com/getlago/lago-api/issues/3049); it is sent again without the events that Lago names.
    """

    window = FOREVER
    max_batch = 100

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[RejectedEvent]:  # noqa: ARG002  Sink's signature
        """Post batch by batch."""
        known, refused = self._known(events)
        for start in range(0, len(known), self.max_batch):
            with _after(start):
                refused += await self._send(known[start : start + self.max_batch])
        return refused

    async def _send(self, events: list[MeterEvent]) -> list[RejectedEvent]:
        refused: list[RejectedEvent] = []
        while events:
            response = await self._post("/api/v1/events/batch", json={"events": [self._event(one) for one in events]})
            if response.is_success:
                return refused
            wrong = _lago_errors(response)
            if not wrong:
                return refused + [RejectedEvent(event, _why(response)) for event in events]
            refused += [RejectedEvent(events[i], why) for i, why in wrong.items() if "already_exist" not in why]
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


KINDS: dict[str, type[HttpSink]] = {
    "openmeter": OpenMeterSink,
    "stripe": StripeSink,
    "lago": LagoSink,
}


def cloud_event(event: MeterEvent) -> dict[str, Any]:
    """Return a CloudEvent 1.0; its `data` has the fields that OpenMeter's meters sum and group by."""
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
    """Make the sink that the settings describe. Raises ExportError if its secret cannot be read."""
    secret = _secret(settings)
    if settings.kind == "webhook":
        return WebhookSink(settings.name, client, settings.url, secret)
    client.headers["Authorization"] = f"Bearer {secret}"
    kind = KINDS[settings.kind]
    return kind(settings.name, client, settings.url, settings.customers)


@contextmanager
def _after(delivered: int) -> Iterator[None]:
    """Turn NotDelivered into DeliveryUnknown if an earlier part of the batch was delivered."""
    try:
        yield
    except NotDelivered as error:
        if delivered:
            raise DeliveryUnknown(str(error)) from error
        raise


def _secret(settings: SinkSettings) -> str:
    where = f"sinks.{settings.name}.secret_file: {settings.secret_file}"
    try:
        secret = Path(settings.secret_file).read_text().strip()
        if settings.kind == "webhook":
            read_secret(secret)
    except OSError as error:
        raise ExportError(f"{where}: {error.strerror}") from None
    except ValueError:  # not UTF-8, or not base64
        secret = ""
    if not (secret and secret.isascii() and secret.isprintable()):
        kind = "a webhook's secret, whsec_ and base64" if settings.kind == "webhook" else "an API key, on one line"
        raise ExportError(f"{where} does not hold {kind}")
    return secret


def _lago_errors(response: httpx.Response) -> dict[int, str]:
    """Return Lago's errors by the event's index in the batch."""
    try:
        details = response.json()["error_details"]
        return {int(place): str(why) for place, why in details.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}


def _why(response: httpx.Response) -> str:
    return f"the sink answered {response.status_code}: {response.text[:500]}"
