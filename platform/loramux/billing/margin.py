"""What the operator keeps: each customer's and each adapter's price beside its share of the GPUs' cost.

A share is counted in the units that the scheduler charges: a computed prompt token is one, a generated one two.
Waived work costs GPU time like any other; so a share counts it, and its price does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from loramux.billing.invoices import Bill
from loramux.pricing import to_decimal
from loramux.pricing.money import NANO_DIGITS, allocate
from loramux.records.quantities import DailyQuantities

UNITS = {"input_uncached": 1, "waived_input_uncached": 1, "output": 2, "waived_output": 2}


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's model in one period, in one currency."""

    tenant_name: str
    model: str
    currency: str
    units: int
    """Its share of the GPUs, in scheduler's units."""
    price: Decimal
    cost: Decimal
    margin: Decimal


class Earned(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's period: its bill and its quantities, both divided by model alone."""

    tenant_name: str
    bill: Bill
    quantities: Sequence[DailyQuantities]


def margins(earned: Sequence[Earned], gpu_nanos: int) -> list[Margin]:
    """Who pays how much more than it cost; `gpu_nanos` is what the GPUs cost in the period, in nano-units.

    The whole cost is divided, exactly, over what ran; idle time is paid by those who ran.
    """
    units, prices, currencies = _units(earned), _prices(earned), {one.tenant_name: one.bill.currency for one in earned}
    keys = sorted(units.keys() | prices.keys())
    costs = allocate(gpu_nanos, [units.get(key, 0) for key in keys])
    return [
        Margin(
            tenant_name=tenant,
            model=model,
            currency=currencies[tenant].code,
            units=units.get((tenant, model), 0),
            price=_money(prices.get((tenant, model), 0)),
            cost=_money(cost),
            margin=_money(prices.get((tenant, model), 0) - cost),
        )
        for (tenant, model), cost in zip(keys, costs, strict=True)
    ]


def _units(earned: Sequence[Earned]) -> Mapping[tuple[str, str], int]:
    units: dict[tuple[str, str], int] = {}
    for one in earned:
        for quantity in one.quantities:
            key = one.tenant_name, quantity.group[0] or ""
            done = sum(weight * quantity.quantities.get(meter, 0) for meter, weight in UNITS.items())
            units[key] = units.get(key, 0) + done
    return units


def _prices(earned: Sequence[Earned]) -> Mapping[tuple[str, str], int]:
    prices: dict[tuple[str, str], int] = {}
    for one in earned:
        for _, part in one.bill.charges():
            key = one.tenant_name, part.group[0] or ""
            prices[key] = prices.get(key, 0) + part.nanos
    return prices


def _money(nanos: int) -> Decimal:
    return to_decimal(nanos, NANO_DIGITS)
