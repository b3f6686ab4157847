"""Prices and charges: pure functions over integers, without a database and without a clock."""

from loramux.pricing.money import (
    Currency,
    UnknownCurrency,
    encode_money,
    minor_units,
    nanos_of,
    plain_builtins,
    plain_text,
    to_decimal,
)
from loramux.pricing.prices import METERS, Charge, Group, Line, Price, Step, charge, cost, price_for
from loramux.records.service_tiers import ANY

__all__ = [
    "ANY",
    "METERS",
    "Charge",
    "Currency",
    "Group",
    "Line",
    "Price",
    "Step",
    "UnknownCurrency",
    "charge",
    "cost",
    "encode_money",
    "minor_units",
    "nanos_of",
    "plain_builtins",
    "plain_text",
    "price_for",
    "to_decimal",
]
