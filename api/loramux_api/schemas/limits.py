"""Limits and budgets on the wire. Money in nano-units of the tenant's currency, times in Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.limits import Budget, BudgetState, Limit
from loramux_api.schemas.strict import Body

SECOND = 1_000_000


class LimitBody(Body, forbid_unknown_fields=True):
    """A limit's value."""

    value: Annotated[int, Meta(ge=0)]


class BudgetBody(Body, forbid_unknown_fields=True):
    """A budget's amount, and when to tell."""

    amount_nano: Annotated[int, Meta(ge=0)]
    thresholds: list[int] = msgspec.field(default_factory=lambda: [50, 80, 100])
    """Percents of the amount."""


class LimitObject(msgspec.Struct, kw_only=True):
    """A limit; `subject` is a tenant, project, key or member by its id, or `tier:NAME`."""

    object: Literal["limit"] = "limit"
    subject: str
    name: str
    value: int


class BudgetObject(msgspec.Struct, kw_only=True):
    """A budget."""

    object: Literal["budget"] = "budget"
    id: str
    subject: str
    period: str
    amount_nano: int
    thresholds: list[int]
    period_start: int | None = None
    spent_nano: int | None = None
    held_nano: int | None = None
    """What requests that run may still come to."""


def limit_object(limit: Limit) -> LimitObject:
    """The limit, as callers see it."""
    return LimitObject(subject=limit.subject, name=limit.name, value=limit.value)


def budget_object(budget: Budget) -> BudgetObject:
    """The budget as it is set."""
    return BudgetObject(
        id=budget.id,
        subject=budget.subject,
        period=budget.period,
        amount_nano=budget.amount,
        thresholds=list(budget.thresholds),
    )


def budget_state_object(state: BudgetState) -> BudgetObject:
    """The budget, and how it stands."""
    shown = budget_object(state.budget)
    shown.period_start = state.start // SECOND
    shown.spent_nano, shown.held_nano = state.spent, state.held
    return shown
