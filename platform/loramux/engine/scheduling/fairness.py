"""Fair shares by virtual token counters: the party to serve next, the suspended parties, and the counter of a new
party.

The idea is VTC's (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each party has a counter: the
service that it received, divided by its weight. The party with the lowest counter is admitted next. VTC's bound grows
with the pool, because every admitted request runs to its end. Here a party that is too far ahead is *suspended*: its
rows sit out a step and keep their memory. This limits the difference between parties for any size of the pool (decision
0004).

Parties that compete (classes; the tenants of one class) are in one `FairQueue` while they have eligible work waiting. L
is `max_service_lead`, and three rules hold:

1. A party that returns is raised to the lowest counter of the waiting parties. If no party waits, it is raised to the
   highest counter of all parties, because no waiting party is at a disadvantage. Counters never fall.
2. A party more than L above the lowest waiting party is suspended in this step.
3. One step charges one party at most delta.

By rule 1, the lowest counter m of the waiting parties never falls while any party waits. When the first party arrives,
no counter is above its own. By rules 2 and 3, no counter ever exceeds m + L + delta. So the counters of two waiting
parties differ by at most L + delta at every moment, and the service that they received over any interval by at most 2 *
(L + delta). A party may be admitted before its turn, by at most an affinity window Q, because its adapter is in the
batch. The bound is then 2 * (L + Q + delta).

The *order* of admission uses another number, `projected_service`: the counter plus the service that admitted requests
are still expected to take. If the order used received service alone, it would admit too many requests of the party with
the least service before the first of them is charged, and would oscillate.

In a fleet, engines exchange the service of tenants, and each engine *lifts* a tenant by the service of the other
engines:

- The tenant's projected service grows by this whole service, so the order of admission follows the service of the whole
  fleet. Between two admissions it grows at most to `max_lift` above the party that was first at that time. So the
  tenant waits for at most this much service of other tenants, independently of its service on other engines.
- The tenant's counter does not grow at once. Otherwise rule 2 would suspend the first party until the lifted tenant,
  which had its share on other engines, has caught up here. The part of the projection that is not yet in the counter is
  the *pending lift*.
- The pending lift is spent while other parties are served. Whenever the first party would be suspended because of the
  lifted tenant, the counter of the lifted tenant grows. Otherwise the first party would soon be `max_service_lead`
  ahead, and the lifted tenant would be admitted although it is much later in the order.
- A party that returns is raised by rule 1; its pending lift is reduced by this raise, because the other parties were
  served while it was absent.

So a lift suspends no party, and no counter exceeds m + L + delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from loramux.engine.memory.ranking import RankedItems
from loramux.engine.scheduling.estimates import QueuedWork, WaitBias


@dataclass(eq=False, slots=True)
class VirtualTokenCounter:
    """One party's service, in units divided by its weight."""

    weight: float = 1.0
    served: float = 0.0
    """Executed service, plus the raise of rule 1, plus the part of the lift that was spent."""
    projected_service: float = 0.0
    """`served`, plus the pending lift, plus the service that admitted requests are still expected to take."""
    credited: float = 0.0
    """Service that rule 1 added."""
    lifted: float = 0.0
    """Service on other engines that is included in `served`."""
    pending_lift: float = 0.0
    """Service on other engines that `projected_service` includes and `served` does not yet."""
    lift_limit: float | None = None
    """Maximum projection that lifts may reach before the party is admitted again; None: no lift has arrived since its
    last admission.
    """
    executed: float = 0.0
    """Executed units, without division by the weight."""
    queued: QueuedWork = field(default_factory=QueuedWork)
    """The work that waits."""

    @property
    def counted(self) -> float:
        """Service of the whole fleet, as this engine counts it."""
        return self.served + self.pending_lift

    @property
    def received(self) -> float:
        """Executed service over weight."""
        return self.served - self.credited - self.lifted

    def charge(self, units: float) -> None:
        """Count executed service, which was projected before."""
        self.executed += units
        self.served += units / self.weight

    def project(self, units: float) -> None:
        """Count the expected service of an admission; negative if less came than was expected."""
        if units > 0.0:
            self.lift_limit = None
        self.projected_service += units / self.weight

    def settle(self) -> None:
        """Reset the projection when no admitted request is left, so that rounding errors do not accumulate."""
        self.projected_service = self.counted

    def lift(self, units: float, first: VirtualTokenCounter, max_lift: float) -> None:
        """Count service on other engines; `first` is the first in the order of admission."""
        if self.lift_limit is None:
            self.lift_limit = first.projected_service + max_lift
        added = max(0.0, min(units / self.weight, self.lift_limit - self.projected_service))
        self.projected_service += added
        self.pending_lift += added
        self.follow(first)

    def follow(self, first: VirtualTokenCounter) -> float:
        """Spend pending lift, up to the counter of the `first` in order; return how much was spent."""
        if self.projected_service <= first.projected_service:
            return 0.0
        return self._spend_lift(first.served - self.served)

    def _spend_lift(self, units: float) -> float:
        spent = max(0.0, min(self.pending_lift, units))
        self.pending_lift -= spent
        self.served += spent
        self.lifted += spent
        return spent

    def reweigh(self, weight: float) -> None:
        """Change the weight; projected service that is not yet executed counts with the new weight."""
        self.projected_service = self.served + (self.projected_service - self.served) * self.weight / weight
        self.pending_lift *= self.weight / weight
        self.weight = weight

    def credit_up_to(self, floor: float) -> None:
        """Raise the counter to `floor`, with pending lift first."""
        self._spend_lift(floor - self.served)
        if (missing := floor - self.served) > 0:
            self.served += missing
            self.projected_service += missing
            self.credited += missing


