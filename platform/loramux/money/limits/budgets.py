"""Budgets: the maximum amount of money in a period, the part of it that open requests hold, and the alerts at
thresholds.

Money is in nano-units of the tenant's currency. From admission to settlement a request holds its maximum cost, so
simultaneous requests cannot overspend together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.identity import TenantId
from loramux.common.units import DAY, SECOND, TokenCounts
from loramux.data.records.limits import CounterRepository, LimitRepository, Spending
from loramux.data.records.requests import OpenedRequest, RequestRepository
from loramux.data.records.subjects import SubjectRepository
from loramux.data.records.usage import Span
from loramux.money.limits.definitions import subjects_of
from loramux.money.limits.errors import BudgetSpent
from loramux.money.pricing import NANO


class ChargedUsage(msgspec.Struct, frozen=True):
    """Tokens and adapter loads that a request is charged for."""

    tokens: TokenCounts = TokenCounts()
    adapter_loads: int = 0


class Tariff(Protocol):
    """The prices of some tenants at one moment."""

    def most_it_can_cost(self, request: OpenedRequest) -> int:
        """Return a bound that `cost` never exceeds for this request, even if it is settled a day later."""

    def cost(self, tenant: TenantId, base_model: str, tier: str, used: ChargedUsage, at: int | None = None) -> int:
        """Return the cost of this usage at the prices of the time `at` (in microseconds); None: the tariff's time."""


class Prices(Protocol):
    """The source of tariffs."""

    async def tariff(self, session: AsyncSession, tenants: Collection[TenantId]) -> Tariff:
        """Return the tariff of these tenants; called only if at least one of these tenants has a budget."""


class NoPrices:
    """Prices and tariff of a server without price plans: all usage is free."""

    async def tariff(self, *_: object, **__: object) -> Tariff:
        """Return itself."""
        return self

    def most_it_can_cost(self, *_: object, **__: object) -> int:
        """Return 0."""
        return 0

    def cost(self, *_: object, **__: object) -> int:
        """Return 0."""
        return 0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum amount of money that a subject may spend in a period. `thresholds` are in percent, ascending."""

    id: str
    tenant: TenantId
    subject: str
    period: str
    amount: int
    thresholds: tuple[int, ...]


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """A budget with the amounts that are spent and held in the current period, in nano-units."""

    budget: Budget
    currency: str
    """The tenant's currency, ISO 4217; empty for a tenant without a plan."""
    start: int
    spent: int
    held: int
    abandoned: int = 0
    """Part of `spent` that is not billed: tokens computed for callers that disconnected before they could read them."""


class Spent(msgspec.Struct, frozen=True):
    """The cost of one period so far, and the maximum that its open requests may still cost."""

    spent: int
    held: int
    abandoned: int = 0
    """Part of `spent` that is not billed."""

    def __add__(self, other: Spent) -> Spent:
        """Add another cost of the same period."""
        return Spent(self.spent + other.spent, self.held + other.held, self.abandoned + other.abandoned)


def budget_of(row: Any) -> Budget:
    """Return the budget of a row of `records.limits.BUDGETS`."""
    return Budget(
        id=row.id,
        tenant=row.tenant_id,
        subject=row.subject,
        period=row.period,
        amount=row.amount,
        thresholds=tuple(map(int, row.thresholds.split())),
    )


