"""Prices, invoices and limits by the tier of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from billing_harness import NOVEMBER, Clock, use

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.settings.server import BillingSettings
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest, charged_tier, service_tier, tenant_tier
from loramux.money.billing.catalog import Catalog, read_plans
from loramux.money.billing.errors import InvalidPlan
from loramux.money.billing.service import BillingService
from loramux.money.limits.errors import RequestTooLarge, TooManyRunning
from loramux.money.limits.limits import Limits
from loramux.money.pricing import Price, PriceStep, price_for
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

PLAN = """
[[plans]]
name = "tiered"
currency = "USD"

[[plans.prices]]
meter = "output"
valid_from = 2026-11-01
price = "0.02"

[[plans.prices]]
meter = "output"
tier = "*/batch"
valid_from = 2026-11-01
price = "0.01"

[[plans.prices]]
meter = "output"
tier = "standard/priority"
valid_from = 2026-11-01
price = "0.05"
"""


def test_charged_tier_names_the_tenants_tier_and_the_requests() -> None:
    assert [charged_tier("gold", one) for one in ("default", "flex")] == ["gold", "gold/flex"]
    assert [(tenant_tier(one), service_tier(one)) for one in ("gold", "gold/batch")] == [
        ("gold", "default"),
        ("gold", "batch"),
    ]


@pytest.mark.parametrize(
    ("charged", "priced"),
    [
        ("gold", "gold"),
        ("free", "*"),
        ("gold/flex", "gold"),
        ("free/flex", "*"),
        ("gold/batch", "gold/batch"),
        ("free/batch", "*/batch"),
    ],
)
def test_price_of_the_closest_tier_applies(charged: str, priced: str) -> None:
    prices = [
        Price(id=tier, plan_id="p", meter="output", tier=tier, valid_from=0, steps=(PriceStep(0, 1),))
        for tier in ("gold/batch", "*", "*/batch", "gold")
    ]
    assert price_for(prices, "output", "base", charged, 0).id == priced


@pytest.mark.parametrize("tier", ["gold/cheap", "/batch", "gold/"])
def test_plan_with_an_impossible_tier_is_refused(tmp_path: Path, tier: str) -> None:
    (tmp_path / "plans.toml").write_text(PLAN.replace("*/batch", tier))
    with pytest.raises(InvalidPlan, match="/flex, /priority, /batch"):
        read_plans(tmp_path / "plans.toml")


@pytest.mark.anyio
async def test_invoice_has_a_line_for_every_priced_tier(
    database: Database, enrol: Callable[[str], Awaitable[Principal]], tmp_path: Path
) -> None:
    database.now = Clock()
    acme = await enrol("acme")
    (tmp_path / "plans.toml").write_text(PLAN)
    await Catalog(database).apply(read_plans(tmp_path / "plans.toml"))
    await Catalog(database).subscribe("acme", "tiered", NOVEMBER)
    usage = UsageService(database)
    await usage.start()
    for number, tier in enumerate(("standard", "standard/flex", "standard/batch", "standard/priority")):
        await use(usage, acme, f"r{number}", 5, 0, 100, tier=tier)
    await usage.stop()
    invoice = await BillingService(database, BillingSettings()).invoice("acme", NOVEMBER)
    lines = {line.tier: (line.quantity, str(line.amount)) for line in invoice.lines if line.meter == "output"}
    assert lines == {"*": (200, "4.00"), "*/batch": (100, "1.00"), "standard/priority": (100, "5.00")}


@pytest.mark.anyio
async def test_batch_lines_take_from_limits_of_their_own(
    database: Database, tenants: Tenants, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    acme, limits = await enrol("acme"), Limits(tenants.changes)
    usage = UsageService(database)
    await usage.start()
    await limits.put(acme.tenant, acme.tenant, "concurrent_requests", 1)
    await limits.put_for_tier("standard", "batch_concurrent_requests", 2)
    await limits.put(acme.tenant, acme.tenant, "batch_tokens_per_minute", 100)

    def request(id: str, tier: str, tokens: int = 10) -> OpenedRequest:
        return OpenedRequest(
            id=id,
            tenant_id=acme.tenant,
            key_id=acme.key_id,
            model="tiny",
            adapter_digest=None,
            tier=tier,
            prompt_tokens=1,
            max_tokens=tokens,
        )

    await usage.open(request("b1", "standard/batch"))
    await usage.open(request("b2", "standard/batch"))
    with pytest.raises(TooManyRunning, match="batch_concurrent_requests"):
        await usage.open(request("b3", "standard/batch"))
    with pytest.raises(RequestTooLarge, match="batch_tokens_per_minute"):
        await usage.open(request("b4", "standard/batch", 1000))
    await usage.open(request("i1", "standard", 1000))
    with pytest.raises(TooManyRunning, match=r"\(concurrent_requests"):
        await usage.open(request("i2", "standard/flex"))
    await usage.settle(Settlement(request_id="b1", ended_by="platform", finish_reason=None))
    await usage.open(request("b5", "standard/batch"))
    await usage.stop()
