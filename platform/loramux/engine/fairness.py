"""Fair shares by virtual counters: who is next, who is too far ahead, and where one who comes back starts.

Parties that compete (classes; the tenants of one class) each have a counter of executed service over weight. Three
rules bound how far two parties that both have eligible work waiting can drift apart, whatever the memory:

1. A party that comes back is lifted to the lowest counter of those that wait; where nobody waits, to the highest
   counter of all, for debts that nobody feels are void. Counters never fall.
2. A party more than tau above the lowest of those that wait sits out the step.
3. One step charges one party at most delta.

By 1, the lowest counter m of those that wait never falls while anybody waits, and when the first one comes nobody is
above it. By 2 and 3 nobody ever exceeds m + tau + delta. So the counters of any two parties that wait differ by at most
tau + delta at every moment, and the service they received over any interval by at most 2 * (tau + delta). One that is
admitted early for its adapter's sake, up to a quantum Q before its turn, may be that much further ahead: then it is at
most 2 * (tau + Q + delta).

The *order* of admission is by another number, `booked`: the counter plus what the requests already admitted are still
expected to take. Ordering by service received alone admits too many of the one who is behind, before the first of them
is charged, and swings back and forth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from loramux.engine.load import Load
from loramux.engine.ranking import Ranking


@dataclass(eq=False, slots=True)
class Account:
    """One party's service in units over its weight."""

    weight: float = 1.0
    served: float = 0.0
    """Executed, and what rule 1 added."""
    booked: float = 0.0
    """`served`, and what its admitted requests are expected to take yet."""
    lifted: float = 0.0
    """What rule 1 added."""
    executed: float = 0.0
    """Units, whatever the weight."""
    queued: Load = field(default_factory=Load)
    """What waits."""

    @property
    def received(self) -> float:
        """Executed service over weight, since the start."""
        return self.served - self.lifted

    def charge(self, units: float) -> None:
        """Executed, as booked before."""
        self.executed += units
        self.served += units / self.weight

    def book(self, units: float) -> None:
        """Expected; negative where less came than was expected."""
        self.booked += units / self.weight

    def reweigh(self, weight: float) -> None:
        """Another weight from now on; what is booked and not yet executed counts by it."""
        self.booked = self.served + (self.booked - self.served) * self.weight / weight
        self.weight = weight

    def lift(self, floor: float) -> None:
        """Raise the counter to `floor`."""
        if (missing := floor - self.served) > 0:
            self.served += missing
            self.booked += missing
            self.lifted += missing


AccountT = TypeVar("AccountT", bound=Account)


class Contest(Generic[AccountT]):
    """Parties with eligible work waiting: `enter` when it comes, `leave` when there is none."""

    def __init__(self) -> None:
        self._by_served: Ranking[AccountT, float] = Ranking(attrgetter("served"))
        self._by_booked: Ranking[AccountT, float] = Ranking(attrgetter("booked"))
        self._aside: list[AccountT] = []
        self._peak = 0.0

    def __contains__(self, account: AccountT) -> bool:
        return account in self._by_served

    def __iter__(self) -> Iterator[AccountT]:
        return iter(self._by_served)

    @property
    def floor(self) -> float | None:
        """The lowest counter of those that wait; None where nobody does."""
        lowest = self._by_served.first()
        return None if lowest is None else lowest.served

    @property
    def first(self) -> AccountT | None:
        """Who should be admitted next."""
        return self._by_booked.first()

    def first_near(self, suits: Callable[[AccountT], bool], span: float, limit: int) -> AccountT | None:
        """The first in order that `suits`, booked no more than `span` beyond the very first; `limit` are looked at."""
        lowest = self._by_booked.first()
        return None if lowest is None else self._by_booked.lowest(suits, limit, up_to=lowest.booked + span)

    def entry(self, account: AccountT) -> float:
        """Where `account` is, or would be after rule 1, in the order of admission."""
        if account in self:
            return account.booked
        return account.booked + max(0.0, self._start - account.served)

    @property
    def _start(self) -> float:
        """Where one who comes back starts (rule 1)."""
        floor = self.floor
        return self._peak if floor is None else floor

    def enter(self, account: AccountT) -> None:
        """Eligible work has come (rule 1)."""
        if account not in self:
            account.lift(self._start)
            self._by_served.put(account)
            self._by_booked.put(account)

    def leave(self, account: AccountT) -> None:
        """No eligible work is left waiting."""
        self._by_served.drop(account)
        self._by_booked.drop(account)

    def set_aside(self, account: AccountT) -> None:
        """Not `first` before `restore`, though it goes on waiting."""
        self._by_booked.drop(account)
        self._aside.append(account)

    def restore(self) -> None:
        """Those set aside are candidates again."""
        for account in self._aside:
            if account in self:
                self._by_booked.put(account)
        self._aside.clear()

    def charge(self, account: AccountT, units: float) -> None:
        """Executed."""
        account.charge(units)
        self._peak = max(self._peak, account.served)

    def book(self, account: AccountT, units: float) -> None:
        """Expected of an admitted request, or no longer expected."""
        account.book(units)
        if units < 0 and account in self._by_booked:
            self._by_booked.put(account)


@dataclass(eq=False, slots=True)
class Group(Account):
    """A class, and the contest of its tenants."""

    contest: Contest[Flow] = field(default_factory=Contest)
    ceiling: float = float("inf")
    """A flow above it sits out this step (rule 2)."""


@dataclass(eq=False, slots=True)
class Flow(Account):
    """A tenant in a class."""

    tenant: str = ""
    group: Group = field(default_factory=Group)

    @property
    def too_far(self) -> bool:
        """Whether it sits out this step (rule 2)."""
        return self.served > self.group.ceiling
