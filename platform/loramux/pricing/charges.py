"""From quantities by day and group to invoice lines, and from each line back to whoever caused it.

A line is one price's usage in one period, rounded once. Its amount is then divided exactly: first over the days, each
taking what it added to the running total (so that volume steps and free quotas fall on the days that reached them),
then within a day in proportion to the quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from loramux.pricing.money import Currency, allocate, minor_units
from loramux.pricing.prices import METERS, Price, cost, price_for

DAY = 86_400_000_000
"""Microseconds."""

Group = TypeVar("Group", bound=Hashable)


class Usage(msgspec.Struct, Generic[Group], frozen=True):
    """What one group used on one day (days since the epoch, UTC), by meter."""

    day: int
    base_model: str
    tier: str
    group: Group
    quantities: dict[str, int]


class Charge(msgspec.Struct, Generic[Group], frozen=True):
    """One group's part of a line on one day; `nanos` in nano-units of the currency, exact to the line's sum."""

    day: int
    group: Group
    quantity: int
    nanos: int


class Line(msgspec.Struct, Generic[Group], frozen=True, kw_only=True):
    """A meter's usage at one price, or at none; `amount` in minor units is the only number that was rounded."""

    meter: str
    base_model: str
    tier: str
    price: Price | None
    quantity: int
    amount: int
    charges: tuple[Charge[Group], ...]


def charge(
    usages: Iterable[Usage[Group]], prices_at: Callable[[int], Sequence[Price]], currency: Currency
) -> list[Line[Group]]:
    """The lines of one period: one for each price that was used, and one for each usage without a price.

    `prices_at` tells a moment's price list (microseconds).

    Volume steps count everything that the price is for, together.
    """
    pots: dict[tuple[str, str, str, str], tuple[Price | None, list[tuple[int, Group, int]]]] = {}
    for usage in usages:
        prices = prices_at(usage.day * DAY)
        for meter in METERS:
            quantity = usage.quantities.get(meter, 0)
            if quantity:
                price = price_for(prices, meter, usage.base_model, usage.tier, usage.day * DAY)
                key = (meter, *_scope(price, usage))
                pots.setdefault(key, (price, []))[1].append((usage.day, usage.group, quantity))
    order = {meter: number for number, meter in enumerate(METERS)}
    return [_line(key[:3], *pots[key], currency) for key in sorted(pots, key=lambda key: (order[key[0]], *key[1:]))]


def _scope(price: Price | None, usage: Usage[Group]) -> tuple[str, str, str]:
    return (price.base_model, price.tier, price.id) if price else (usage.base_model, usage.tier, "")


def _line(
    what: tuple[str, str, str], price: Price | None, parts: list[tuple[int, Group, int]], currency: Currency
) -> Line[Group]:
    meter, base_model, tier = what
    parts = sorted(parts, key=lambda part: (part[0], repr(part[1])))
    quantity = sum(part[2] for part in parts)
    amount = minor_units(cost(price, quantity), price.per, currency) if price else 0
    nanos = allocate(amount * currency.nanos, _weights(price, parts))
    return Line(
        meter=meter,
        base_model=base_model,
        tier=tier,
        price=price,
        quantity=quantity,
        amount=amount,
        charges=tuple(Charge(day, group, q, n) for (day, group, q), n in zip(parts, nanos, strict=True)),
    )


def _weights(price: Price | None, parts: list[tuple[int, Group, int]]) -> list[int]:
    """What each part added to the exact cost of the line, parts of one day in proportion to their quantity."""
    if price is None:
        return [0] * len(parts)
    weights: list[int] = []
    before = 0
    for day in dict.fromkeys(part[0] for part in parts):
        quantities = [part[2] for part in parts if part[0] == day]
        after = before + sum(quantities)
        weights += allocate(cost(price, after) - cost(price, before), quantities)
        before = after
    return weights
