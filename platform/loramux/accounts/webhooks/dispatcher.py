"""Deliver events to webhook endpoints: at least once, in order unless a delivery fails, with retries.

Each endpoint's deliveries run in a separate task, so a slow or failing endpoint does not delay other endpoints. After a
failure an endpoint gets a pause, which grows with its consecutive failures, or has the length of its `Retry-After`. An
endpoint is disabled if it has accepted no message for DISABLED_AFTER, or if it answers 410 Gone. If a delivery cannot
be attempted because its row is damaged, this delivery is marked as failed, and other deliveries continue.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC
from itertools import groupby
from typing import Any

import httpx
import msgspec

from loramux.accounts.webhooks.messages import EventMessage, endpoint_secret, event_message, rfc3339, sign
from loramux.common.public_http import ANYWHERE, TENANT, NotPublic, PublicTransport, Resolver
from loramux.common.settings.server import WebhookSettings
from loramux.common.units import DAY, SECOND
from loramux.data.records.database import Database
from loramux.data.records.webhooks import DeliveryRepository, DueDelivery, forget_events

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Seconds that an endpoint may take to accept a message."""
LEASE = 300 * SECOND
"""The length of a lease, which is longer than PER_ENDPOINT messages can take."""
RETRIES = tuple(seconds * SECOND for seconds in (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400))
"""Delays before each attempt after the first, as in the example of Standard Webhooks."""
MAX_PAUSE = 3600 * SECOND
"""The longest pause of an endpoint after failures in a row."""
MAX_RETRY_AFTER = DAY
"""The longest `Retry-After` that is honoured in full."""
DISABLED_AFTER = 5 * DAY
RETENTION = 90 * DAY
"""The age at which events, and the log of their deliveries, are deleted."""
MAX_VISITS = 64
"""Endpoints that one server delivers to at the same time."""
MAX_VISITS_PER_TENANT = 8
POLL_S = 0.5
"""Seconds between two searches for due deliveries, while slow endpoints are still being served."""
TEST = "webhook.test"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one delivery attempt."""

    status: int | None = None
    error: str | None = None
    milliseconds: int
    retry_after: int | None = None
    """Microseconds that the endpoint's `Retry-After` demands."""
    is_final: bool = False
    """True: another attempt cannot succeed, because the delivery itself is damaged."""

    @property
    def delivered(self) -> bool:
        """Return whether the endpoint has accepted the message."""
        return self.error is None


def webhook_client(settings: WebhookSettings, resolver: Resolver) -> httpx.AsyncClient:
    """Make the client for endpoints: no redirects, and only public addresses, unless the operator allows private
    addresses.
    """
    is_open = settings.allow_private_addresses
    transport = PublicTransport(resolver, ANYWHERE if is_open else (), ports=() if is_open else settings.ports)
    headers = {"Accept-Encoding": "identity"}  # the bodies of replies are not read
    return httpx.AsyncClient(
        transport=transport, timeout=TIMEOUT_S, follow_redirects=False, trust_env=False, headers=headers
    )


