"""Statements about limits: what they are, what counts against them, and what open requests hold of them.

Rows that count are locked in the order of their keys, after the ledger's head and before anything else, so that
no two transactions wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from sqlalchemy import Table, bindparam, delete, select, tuple_, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase

from loramux.records.bulk import among, insert_new, insert_rows
from loramux.records.identity import TenantId
from loramux.records.limit_models import (
    AlertRow,
    BudgetHoldRow,
    BudgetRow,
    CounterRow,
    HoldRow,
    LimitRow,
    SpendingRow,
)
from loramux.records.models import KeyRow
from loramux.records.tenancy_models import MemberRow, ProjectRow, TierRow

Rows = Sequence[Any]
"""Rows of the named columns."""
Spending = tuple[str, int]
"""A budget and the start of a period."""

COUNTED = ("requests_free", "requests_at", "tokens_free", "tokens_at", "running")
BUDGET = (
    BudgetRow.id,
    BudgetRow.tenant_id,
    BudgetRow.subject,
    BudgetRow.period,
    BudgetRow.amount,
    BudgetRow.thresholds,
)


def table(model: type[DeclarativeBase]) -> Table:
    """The table behind a model: what counts is read and written past the session, which would remember it."""
    return cast(Table, model.__table__)


class LimitRepository:
    """Limits and budgets as they are set."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def limits(self, subjects: Collection[str]) -> Rows:
        """subject, name, value."""
        statement = select(LimitRow.subject, LimitRow.name, LimitRow.value).where(LimitRow.subject.in_(subjects))
        return (await self._session.execute(statement.order_by(LimitRow.subject, LimitRow.name))).all()

    async def budgets(self, subjects: Collection[str], ids: Collection[str] = ()) -> Rows:
        """The columns of BUDGET: those of these subjects, and those with these ids."""
        statement = select(*BUDGET).where(BudgetRow.subject.in_(subjects) | BudgetRow.id.in_(ids))
        return (await self._session.execute(statement.order_by(BudgetRow.id))).all()

    async def knows(self, tenant: TenantId | None, subject: str) -> bool:
        """Whether it is the tenant, or a project, a key or a member of it; for no tenant, whether it is a tier."""
        if tenant is None:
            return await self._session.get(TierRow, subject.removeprefix("tier:")) is not None
        owned = (ProjectRow, KeyRow, MemberRow)
        found = union_all(*(select(row.id).where(row.tenant_id == tenant, row.id == subject) for row in owned))
        return subject == tenant or await self._session.scalar(found) is not None

    async def limit(self, subject: str, name: str) -> LimitRow | None:
        """One limit, to be changed."""
        return await self._session.get(LimitRow, (subject, name), with_for_update=True)

    async def budget(self, subject: str, period: str) -> BudgetRow | None:
        """One budget, to be changed."""
        statement = select(BudgetRow).where(BudgetRow.subject == subject, BudgetRow.period == period)
        return await self._session.scalar(statement.with_for_update())

    async def add(self, row: LimitRow | BudgetRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def remove(self, row: LimitRow | BudgetRow) -> None:
        """Delete the row; a budget takes along what was counted of it."""
        await self._session.delete(row)
        await self._session.flush()

    async def spendings(self, budgets: Collection[Spending]) -> Rows:
        """budget_id, start, spent, held; those that exist."""
        return (await self._session.execute(_spendings(budgets))).all()


class CountRepository:
    """What counts, locked until the transaction ends."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def holds(self, request_ids: Collection[str]) -> Rows:
        """What these requests hold of subjects."""
        statement = select(*table(HoldRow).c).where(among(self._session, HoldRow.request_id, request_ids))
        return (await self._session.execute(statement)).all()

    async def budget_holds(self, request_ids: Collection[str]) -> Rows:
        """What these requests hold of budgets."""
        statement = select(*table(BudgetHoldRow).c).where(among(self._session, BudgetHoldRow.request_id, request_ids))
        return (await self._session.execute(statement)).all()

    async def counters(self, subjects: Collection[str]) -> Rows:
        """The subjects' counters, made where there are none."""
        statement = select(*table(CounterRow).c).where(CounterRow.subject.in_(subjects)).order_by(CounterRow.subject)
        found = (await self._session.execute(statement.with_for_update())).all()
        missing = sorted(set(subjects) - {row.subject for row in found})
        if not missing:
            return found
        zero = dict.fromkeys(COUNTED, 0)
        await insert_new(self._session, CounterRow, [{"subject": subject} | zero for subject in missing])
        return (await self._session.execute(statement.with_for_update())).all()

    async def spendings(self, budgets: Collection[Spending]) -> Rows:
        """The budgets' spendings in these periods, made where there are none."""
        statement = _spendings(budgets).with_for_update()
        found = (await self._session.execute(statement)).all()
        missing = sorted(set(budgets) - {(row.budget_id, row.start) for row in found})
        if not missing:
            return found
        fresh = [{"budget_id": budget, "start": start, "spent": 0, "held": 0} for budget, start in missing]
        await insert_new(self._session, SpendingRow, fresh)
        return (await self._session.execute(statement)).all()

    async def write_counters(self, rows: Sequence[dict[str, Any]]) -> None:
        """Whole rows, that were locked."""
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in COUNTED}
        statement = update(table(CounterRow)).where(CounterRow.subject == bindparam("new_subject")).values(values)
        await self._execute(statement, [{f"new_{name}": value for name, value in row.items()} for row in rows])

    async def write_spendings(self, rows: Sequence[dict[str, Any]]) -> None:
        """Whole rows, that were locked."""
        key = (SpendingRow.budget_id == bindparam("new_budget_id"), SpendingRow.start == bindparam("new_start"))
        values: dict[str, Any] = {"spent": bindparam("new_spent"), "held": bindparam("new_held")}
        statement = update(table(SpendingRow)).where(*key).values(values)
        await self._execute(statement, [{f"new_{name}": value for name, value in row.items()} for row in rows])

    async def add_holds(self, rows: Sequence[dict[str, Any]]) -> None:
        """What newly opened requests hold of subjects."""
        if rows:
            await insert_rows(self._session, HoldRow, rows)

    async def add_budget_holds(self, rows: Sequence[dict[str, Any]]) -> None:
        """What newly opened requests hold of budgets."""
        if rows:
            await insert_rows(self._session, BudgetHoldRow, rows)

    async def remove_holds(self, request_ids: Collection[str]) -> None:
        """What ended requests held."""
        for model in (HoldRow, BudgetHoldRow):
            held = table(model)
            await self._session.execute(delete(held).where(among(self._session, held.c.request_id, request_ids)))

    async def add_alerts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Alerts that are not there already."""
        if rows:
            await insert_new(self._session, AlertRow, rows)

    async def _execute(self, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            await (await self._session.connection()).execute(statement, rows)


def _spendings(budgets: Collection[Spending]) -> Any:
    key = tuple_(SpendingRow.budget_id, SpendingRow.start)
    return (
        select(*table(SpendingRow).c).where(key.in_(list(budgets))).order_by(SpendingRow.budget_id, SpendingRow.start)
    )


class AlertRepository:
    """The outbox of budget alerts."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def undelivered(self, limit: int) -> Sequence[AlertRow]:
        """The oldest that were not delivered."""
        statement = select(AlertRow).where(AlertRow.delivered_at.is_(None)).order_by(AlertRow.created_at, AlertRow.id)
        return (await self._session.scalars(statement.limit(limit))).all()

    async def delivered(self, id: str, at: int) -> None:
        """Everybody has it."""
        await self._session.execute(update(table(AlertRow)).where(AlertRow.id == id).values(delivered_at=at))
