"""Signed webhooks: usage in batches, and whatever else the operator's own systems are told."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from loramux.exports.delivery import NotDelivered, Refusal
from loramux.exports.events import MeterEvent
from loramux.exports.http_sink import HttpSink
from loramux.webhooks.messages import rfc3339
from loramux.webhooks.signing import read_secret, signed


class Told(msgspec.Struct, frozen=True):
    """A message: what it is, the id by which it is known again, when that happened (microseconds), and the rest."""

    kind: str
    id: str
    at: int
    data: Any


class WebhookSink(HttpSink):
    """Batches as JSON, signed and laid out (`type`, `timestamp`, `data`) as Standard Webhooks 1.0.0 says.

    The receiver knows `webhook-id` again for as long as it likes, and every event by its own id.
    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, secret: str) -> None:
        super().__init__(name, client, url, {})
        self._secret = read_secret(secret)

    async def send(self, events: Sequence[MeterEvent], now: int) -> list[Refusal]:
        """All or none are taken; a receiver that says no is asked again, since only it knows what is wrong."""
        id = "msg_" + hashlib.sha256(f"{events[0].id}:{events[-1].id}".encode()).hexdigest()[:32]
        await self.tell(Told("usage.recorded", id, events[-1].occurred_at, {"events": events}), now)
        return []

    async def tell(self, told: Told, now: int) -> None:
        """Deliver one message. Raises NotDelivered or Unknown."""
        content = {"type": told.kind, "timestamp": rfc3339(told.at), "data": told.data}
        message = signed(self._secret, told.id, content, now)
        response = await self._post("", content=message.body, headers=message.headers)
        if not response.is_success:
            raise NotDelivered(f"answered {response.status_code}")
