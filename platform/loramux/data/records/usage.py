"""Sums over the ledger: token counts by bucket of time for usage queries, daily quantities by meter for bills.

Quantities by day are added up once, in `daily_usage`, and queries over long spans read them instead of single entries.
For this purpose the ledger is divided into segments: ranges of sequences that follow one another without a gap from
entry 1 on. A segment ends before the first entry of a later day (UTC, by `created_at`). So a segment holds about one
day, and a closed month begins with a new segment. The newest segment grows. Rows of `daily_usage` hold the sums of a
segment. Entries after the last segment are not added up yet: a query reads them from the ledger, in the same snapshot.
So a query's sums always agree with the ledger, at any progress of `advance`. The settlement of a request writes no row
here.

If `daily_usage` has the columns of a query, the query reads whole days from `daily_usage`. From the ledger it reads the
parts of days at both ends, and entries that are not added up yet. Invoices and reconciliations read only the ledger.
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
    Subquery,
    case,
    cast,
    delete,
    except_,
    func,
    select,
    union_all,
)
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.common.jobs import run_blocking
from loramux.common.units import DAY, TokenCounts
from loramux.data.records.base import (
    Base,
    BigInt,
    Repository,
    TenantScoped,
    among,
    exact_sum,
    exact_value,
    insert_sums,
    model_name,
    table_of,
)
from loramux.data.records.database import DAILY_USAGE, advisory_lock, is_postgresql
from loramux.data.records.ledger import LedgerHeadRow, LedgerRow
from loramux.data.records.requests import SHADOW

SHOWN_PROBLEMS = 5


class UsageSegmentRow(Base):
    """A range of ledger entries whose sums are in `daily_usage`. Days are days since the epoch of `created_at`."""

    __tablename__ = "usage_segments"
    __table_args__ = (CheckConstraint("first_sequence <= last_sequence AND first_day <= last_day", name="order"),)

    first_sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_sequence: Mapped[int]
    first_day: Mapped[int]
    """The earliest day of the segment's entries. A server whose clock is slow may write entries of the day before."""
    last_day: Mapped[int]
    earliest_subject: Mapped[int]
    """The earliest day that an entry of the segment is about. Corrections and storage are about earlier days."""


class DailyUsageRow(Base):
    """Sums of the entries of one segment that agree in all key columns."""

    __tablename__ = "daily_usage"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    segment: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The segment's first sequence."""
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The day that the entries are about, whose prices apply."""
    created_day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the project; empty if the entries have no project."""
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
    image_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_image_tokens: Mapped[int] = mapped_column(server_default="0")


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


class DailyUsageRepository(Repository):
    """Segments of the whole ledger."""

    async def within(self, start: int, end: int | None) -> Summed | None:
        """Return the segments that are wholly inside these sequences, both inclusive; None if there are no such
        segments.
        """
        inside = [UsageSegmentRow.first_sequence >= start]
        if end is not None:
            inside.append(UsageSegmentRow.last_sequence <= end)
        return await self._summed(inside)

    async def of_days(self, first_day: int, last_day: int) -> Summed | None:
        """Return a range of all segments that have entries of these days, both inclusive."""
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
        """Return the sequence of the last entry that has been added up; 0 if no entry has been added up."""
        return await self._session.scalar(select(func.max(UsageSegmentRow.last_sequence))) or 0

    async def _summed(self, conditions: Sequence[ColumnElement[bool]]) -> Summed | None:
        first = UsageSegmentRow.first_sequence
        ends = select(func.min(first), func.max(first), func.max(UsageSegmentRow.last_sequence)).where(*conditions)
        found = (await self._session.execute(ends)).one()
        return None if found[0] is None else Summed(found[0], found[1], found[2])

    async def advance(self, most: int) -> int:
        """Add up at most `most` of the next entries, in the caller's transaction; return their number."""
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
        insert = insert_sums(is_postgresql(self._session), table_of(DailyUsageRow), QUANTITIES)
        await self._session.execute(insert.from_select([*KEYS, *QUANTITIES], sums))

    async def clear(self) -> None:
        """Delete all sums; `advance` computes them again from the ledger."""
        await advisory_lock(self._session, DAILY_USAGE)
        await self._session.execute(delete(DailyUsageRow))
        await self._session.execute(delete(UsageSegmentRow))

    async def problems(self) -> list[str]:
        """Compare every sum with the ledger's, and the segments with each other; return the differences."""
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
    """Select the rows of `daily_usage`, computed from the ledger, in the order KEYS, QUANTITIES."""
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


