"""Costs by day and by whoever caused them: OpenAI's costs endpoint, and the operator's view of where money is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

import msgspec

from loramux.billing.invoices import MINIMUM, Bill
from loramux.pricing import to_decimal
from loramux.pricing.money import NANO_DIGITS
from loramux.usage import InvalidQuery

DAY = 86_400
"""Seconds."""
GROUP_BY = ("project_id", "line_item", "api_key_id", "model", "tags")
DEFAULT_LIMIT, MAX_LIMIT = 7, 180
LATEST = 1 << 40
_page = re.compile(r"page_([0-9a-f]{1,11})_([0-9a-f]{1,11})")


class CostsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's question: Unix seconds, start_time inclusive, end_time exclusive, in days, UTC. Raises InvalidQuery."""

    start_time: int
    end_time: int | None = None
    """None: now."""
    bucket_width: str = "1d"
    group_by: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    limit: int = DEFAULT_LIMIT
    """Buckets a page."""
    page: str | None = None

    def __post_init__(self) -> None:
        if self.bucket_width != "1d":
            raise InvalidQuery("bucket_width", "bucket_width is 1d: costs are known by the day")
        if not 0 <= self.start_time <= LATEST:
            raise InvalidQuery("start_time", f"start_time is a Unix time in seconds, 0 to {LATEST}")
        if self.end_time is not None and not self.start_time < self.end_time <= LATEST:
            raise InvalidQuery("end_time", f"end_time is a Unix time in seconds after start_time, at most {LATEST}")
        unknown = [name for name in self.group_by if name not in GROUP_BY]
        if unknown:
            raise InvalidQuery("group_by", f"group_by takes {', '.join(GROUP_BY)}; not {unknown[0][:40]}")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidQuery("limit", f"limit is 1 to {MAX_LIMIT}")
        if self.page is not None and not _page.fullmatch(self.page):
            raise InvalidQuery("page", "page is the next_page of an earlier answer to this question, unchanged")

    @property
    def divided_by(self) -> tuple[str, ...]:
        """What the ledger must be grouped by."""
        asked = [name for name in self.group_by if name != "line_item"]
        return tuple(dict.fromkeys([*asked, *(["project_id"] if self.project_ids else [])]))

    def days(self, now: int) -> tuple[int, int, int]:
        """This page's first day, the day after its last, and the day after the whole answer's; since the epoch."""
        if self.page is not None and (match := _page.fullmatch(self.page)):
            first, final = int(match[1], 16), int(match[2], 16)
        else:
            first = self.start_time // DAY
            final = max(first + 1, -(-(self.end_time if self.end_time is not None else now + 1) // DAY))
        return first, min(final, first + self.limit), final


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


class CostBucket(msgspec.Struct, frozen=True, kw_only=True):
    """One day."""

    object: str = "bucket"
    start_time: int
    end_time: int
    results: tuple[CostResult, ...]


class CostPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    object: str = "page"
    data: tuple[CostBucket, ...]
    has_more: bool
    next_page: str | None


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
    first, end, final = query.days(now)
    by_day: dict[int, dict[tuple[str | None, ...], list[Cost]]] = {day: {} for day in range(first, end)}
    for cost in costs:
        wanted = not query.project_ids or cost.keys.get("project_id") in query.project_ids
        if wanted and cost.day in by_day:
            key = tuple(_key(cost, name) for name in query.group_by)
            by_day[cost.day].setdefault(key, []).append(cost)
    buckets = [
        CostBucket(
            start_time=day * DAY,
            end_time=(day + 1) * DAY,
            results=tuple(_result(query, key, groups[key]) for key in sorted(groups, key=repr)),
        )
        for day, groups in by_day.items()
    ]
    more = end < final
    return CostPage(data=tuple(buckets), has_more=more, next_page=f"page_{end:x}_{final:x}" if more else None)


def _cost(bill: Bill, day: int, item: str, keys: dict[str, str | None], quantity: int, nanos: int) -> Cost:
    return Cost(day=day, line_item=item, keys=keys, quantity=quantity, nanos=nanos, currency=bill.currency.code)


def _key(cost: Cost, name: str) -> str | None:
    return cost.line_item if name == "line_item" else cost.keys.get(name)


def _result(query: CostsQuery, key: tuple[str | None, ...], costs: list[Cost]) -> CostResult:
    value = to_decimal(sum(cost.nanos for cost in costs), NANO_DIGITS)
    quantity = sum(cost.quantity for cost in costs) if "line_item" in query.group_by else None
    result = CostResult(amount=Amount(value, costs[0].currency.lower()), quantity=quantity)
    return msgspec.structs.replace(result, **dict(zip(query.group_by, key, strict=True)))