class WebhookDispatcher:
    """Delivers for one server, to the endpoints of every tenant. `pepper` is the secret from which the endpoints'
    secrets are derived.
    """

    def __init__(self, database: Database, client: httpx.AsyncClient, pepper: bytes) -> None:
        self._database = database
        self._client = client
        self._pepper = pepper

    async def run(self) -> int:
        """Deliver all due messages; return the number of messages that endpoints accepted.

        While some endpoints are slow, new deliveries to other endpoints are still sent.
        """
        delivered = 0
        visits: dict[asyncio.Task[int], list[DueDelivery]] = {}
        try:
            while True:
                for dues in await self._lease([dues[0] for dues in visits.values()]):
                    visits[asyncio.create_task(self._visit(dues))] = dues
                if not visits:
                    return delivered
                done, _ = await asyncio.wait(visits, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for visit in done:
                    endpoint = visits.pop(visit)[0].endpoint
                    if error := visit.exception():
                        # the endpoint's deliveries stay leased, so they are not tried again immediately
                        logger.error("webhook %s could not be served", endpoint, exc_info=error)
                    else:
                        delivered += visit.result()
        finally:
            await self._give_up(visits)

    async def _give_up(self, visits: Mapping[asyncio.Task[int], list[DueDelivery]]) -> None:
        """Cancel visits and their leases. After a restart their deliveries need not wait until the leases expire."""
        if not visits:
            return
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        async with self._database.begin() as session:
            await DeliveryRepository(session).release([due for dues in visits.values() for due in dues])

    async def forget(self) -> None:
        """Delete events that are older than RETENTION, with the log of their deliveries."""
        async with self._database.begin() as session:
            await forget_events(session, self._database.now() - RETENTION)

    async def test(self, endpoint_id: str, url: str, tenant: str) -> Attempt:
        """Send a test message to an endpoint; the test is neither recorded nor retried."""
        now = self._database.now()
        content = EventMessage(type=TEST, timestamp=rfc3339(now), data={"webhook": endpoint_id})
        return await self._send(url, endpoint_id, tenant, f"msg_test_{now}", content)

    async def _lease(self, active: Collection[DueDelivery]) -> list[list[DueDelivery]]:
        """Lease due deliveries, by endpoint. Skip endpoints that are being served, and tenants without a free place."""
        busy = {due.endpoint for due in active}
        tenants = Counter(due.tenant_id for due in active)
        if len(busy) >= MAX_VISITS:
            return []
        full = [tenant for tenant, number in tenants.items() if number >= MAX_VISITS_PER_TENANT]
        now = self._database.now()
        # Read first, so that a search without result takes no locks.
        async with self._database.read() as session:
            keys = await DeliveryRepository(session).due(now, busy, full)
        chosen: set[str] = set()
        for key in keys:
            if key.endpoint in chosen:
                continue
            if len(busy) + len(chosen) < MAX_VISITS and tenants[key.tenant_id] < MAX_VISITS_PER_TENANT:
                chosen.add(key.endpoint)
                tenants[key.tenant_id] += 1
        if not chosen:
            return []
        async with self._database.begin() as session:
            repository = DeliveryRepository(session)
            dues = await repository.lease([key for key in keys if key.endpoint in chosen], now, now + LEASE)
        # deliveries that never failed first
        ordered = sorted(dues, key=lambda due: (due.endpoint, due.attempts))
        return [list(group) for _, group in groupby(ordered, lambda due: due.endpoint)]

    async def _visit(self, dues: Sequence[DueDelivery]) -> int:
        """Send one endpoint's messages until it fails to accept a message; return the number of accepted messages."""
        taken = 0
        for place, due in enumerate(dues):
            attempt = await self._attempt(due)
            # a message that was accepted during this visit ended the endpoint's failures in a row
            last = msgspec.structs.replace(due, failures=0, failing_since=None) if taken else due
            async with self._database.begin() as session:
                deliveries = DeliveryRepository(session)
                if attempt.delivered:
                    await deliveries.note(due, *_taken(attempt, self._database.now()))
                    taken += 1
                    continue
                if attempt.is_final:
                    await deliveries.note(due, _final(due, attempt, self._database.now()), {})
                    continue
                await deliveries.note(due, *_failed(last, attempt, self._database.now()))
                await deliveries.release(dues[place + 1 :])
            logger.warning("webhook %s failed %d times in a row", due.endpoint, last.failures + 1)
            break
        return taken

    async def _attempt(self, due: DueDelivery) -> Attempt:
        try:
            content = event_message(due.event, due.tenant_name)
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            logger.error("webhook delivery %s to %s cannot be read: %s", due.event_id, due.endpoint, error)
            return Attempt(error="the event cannot be read", milliseconds=0, is_final=True)
        return await self._send(due.url, due.endpoint, due.tenant_id, f"msg_{due.event_id}", content)

    async def _send(self, url: str, endpoint: str, tenant: str, id: str, content: EventMessage) -> Attempt:
        message = sign(endpoint_secret(self._pepper, endpoint), id, content, self._database.now())
        started = time.monotonic()
        status, error, retry_after = None, None, None
        try:
            request = self._client.build_request(
                "POST", url, content=message.body, headers=message.headers, extensions={TENANT: tenant}
            )
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.send(request, stream=True)
                try:
                    status = response.status_code  # the body is not read, because it may be long
                    error = None if response.is_success else f"answered {status}"
                    retry_after = _retry_after(response, self._database.now())
                finally:
                    await response.aclose()
        except (httpx.TimeoutException, TimeoutError):
            error = f"no answer within {TIMEOUT_S:g} s"
        except NotPublic as refused:
            error = str(refused)
        except (
            Exception
        ) as failure:  # the tenant chose the address, so no error that the call causes may end the dispatcher
            error = f"cannot be reached ({type(failure).__name__})"
            if not isinstance(failure, httpx.HTTPError | httpx.InvalidURL | OSError | ValueError | OverflowError):
                logger.exception("webhook %s", endpoint)
        milliseconds = int((time.monotonic() - started) * 1000)
        return Attempt(status=status, error=error, milliseconds=milliseconds, retry_after=retry_after)


def _retry_after(response: httpx.Response, now: int) -> int | None:
    """Return the microseconds of a `Retry-After` header, which has seconds or a date (RFC 9110); None without a usable
    header.
    """
    text = response.headers.get("retry-after", "").strip()
    if not text or response.is_success:
        return None
    if text.isascii() and text.isdigit():
        return min(int(text[:12]) * SECOND, MAX_RETRY_AFTER)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, min(int(moment.timestamp()) * SECOND - now, MAX_RETRY_AFTER))


def _taken(attempt: Attempt, now: int) -> tuple[dict[str, Any], dict[str, Any]]:
    delivery = {"state": "delivered", "status": attempt.status, "error": None, "updated_at": now}
    return delivery, {"failures": 0, "failing_since": None, "quiet_until": 0}


def _final(due: DueDelivery, attempt: Attempt, now: int) -> dict[str, Any]:
    return {"state": "failed", "attempts": due.attempts + 1, "error": attempt.error, "updated_at": now}


def _failed(due: DueDelivery, attempt: Attempt, now: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the new columns of the delivery and of its endpoint."""
    since = due.failing_since or now
    asked = attempt.retry_after or 0
    pause = max(asked, min(RETRIES[min(due.failures, len(RETRIES) - 1)], MAX_PAUSE))
    endpoint: dict[str, Any] = {"failures": due.failures + 1, "failing_since": since, "quiet_until": now + pause}
    if attempt.status == 410:
        endpoint |= {"disabled_at": now, "disabled_because": "it answered 410 Gone"}
    elif now - since >= DISABLED_AFTER:
        endpoint |= {"disabled_at": now, "disabled_because": "it took nothing for 5 days"}
    is_over = due.attempts >= len(RETRIES)
    delivery = {
        "state": "failed" if is_over else "pending",
        "attempts": due.attempts + 1,
        "next_attempt_at": now if is_over else now + max(asked, RETRIES[due.attempts]),
        "status": attempt.status,
        "error": attempt.error,
        "updated_at": now,
    }
    return delivery, endpoint
