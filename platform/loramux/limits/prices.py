"""What limits ask of prices: bounds before a request, and its cost after. Nano-units, integers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import TenantId


class Used(msgspec.Struct, frozen=True):
    """What a request is charged for, in whole tokens; cached_tokens are part of input_tokens."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    adapter_loads: int = 0

    @property
    def tokens(self) -> int:
        """What counts against limits."""
        return self.input_tokens + self.output_tokens


class Tariff(Protocol):
    """Prices as they stand, of some tenants."""

    def most_it_can_cost(self, tenant: TenantId, tier: str, prompt_tokens: int, max_tokens: int) -> int:
        """A bound that `cost` never exceeds for a request of this size."""

    def cost(self, tenant: TenantId, tier: str, used: Used) -> int:
        """What it comes to."""


class Prices(Protocol):
    """Where tariffs come from."""

    async def tariff(self, session: AsyncSession, tenants: Collection[TenantId]) -> Tariff:
        """Those of these tenants; asked only where somebody has a budget."""


class NoPrices:
    """Nothing costs anything."""

    async def tariff(self, session: AsyncSession, tenants: Collection[TenantId]) -> Tariff:  # noqa: ARG002
        """Itself."""
        return self

    def most_it_can_cost(self, tenant: TenantId, tier: str, prompt_tokens: int, max_tokens: int) -> int:  # noqa: ARG002
        """0."""
        return 0

    def cost(self, tenant: TenantId, tier: str, used: Used) -> int:  # noqa: ARG002
        """0."""
        return 0
