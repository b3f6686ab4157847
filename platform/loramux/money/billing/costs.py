"""Divided bills: costs by day and group for OpenAI's costs endpoint, and margins for the operator.

A margin compares a model's revenue with its share of the GPUs' cost. Shares are counted in the scheduler's service
units: a computed prompt token is one unit, a generated token two units. A share includes waived work; revenue does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from typing import ClassVar

import msgspec

from loramux.common.units import DAY, SECONDS_PER_DAY
from loramux.data.records.usage import DailyQuantities
from loramux.money.billing.errors import MissingCurrency
from loramux.money.billing.invoices import MINIMUM, NO_CURRENCY, Bill
from loramux.money.pricing import NANO_DIGITS, allocate, to_decimal
from loramux.money.usage.errors import InvalidQuery
from loramux.money.usage.query import MAX_FILTER, BucketQuery, BucketWidth, Page

SERVICE_UNITS = {
    **dict.fromkeys(("input_uncached", "waived_input_uncached", "image_tokens", "waived_image_tokens"), 1),
    **dict.fromkeys(("output", "waived_output"), 2),
}


class CostsQuery(BucketQuery, frozen=True, kw_only=True):
    """A query of costs by day (UTC)."""

    widths: ClassVar[Mapping[str, BucketWidth]] = {"1d": BucketWidth(SECONDS_PER_DAY, 7, 180)}
    groups: ClassVar[tuple[str, ...]] = ("project_id", "line_item", "api_key_id", "model", "tags")

    project_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.project_ids) > MAX_FILTER:
            raise InvalidQuery(f"project_ids takes at most {MAX_FILTER} ids", "project_ids")

    @property
    def divided_by(self) -> tuple[str, ...]:
        """The columns that bills must be divided by."""
        asked = [name for name in self.group_by if name != "line_item"]
        return tuple(dict.fromkeys([*asked, *(["project_id"] if self.project_ids else [])]))

    def cut(self, start: int, end: int) -> tuple[int, int]:
        """Extend to whole days."""
        return start // SECONDS_PER_DAY * SECONDS_PER_DAY, -(-end // SECONDS_PER_DAY) * SECONDS_PER_DAY


class Amount(msgspec.Struct, frozen=True):
    """An amount of money. The value is a JSON number with all its digits."""

    value: Decimal
    currency: str
    """ISO 4217 in small letters, as OpenAI writes it."""


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sum of costs. Columns that are not among the groups are null."""

    object: str = "organization.costs.result"
    amount: Amount
    quantity: int | None = None
    """Units of the meter, if the sums are grouped by line_item."""
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    tags: str | None = None


CostPage = Page[CostResult]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an invoice line: its costs on one day, with their groups."""

    day: int
    line_item: str
    keys: dict[str, str | None]
    quantity: int
    nanos: int
    currency: str


def costs_of(bills: Iterable[Bill], group_by: Sequence[str]) -> list[Cost]:
    """List every part of these bills, which were divided by `group_by`; a plan's minimum is a cost of the period's last
    day.
    """
    costs = []
    for bill in bills:
        for line, part in bill.charges():
            item = ", ".join(what for what in (line.meter, line.base_model, line.tier) if what not in ("", "*"))
            keys = dict(zip(group_by, part.group, strict=True))
            costs.append(_cost(bill, part.day, item, keys, part.quantity, part.nanos))
        if bill.shortfall:
            last_day = bill.period.month.ends_at // DAY - 1
            costs.append(_cost(bill, last_day, MINIMUM, {}, 1, bill.shortfall * bill.currency.nanos))
    return costs


def cost_page(query: CostsQuery, costs: Iterable[Cost], now: int) -> CostPage:
    """Return the page of days of `query`; `now` in seconds."""
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


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """The margin of one tenant's model in one period, in one currency."""

    tenant_name: str
    model: str
    currency: str
    units: int
    """Share of the GPUs, in service units."""
    price: Decimal
    cost: Decimal
    margin: Decimal


class Revenue(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's period: its bill and its quantities, both divided only by model."""

    tenant_name: str
    bill: Bill
    quantities: Sequence[DailyQuantities]


def margins(revenues: Sequence[Revenue], gpu_cost: int | Mapping[str, int]) -> list[Margin]:
    """Return every model's margin in its tenant's currency. Amounts are not converted or added across currencies.

    `gpu_cost` is the cost of all GPUs in the period, in nano-units. If the plans have several currencies, it gives the
    same cost in each of them; if they have one, it is a number. The cost is divided exactly over all computed tokens,
    so they also share the cost of idle time. Rows of tenants without a plan are in the first currency. Raises
    MissingCurrency.
    """
    units, prices = _units(revenues), _prices(revenues)
    currencies = {one.tenant_name: one.bill.currency.code for one in revenues}
    keys = sorted(units.keys() | prices.keys())
    costs = _by_currency(gpu_cost, {currencies[tenant] for tenant, _ in keys} - {NO_CURRENCY.code})
    weights = [units[key] for key in keys]
    shares = {currency: allocate(nanos, weights) for currency, nanos in costs.items()}
    found = []
    for number, (tenant, model) in enumerate(keys):
        price, currency = prices[tenant, model], currencies[tenant]
        if currency == NO_CURRENCY.code:
            currency = next(iter(costs))
        cost = shares[currency][number]
        found.append(
            Margin(
                tenant_name=tenant,
                model=model,
                currency=currency,
                units=units[tenant, model],
                price=_money(price),
                cost=_money(cost),
                margin=_money(price - cost),
            )
        )
    return found


def _by_currency(cost: int | Mapping[str, int], needed: Set[str]) -> Mapping[str, int]:
    """Return the cost by currency, with every currency that is needed. Raises MissingCurrency."""
    if isinstance(cost, int) and len(needed) <= 1:
        return {next(iter(needed), NO_CURRENCY.code): cost}
    given = {} if isinstance(cost, int) else cost
    missing = sorted(needed - given.keys())
    if missing or not given:
        raise MissingCurrency(
            f"this month's plans are in {', '.join(sorted(needed)) or 'no currency'}: give the cost of all GPUs in "
            f"each of them (--gpu-cost CURRENCY=AMOUNT, once for each); {', '.join(missing) or 'any'} is missing",
            "gpu_cost",
        )
    return given


def _units(revenues: Sequence[Revenue]) -> Counter[tuple[str, str]]:
    units: Counter[tuple[str, str]] = Counter()
    for one in revenues:
        for quantity in one.quantities:
            done = sum(weight * quantity.quantities.get(meter, 0) for meter, weight in SERVICE_UNITS.items())
            units[one.tenant_name, quantity.group[0] or ""] += done
    return units


def _prices(revenues: Sequence[Revenue]) -> Counter[tuple[str, str]]:
    prices: Counter[tuple[str, str]] = Counter()
    for one in revenues:
        for _, part in one.bill.charges():
            prices[one.tenant_name, part.group[0] or ""] += part.nanos
    return prices


def _money(nanos: int) -> Decimal:
    return to_decimal(nanos, NANO_DIGITS)
