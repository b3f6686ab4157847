"""Events on their way to endpoints: at least once, in order while all goes well, again and again while it does not.

One endpoint's failures hold up nobody else's messages. An endpoint that fails is left alone for a while that grows
with its failures in a row; one that has taken nothing for DISABLED_AFTER, or says 410 Gone, is switched off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import httpx
import msgspec

from loramux.outward import NotPublic, PublicTransport
from loramux.records import Database
from loramux.records.events import forget_events
from loramux.records.webhooks import DeliveryRepository, Due
from loramux.settings import WebhookSettings
from loramux.webhooks.messages import EventMessage, event_message, rfc3339
from loramux.webhooks.signing import SECOND, endpoint_secret, signed

logger = logging.getLogger(__name__)

TIMEOUT = 10.0
"""Seconds that an endpoint may take for a message."""
LEASE = 300 * SECOND
"""Longer than the most that one visit can take."""
RETRIES = tuple(seconds * SECOND for seconds in (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400))
"""After which time a message is tried again; Standard Webhooks' own example."""
LONGEST_QUIET = 3600 * SECOND
DISABLED_AFTER = 5 * 86400 * SECOND
KEPT = 90 * 86400 * SECOND
"""How long events, and the log of their deliveries, are kept."""
TEST = "webhook.test"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How telling an endpoint went."""

    status: int | None = None
    error: str | None = None
    milliseconds: int

    @property
    def delivered(self) -> bool:
        """Whether the endpoint has taken it."""
        return self.error is None


def webhook_client(settings: WebhookSettings) -> httpx.AsyncClient:
    """What endpoints are called with: no redirects, and public addresses only unless the operator says otherwise."""
    transport = None if settings.allow_private_addresses else PublicTransport()
    return httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=False, trust_env=False)


class Courier:
    """One server's hand at the endpoints of every tenant; `pepper` is what their secrets are derived from."""

    def __init__(self, database: Database, client: httpx.AsyncClient, pepper: bytes) -> None:
        self._database = database
        self._client = client
        self._pepper = pepper

    async def run(self) -> int:
        """Tell what is due, until nothing is; the number of messages that were taken."""
        delivered = 0
        while dues := await self._lease():
            visits = (self._visit(list(group)) for _, group in groupby(dues, lambda due: due.endpoint))
            delivered += sum(await asyncio.gather(*visits))
        return delivered

    async def forget(self) -> None:
        """Delete what is older than KEPT."""
        async with self._database.begin() as session:
            await forget_events(session, self._database.now() - KEPT)

    async def test(self, endpoint_id: str, url: str) -> Outcome:
        """Tell an endpoint that it can be told; nothing is recorded and nothing tried again."""
        now = self._database.now()
        content = EventMessage(type=TEST, timestamp=rfc3339(now), data={"webhook": endpoint_id})
        return await self._send(url, endpoint_id, f"msg_test_{now}", content)

    async def _lease(self) -> list[Due]:
        """What is due and nobody else's; a look that finds nothing locks nothing."""
        now = self._database.now()
        async with self._database.read() as session:
            keys = await DeliveryRepository(session).due(now)
        if not keys:
            return []
        async with self._database.begin() as session:
            dues = await DeliveryRepository(session).lease(keys, now, now + LEASE)
        return sorted(dues, key=lambda due: (due.endpoint, due.attempts))

    async def _visit(self, dues: Sequence[Due]) -> int:
        """One endpoint's messages, those that never failed first, until it does not take one."""
        for place, due in enumerate(dues):
            content = event_message(due.event, due.tenant_name)
            outcome = await self._send(due.url, due.endpoint, f"msg_{due.event.id}", content)
            async with self._database.begin() as session:
                deliveries = DeliveryRepository(session)
                if outcome.delivered:
                    await deliveries.note(due, *_taken(outcome, self._database.now()))
                    continue
                last = msgspec.structs.replace(due, failures=0, failing_since=None) if place else due
                await deliveries.note(due, *_failed(last, outcome, self._database.now()))
                await deliveries.release(dues[place + 1 :])
            logger.warning("webhook %s failed %d times in a row", due.endpoint, last.failures + 1)
            return place
        return len(dues)

    async def _send(self, url: str, endpoint: str, id: str, content: EventMessage) -> Outcome:
        message = signed(endpoint_secret(self._pepper, endpoint), id, content, self._database.now())
        started = time.monotonic()
        status, error = None, None
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                self._client.stream("POST", url, content=message.body, headers=message.headers) as response,
            ):
                status = response.status_code  # the body is nobody's business, however long it is
                error = None if response.is_success else f"answered {status}"
        except (httpx.TimeoutException, TimeoutError):
            error = f"no answer within {TIMEOUT:g} s"
        except NotPublic as refused:
            error = str(refused)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as failure:
            error = f"cannot be reached ({type(failure).__name__})"
        return Outcome(status=status, error=error, milliseconds=int((time.monotonic() - started) * 1000))


def _taken(outcome: Outcome, now: int) -> tuple[dict[str, Any], dict[str, Any]]:
    delivery = {"state": "delivered", "status": outcome.status, "error": None, "updated_at": now}
    return delivery, {"failures": 0, "failing_since": None, "quiet_until": 0}


def _failed(due: Due, outcome: Outcome, now: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What becomes of the delivery and of its endpoint."""
    since = due.failing_since or now
    quiet = min(RETRIES[min(due.failures, len(RETRIES) - 1)], LONGEST_QUIET)
    endpoint: dict[str, Any] = {"failures": due.failures + 1, "failing_since": since, "quiet_until": now + quiet}
    if outcome.status == 410:
        endpoint |= {"disabled_at": now, "disabled_because": "it answered 410 Gone"}
    elif now - since >= DISABLED_AFTER:
        endpoint |= {"disabled_at": now, "disabled_because": "it took nothing for 5 days"}
    over = due.attempts >= len(RETRIES)
    delivery = {
        "state": "failed" if over else "pending",
        "attempts": due.attempts + 1,
        "next_attempt_at": now if over else now + RETRIES[due.attempts],
        "status": outcome.status,
        "error": outcome.error,
        "updated_at": now,
    }
    return delivery, endpoint
