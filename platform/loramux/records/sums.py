"""Sums of any size from databases whose integers have 64 bits.

A terabyte held for four months is 10^19 byte-seconds, more than an integer column holds; so a sum is taken in two
halves.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, cast, func

from loramux.records.models import BigInt

HALF = 1 << 31


def exact_sum(column: SQLColumnExpression[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Two columns for a SELECT, whose values `exact_value` puts together; both 0 over no rows."""
    high, low = func.sum(column // HALF), func.sum(column % HALF)
    return cast(func.coalesce(high, 0), BigInt), cast(func.coalesce(low, 0), BigInt)


def exact_value(high: Any, low: Any) -> int:
    """The sum."""
    return int(high) * HALF + int(low)