def period_start(period: str, now: int) -> int:
    """Return the start of the period that contains `now`, UTC; 0 for `total`. Both are in microseconds."""
    if period == "total":
        return 0
    today = datetime.fromtimestamp(now // SECOND, UTC).replace(hour=0, minute=0, second=0)
    start = today.replace(day=1) if period == "month" else today
    return int(start.timestamp()) * SECOND


def period_end(period: str, start: int) -> int | None:
    """Return the start of the next period; None for `total`."""
    if period == "total":
        return None
    begun = datetime.fromtimestamp(start // SECOND, UTC)
    later = begun + timedelta(days=1 if period == "day" else 32)
    return int((later.replace(day=1) if period == "month" else later).timestamp()) * SECOND


class BudgetBatch:
    """The budgets that a batch touches, locked by `read`, changed in memory, written once."""

    def __init__(self, session: AsyncSession, now: int) -> None:
        self._session = session
        self._counter_rows = CounterRepository(session)
        self._now = now
        self._of_subject: dict[str, list[Budget]] = defaultdict(list)
        self._by_id: dict[str, Budget] = {}
        self._spendings: dict[Spending, Spent] = {}
        self._held: dict[str, list[Any]] = defaultdict(list)
        self._new: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._alerts: list[dict[str, Any]] = []
        self._tariff: Tariff | None = None
        self._currencies: dict[TenantId, str] = {}

    async def read(self, opened: Sequence[OpenedRequest], ended: Collection[str], prices: Prices) -> None:
        """Look up and lock the budgets of these requests, and the budgets of which ended requests hold a part."""
        limits = LimitRepository(self._session)
        subjects = {subject for request in opened for subject in subjects_of(request)}
        self._know(await limits.budgets(subjects) if subjects else ())
        requests = {*ended, *(request.id for request in opened if self._budgets_of(request))}
        for row in await self._counter_rows.budget_holds(requests) if requests else ():
            self._held[row.request_id].append(row)
        held = {row.budget_id for rows in self._held.values() for row in rows} - self._by_id.keys()
        self._know(await limits.budgets((), held) if held else ())
        if not self._by_id:
            return
        tenants = {budget.tenant for budget in self._by_id.values()}
        self._tariff = await prices.tariff(self._session, tenants)
        self._currencies = await limits.currencies(tenants) if opened else {}
        periods = {(row.budget_id, row.start) for rows in self._held.values() for row in rows}
        periods |= {self._period(budget) for request in opened for budget in self._budgets_of(request)}
        for row in await self._counter_rows.spendings(periods):
            self._spendings[row.budget_id, row.start] = Spent(row.spent, row.held, row.abandoned)

    def holds(self, request_id: str) -> bool:
        """Return True if the request holds anything, now or before."""
        return request_id in self._held or request_id in self._new

    def ensure_affordable(self, request: OpenedRequest) -> int:
        """Return the maximum cost of the request. Raises BudgetSpent unless each budget has this amount left."""
        budgets = self._budgets_of(request)
        if not budgets or self._tariff is None:
            return 0
        cost = self._tariff.most_it_can_cost(request)
        for budget in budgets:
            owner = subjects_of(request)[budget.subject]
            period = self._period(budget)
            spent, currency = self._spendings[period], self._currencies.get(budget.tenant, "")
            state = BudgetState(budget=budget, currency=currency, start=period[1], spent=spent.spent, held=spent.held)
            ensure_affordable(owner, state, cost, self._now)
        return cost

    def hold(self, request: OpenedRequest, cost: int) -> None:
        """Hold this amount of every budget of the request."""
        for budget in self._budgets_of(request):
            period = self._period(budget)
            self._spendings[period] += Spent(0, cost)
            self._new[request.id].append(hold_row(request, budget.id, period[1], cost))

    def release(self, request_id: str, used: ChargedUsage, unbilled: TokenCounts) -> None:
        """In the period in which the request began, count the used amount, billed or not, as spent, and give back the
        remaining hold.
        """
        for row in self._held.pop(request_id, ()):
            assert self._tariff is not None
            budget, period = self._by_id[row.budget_id], (row.budget_id, row.start)
            before = self._spendings[period]
            price = partial(self._tariff.cost, budget.tenant, row.base_model, row.tier)
            after = self._spendings[period] = before + spent_by(price, used, unbilled) + Spent(0, -row.amount)
            for percent in crossed_thresholds(budget, before.spent, after.spent):
                self._alerts.append(alert_row(budget, row.start, percent, after.spent, self._now))

    async def write(self) -> None:
        """Write changed rows. `AdmissionBatch` removes the holds of ended requests."""
        rows = [
            spending_row(budget, start, spent)
            for (budget, start), spent in sorted(self._spendings.items(), key=itemgetter(0))
        ]
        await self._counter_rows.write_spendings(rows)
        await self._counter_rows.add_budget_holds(list(chain.from_iterable(self._new.values())))
        await self._counter_rows.add_alerts(self._alerts)

    def _know(self, rows: Iterable[Any]) -> None:
        for row in rows:
            budget = self._by_id[row.id] = budget_of(row)
            self._of_subject[budget.subject].append(budget)

    def _budgets_of(self, request: OpenedRequest) -> list[Budget]:
        return [budget for subject in subjects_of(request) for budget in self._of_subject.get(subject, ())]

    def _period(self, budget: Budget) -> Spending:
        return budget.id, period_start(budget.period, self._now)


def ensure_affordable(owner: str, state: BudgetState, cost: int, now: int) -> None:
    """Raise BudgetSpent unless a request with this maximum cost fits into the remaining budget."""
    budget = state.budget
    left = budget.amount - state.spent - state.held
    if cost <= left and left > 0:
        return
    end = period_end(budget.period, state.start)
    total, gone, held, more = (
        format_money(nanos, state.currency) for nanos in (budget.amount, state.spent, state.held, cost)
    )
    raise BudgetSpent(
        f"The {budget.period} budget of your {owner} is {total}: {gone} is spent, {held} is held by running requests, "
        f"and this request may cost {more}. Lower max_tokens, or raise the budget.",
        wait=None if end is None else end - now,
    )


def spent_by(price: Callable[[ChargedUsage], int], used: ChargedUsage, unbilled: TokenCounts) -> Spent:
    """Return the cost of billed and unbilled tokens for a budget: priced together, so each meter is rounded once."""
    billed = price(used)
    if unbilled == TokenCounts():
        return Spent(billed, 0)
    cost = price(ChargedUsage(used.tokens + unbilled, used.adapter_loads))
    return Spent(cost, 0, cost - billed)


async def spent_so_far(
    session: AsyncSession, tenant: TenantId, subject: str, start: int, span: Span, tariff: Tariff
) -> Spent:
    """Return the cost of the subject's requests since the period's `start`, from the ledger's entries in `span`.

    Each day's tokens of one base model and tier are priced together, at that day's prices.
    """
    spent = Spent(0, 0)
    for one in await SubjectRepository(session, tenant, subject).used(start, span):
        price = partial(tariff.cost, tenant, one.base_model, one.tier, at=one.day * DAY)
        spent += spent_by(price, ChargedUsage(one.tokens, one.adapter_loads), one.abandoned)
    return spent


async def begin_period(
    session: AsyncSession, budget: Budget, start: int, spent: Spent, tariff: Tariff, now: int
) -> None:
    """Begin the first period of a new budget, with the amount spent and the maximum that open requests may still cost.

    The caller has locked the ledger's head, so none of these requests ends at the same time.
    """
    running = await SubjectRepository(session, budget.tenant, budget.subject).open(start)
    holds = [hold_row(request, budget.id, start, tariff.most_it_can_cost(request)) for request in running]
    counters = CounterRepository(session)
    await counters.spendings([(budget.id, start)])
    held = Spent(0, sum(hold["amount"] for hold in holds))
    await counters.write_spendings([spending_row(budget.id, start, spent + held)])
    await counters.add_budget_holds(holds)
    if running:
        await RequestRepository(session).note_holds([request.id for request in running])
    passed = crossed_thresholds(budget, 0, spent.spent)
    await counters.add_alerts([alert_row(budget, start, percent, spent.spent, now) for percent in passed])


def crossed_thresholds(budget: Budget, before: int, after: int) -> list[int]:
    """Return the thresholds, in percent, that spending reaches by going from `before` to `after`."""
    return [percent for percent in budget.thresholds if before * 100 < budget.amount * percent <= after * 100]


def spending_row(budget_id: str, start: int, spent: Spent) -> dict[str, Any]:
    """Return the row of a period's spending."""
    return {"budget_id": budget_id, "start": start} | msgspec.structs.asdict(spent)


def hold_row(request: OpenedRequest, budget_id: str, start: int, amount: int) -> dict[str, Any]:
    """Return the row of a request's hold on a budget."""
    return {
        "request_id": request.id,
        "budget_id": budget_id,
        "start": start,
        "amount": amount,
        "base_model": request.base_model,
        "tier": request.tier,
    }


def alert_row(budget: Budget, start: int, percent: int, spent: int, now: int) -> dict[str, Any]:
    """Return the row of the alert for the outbox."""
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


def format_money(nanos: int, currency: str) -> str:
    """Return an amount as a text for people, exact and with at least two decimals: `12.50 USD`, `0.00005 USD`."""
    whole, part = divmod(nanos, NANO)
    return f"{whole}.{f'{part:09d}'.rstrip('0').ljust(2, '0')} {currency}".rstrip()
