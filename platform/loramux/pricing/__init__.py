"""What usage costs: pure functions over integers, without a database and without a clock."""

from loramux.pricing.charges import Charge, Line, Usage, charge
from loramux.pricing.money import Currency, UnknownCurrency, minor_units, nanos_of, to_decimal
from loramux.pricing.prices import ANY, METERS, Price, Step, cost, most, price_for

__all__ = [
    "ANY",
    "METERS",
    "Charge",
    "Currency",
    "Line",
    "Price",
    "Step",
    "UnknownCurrency",
    "Usage",
    "charge",
    "cost",
    "minor_units",
    "most",
    "nanos_of",
    "price_for",
    "to_decimal",
]
