"""Tenants' plans as what their budgets count with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.billing.catalog import subscriptions_of
from loramux.limits import Used
from loramux.pricing import Price, price_for
from loramux.records import Database, TenantId

MOST_LOADS = 1
"""Adapter loads that a budget counts for a request, at most."""


class PlanTariff:
    """The prices of some tenants' plans at one moment, each meter at its dearest step and without free quotas.

    So a budget is never behind the invoice, whatever quotas and steps the whole period comes to.
    """

    def __init__(self, prices: Mapping[TenantId, tuple[Price, ...]], base_model: str, at: int) -> None:
        self._prices = prices
        self._base_model = base_model
        self._at = at

    def most_it_can_cost(self, tenant: TenantId, tier: str, prompt_tokens: int, max_tokens: int) -> int:
        """With the whole prompt at the dearer of cached and uncached."""
        prompt = max(self._meter(tenant, tier, meter, prompt_tokens) for meter in ("input_uncached", "input_cached"))
        loads = self._meter(tenant, tier, "adapter_load", MOST_LOADS)
        # a prompt that is cached in part is rounded up twice
        return prompt + 1 + self._meter(tenant, tier, "output", max_tokens) + loads

    def cost(self, tenant: TenantId, tier: str, used: Used) -> int:
        """Meter by meter, each rounded up to a nano-unit."""
        meters = {
            "input_uncached": used.input_tokens - used.cached_tokens,
            "input_cached": used.cached_tokens,
            "output": used.output_tokens,
            "adapter_load": min(used.adapter_loads, MOST_LOADS),
        }
        return sum(self._meter(tenant, tier, meter, quantity) for meter, quantity in meters.items())

    def _meter(self, tenant: TenantId, tier: str, meter: str, quantity: int) -> int:
        price = price_for(self._prices.get(tenant, ()), meter, self._base_model, tier, self._at)
        if price is None:
            return 0
        return -(-quantity * max(step.nanos for step in price.steps) // price.per)


class PlanPrices:
    """Where `PlanTariff`s come from; a tenant without a plan pays nothing, and its budgets count nothing."""

    def __init__(self, database: Database, base_model: str) -> None:
        self._now = database.now
        self._base_model = base_model

    async def tariff(self, session: AsyncSession, tenants: Collection[TenantId]) -> PlanTariff:
        """Read in the transaction that admits or settles."""
        at = self._now()
        prices = {tenant: (await subscriptions_of(session, tenant)).prices_at(at) for tenant in tenants}
        return PlanTariff(prices, self._base_model, at)
