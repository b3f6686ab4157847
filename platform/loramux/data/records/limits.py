"""Limits, budgets, their counters, and the holds of open requests: rows and statements.

A *subject* is the object of a limit: the id of a tenant, a project, a key or a member, or `tier:NAME`.

Counters and spendings are locked in the order of their keys, after the ledger's head and before all other rows, so that
no two transactions wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Executable,
    ForeignKey,
    Index,
    UniqueConstraint,
    bindparam,
    delete,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.data.records.base import Base, Repository, among_parameter, insert_new, insert_rows, table_of, text_list
from loramux.data.records.billing import PlanRow, PriceRow, SubscriptionRow
from loramux.data.records.credentials import KeyRow
from loramux.data.records.tenants import MemberRow, ProjectRow, TierRow

UNDELIVERED = text("delivered_at IS NULL")

Rows = Sequence[Any]
"""Rows of the named columns."""
Spending = tuple[str, int]
"""A budget and the start of a period."""

SPENT = ("spent", "held", "abandoned")
COUNTED = ("requests_free", "requests_at", "tokens_free", "tokens_at", "running")


class LimitRow(Base):
    """One limit of a subject; `tenant_id` is null for a tier's limit."""

    __tablename__ = "limits"
    __table_args__ = (CheckConstraint("value >= 0", name="value"),)

    subject: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId | None] = mapped_column(ForeignKey("tenants.id"))
    value: Mapped[int]


class CounterRow(Base):
    """A subject's token buckets (`limits.definitions`) and the number of its running requests."""

    __tablename__ = "limit_counters"
    __table_args__ = (CheckConstraint("running >= 0", name="running"),)

    subject: Mapped[str] = mapped_column(primary_key=True)
    requests_free: Mapped[int]
    requests_at: Mapped[int]
    tokens_free: Mapped[int]
    tokens_at: Mapped[int]
    running: Mapped[int]


class HoldRow(Base):
    """An open request's hold on a subject: one concurrent request, and tokens of the minute."""

    __tablename__ = "limit_holds"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int]


