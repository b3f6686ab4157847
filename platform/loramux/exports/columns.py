"""Tables as every format knows them: named columns of a few kinds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["text", "integer", "decimal", "time"]
"""Integers have 64 bits, decimals 9 digits behind the point, times are UTC to the microsecond."""

Row = dict[str, Any]
"""str, int, decimal.Decimal, datetime or None, by column."""


class Column(msgspec.Struct, frozen=True):
    """One column."""

    name: str
    kind: Kind
