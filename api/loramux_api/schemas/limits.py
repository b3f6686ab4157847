"""JSON objects of limits and budgets. Money is in nano-units of the tenant's currency, times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.common.units import SECOND
from loramux.money.limits.budgets import Budget, BudgetState
from loramux.money.limits.limits import DEFAULT_THRESHOLDS, MAX_THRESHOLDS, Limit
from loramux_api.bodies import Body


class LimitBody(Body, forbid_unknown_fields=True):
    """A limit's value."""

    value: Annotated[int, Meta(ge=0)]


class BudgetBody(Body, forbid_unknown_fields=True):
    """A budget's amount and alert thresholds."""

    amount_nano: Annotated[int, Meta(ge=0)]
    thresholds: Annotated[tuple[int, ...], Meta(max_length=MAX_THRESHOLDS)] = DEFAULT_THRESHOLDS
    """Percentages of the amount at which an alert is sent."""


class LimitObject(msgspec.Struct, kw_only=True):
    """A limit. `subject` is the id of a tenant, project, key or member, or `tier:NAME`."""

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
    """Reserved for running requests."""
    abandoned_nano: int | None = None
    """The part of `spent_nano` that is not billed: the cost of tokens computed for callers that disconnected before
    they could read them.
    """
    currency: str | None = None
    """Currency as an ISO 4217 code; null for a tenant without a plan, and in the answer to a change."""


def limit_object(limit: Limit) -> LimitObject:
    """Return the limit as a JSON object."""
    return LimitObject(subject=limit.subject, name=limit.name, value=limit.value)


def budget_object(budget: Budget) -> BudgetObject:
    """Return the budget as a JSON object."""
    return BudgetObject(
        id=budget.id,
        subject=budget.subject,
        period=budget.period,
        amount_nano=budget.amount,
        thresholds=list(budget.thresholds),
    )


def budget_state_object(state: BudgetState) -> BudgetObject:
    """Return the budget with the current period's spending."""
    shown = budget_object(state.budget)
    shown.period_start = state.start // SECOND
    shown.spent_nano, shown.held_nano, shown.abandoned_nano = state.spent, state.held, state.abandoned
    shown.currency = state.currency or None
    return shown