FOREVER = (1 << 60) // DAY * DAY
"""A time in microseconds after every entry."""


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of ledger entries. The first five fields are set only if the sum was grouped by them."""

    bucket: int = 0
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    tier: str | None = None
    tokens: TokenCounts
    requests: int
    waived: TokenCounts = TokenCounts()
    """Tokens that were computed and are not charged."""

    def __add__(self, other: UsageTotals) -> UsageTotals:
        """Add the sums of another group to this one's."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens + other.tokens,
            requests=self.requests + other.requests,
            waived=self.waived + other.waived,
        )


class UsageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The selection of entries to add up. Times are in microseconds, `start` is inclusive, `end` exclusive."""

    start: int
    end: int
    width: int
    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()
    user_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    batch: bool | None = None
    """True: only lines of batches; False: only other requests; None: both."""
    shadows: bool = False
    """True: shadows count too, although they are not requests of the caller."""
    allowed: frozenset[str] | None = None
    """The only models that count, without revisions (`Principal.models`); None: all models."""
    project_id: str | None = None
    """The only project that counts (`Principal.bound_project`); None: all projects."""
    named: tuple[str, ...] | None = None
    """The models that keep their names in groups; the names of other models become None. None: all models keep their
    names.
    """


Row = type[LedgerRow] | type[DailyUsageRow]
Column = SQLColumnExpression[Any]

USAGE_GROUPS = {
    "model": "model",
    "api_key_id": "key_id",
    "project_id": "project_id",
    "user_id": "user_id",
    "tier": "tier",
}
"""The columns that usage can be grouped by, and the ledger's names for them."""
TOKENS = {
    "prompt": "input_tokens",
    "cached": "cached_tokens",
    "output": "output_tokens",
    "image": "image_tokens",
    "waived_prompt": "waived_input_tokens",
    "waived_cached": "waived_cached_tokens",
    "waived_output": "waived_output_tokens",
    "waived_image": "waived_image_tokens",
}


