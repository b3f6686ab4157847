"""The ledger's quantities by day, added up once: what queries over long spans read instead of single entries.

The ledger is cut into segments, ranges of sequences without a gap from entry 1 on. A segment ends where an entry of a
later day (UTC, by `created_at`) begins, so that it holds about one day, and a closed month begins with one. The newest
grows. Rows of `daily_usage` hold the sums of a segment. Entries behind the last segment are not added up yet: a query
reads them from the ledger, in the same snapshot. So its sums are the ledger's at every moment, however far `advance`
is, and settling a request writes nothing here. Invoices and reconciliations read the ledger alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    Select,
    SQLColumnExpression,
    case,
    cast,
    delete,
    except_,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base, BigInt
from loramux.records.database import is_postgresql
from loramux.records.identity import TenantId
from loramux.records.ledger import LedgerHeadRow, LedgerRow
from loramux.records.locks import DAILY_USAGE, advisory_lock
from loramux.units import DAY

SHOWN_PROBLEMS = 5


class UsageSegmentRow(Base):
    """A range of ledger entries whose sums are in `daily_usage`. Days are of `created_at`, since the epoch."""

    __tablename__ = "usage_segments"
    __table_args__ = (CheckConstraint("first_sequence <= last_sequence AND first_day <= last_day", name="order"),)

    first_sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_sequence: Mapped[int]
    first_day: Mapped[int]
    """Of any of its entries: a server whose clock is behind may write entries of the day before."""
    last_day: Mapped[int]
    earliest_subject: Mapped[int]
    """The earliest day that one of its entries is about: corrections and storage are about days before theirs."""


class DailyUsageRow(Base):
    """Sums of the entries of one segment that agree in all key columns."""

    __tablename__ = "daily_usage"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    segment: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its first sequence."""
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The day that the entries are about, whose prices apply."""
    created_day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty where the entries have none."""
    key_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    waived_input_tokens: Mapped[int]
    waived_cached_tokens: Mapped[int]
    waived_output_tokens: Mapped[int]
    adapter_load: Mapped[int]
    adapter_byte_seconds: Mapped[int]
    adapter_resident_byte_seconds: Mapped[int]


KEYS = tuple(column.name for column in DailyUsageRow.__table__.columns if column.primary_key)
QUANTITIES = tuple(column.name for column in DailyUsageRow.__table__.columns if not column.primary_key)

created_day = LedgerRow.created_at // DAY
subject_day = func.coalesce(LedgerRow.occurred_at, LedgerRow.created_at) // DAY
requests_of_entry = case((LedgerRow.kind == "usage", 1), else_=0)


class Summed(msgspec.Struct, frozen=True):
    """A range of segments, `first` to `last` by their first sequences, and the last entry in them."""

    first: int
    last: int
    end: int


