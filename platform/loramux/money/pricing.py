"""Money, prices, and the charges for usage at these prices: pure functions over integers, without database or clock.

Prices are in nano-units of a currency, invoices in its minor units (ISO 4217).

A line is the usage at one price in one period, rounded once. The line's amount is then divided exactly, first over the
days and then within a day. A day gets the amount that it added to the running total, so volume steps and free quotas
apply to the days that reached them. Within a day the amount is divided in proportion to the quantity. So a further
division of one day changes no other day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import iso4217
import msgspec

from loramux.common.units import DAY
from loramux.data.records.requests import ANY, tier_match
from loramux.data.records.usage import DailyQuantities

NANO_DIGITS = 9
NANO = 10**NANO_DIGITS
"""Nano-units in one unit of a currency."""

Group = tuple[str | None, ...]
"""Values of the columns that a bill is divided by."""

METERS = (
    "input_uncached",
    "input_cached",
    "image_tokens",
    "output",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)
"""The meters that prices are for. Token meters have a `waived_` twin, which is never charged."""
PROMPT_METERS = ("input_uncached", "input_cached", "image_tokens")
"""The meters of the parts of a prompt."""
PRICED_AS = {"image_tokens": "input_uncached"}
"""Meters whose usage has another meter's price if it has none itself."""


class UnknownCurrency(ValueError):
    """ISO 4217 has no currency with that code, or the currency has no minor unit (gold, test codes)."""


class Currency(msgspec.Struct, frozen=True):
    """A currency and the number of digits of its minor unit: 2 for USD, 0 for JPY, 3 for BHD."""

    code: str
    digits: int

    @classmethod
    def of(cls, code: str) -> Currency:
        """Return the currency of that ISO code. Raises UnknownCurrency."""
        try:
            digits = iso4217.Currency(code).exponent
        except ValueError:
            digits = None
        if digits is None or digits > NANO_DIGITS:
            raise UnknownCurrency(f"{code[:8]!r} is no currency of ISO 4217 with minor units; write USD, EUR, JPY, ...")
        return cls(code, digits)

    @property
    def nanos(self) -> int:
        """Nano-units in one minor unit."""
        return int(10 ** (NANO_DIGITS - self.digits))


def minor_units(numerator: int, denominator: int, currency: Currency) -> int:
    """Round `numerator / denominator` nano-units once, to the nearest minor unit, halves away from zero."""
    divisor = denominator * currency.nanos
    magnitude = (2 * abs(numerator) + divisor) // (2 * divisor)
    return magnitude if numerator >= 0 else -magnitude


def nanos_of(amount: str, field: str) -> int:
    """Convert a decimal text to nano-units. Raises ValueError with the field's name."""
    try:
        nanos = Decimal(amount).scaleb(NANO_DIGITS)
        exact = int(nanos)
    except (ArithmeticError, ValueError):
        raise ValueError(f"{field} is a decimal number in quotes, such as '0.25'; got {amount[:40]!r}") from None
    if exact != nanos or exact < 0:
        raise ValueError(
            f"{field} is at least 0 and has at most {NANO_DIGITS} digits behind the point; got {amount[:40]!r}"
        )
    return exact


def to_decimal(units: int, digits: int) -> Decimal:
    """Convert an integer of `digits` decimal places to an exact decimal."""
    return Decimal(units).scaleb(-digits)


def plain_text(amount: Decimal) -> str:
    """Format without an exponent, because `str` writes a zero with nine decimal places as 0E-9."""
    return format(amount, "f")


def encode_money(value: Any, *, as_numbers: bool = False) -> bytes:
    """Encode as JSON with keys sorted and amounts without exponents: as texts, or as numbers with all their digits."""
    builtins = msgspec.to_builtins(value, builtin_types=(Decimal,), order="sorted")
    return msgspec.json.encode(_plain(builtins, as_numbers))


def plain_builtins(value: Any) -> Any:
    """Turn structs into dicts and lists, with amounts as texts without exponents."""
    return _plain(msgspec.to_builtins(value, builtin_types=(Decimal,)), as_numbers=False)


def _plain(value: Any, as_numbers: bool) -> Any:
    if isinstance(value, Decimal):
        return msgspec.Raw(plain_text(value).encode()) if as_numbers else plain_text(value)
    if isinstance(value, dict):
        return {key: _plain(item, as_numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, as_numbers) for item in value]
    return value