class UsageRepository(TenantScoped):
    """One tenant's usage."""

    async def by_model(self) -> list[UsageTotals]:
        """Sum the tenant's whole usage, by model."""
        everything = UsageWindow(start=0, end=FOREVER, width=FOREVER, shadows=True)
        return await self.by_bucket(everything, ("model",))

    async def top_models(self, window: UsageWindow, number: int) -> list[str]:
        """Return the models with the most tokens, the largest first."""
        rows = [part.subquery() for part in await self._parts(window, ("model",))]
        # sum each part first, because SQLite would materialise all rows of a union
        sums = [
            select(one.c.model, func.sum(one.c.prompt + one.c.output).label("tokens")).group_by(one.c.model)
            for one in rows
        ]
        source = _union(sums)
        tokens = func.sum(source.c.tokens)
        statement = select(source.c.model).group_by(source.c.model).order_by(tokens.desc(), source.c.model)
        return list(await self._session.scalars(statement.limit(number)))

    async def by_bucket(
        self, window: UsageWindow, group_by: Sequence[str], limit: int | None = None
    ) -> list[UsageTotals]:
        """Sum by bucket (created_at // width) and the named USAGE_GROUPS; buckets without entries are absent."""
        source = _union(await self._parts(window, group_by))
        keys = [source.c[name] for name in ("bucket", *group_by)]
        # PostgreSQL's sum over bigint is numeric: cast it back, so that whole tokens stay integers
        sums = [cast(func.sum(source.c[name]), BigInt).label(name) for name in (*TOKENS, "requests")]
        statement = select(*keys, *sums).group_by(*keys).order_by(*keys).limit(limit)
        return [_totals(dict(row)) for row in (await self._session.execute(statement)).mappings()]

    async def _parts(self, window: UsageWindow, group_by: Sequence[str]) -> list[Select[Any]]:
        """Return the rows to add up, from the ledger and from its daily sums. Each entry is in one of the two."""
        first_day, end_day = -(-window.start // DAY), window.end // DAY
        by_user = "user_id" in group_by or window.user_ids
        days = DailyUsageRepository(self._session)
        summed = None
        if window.width % DAY == 0 and first_day < end_day and not by_user:
            summed = await days.of_days(first_day, end_day - 1)
        if summed is None:
            return [self._entries(window, group_by, window.start, window.end)]
        in_days = DailyUsageRow.created_day.between(first_day, end_day - 1)
        in_segments = DailyUsageRow.segment.between(summed.first, summed.last)
        bucket = DailyUsageRow.created_day // (window.width // DAY)
        sums = self._rows(DailyUsageRow, bucket, DailyUsageRow.requests, window, group_by).where(in_days, in_segments)
        # the tail is short, so it is found by its sequence, not by the tenant's index
        tail = LedgerRow.sequence > await days.last_sequence(), _unindexed(LedgerRow.tenant_id) == self._tenant
        parts = [sums, self._entries(window, group_by, first_day * DAY, end_day * DAY).where(*tail)]
        edges = (window.start, first_day * DAY), (end_day * DAY, window.end)
        return parts + [self._entries(window, group_by, start, end) for start, end in edges if start < end]

    def _entries(self, window: UsageWindow, group_by: Sequence[str], start: int, end: int) -> Select[Any]:
        bucket = LedgerRow.created_at // window.width
        rows = self._rows(LedgerRow, bucket, requests_of_entry, window, group_by)
        return rows.where(LedgerRow.created_at >= start, LedgerRow.created_at < end)

    def _rows(
        self, row: Row, bucket: Column, requests: Column, window: UsageWindow, group_by: Sequence[str]
    ) -> Select[Any]:
        groups: list[Column] = [_column(row, USAGE_GROUPS[name], window.named).label(name) for name in group_by]
        tokens: list[Column] = [getattr(row, column).label(name) for name, column in TOKENS.items()]
        columns = bucket.label("bucket"), *groups, *tokens, requests.label("requests")
        return select(*columns).where(row.tenant_id == self._tenant, *self._filters(row, window))

    def _filters(self, row: Row, window: UsageWindow) -> list[ColumnElement[bool]]:
        filters = {"model": window.models, "key_id": window.api_key_ids, "project_id": window.project_ids}
        conditions = [getattr(row, name).in_(kept) for name, kept in filters.items() if kept]
        if window.user_ids:
            conditions.append(LedgerRow.user_id.in_(window.user_ids))
        if window.batch is not None:
            in_batch = row.tier.endswith("/batch", autoescape=True)
            conditions.append(in_batch if window.batch else ~in_batch)
        if not window.shadows:
            conditions.append(~row.tier.endswith(f"/{SHADOW}", autoescape=True))
        if window.project_id is not None:
            conditions.append(row.project_id == window.project_id)
        if window.allowed is not None:
            conditions.append(among(self._session, model_name(self._session, row.model), window.allowed))
        return conditions


def _column(row: Row, name: str, named: Sequence[str] | None = None) -> Column:
    """Return a column of either table. A missing project is NULL in both tables, and so is a model that is not in
    `named`.
    """
    if row is DailyUsageRow and name == "project_id":
        return func.nullif(DailyUsageRow.project_id, "")
    column: Column = getattr(row, name)
    return case((row.model.in_(named), column)) if name == "model" and named is not None else column


def _union(parts: Sequence[Select[Any]]) -> Subquery:
    return parts[0].subquery() if len(parts) == 1 else union_all(*parts).subquery()


def _unindexed(column: SQLColumnExpression[str]) -> SQLColumnExpression[str]:
    """Return the same value in a form for which no index is used."""
    return column.concat("")


def _totals(row: dict[str, Any]) -> UsageTotals:
    tokens, waived = (
        TokenCounts(**{name: row.pop(f"{prefix}{name}") for name in ("prompt", "cached", "output", "image")})
        for prefix in ("", "waived_")
    )
    return UsageTotals(tokens=tokens, waived=waived, **row)


def meters_of(row: Any) -> dict[str, Any]:
    """Return every meter by name: SQL expressions if `row` is a table, numbers if it is a ledger entry."""
    return {
        "input_uncached": row.input_tokens - row.cached_tokens - row.image_tokens,
        "input_cached": row.cached_tokens,
        "image_tokens": row.image_tokens,
        "output": row.output_tokens,
        "adapter_load": row.adapter_load,
        "adapter_byte_seconds": row.adapter_byte_seconds,
        "adapter_resident_byte_seconds": row.adapter_resident_byte_seconds,
        "waived_input_uncached": row.waived_input_tokens - row.waived_cached_tokens - row.waived_image_tokens,
        "waived_input_cached": row.waived_cached_tokens,
        "waived_image_tokens": row.waived_image_tokens,
        "waived_output": row.waived_output_tokens,
    }


METERS = tuple(meters_of(LedgerRow))

QUANTITY_GROUPS = {
    "project_id": "project_id",
    "api_key_id": "key_id",
    "model": "model",
    "adapter_digest": "adapter_digest",
    "tags": "tags",
}
"""The columns that bills can be divided by, and the ledger's names for them."""
NOT_SUMMED = frozenset({"adapter_digest", "tags"})
"""The groups that the daily sums do not have."""


class Span(msgspec.Struct, frozen=True):
    """Ledger entries from `first` to `last`, both inclusive; without `last`, to the end of the ledger."""

    first: int
    last: int | None


class Division(msgspec.Struct, frozen=True):
    """The division of sums by the named QUANTITY_GROUPS."""

    group_by: tuple[str, ...]
    days: range | None = None
    """The days whose quantities are divided by group. On other days the groups are None."""
    named: tuple[str, ...] | None = None
    """The models that keep their names; the names of other models become None."""


class DailyQuantities(msgspec.Struct, frozen=True):
    """One day's sums (days since the epoch, UTC) for one base model, tier and group; The sums contain only meters that
    are not 0.
    """

    day: int
    base_model: str
    tier: str
    group: tuple[str | None, ...]
    quantities: dict[str, int]


class QuantityRepository(TenantScoped):
    """One tenant's quantities by day (the day that entries are about), base model, tier and groups."""

    async def daily(self, span: Span, group_by: Sequence[str] = ()) -> list[DailyQuantities]:
        """Sum the ledger's own entries by the named QUANTITY_GROUPS. Bills are made from these sums."""
        return await self._sum([self._entries(span, Division(tuple(group_by)))], group_by)

    async def daily_of(self, span: Span, division: Division, limit: int | None = None) -> list[DailyQuantities]:
        """Return the same sums with the help of `daily_usage`."""
        group_by, summed = division.group_by, None
        if not NOT_SUMMED.intersection(group_by):
            summed = await DailyUsageRepository(self._session).within(span.first, span.last)
        if summed is None:
            return await self._sum([self._entries(span, division)], group_by, limit)
        sums = self._rows(DailyUsageRow, DailyUsageRow.day, division).where(
            DailyUsageRow.tenant_id == self._tenant, DailyUsageRow.segment.between(summed.first, summed.last)
        )
        rest = Span(span.first, summed.first - 1), Span(summed.end + 1, span.last)
        parts = [self._entries(one, division) for one in rest if one.last is None or one.first <= one.last]
        return await self._sum([sums, *parts], group_by, limit)

    def _entries(self, span: Span, division: Division) -> Select[Any]:
        rows = self._rows(LedgerRow, subject_day, division)
        mine = rows.where(_unindexed(LedgerRow.tenant_id) == self._tenant, LedgerRow.sequence >= span.first)
        return mine if span.last is None else mine.where(LedgerRow.sequence <= span.last)

    def _rows(self, row: Row, day: Column, division: Division) -> Select[Any]:
        groups: list[Column] = [_column(row, QUANTITY_GROUPS[name], division.named) for name in division.group_by]
        if (days := division.days) is not None:
            groups = [case((day.between(days.start, days.stop - 1), column)) for column in groups]
        named: list[Column] = [column.label(name) for name, column in zip(division.group_by, groups, strict=True)]
        meters: list[Column] = [column.label(meter) for meter, column in meters_of(row).items()]
        columns: list[Column] = [day.label("day"), row.base_model, row.tier, *named, *meters]
        return select(*columns)

    async def _sum(
        self, parts: Sequence[Select[Any]], group_by: Sequence[str], limit: int | None = None
    ) -> list[DailyQuantities]:
        source = _union(parts)
        keys = [source.c.day, source.c.base_model, source.c.tier, *(source.c[name] for name in group_by)]
        sums = [part for meter in METERS for part in exact_sum(source.c[meter])]
        statement = select(*keys, *sums).group_by(*keys).order_by(*keys).limit(limit)
        rows = (await self._session.execute(statement)).all()
        # in a thread, because tens of thousands of groups take long
        return await run_blocking(self._tenant, lambda: [_daily_quantities(tuple(row), len(group_by)) for row in rows])


def _daily_quantities(row: tuple[Any, ...], num_groups: int) -> DailyQuantities:
    halves = iter(row[3 + num_groups :])
    quantities = {meter: value for meter in METERS if (value := exact_value(next(halves), next(halves)))}
    return DailyQuantities(int(row[0]), row[1], row[2], row[3 : 3 + num_groups], quantities)
