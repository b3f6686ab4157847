"""Money as integers: prices in nano-units of a currency, invoices in its minor units (ISO 4217)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import iso4217
import msgspec

NANO_DIGITS = 9
NANO = 10**NANO_DIGITS


class UnknownCurrency(ValueError):
    """No currency of ISO 4217 has that code, or it has no minor unit (gold, test codes)."""


class Currency(msgspec.Struct, frozen=True):
    """A currency and how many digits its minor unit has: 2 for USD, 0 for JPY, 3 for BHD."""

    code: str
    digits: int

    @classmethod
    def of(cls, code: str) -> Currency:
        """The currency of that ISO code. Raises UnknownCurrency."""
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
    """`numerator / denominator` nano-units in minor units, rounded once: to the nearest, halves away from zero."""
    divisor = denominator * currency.nanos
    magnitude = (2 * abs(numerator) + divisor) // (2 * divisor)
    return magnitude if numerator >= 0 else -magnitude


def nanos_of(amount: str, field: str) -> int:
    """A decimal text, as people write prices, in nano-units. Raises ValueError naming the field."""
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
    """An integer of `digits` decimal places as an exact decimal."""
    return Decimal(units).scaleb(-digits)


def allocate(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, which add up to it exactly.

    Every part is rounded down, and what is left goes one by one to the largest remainders, earlier ones first. Weights
    that add up to nothing share alike.
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
