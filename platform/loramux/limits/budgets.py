"""Budgets: the most money in a period, what is held of it, and when to tell."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from loramux.limits.errors import BudgetSpent
from loramux.records import TenantId

SECOND = 1_000_000
NANO = 1_000_000_000


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`amount` in nano-units of the tenant's currency; `thresholds` in percent, ascending."""

    id: str
    tenant: TenantId
    subject: str
    period: str
    amount: int
    thresholds: tuple[int, ...]


class Spent(msgspec.Struct, frozen=True):
    """What one period has cost, and what open requests may still come to."""

    spent: int
    held: int


def budget_of(row: Any) -> Budget:
    """A row of `records.limits.BUDGET`."""
    thresholds = tuple(map(int, row.thresholds.split()))
    return Budget(
        id=row.id,
        tenant=row.tenant_id,
        subject=row.subject,
        period=row.period,
        amount=row.amount,
        thresholds=thresholds,
    )


def period_start(period: str, now: int) -> int:
    """When the period that `now` lies in began, UTC; 0 for `total`. Both in microseconds."""
    if period == "total":
        return 0
    today = datetime.fromtimestamp(now // SECOND, UTC).replace(hour=0, minute=0, second=0)
    start = today.replace(day=1) if period == "month" else today
    return int(start.timestamp()) * SECOND


def period_end(period: str, start: int) -> int | None:
    """When the next period begins; None for `total`."""
    if period == "total":
        return None
    begun = datetime.fromtimestamp(start // SECOND, UTC)
    later = begun + timedelta(days=1 if period == "day" else 32)
    return int((later.replace(day=1) if period == "month" else later).timestamp()) * SECOND


def demand_money(whose: str, budget: Budget, spent: Spent, cost: int, now: int) -> None:
    """Raise BudgetSpent unless a request that may cost so much fits into what is left."""
    left = budget.amount - spent.spent - spent.held
    if cost <= left and left > 0:
        return
    end = period_end(budget.period, period_start(budget.period, now))
    raise BudgetSpent(
        f"The {budget.period} budget of your {whose} is {_money(budget.amount)}: {_money(spent.spent)} are spent, "
        f"{_money(spent.held)} are held by requests that run, and this one may cost {_money(cost)}. "
        "Lower max_tokens, or raise the budget.",
        wait=None if end is None else end - now,
    )


def crossed(budget: Budget, before: int, after: int) -> list[int]:
    """The thresholds that spending has reached with this settlement, in percent."""
    return [percent for percent in budget.thresholds if before * 100 < budget.amount * percent <= after * 100]


def alert_of(budget: Budget, start: int, percent: int, spent: int, now: int) -> dict[str, Any]:
    """The row of the outbox."""
    return {
        "id": f"{budget.id}:{start}:{percent}",
        "tenant_id": budget.tenant,
        "budget_id": budget.id,
        "subject": budget.subject,
        "period": budget.period,
        "start": start,
        "percent": percent,
        "amount": budget.amount,
        "spent": spent,
        "created_at": now,
        "delivered_at": None,
    }


def _money(nano: int) -> str:
    """Exact, without trailing zeros."""
    whole, part = divmod(nano, NANO)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".")
