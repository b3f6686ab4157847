"""Prices that are the same for every tenant, and a plan that has some."""

from __future__ import annotations

from datetime import date

from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import Catalog, PlanSpec, PriceSpec
from loramux.money.billing.periods import Month
from loramux.money.limits.budgets import ChargedUsage

SINCE = Month(2023, 1)


async def give_flat_plan(database: Database, tenant_name: str) -> None:
    """Give the tenant a plan, without which it gets no budget: a nano-dollar a token."""
    prices = tuple(
        PriceSpec(meter=meter, price="0.000000001", valid_from=date(2023, 1, 1))
        for meter in ("input_uncached", "output")
    )
    await Catalog(database).apply([PlanSpec(name="flat", currency="USD", prices=prices)])
    await Catalog(database).subscribe(tenant_name, "flat", SINCE)


class FlatPrices:
    """So many nano-units for a token in and a token out, for every tenant."""

    def __init__(self, input_nano: int, output_nano: int) -> None:
        self.input_nano, self.output_nano = input_nano, output_nano

    async def tariff(self, session: object, tenants: object) -> FlatPrices:
        return self

    def most_it_can_cost(self, request: OpenedRequest) -> int:
        return request.prompt_tokens * self.input_nano + request.max_tokens * self.output_nano

    def cost(self, tenant: str, base_model: str, tier: str, used: ChargedUsage, at: int | None = None) -> int:
        return used.tokens.prompt * self.input_nano + used.tokens.output * self.output_nano
