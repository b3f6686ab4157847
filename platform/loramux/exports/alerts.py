"""Budget alerts on their way to webhooks: at least once, under an id by which a receiver knows them again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from loramux.exports.delivery import NotDelivered, Unknown
from loramux.exports.webhook_sink import Told, WebhookSink
from loramux.records import Database
from loramux.records.limit_models import AlertRow
from loramux.records.limits import AlertRepository

logger = logging.getLogger(__name__)

SECOND = 1_000_000
PAGE = 100
KIND = "budget.threshold_reached"


class AlertDelivery:
    """Empties the outbox that settlements write."""

    def __init__(self, database: Database, webhooks: Sequence[WebhookSink]) -> None:
        self._database = database
        self._webhooks = webhooks

    async def run(self) -> int:
        """Deliver what is there, oldest first, until a webhook does not take it; the number of alerts."""
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
            return await AlertRepository(session).undelivered(PAGE)

    async def _send(self, alert: AlertRow) -> bool:
        try:
            for webhook in self._webhooks:
                told = Told(KIND, f"msg_{alert.id}", alert.created_at, _data(alert))
                await webhook.tell(told, self._database.now())
        except (NotDelivered, Unknown) as error:
            logger.warning("webhook %s: %s; the alert is tried again", webhook.name, error)
            return False
        return True


def _data(alert: AlertRow) -> dict[str, Any]:
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
