"""Prices that need no plan."""

from __future__ import annotations

from loramux.limits import Used


class FlatPrices:
    """So many nano-units for a token in and a token out, for everybody."""

    def __init__(self, input_nano: int, output_nano: int) -> None:
        self.input_nano, self.output_nano = input_nano, output_nano

    async def tariff(self, session: object, tenants: object) -> FlatPrices:
        return self

    def most_it_can_cost(self, tenant: str, tier: str, prompt_tokens: int, max_tokens: int) -> int:
        return prompt_tokens * self.input_nano + max_tokens * self.output_nano

    def cost(self, tenant: str, tier: str, used: Used) -> int:
        return used.input_tokens * self.input_nano + used.output_tokens * self.output_nano
