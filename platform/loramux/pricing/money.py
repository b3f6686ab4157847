"""Money as integers: prices in nano-units of a currency, invoices in its minor units (ISO 4217)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

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
    """Round `numerator / denominator` nano-units to minor units, once: to the nearest, halves away from zero."""
    divisor = denominator * currency.nanos
    magnitude = (2 * abs(numerator) + divisor) // (2 * divisor)
    return magnitude if numerator >= 0 else -magnitude


def nanos_of(amount: str, field: str) -> int:
    """Convert a decimal text to nano-units. Raises ValueError naming the field."""
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
    """Format without an exponent: `str` writes a zero of nine decimal places as 0E-9."""
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

    Every part is rounded down, and the rest goes one by one to the largest remainders, earlier ones first. Weights
    that sum to zero get equal parts.
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
