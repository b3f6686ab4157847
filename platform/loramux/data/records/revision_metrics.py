"""Metrics of each revision and base model by the hour, and callers' feedback on its answers.

There is one row per hour for each model that a project's requests have used. Rows hold only sums, so several servers
can add to the same row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Column, ColumnElement, ForeignKey, Index, Row, Select, Table, Text, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.data.records.base import Base, BigInt, Repository, insert_sums
from loramux.data.records.database import is_postgresql
from loramux.data.records.requests import RequestRow

FIRST_TOKENS = tuple(f"first_token_{number}" for number in range(len(FIRST_TOKEN_BOUNDS) + 1))
COUNTED = (
    "completed",
    "cancelled",
    "failed",
    "refused",
    "stop",
    "length",
    "abort",
    "prompt_tokens",
    "output_tokens",
    "decode_tokens",
    "decode_us",
    *FIRST_TOKENS,
)
"""Columns of counts: requests by their end, choices by finish reason, tokens, and tokens after the first token with
their time.
"""

REVISION_HOURS = Table(
    "revision_hours",
    Base.metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("project_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("hour", BigInt, primary_key=True, autoincrement=False),
    *(Column(name, BigInt, nullable=False) for name in COUNTED),
    Index("ix_revision_hours_hour", "hour"),
)
"""Rows of sums. `hour` is the beginning of the hour in microseconds.

`tenant_id` and `project_id` are the caller's; `project_id` is empty if the caller has no project."""

Counts = dict[str, int]
"""Counts by column; the columns are some of COUNTED."""


class RevisionHour(NamedTuple):
    """The key of a row."""

    tenant: TenantId
    project: str
    model: str
    hour: int


class FeedbackRow(Base):
    """The caller's rating of one answer. A later rating replaces it."""

    __tablename__ = "request_feedback"
    __table_args__ = (Index("ix_request_feedback_tenant_id_model", "tenant_id", "model", "created_at"),)

    request_id: Mapped[str] = mapped_column(ForeignKey("requests.id"), primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    model: Mapped[str]
    score: Mapped[int]
    """The score in thousandths, 0 to 1,000."""
    label: Mapped[str | None]
    created_at: Mapped[int]


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """Ratings of one revision's answers with the same label."""

    model: str
    label: str | None
    count: int
    total: int
    """Sum of the scores, in thousandths."""


class Caller(NamedTuple):
    """The caller of requests: a tenant, or one project of it (`Principal.bound_project`)."""

    tenant: TenantId
    project: ProjectId | None


class RevisionMetricsRepository(Repository):
    """Every tenant's rows, to which servers add."""

    async def add(self, counts: Mapping[RevisionHour, Counts]) -> None:
        """Add the counts to the rows; insert missing rows."""
        rows = [
            {"tenant_id": key.tenant, "project_id": key.project, "model": key.model, "hour": key.hour}
            | {name: one.get(name, 0) for name in COUNTED}
            for key, one in sorted(counts.items())
        ]
        await self._session.execute(insert_sums(is_postgresql(self._session), REVISION_HOURS, COUNTED), rows)

    async def sums(self, caller: Caller, adapter: str, since: int, until: int | None = None) -> dict[str, Counts]:
        """Sum the caller's requests to revisions of `owner/adapter` in the hours from `since` to `until`, by model."""
        statement = _sums().where(
            *_made_by(caller),
            REVISION_HOURS.c.model.startswith(f"{adapter}@", autoescape=True),
            REVISION_HOURS.c.hour >= since,
        )
        if until is not None:
            statement = statement.where(REVISION_HOURS.c.hour <= until)
        return _counts(await self._session.execute(statement))

    async def sums_by_model(self, caller: Caller, since: int, limit: int) -> dict[str, Counts]:
        """Sum the caller's requests since then, by model: the `limit` models with most completed requests."""
        statement = (
            _sums()
            .where(*_made_by(caller), REVISION_HOURS.c.hour >= since)
            .order_by(func.sum(REVISION_HOURS.c.completed).desc(), REVISION_HOURS.c.model)
            .limit(limit)
        )
        return _counts(await self._session.execute(statement))

    async def forget(self, before: int) -> None:
        """Delete the hours before that time."""
        await self._session.execute(delete(REVISION_HOURS).where(REVISION_HOURS.c.hour < before))


def _sums() -> Select[*tuple[Any, ...]]:
    columns = [func.sum(REVISION_HOURS.c[name]).label(name) for name in COUNTED]
    return select(REVISION_HOURS.c.model, *columns).group_by(REVISION_HOURS.c.model)


def _counts(rows: Iterable[Row[*tuple[Any, ...]]]) -> dict[str, Counts]:
    return {row.model: {name: int(getattr(row, name)) for name in COUNTED} for row in rows}


def _made_by(caller: Caller) -> list[ColumnElement[bool]]:
    conditions = [REVISION_HOURS.c.tenant_id == caller.tenant]
    if caller.project is not None:
        conditions.append(REVISION_HOURS.c.project_id == caller.project)
    return conditions


class FeedbackSums(NamedTuple):
    """Ratings of a revision's answers: their number, and the sum of the scores in thousandths."""

    number: int
    total: int


async def sums_of_models(
    session: AsyncSession, models: Sequence[str], since: int
) -> tuple[dict[str, Counts], dict[str, FeedbackSums]]:
    """Sum the requests and opinions of every tenant since then, by model."""
    statement = _sums().where(REVISION_HOURS.c.model.in_(models), REVISION_HOURS.c.hour >= since)
    counts = _counts(await session.execute(statement))
    opinions = (
        select(FeedbackRow.model, func.count(), func.sum(FeedbackRow.score))
        .where(FeedbackRow.model.in_(models), FeedbackRow.created_at >= since)
        .group_by(FeedbackRow.model)
    )
    found = await session.execute(opinions)
    return counts, {model: FeedbackSums(count, int(total)) for model, count, total in found}


class FeedbackRepository(Repository):
    """Feedback on the requests of one caller."""

    def __init__(self, session: AsyncSession, caller: Caller) -> None:
        super().__init__(session)
        self._own = [RequestRow.tenant_id == caller.tenant]
        if caller.project is not None:
            self._own.append(RequestRow.project_id == caller.project)

    async def model_of(self, request_id: str) -> str | None:
        """Return the model that answered one of the caller's requests."""
        statement = select(RequestRow.model).where(*self._own, RequestRow.id == request_id)
        return await self._session.scalar(statement)

    async def put(self, row: FeedbackRow) -> None:
        """Insert the row, or replace the row of the same request."""
        await self._put(row)

    async def sums(self, adapter: str, since: int, until: int, limit: int) -> Sequence[Feedback]:
        """Sum the feedback from `since` to `until` by model and label: at most `limit`, the most frequent first."""
        count: Any = func.count()
        statement = (
            select(FeedbackRow.model, FeedbackRow.label, count, func.sum(FeedbackRow.score))
            .join(RequestRow, RequestRow.id == FeedbackRow.request_id)
            .where(
                *self._own,
                FeedbackRow.tenant_id == RequestRow.tenant_id,
                FeedbackRow.model.startswith(f"{adapter}@", autoescape=True),
                FeedbackRow.created_at >= since,
                FeedbackRow.created_at <= until,
            )
            .group_by(FeedbackRow.model, FeedbackRow.label)
            .order_by(count.desc(), FeedbackRow.model, FeedbackRow.label)
            .limit(limit)
        )
        return [
            Feedback(model=model, label=label, count=number, total=int(total))
            for model, label, number, total in await self._session.execute(statement)
        ]
