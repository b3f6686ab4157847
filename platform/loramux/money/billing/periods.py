"""Billing periods: calendar months, UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from loramux.common.units import SECOND
from loramux.data.records.billing import PeriodRow
from loramux.data.records.usage import Span
from loramux.money.billing.errors import InvalidPeriod, PeriodNotOpen

_month = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")
YEARS = range(1970, 9999)
"""Years of valid months; the last one ends before Python's latest date."""


class Month(msgspec.Struct, frozen=True, order=True):
    """A calendar month, UTC."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str) -> Month:
        """Parse `2026-11`. Raises InvalidPeriod."""
        match = _month.fullmatch(text)
        if match is None or int(match[1]) not in YEARS:
            raise InvalidPeriod(f"a period is a month such as 2026-11; got {text[:20]!r}", "period")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def at(cls, microseconds: int) -> Month:
        """Return the month of a moment."""
        moment = datetime.fromtimestamp(microseconds // SECOND, UTC)
        return cls(moment.year, moment.month)

    @property
    def next(self) -> Month:
        """The month after."""
        return Month(self.year + self.month // 12, self.month % 12 + 1)

    @property
    def starts_at(self) -> int:
        """First microsecond of the period."""
        return int(datetime(self.year, self.month, 1, tzinfo=UTC).timestamp()) * SECOND

    @property
    def ends_at(self) -> int:
        """The next month's first microsecond."""
        return self.next.starts_at

    def __str__(self) -> str:
        return f"{self.year:04}-{self.month:02}"


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A month and the ledger entries that are billed in it. An open period has no last entry yet, and no digest."""

    month: Month
    span: Span
    digest: str | None
    """The hash of the last entry, which covers every entry before."""

    @property
    def is_closed(self) -> bool:
        """Return True if the period can no longer change."""
        return self.digest is not None


def closed_period(row: PeriodRow) -> Period:
    """Convert the row of a closed period."""
    return Period(month=Month.parse(row.id), span=Span(row.first_sequence, row.last_sequence), digest=row.digest)


def check_closable(month: Month, latest: Month | None, now: int, *, preview: bool = False) -> None:
    """Raise PeriodNotOpen unless `month` is over and follows the month that was closed last. `now` is in microseconds.

    For a preview it is enough that the month has begun.
    """
    if latest is not None and month <= latest:
        raise PeriodNotOpen(f"{month} is closed already; corrections go to the open period", "period")
    if latest is not None and month != latest.next:
        raise PeriodNotOpen(f"{latest.next} is still open; close it before {month}", "period")
    if now < month.starts_at:
        raise PeriodNotOpen(f"{month} has not begun yet", "period")
    if now < month.ends_at and not preview:
        raise PeriodNotOpen(
            f"{month} is not over yet; it ends at midnight UTC before {month.next}-01. A dry run shows it as of now",
            "period",
        )
