"""A November with a plan, a clock, and usage to bill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from manual_clock import ManualClock

from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import Catalog, read_plans
from loramux.money.billing.periods import Month
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

SECOND = 1_000_000
DAY = 86_400
NOVEMBER, DECEMBER = Month(2026, 11), Month(2026, 12)

PLANS = """
[[plans]]
name = "standard"
currency = "USD"
minimum = "0.50"

[[plans.prices]]
meter = "input_uncached"
valid_from = 2026-11-01
per = 1_000_000
price = "0.20"

[[plans.prices]]
meter = "input_cached"
valid_from = 2026-11-01
per = 1_000_000
price = "0.02"

[[plans.prices]]
meter = "output"
valid_from = 2026-11-01
per = 1_000
free = 1_000
steps = [{ above = 0, price = "0.0137" }, { above = 10_000, price = "0.0091" }]
"""


@dataclass
class Clock(ManualClock[int]):
    """A clock of the records that starts in the middle of November."""

    now: int = NOVEMBER.starts_at + 14 * DAY * SECOND


async def give_plan(database: Database, folder: Path) -> None:
    """The plan, and acme has it from November on."""
    (folder / "plans.toml").write_text(PLANS)
    await Catalog(database).apply(read_plans(folder / "plans.toml"))
    await Catalog(database).subscribe("acme", "standard", NOVEMBER)


async def use(
    usage: UsageService, who: Principal, id: str, input: int, cached: int, output: int, image: int = 0, **facts: object
) -> str:
    """Open and settle a request; the id of its event."""
    opened = OpenedRequest(
        id=id,
        tenant_id=who.tenant,
        key_id=who.key_id,
        model="acme/a@1",
        adapter_digest="sha256:a",
        base_model="base",
        tier="standard",
        prompt_tokens=input,
        max_tokens=output,
    )
    await usage.open(msgspec.structs.replace(opened, **facts))
    tokens = TokenCounts(prompt=input, cached=cached, output=output, image=image)
    settlement = Settlement(
        request_id=id, ended_by="completion", finish_reason="stop", delivered=tokens, engine_count=tokens
    )
    return (await usage.settle(settlement)).event_id