CounterT = TypeVar("CounterT", bound=VirtualTokenCounter)


class FairQueue(Generic[CounterT]):
    """Parties with eligible work waiting: `enter` when work arrives, `leave` when no work is left."""

    def __init__(self) -> None:
        self._by_served: RankedItems[CounterT, float] = RankedItems(attrgetter("served"))
        self._by_projected: RankedItems[CounterT, float] = RankedItems(attrgetter("projected_service"))
        self._skipped: list[CounterT] = []
        self.peak = 0.0
        """Highest counter that a party has, or ever had."""

    def __contains__(self, party: CounterT) -> bool:
        return party in self._by_served

    def __iter__(self) -> Iterator[CounterT]:
        return iter(self._by_served)

    def __len__(self) -> int:
        return len(self._by_served)

    @property
    def floor(self) -> float | None:
        """The lowest counter of the waiting parties; None if no party waits."""
        lowest = self._by_served.first()
        return None if lowest is None else lowest.served

    @property
    def start(self) -> float:
        """The counter at which a returning party starts (rule 1)."""
        floor = self.floor
        return self.peak if floor is None else floor

    @property
    def first(self) -> CounterT | None:
        """The party to admit from next."""
        return self._by_projected.first()

    def first_near(self, suits: Callable[[CounterT], bool], span: float, limit: int) -> CounterT | None:
        """Return the first party in order that `suits`, at most `span` after the very first; look at `limit`
        parties."""
        lowest = self._by_projected.first()
        if lowest is None:
            return None
        return self._by_projected.lowest(suits, limit, up_to=lowest.projected_service + span)

    def entry(self, party: CounterT) -> float:
        """Return the projected service of `party`. If the party does not wait, return the projected service that rule 1
        would give it.
        """
        if party in self:
            return party.projected_service
        return party.projected_service + max(0.0, self.start - party.counted)

    def enter(self, party: CounterT) -> None:
        """Add a party to which eligible work has come (rule 1)."""
        if party not in self:
            party.credit_up_to(self.start)
            self._by_served.put(party)
            self._by_projected.put(party)

    def leave(self, party: CounterT) -> None:
        """Remove a party that has no eligible work left."""
        self._by_served.drop(party)
        self._by_projected.drop(party)

    def skip(self, party: CounterT) -> None:
        """Do not return `party` as `first` before `reset_skips`, although it still waits."""
        self._by_projected.drop(party)
        self._skipped.append(party)

    def reset_skips(self) -> None:
        """Make the parties that were skipped candidates again."""
        for party in self._skipped:
            if party in self:
                self._by_projected.put(party)
        self._skipped.clear()

    def charge(self, party: CounterT, units: float) -> None:
        """Count executed service."""
        party.charge(units)
        self.peak = max(self.peak, party.served)

    def lift(self, party: CounterT, units: float, max_lift: float) -> None:
        """Count service on other engines. If no other party waits, the lift changes nothing."""
        # Skipped parties wait too, and the first in order may be skipped.
        self.reset_skips()
        first = self._by_projected.first()
        if first is not None and (len(self._by_projected) > 1 or first is not party):
            party.lift(units, first, max_lift)
            self.peak = max(self.peak, party.served)

    def spend_lifts(self, lead: float) -> float:
        """Let lifted counters follow that of the first in order, if it would sit out because of them by `lead` (rule
        2).

        Return the lift that was spent.
        """
        first, lowest, total = self._by_projected.first(), self._by_served.first(), 0.0
        while first is not None and lowest is not None and lowest.served + lead < first.served:
            if not (spent := lowest.follow(first)):
                break
            total += spent
            lowest = self._by_served.first()
        return total

    def project(self, party: CounterT, units: float) -> None:
        """Count service that is expected of an admitted request, or (negative) is no longer expected."""
        party.project(units)
        if units < 0 and party in self._by_projected:
            self._by_projected.put(party)


@dataclass(eq=False, slots=True)
class ClassCounter(VirtualTokenCounter):
    """A service class, and its waiting tenants."""

    tenants: FairQueue[Flow] = field(default_factory=FairQueue)
    num_running: int = 0
    """Sequences that hold memory."""
    left_at: float = -math.inf
    """Time at which the last waiting tenant left, by the scheduler's clock."""
    ceiling: float = math.inf
    """Counter above which a flow sits out this step (rule 2)."""


@dataclass(eq=False, slots=True)
class Flow(VirtualTokenCounter):
    """A tenant in a class."""

    tenant: str = ""
    group: ClassCounter = field(default_factory=ClassCounter)
    wait_bias: WaitBias = field(default_factory=WaitBias)
    num_running: int = 0
    """Sequences that hold memory."""
    num_pages: int = 0
    """Number of pages of KV in the block tables of the flow's sequences."""

    @property
    def is_suspended(self) -> bool:
        """True if the flow is suspended in this step (rule 2)."""
        return self.served > self.group.ceiling