def allocate(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into whole parts in proportion to `weights`; the parts add up to it exactly.

    Every part is rounded down. The remaining units go one by one to the parts with the largest remainders, earlier
    parts first. If all weights are zero, the parts are equal.
    """
    whole = sum(weights)
    if not weights:
        return []
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    shares = [divmod(total * weight, whole) for weight in weights]
    parts = [part for part, _ in shares]
    left = total - sum(parts)
    fullest = sorted(range(len(parts)), key=lambda i: -abs(shares[i][1]))
    for i in fullest[:left]:
        parts[i] += 1
    return parts


class PriceStep(msgspec.Struct, frozen=True):
    """One step of a price: after the first `above` units of a period, `Price.per` units cost `nanos` nano-units of the
    currency.
    """

    above: int
    nanos: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A price. A price never changes: another price with a later `valid_from` replaces it. Times are in microseconds,
    at midnight UTC.

    Steps are graduated: each step applies to the units between its `above` and the next step's `above`. The first step
    begins at 0. A free quota is a first step with the price 0.
    """

    id: str
    plan_id: str
    meter: str
    base_model: str = ANY
    tier: str = ANY
    valid_from: int
    valid_until: int | None = None
    per: int = 1
    steps: tuple[PriceStep, ...]

    def applies_to(self, meter: str, base_model: str, tier: str, at: int) -> bool:
        """Return True if this price applies to that usage at that time."""
        return (
            self.meter == meter
            and self.base_model in (ANY, base_model)
            and tier_match(self.tier, tier) is not None
            and self.valid_from <= at
            and (self.valid_until is None or at < self.valid_until)
        )


def price_for(prices: Sequence[Price], meter: str, base_model: str, tier: str, at: int) -> Price | None:
    """Return the most specific price of that usage: by base model, then by tier (`tier_match`), then the newest."""
    candidates = [price for price in prices if price.applies_to(meter, base_model, tier, at)]
    if not candidates and meter in PRICED_AS:
        return price_for(prices, PRICED_AS[meter], base_model, tier, at)
    return max(candidates, key=lambda p: (p.base_model != ANY, tier_match(p.tier, tier), p.valid_from), default=None)


def cost(price: Price, quantity: int) -> int:
    """Return the exact cost of `quantity` units in one period, in nano-units times `price.per`, before the division.

    A negative quantity (a credit larger than the usage) has the negative cost of the same positive quantity.
    """
    if quantity < 0:
        return -cost(price, -quantity)
    ends = [step.above for step in price.steps[1:]] + [quantity]
    return sum(
        max(0, min(end, quantity) - step.above) * step.nanos for step, end in zip(price.steps, ends, strict=True)
    )


class Charge(msgspec.Struct, frozen=True):
    """One group's part of a line on one day. The `nanos` (nano-units of the currency) of all parts add up exactly to
    the line.
    """

    day: int
    group: Group
    quantity: int
    nanos: int


class PricedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A meter's usage at one price, or without a price. `amount`, in minor units, is the only rounded number."""

    meter: str
    base_model: str
    tier: str
    price: Price | None
    quantity: int
    amount: int
    charges: tuple[Charge, ...]


def charge(
    usages: Iterable[DailyQuantities], prices_at: Callable[[int], Sequence[Price]], currency: Currency
) -> list[PricedLine]:
    """Return the lines of one period: one line per applicable price, and one line per usage without a price.

    `prices_at` returns the price list of a moment, in microseconds. Volume steps count all usage of a price together:
    a meter with another meter's price begins after the usage of that meter.
    """
    groups: dict[tuple[str, str, str, str], tuple[Price | None, list[tuple[int, Group, int]]]] = {}
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
                groups.setdefault(key, (price, []))[1].append((usage.day, usage.group, quantity))
    order = {meter: number for number, meter in enumerate(METERS)}
    lines = []
    for key in sorted(groups, key=lambda key: (order[key[0]], *key[1:])):
        price, parts = groups[key]
        shares = price is not None and price.meter != key[0]
        others = groups.get((PRICED_AS[key[0]], *key[1:]), (price, []))[1] if shares else []
        lines.append(_line(key[:3], price, parts, currency, sum(quantity for _, _, quantity in others)))
    return lines


def _scope(price: Price | None, usage: DailyQuantities) -> tuple[str, str, str]:
    return (price.base_model, price.tier, price.id) if price else (usage.base_model, usage.tier, "")


def _line(
    scope: tuple[str, str, str],
    price: Price | None,
    parts: list[tuple[int, Group, int]],
    currency: Currency,
    before: int,
) -> PricedLine:
    """Return a line for usage that follows `before` units of the same price on another line."""
    meter, base_model, tier = scope
    by_day: dict[int, list[tuple[int, Group, int]]] = {}
    for part in sorted(parts, key=lambda part: (part[0], repr(part[1]))):
        by_day.setdefault(part[0], []).append(part)
    quantities = {day: sum(part[2] for part in of_day) for day, of_day in by_day.items()}
    quantity = sum(quantities.values())
    weights = _weights(price, list(quantities.values()), before)
    amount = minor_units(sum(weights), price.per, currency) if price else 0
    nanos = allocate(amount * currency.nanos, weights)
    return PricedLine(
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
    """Divide one day's nano-units. The sum of a day does not depend on how this day or other days are divided."""
    divided = allocate(nanos, [quantity for _, _, quantity in parts])
    return [Charge(day, group, quantity, n) for (day, group, quantity), n in zip(parts, divided, strict=True)]


def _weights(price: Price | None, quantities: list[int], before: int) -> list[int]:
    """Return the part of the line's exact cost that each day's quantity adds, after `before` units."""
    if price is None:
        return [0] * len(quantities)
    weights = []
    for quantity in quantities:
        weights.append(cost(price, before + quantity) - cost(price, before))
        before += quantity
    return weights