class BudgetRow(Base):
    """A budget: the maximum amount of money that a subject may spend in a period."""

    __tablename__ = "budgets"
    __table_args__ = (
        UniqueConstraint("subject", "period"),
        CheckConstraint("period IN ('day', 'month', 'total')", name="period"),
        CheckConstraint("amount >= 0", name="amount"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    subject: Mapped[str]
    period: Mapped[str]
    amount: Mapped[int]
    thresholds: Mapped[str]
    """Percentages of the amount at which an alert is sent, ascending, separated by spaces."""


class SpendingRow(Base):
    """The money spent from a budget in one period, and the maximum that open requests may still cost."""

    __tablename__ = "budget_spendings"
    __table_args__ = (CheckConstraint("spent >= 0 AND held >= 0", name="quantities"),)

    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The period's start in microseconds."""
    spent: Mapped[int]
    held: Mapped[int]
    abandoned: Mapped[int] = mapped_column(server_default="0")
    """The part of `spent` that is not billed: the cost of tokens whose callers disconnected before they could read
    them.
    """


class BudgetHoldRow(Base):
    """Maximum cost of an open request, which is reserved in a budget."""

    __tablename__ = "budget_holds"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int]
    amount: Mapped[int]
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    tier: Mapped[str]
    """The tier at which the request will be charged; its base is in `base_model`."""


class AlertRow(Base):
    """An alert: a budget has passed a threshold. The alert is written once, together with the settlement that passed
    the threshold; sinks deliver it.
    """

    __tablename__ = "budget_alerts"
    __table_args__ = (
        Index("ix_budget_alerts_undelivered", "created_at", sqlite_where=UNDELIVERED, postgresql_where=UNDELIVERED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """The id `BUDGET:START:PERCENT`, so that the same alert is never written twice."""
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    budget_id: Mapped[str]
    subject: Mapped[str]
    period: Mapped[str]
    start: Mapped[int]
    percent: Mapped[int]
    amount: Mapped[int]
    spent: Mapped[int]
    created_at: Mapped[int]
    delivered_at: Mapped[int | None]


LIMITS, COUNTERS, HOLDS = table_of(LimitRow), table_of(CounterRow), table_of(HoldRow)
BUDGETS, SPENDINGS, BUDGET_HOLDS = table_of(BudgetRow), table_of(SpendingRow), table_of(BudgetHoldRow)


@cache
def _limits(on_postgresql: bool) -> Executable:
    statement = select(LIMITS.c.subject, LIMITS.c.name, LIMITS.c.value)
    found = statement.where(among_parameter(on_postgresql, LIMITS.c.subject, "subjects"))
    return found.order_by(LIMITS.c.subject, LIMITS.c.name)


@cache
def _budgets(on_postgresql: bool) -> Executable:
    of_subject = among_parameter(on_postgresql, BUDGETS.c.subject, "subjects")
    return (
        select(BUDGETS).where(of_subject | among_parameter(on_postgresql, BUDGETS.c.id, "ids")).order_by(BUDGETS.c.id)
    )


@cache
def _counters(on_postgresql: bool) -> Executable:
    found = select(COUNTERS).where(among_parameter(on_postgresql, COUNTERS.c.subject, "subjects"))
    return found.order_by(COUNTERS.c.subject).with_for_update()


@cache
def _holds(on_postgresql: bool) -> Executable:
    return select(HOLDS).where(among_parameter(on_postgresql, HOLDS.c.request_id, "requests"))


@cache
def _budget_holds(on_postgresql: bool) -> Executable:
    return select(BUDGET_HOLDS).where(among_parameter(on_postgresql, BUDGET_HOLDS.c.request_id, "requests"))


@cache
def _remove_holds(on_postgresql: bool) -> Executable:
    return delete(HOLDS).where(among_parameter(on_postgresql, HOLDS.c.request_id, "requests"))


@cache
def _remove_budget_holds(on_postgresql: bool) -> Executable:
    return delete(BUDGET_HOLDS).where(among_parameter(on_postgresql, BUDGET_HOLDS.c.request_id, "requests"))


_WRITE_COUNTER = (
    update(COUNTERS)
    .where(COUNTERS.c.subject == bindparam("new_subject"))
    .values({name: bindparam(f"new_{name}") for name in COUNTED})
)
_WRITE_SPENDING = (
    update(SPENDINGS)
    .where(SPENDINGS.c.budget_id == bindparam("new_budget_id"), SPENDINGS.c.start == bindparam("new_start"))
    .values({name: bindparam(f"new_{name}") for name in SPENT})
)


class LimitRepository(Repository):
    """Limits and budgets."""

    async def limits(self, subjects: Collection[str]) -> Rows:
        """Return subject, name and value of these subjects' limits."""
        return (await self._run(_limits, subjects=text_list(self._session, subjects))).all()

    async def budgets(self, subjects: Collection[str], ids: Collection[str] = ()) -> Rows:
        """Return the rows of these subjects' budgets and of those with these ids."""
        named = {"subjects": text_list(self._session, subjects), "ids": text_list(self._session, ids)}
        return (await self._run(_budgets, **named)).all()

    async def subject(self, tenant: TenantId | None, id: str) -> str | None:
        """Return the subject that `id` names: the tenant, its project or member, or for a key the head of its lineage.

        Return None if the tenant has no such object. Without a tenant, `id` names a tier.
        """
        if tenant is None:
            return id if await self._session.get(TierRow, id.removeprefix("tier:")) is not None else None
        owned = ((ProjectRow, ProjectRow.id), (MemberRow, MemberRow.id), (KeyRow, KeyRow.lineage))
        found = union_all(*(select(name).where(row.tenant_id == tenant, row.id == id) for row, name in owned))
        subject = id if id == tenant else await self._session.scalar(found)
        return None if subject is None else str(subject).split()[0]

    async def currencies(self, tenants: Collection[TenantId]) -> dict[TenantId, str]:
        """Return the currency of each tenant with a present or past plan. A tenant's currency never changes."""
        statement = (
            select(SubscriptionRow.tenant_id, PlanRow.currency)
            .join(PlanRow, PlanRow.id == SubscriptionRow.plan_id)
            .where(SubscriptionRow.tenant_id.in_(tenants))
            .distinct()
        )
        return {tenant: currency for tenant, currency in await self._session.execute(statement)}

    async def has_prices(self, tenant: TenantId) -> bool:
        """Return whether any present or past plan of the tenant has a price."""
        statement = (
            select(PriceRow.id)
            .join(SubscriptionRow, SubscriptionRow.plan_id == PriceRow.plan_id)
            .where(SubscriptionRow.tenant_id == tenant)
        )
        return await self._session.scalar(statement.limit(1)) is not None

    async def limit(self, subject: str, name: str) -> LimitRow | None:
        """Return one limit, locked."""
        return await self._session.get(LimitRow, (subject, name), with_for_update=True)

    async def budget(self, subject: str, period: str) -> BudgetRow | None:
        """Return one budget, locked."""
        statement = select(BudgetRow).where(BudgetRow.subject == subject, BudgetRow.period == period)
        return await self._session.scalar(statement.with_for_update())

    async def add(self, row: LimitRow | BudgetRow) -> None:
        """Insert the row."""
        await self._insert(row)

    async def remove(self, row: LimitRow | BudgetRow) -> None:
        """Delete the row, and with a budget also its spendings."""
        await self._delete(row)

    async def spendings(self, budgets: Collection[Spending]) -> Rows:
        """Return budget_id, start and SPENT of those that exist."""
        return (await self._session.execute(_spendings(budgets))).all()


class CounterRepository(Repository):
    """Counters, spendings and holds, locked until the transaction ends."""

    async def holds(self, request_ids: Collection[str]) -> Rows:
        """Return the holds of these requests on subjects."""
        return (await self._run(_holds, requests=text_list(self._session, request_ids))).all()

    async def budget_holds(self, request_ids: Collection[str]) -> Rows:
        """Return the holds of these requests on budgets."""
        return (await self._run(_budget_holds, requests=text_list(self._session, request_ids))).all()

    async def peek(self, subjects: Collection[str]) -> Rows:
        """Return the subjects' existing counters, without a lock."""
        return (
            await self._session.execute(select(*table_of(CounterRow).c).where(CounterRow.subject.in_(subjects)))
        ).all()

    async def counters(self, subjects: Collection[str]) -> Rows:
        """Return the subjects' counters; insert missing ones."""
        named = {"subjects": text_list(self._session, subjects)}
        found = (await self._run(_counters, **named)).all()
        missing = sorted(set(subjects) - {row.subject for row in found})
        if not missing:
            return found
        zero = dict.fromkeys(COUNTED, 0)
        await insert_new(self._session, CounterRow, [{"subject": subject} | zero for subject in missing])
        return (await self._run(_counters, **named)).all()

    async def spendings(self, budgets: Collection[Spending]) -> Rows:
        """Return the budgets' spendings in these periods; insert missing ones."""
        statement = _spendings(budgets).with_for_update()
        found = (await self._session.execute(statement)).all()
        missing = sorted(set(budgets) - {(row.budget_id, row.start) for row in found})
        if not missing:
            return found
        zero = dict.fromkeys(SPENT, 0)
        fresh = [{"budget_id": budget, "start": start} | zero for budget, start in missing]
        await insert_new(self._session, SpendingRow, fresh)
        return (await self._session.execute(statement)).all()

    async def write_counters(self, rows: Sequence[dict[str, Any]]) -> None:
        """Update whole rows, which are locked."""
        await self._execute(_WRITE_COUNTER, [{f"new_{name}": value for name, value in row.items()} for row in rows])

    async def write_spendings(self, rows: Sequence[dict[str, Any]]) -> None:
        """Update whole rows, which are locked."""
        await self._execute(_WRITE_SPENDING, [{f"new_{name}": value for name, value in row.items()} for row in rows])

    async def add_holds(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert holds on subjects."""
        await insert_rows(self._session, HoldRow, rows)

    async def add_budget_holds(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert holds on budgets."""
        await insert_rows(self._session, BudgetHoldRow, rows)

    async def remove_holds(self, request_ids: Collection[str]) -> None:
        """Delete the holds of ended requests."""
        for remove in (_remove_holds, _remove_budget_holds):
            await self._run(remove, requests=text_list(self._session, request_ids))

    async def add_alerts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert the alerts that do not exist yet."""
        await insert_new(self._session, AlertRow, rows)

    async def _execute(self, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            await (await self._session.connection()).execute(statement, rows)


def _spendings(budgets: Collection[Spending]) -> Any:
    key = tuple_(SpendingRow.budget_id, SpendingRow.start)
    return (
        select(*table_of(SpendingRow).c)
        .where(key.in_(list(budgets)))
        .order_by(SpendingRow.budget_id, SpendingRow.start)
    )


class AlertRepository(Repository):
    """The outbox of budget alerts."""

    async def undelivered(self, limit: int) -> Sequence[AlertRow]:
        """Return the oldest alerts that are not delivered."""
        statement = select(AlertRow).where(AlertRow.delivered_at.is_(None)).order_by(AlertRow.created_at, AlertRow.id)
        return (await self._session.scalars(statement.limit(limit))).all()

    async def delivered(self, id: str, at: int) -> None:
        """Mark an alert as delivered to every sink."""
        await self._session.execute(update(table_of(AlertRow)).where(AlertRow.id == id).values(delivered_at=at))
