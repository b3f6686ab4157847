"""Messages as standardwebhooks.com has them: an id, a time, and an HMAC-SHA256 over both and the body."""

from __future__ import annotations

import base64
import hmac
from typing import Any

import msgspec

SECOND = 1_000_000
PREFIX = "whsec_"


class Message(msgspec.Struct, frozen=True):
    """What is sent."""

    body: bytes
    headers: dict[str, str]


def signed(secret: bytes, id: str, content: Any, now: int) -> Message:
    """`content` as JSON; `now` in microseconds since the epoch. The receiver knows `id` again."""
    body, timestamp = msgspec.json.encode(content), now // SECOND
    digest = hmac.digest(secret, f"{id}.{timestamp}.".encode() + body, "sha256")
    headers = {
        "Content-Type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }
    return Message(body, headers)


def read_secret(text: str) -> bytes:
    """The bytes of `whsec_...`. Raises ValueError."""
    return base64.b64decode(text.removeprefix(PREFIX))


def write_secret(secret: bytes) -> str:
    """As `whsec_...`, which every library of Standard Webhooks reads."""
    return PREFIX + base64.b64encode(secret).decode()


def endpoint_secret(pepper: bytes, endpoint_id: str) -> bytes:
    """An endpoint's secret: 256 bits that whoever has the database, and not the pepper, cannot know."""
    return hmac.digest(pepper, f"webhook endpoint {endpoint_id}".encode(), "sha256")
