"""Prices: what a meter costs, for which base model and tier, from when, in steps of volume."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

METERS = (
    "input_uncached",
    "input_cached",
    "output",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)
"""What can cost something. Each has a `waived_` twin where tokens are concerned, which never does."""

ANY = "*"
"""Any base model, or any tier."""


class Step(msgspec.Struct, frozen=True):
    """From `above` units in a period on, each `Price.per` units cost `nanos` nano-units of the plan's currency."""

    above: int
    nanos: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A price, which never changes; a later `valid_from` for the same takes its place. Times in microseconds, at UTC
    midnight.

    Steps are graduated: each prices the units between its `above` and the next one's. The first is above 0; a free
    quota is a first step that costs nothing.
    """

    id: str
    plan_id: str
    meter: str
    base_model: str = ANY
    tier: str = ANY
    valid_from: int
    valid_until: int | None = None
    per: int = 1
    steps: tuple[Step, ...]

    def holds_for(self, meter: str, base_model: str, tier: str, at: int) -> bool:
        """Whether this price can be asked for that usage at that time."""
        return (
            self.meter == meter
            and self.base_model in (ANY, base_model)
            and self.tier in (ANY, tier)
            and self.valid_from <= at
            and (self.valid_until is None or at < self.valid_until)
        )


def price_for(prices: Iterable[Price], meter: str, base_model: str, tier: str, at: int) -> Price | None:
    """The price of that usage: one that names the base model goes first, then the tier, then the newest."""
    candidates = [price for price in prices if price.holds_for(meter, base_model, tier, at)]
    return max(candidates, key=lambda p: (p.base_model != ANY, p.tier != ANY, p.valid_from), default=None)


def cost(price: Price, quantity: int) -> int:
    """What `quantity` units in one period cost, in nano-units times `price.per`: exact, not yet divided.

    A negative quantity (a credit larger than the usage) costs the negative of its mirror image.
    """
    if quantity < 0:
        return -cost(price, -quantity)
    ends = [step.above for step in price.steps[1:]] + [quantity]
    return sum(
        max(0, min(end, quantity) - step.above) * step.nanos for step, end in zip(price.steps, ends, strict=True)
    )


def most(
    prices: Iterable[Price], base_model: str, tier: str, at: int, *, prompt_tokens: int, max_tokens: int, loads: int = 1
) -> int:
    """The most that a request can cost, in nano-units rounded up: no free quota, the dearest step, nothing cached."""
    known = list(prices)

    def bound(meter: str, quantity: int) -> int:
        price = price_for(known, meter, base_model, tier, at)
        if price is None:
            return 0
        return -(-quantity * max(step.nanos for step in price.steps) // price.per)

    prompt = max(bound("input_uncached", prompt_tokens), bound("input_cached", prompt_tokens))
    return prompt + bound("output", max_tokens) + bound("adapter_load", loads)
