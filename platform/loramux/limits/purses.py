"""The money side of a batch: what its requests hold of budgets, and what they have spent in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.limits.budgets import Budget, Spent, alert_of, budget_of, crossed, demand_money, period_start
from loramux.limits.demand import Demand
from loramux.limits.prices import Prices, Tariff, Used
from loramux.records.limits import CountRepository, LimitRepository, Spending


class Purses:
    """The budgets that a batch touches, locked by `read`, changed in memory, written once."""

    def __init__(self, session: AsyncSession, now: int) -> None:
        self._session = session
        self._counts = CountRepository(session)
        self._now = now
        self._of_subject: dict[str, list[Budget]] = defaultdict(list)
        self._by_id: dict[str, Budget] = {}
        self._spendings: dict[Spending, Spent] = {}
        self._held: dict[str, list[Any]] = defaultdict(list)
        self._new: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._alerts: list[dict[str, Any]] = []
        self._tariff: Tariff | None = None

    async def read(self, demands: Sequence[Demand], ended: Collection[str], prices: Prices) -> None:
        """Look up and lock the budgets that these demands meet, and those that ended requests hold something of."""
        limits = LimitRepository(self._session)
        subjects = {subject for demand in demands for subject in demand.subjects}
        self._know(await limits.budgets(subjects) if subjects else ())
        requests = {*ended, *(demand.request_id for demand in demands if self._budgets_of(demand))}
        for row in await self._counts.budget_holds(requests) if requests else ():
            self._held[row.request_id].append(row)
        held = {row.budget_id for rows in self._held.values() for row in rows} - self._by_id.keys()
        self._know(await limits.budgets((), held) if held else ())
        if not self._by_id:
            return
        self._tariff = await prices.tariff(self._session, {budget.tenant for budget in self._by_id.values()})
        periods = {(row.budget_id, row.start) for rows in self._held.values() for row in rows}
        periods |= {self._period(budget) for demand in demands for budget in self._budgets_of(demand)}
        for row in await self._counts.spendings(periods):
            self._spendings[row.budget_id, row.start] = Spent(row.spent, row.held)

    def holds(self, request_id: str) -> bool:
        """Whether the request has anything set aside, now or before."""
        return request_id in self._held or request_id in self._new

    def demand(self, demand: Demand) -> int:
        """The most that the request can cost; raises BudgetSpent unless every budget of its has so much left."""
        budgets = self._budgets_of(demand)
        if not budgets or self._tariff is None:
            return 0
        cost = self._tariff.most_it_can_cost(demand.tenant, demand.tier, demand.prompt_tokens, demand.max_tokens)
        for budget in budgets:
            word = demand.subjects[budget.subject]
            demand_money(word, budget, self._spendings[self._period(budget)], cost, self._now)
        return cost

    def hold(self, demand: Demand, cost: int) -> None:
        """Set so much aside, of every budget of the request."""
        for budget in self._budgets_of(demand):
            period = self._period(budget)
            spent = self._spendings[period]
            self._spendings[period] = Spent(spent.spent, spent.held + cost)
            hold = {"request_id": demand.request_id, "budget_id": budget.id, "start": period[1], "amount": cost}
            self._new[demand.request_id].append(hold | {"tier": demand.tier})

    def release(self, request_id: str, used: Used) -> None:
        """Spend what was used, and let go of the rest. In the period in which the request began."""
        for row in self._held.pop(request_id, ()):
            assert self._tariff is not None
            budget, period = self._by_id[row.budget_id], (row.budget_id, row.start)
            before = self._spendings[period]
            cost = self._tariff.cost(budget.tenant, row.tier, used)
            after = self._spendings[period] = Spent(before.spent + cost, before.held - row.amount)
            for percent in crossed(budget, before.spent, after.spent):
                self._alerts.append(alert_of(budget, row.start, percent, after.spent, self._now))

    async def write(self) -> None:
        """Write what has changed; the holds of ended requests are `Books` to remove."""
        rows = [
            {"budget_id": budget, "start": start, "spent": spent.spent, "held": spent.held}
            for (budget, start), spent in sorted(self._spendings.items())
        ]
        await self._counts.write_spendings(rows)
        await self._counts.add_budget_holds(list(chain.from_iterable(self._new.values())))
        await self._counts.add_alerts(self._alerts)

    def _know(self, rows: Iterable[Any]) -> None:
        for row in rows:
            budget = self._by_id[row.id] = budget_of(row)
            self._of_subject[budget.subject].append(budget)

    def _budgets_of(self, demand: Demand) -> list[Budget]:
        return [budget for subject in demand.subjects for budget in self._of_subject.get(subject, ())]

    def _period(self, budget: Budget) -> Spending:
        return budget.id, period_start(budget.period, self._now)
