"""Prices, and the charges that they make of usage: pure functions over integers.

A line is one price's usage in one period, rounded once. Its amount is then divided exactly: first over the days, each
taking what it added to the running total (so that volume steps and free quotas fall on the days that reached them),
then within a day in proportion to the quantity: dividing one day further changes no other day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from loramux.pricing.money import Currency, allocate, minor_units
from loramux.records.service_tiers import ANY, tier_match
from loramux.records.usage import DailyQuantities
from loramux.units import DAY

Group = tuple[str | None, ...]
"""The values of the columns that a bill is divided by."""

METERS = (
    "input_uncached",
    "input_cached",
    "output",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)
"""The meters that prices are for. Token meters have a `waived_` twin, which is never charged."""


class Step(msgspec.Struct, frozen=True):
    """One step of a price: from `above` units in a period on, `Price.per` units cost `nanos` nano-units of currency."""

    above: int
    nanos: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A price. It never changes: one with a later `valid_from` succeeds it. Times in microseconds, at UTC midnight.

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

    def applies_to(self, meter: str, base_model: str, tier: str, at: int) -> bool:
        """Return whether this price is for that usage at that time."""
        return (
            self.meter == meter
            and self.base_model in (ANY, base_model)
            and tier_match(self.tier, tier) is not None
            and self.valid_from <= at
            and (self.valid_until is None or at < self.valid_until)
        )


def price_for(prices: Iterable[Price], meter: str, base_model: str, tier: str, at: int) -> Price | None:
    """Return the most specific price of that usage: by base model, then by tier (`tier_match`), then the newest."""
    candidates = [price for price in prices if price.applies_to(meter, base_model, tier, at)]
    return max(candidates, key=lambda p: (p.base_model != ANY, tier_match(p.tier, tier), p.valid_from), default=None)


def cost(price: Price, quantity: int) -> int:
    """Return the cost of `quantity` units in one period, in nano-units times `price.per`: exact, not yet divided.

    A negative quantity (a credit larger than the usage) costs the negative of its mirror image.
    """
    if quantity < 0:
        return -cost(price, -quantity)
    ends = [step.above for step in price.steps[1:]] + [quantity]
    return sum(
        max(0, min(end, quantity) - step.above) * step.nanos for step, end in zip(price.steps, ends, strict=True)
    )


class Charge(msgspec.Struct, frozen=True):
    """One group's part of a line on one day; the `nanos` (nano-units of the currency) add up to the line exactly."""

    day: int
    group: Group
    quantity: int
    nanos: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A meter's usage at one price, or at none; `amount`, in minor units, is the only number that is rounded."""

    meter: str
    base_model: str
    tier: str
    price: Price | None
    quantity: int
    amount: int
    charges: tuple[Charge, ...]


def charge(
    usages: Iterable[DailyQuantities], prices_at: Callable[[int], Sequence[Price]], currency: Currency
) -> list[Line]:
    """Return the lines of one period: one for each price that applies, and one for each usage without a price.

    `prices_at` returns the price list of a moment, in microseconds. Volume steps count everything that the price is for
    together.
    """
    pots: dict[tuple[str, str, str, str], tuple[Price | None, list[tuple[int, Group, int]]]] = {}
    found: dict[tuple[str, str, str, int], Price | None] = {}
    for usage in usages:
        for meter in METERS:
            quantity = usage.quantities.get(meter, 0)
            if quantity:
                kind = meter, usage.base_model, usage.tier, usage.day
                if kind not in found:
                    found[kind] = price_for(prices_at(usage.day * DAY), *kind[:3], usage.day * DAY)
                price = found[kind]
                key = (meter, *_scope(price, usage))
                pots.setdefault(key, (price, []))[1].append((usage.day, usage.group, quantity))
    order = {meter: number for number, meter in enumerate(METERS)}
    return [_line(key[:3], *pots[key], currency) for key in sorted(pots, key=lambda key: (order[key[0]], *key[1:]))]


def _scope(price: Price | None, usage: DailyQuantities) -> tuple[str, str, str]:
    return (price.base_model, price.tier, price.id) if price else (usage.base_model, usage.tier, "")


def _line(
    scope: tuple[str, str, str], price: Price | None, parts: list[tuple[int, Group, int]], currency: Currency
) -> Line:
    meter, base_model, tier = scope
    by_day: dict[int, list[tuple[int, Group, int]]] = {}
    for part in sorted(parts, key=lambda part: (part[0], repr(part[1]))):
        by_day.setdefault(part[0], []).append(part)
    quantities = {day: sum(part[2] for part in of_day) for day, of_day in by_day.items()}
    quantity = sum(quantities.values())
    amount = minor_units(cost(price, quantity), price.per, currency) if price else 0
    nanos = allocate(amount * currency.nanos, _weights(price, list(quantities.values())))
    return Line(
        meter=meter,
        base_model=base_model,
        tier=tier,
        price=price,
        quantity=quantity,
        amount=amount,
        charges=tuple(
            charge for of_day, total in zip(by_day.values(), nanos, strict=True) for charge in _charges(of_day, total)
        ),
    )


def _charges(parts: list[tuple[int, Group, int]], nanos: int) -> list[Charge]:
    """Divide one day's nano-units: a day has the same ones however it is divided, and whether other days are or not."""
    divided = allocate(nanos, [quantity for _, _, quantity in parts])
    return [Charge(day, group, quantity, n) for (day, group, quantity), n in zip(parts, divided, strict=True)]


def _weights(price: Price | None, quantities: list[int]) -> list[int]:
    """Return what each day's quantity adds to the exact cost of the line."""
    if price is None:
        return [0] * len(quantities)
    weights, before = [], 0
    for quantity in quantities:
        weights.append(cost(price, before + quantity) - cost(price, before))
        before += quantity
    return weights
