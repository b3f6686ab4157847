"""Costs by day and by whoever caused them: OpenAI's costs endpoint, and the operator's view of where money is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import ClassVar

import msgspec

from loramux.billing.invoices import MINIMUM, Bill
from loramux.pricing import to_decimal
from loramux.pricing.money import NANO_DIGITS
from loramux.usage.buckets import BucketQuery, BucketWidth, Page

DAY = 86_400
"""Seconds."""


class CostsQuery(BucketQuery, frozen=True, kw_only=True):
    """How much money, by what and for which projects: in whole days, UTC, as costs are known by the day."""

    widths: ClassVar[Mapping[str, BucketWidth]] = {"1d": BucketWidth(DAY, 7, 180)}
    groups: ClassVar[tuple[str, ...]] = ("project_id", "line_item", "api_key_id", "model", "tags")

    project_ids: tuple[str, ...] = ()

    @property
    def divided_by(self) -> tuple[str, ...]:
        """What the ledger must be grouped by."""
        asked = [name for name in self.group_by if name != "line_item"]
        return tuple(dict.fromkeys([*asked, *(["project_id"] if self.project_ids else [])]))

    def cut(self, start: int, end: int) -> tuple[int, int]:
        """To the beginning and the end of their days."""
        return start // DAY * DAY, -(-end // DAY) * DAY


class Amount(msgspec.Struct, frozen=True):
    """Money. The value is a JSON number with all its digits."""

    value: Decimal
    currency: str
    """ISO 4217 in small letters, as OpenAI writes it."""


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sum. What it is not grouped by is null."""

    object: str = "organization.costs.result"
    amount: Amount
    quantity: int | None = None
    """Units of the meter, where grouped by line_item."""
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    tags: str | None = None


CostPage = Page[CostResult]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One part of one line, on one day, with whom it belongs to."""

    day: int
    line_item: str
    keys: dict[str, str | None]
    quantity: int
    nanos: int
    currency: str


def costs_of(bills: Iterable[Bill], group_by: Sequence[str]) -> list[Cost]:
    """Every part of these bills, which were divided by `group_by`; a minimum falls on its period's last day."""
    costs = []
    for bill in bills:
        for line, part in bill.charges():
            item = ", ".join(what for what in (line.meter, line.base_model, line.tier) if what not in ("", "*"))
            keys = dict(zip(group_by, part.group, strict=True))
            costs.append(_cost(bill, part.day, item, keys, part.quantity, part.nanos))
        if bill.shortfall:
            last_day = bill.period.month.ends_at // (DAY * 1_000_000) - 1
            costs.append(_cost(bill, last_day, MINIMUM, {}, 1, bill.shortfall * bill.currency.nanos))
    return costs


def cost_page(query: CostsQuery, costs: Iterable[Cost], now: int) -> CostPage:
    """The days that `query` asks for; `now` in seconds."""
    plan = query.plan(now)
    by_day: dict[int, dict[tuple[str | None, ...], list[Cost]]] = {day: {} for day in plan.indices}
    for cost in costs:
        wanted = not query.project_ids or cost.keys.get("project_id") in query.project_ids
        if wanted and cost.day in by_day:
            key = tuple(_key(cost, name) for name in query.group_by)
            by_day[cost.day].setdefault(key, []).append(cost)
    return plan.page(
        {day: [_result(query, key, groups[key]) for key in sorted(groups, key=repr)] for day, groups in by_day.items()}
    )


def _cost(bill: Bill, day: int, item: str, keys: dict[str, str | None], quantity: int, nanos: int) -> Cost:
    return Cost(day=day, line_item=item, keys=keys, quantity=quantity, nanos=nanos, currency=bill.currency.code)


def _key(cost: Cost, name: str) -> str | None:
    return cost.line_item if name == "line_item" else cost.keys.get(name)


def _result(query: CostsQuery, key: tuple[str | None, ...], costs: list[Cost]) -> CostResult:
    value = to_decimal(sum(cost.nanos for cost in costs), NANO_DIGITS)
    quantity = sum(cost.quantity for cost in costs) if "line_item" in query.group_by else None
    result = CostResult(amount=Amount(value, costs[0].currency.lower()), quantity=quantity)
    return msgspec.structs.replace(result, **dict(zip(query.group_by, key, strict=True)))