class DailyUsageRepository:
    """Segments of the whole ledger."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def within(self, start: int, end: int | None) -> Summed | None:
        """Return the segments that lie wholly inside these sequences, both inclusive; None where none does."""
        inside = [UsageSegmentRow.first_sequence >= start]
        if end is not None:
            inside.append(UsageSegmentRow.last_sequence <= end)
        return await self._summed(inside)

    async def of_days(self, first_day: int, last_day: int) -> Summed | None:
        """Return a range with all segments that have entries of these days, both inclusive."""
        days = UsageSegmentRow.last_day >= first_day, UsageSegmentRow.first_day <= last_day
        return await self._summed(days)

    async def earliest_subject(self, start: int, end: int | None) -> int | None:
        """Return the earliest day that entries of these sequences are about, of any tenant; None without entries."""
        summed = await self.within(start, end)
        if summed is None:
            return await self._earliest_entry(start, end)
        inside = UsageSegmentRow.first_sequence.between(summed.first, summed.last)
        found = [await self._session.scalar(select(func.min(UsageSegmentRow.earliest_subject)).where(inside))]
        found.append(await self._earliest_entry(start, summed.first - 1))
        found.append(await self._earliest_entry(summed.end + 1, end))
        return min(day for day in found if day is not None)

    async def _earliest_entry(self, start: int, end: int | None) -> int | None:
        if end is not None and end < start:
            return None
        entries = select(func.min(subject_day)).where(LedgerRow.sequence >= start)
        return await self._session.scalar(entries if end is None else entries.where(LedgerRow.sequence <= end))

    async def last_sequence(self) -> int:
        """Return the last entry that has been added up; 0 where none has."""
        return await self._session.scalar(select(func.max(UsageSegmentRow.last_sequence))) or 0

    async def _summed(self, conditions: Sequence[ColumnElement[bool]]) -> Summed | None:
        first = UsageSegmentRow.first_sequence
        ends = select(func.min(first), func.max(first), func.max(UsageSegmentRow.last_sequence)).where(*conditions)
        found = (await self._session.execute(ends)).one()
        return None if found[0] is None else Summed(found[0], found[1], found[2])

    async def advance(self, most: int) -> int:
        """Add up at most so many of the next entries, in the caller's transaction; return their number."""
        await advisory_lock(self._session, DAILY_USAGE)
        newest = await self._session.scalar(
            select(UsageSegmentRow).order_by(UsageSegmentRow.first_sequence.desc()).limit(1)
        )
        done = newest.last_sequence if newest else 0
        head = await self._session.scalar(select(LedgerHeadRow.sequence)) or 0
        end = min(done + most, head)
        if end <= done:
            return 0
        day = await self._session.scalar(select(created_day).where(LedgerRow.sequence == done + 1))
        assert day is not None, "the ledger has no gap"
        if newest is None or day > newest.last_day:
            newest = UsageSegmentRow(
                first_sequence=done + 1, last_sequence=done + 1, first_day=day, last_day=day, earliest_subject=day
            )
            self._session.add(newest)
        span = LedgerRow.sequence > done, LedgerRow.sequence <= end
        later = select(func.min(LedgerRow.sequence)).where(*span, created_day > newest.last_day)
        if (next_segment := await self._session.scalar(later)) is not None:
            end = next_segment - 1
        span = LedgerRow.sequence > done, LedgerRow.sequence <= end
        await self._add(_sums_of_ledger(newest.first_sequence).where(*span))
        days = select(func.min(created_day), func.min(subject_day)).where(*span)
        created, subject = (await self._session.execute(days)).one()
        newest.last_sequence = end
        newest.first_day = min(newest.first_day, created)
        newest.earliest_subject = min(newest.earliest_subject, subject)
        await self._session.flush()
        return end - done

    async def _add(self, sums: Select[Any]) -> None:
        dialect = postgresql if is_postgresql(self._session) else sqlite
        insert = dialect.insert(DailyUsageRow)
        added = {name: getattr(DailyUsageRow, name) + getattr(insert.excluded, name) for name in QUANTITIES}
        statement = insert.from_select([*KEYS, *QUANTITIES], sums)
        await self._session.execute(statement.on_conflict_do_update(index_elements=KEYS, set_=added))

    async def clear(self) -> None:
        """Forget all sums; `advance` makes them again from the ledger."""
        await advisory_lock(self._session, DAILY_USAGE)
        await self._session.execute(delete(DailyUsageRow))
        await self._session.execute(delete(UsageSegmentRow))

    async def problems(self) -> list[str]:
        """Compare every sum with the ledger's, and the segments with each other; return what does not agree."""
        problems, after = [], 0
        rows = select(UsageSegmentRow.first_sequence, UsageSegmentRow.last_sequence)
        for first, last in await self._session.execute(rows.order_by(UsageSegmentRow.first_sequence)):
            if first != after + 1:
                problems.append(f"the daily sums go on with entry {first}, and {after + 1} comes next")
            after = last
        inside = LedgerRow.sequence.between(UsageSegmentRow.first_sequence, UsageSegmentRow.last_sequence)
        ledger = _sums_of_ledger(UsageSegmentRow.first_sequence).join(UsageSegmentRow, inside)
        kept = select(*(getattr(DailyUsageRow, name) for name in (*KEYS, *QUANTITIES)))
        for this, other in ((ledger, kept), (kept, ledger)):
            found = await self._session.execute(except_(this, other).limit(SHOWN_PROBLEMS))
            problems += [_problem(dict(zip((*KEYS, *QUANTITIES), row, strict=True))) for row in found]
        return list(dict.fromkeys(problems))[:SHOWN_PROBLEMS]


def _problem(row: dict[str, Any]) -> str:
    return (
        f"the daily sums of tenant {row['tenant_id']} and {row['model']} in the segment of entry {row['segment']} are "
        "not the ledger's; make them again with `loramux usage rebuild-sums`"
    )


def _sums_of_ledger(segment: int | SQLColumnExpression[int]) -> Select[Any]:
    """Select the rows of `daily_usage` as the ledger has them, in the order KEYS, QUANTITIES."""
    keys: dict[str, Any] = {
        "tenant_id": LedgerRow.tenant_id,
        "segment": cast(segment, BigInt),
        "day": subject_day,
        "created_day": created_day,
        "base_model": LedgerRow.base_model,
        "tier": LedgerRow.tier,
        "project_id": func.coalesce(LedgerRow.project_id, ""),
        "key_id": LedgerRow.key_id,
        "model": LedgerRow.model,
    }
    quantities = {name: getattr(LedgerRow, name) for name in QUANTITIES if name != "requests"}
    summed = {"requests": requests_of_entry} | quantities
    columns = [keys[name].label(name) for name in KEYS]
    grouped = [column for name, column in keys.items() if name != "segment" or not isinstance(segment, int)]
    sums = [cast(func.sum(summed[name]), BigInt).label(name) for name in QUANTITIES]
    return select(*columns, *sums).group_by(*grouped)
