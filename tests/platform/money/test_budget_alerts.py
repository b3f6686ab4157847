"""A budget over a plan's own prices, and its alerts at a webhook that fails first."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime

import httpx
import pytest
import standardwebhooks

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import Catalog, PlanPrices, PlanSpec, PriceSpec
from loramux.money.billing.periods import Month
from loramux.money.exports.delivery import AlertDelivery
from loramux.money.exports.sinks import WebhookSink
from loramux.money.limits.errors import BudgetSpent
from loramux.money.limits.limits import Limits
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

pytestmark = pytest.mark.anyio

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
NOW = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp()) * 1_000_000


class Receiver:
    """Refuses its first message, and checks what comes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict]] = []
        self.refusals = 1

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refusals:
            self.refusals -= 1
            return httpx.Response(500)
        at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
        id, body = request.headers["webhook-id"], request.content.decode()
        assert request.headers["webhook-signature"] == standardwebhooks.Webhook(SECRET).sign(id, at, body)
        self.seen.append((id, json.loads(body)))
        return httpx.Response(204)


async def subscribe(database: Database) -> None:
    prices = (
        PriceSpec(meter="input_uncached", price="0.001", valid_from=date(2026, 11, 1)),
        PriceSpec(meter="output", price="0.002", valid_from=date(2026, 11, 1)),
    )
    catalog = Catalog(database)
    await catalog.apply([PlanSpec(name="basic", currency="EUR", prices=prices)])
    await catalog.subscribe("acme", "basic", Month(2026, 11))


async def ask(usage: UsageService, principal: Principal, id: str) -> None:
    """A request of 10 + 20 tokens: 0.05."""
    await usage.open(
        OpenedRequest(
            id=id,
            tenant_id=principal.tenant,
            key_id=principal.key_id,
            project_id=principal.project,
            model="tiny",
            adapter_digest=None,
            base_model="tiny",
            tier="standard",
            prompt_tokens=10,
            max_tokens=20,
        )
    )
    await usage.settle(
        Settlement(
            request_id=id,
            ended_by="completion",
            finish_reason="stop",
            delivered=TokenCounts(prompt=10, output=20),
        )
    )


async def test_budget_alert_is_delivered_when_the_budget_runs_out(
    database: Database, tenants: Tenants, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    database.now = lambda: NOW
    acme = await enrol("acme")
    await subscribe(database)
    await Limits(tenants.changes).put_budget(acme.tenant, acme.tenant, "month", 110_000_000, [40, 90])
    usage = UsageService(database, PlanPrices(database))
    await usage.start()
    await ask(usage, acme, "r1")
    await ask(usage, acme, "r2")
    with pytest.raises(BudgetSpent, match=r"is 0\.11 EUR: 0\.10 EUR is spent"):
        await ask(usage, acme, "r3")
    await usage.stop()
    receiver = Receiver()
    async with httpx.AsyncClient(transport=httpx.MockTransport(receiver)) as client:
        alerts = AlertDelivery(database, [WebhookSink("hook", client, "https://hook.example", SECRET)])
        assert [await alerts.run() for _ in range(3)] == [0, 2, 0]
    assert [body["data"]["percent"] for _, body in receiver.seen] == [40, 90]
    assert {body["type"] for _, body in receiver.seen} == {"budget.threshold_reached"}
    assert [body["data"]["spent_nano"] for _, body in receiver.seen] == [50_000_000, 100_000_000]
    assert len({id for id, _ in receiver.seen}) == 2
