"""Who received how much, for people to watch: a bounded number of tenants, by opaque id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter

from loramux.engine.messages import TenantService
from loramux.engine.queue import RequestQueue

LABELLED_TENANTS = 20
OTHERS = "other"
EVERY = 1.0
"""Seconds between two looks: they cost time in proportion to the tenants."""


class ServiceMeter:
    """Looks at a queue's accounts now and then."""

    def __init__(self, queue: RequestQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._looked_at = float("-inf")
        self.tenants: list[TenantService] = []
        """Those who received most, and the sum of the others, by class."""
        self.gap = 0.0
        """The largest difference of counters, in units over weight, between two tenants of a class that both wait."""

    def look(self) -> None:
        """Look again where the last look is old enough."""
        if (now := self._clock()) - self._looked_at >= EVERY:
            self._looked_at = now
            self.tenants = self._by_tenant()
            waiting = [[flow.served for flow in group.contest] for group in self._queue.groups]
            self.gap = max((max(served) - min(served) for served in waiting if served), default=0.0)

    def _by_tenant(self) -> list[TenantService]:
        names = {group: service_class for service_class, group in self._queue.classes.items()}
        ranked = sorted(self._queue.flows, key=attrgetter("executed"), reverse=True)
        others: defaultdict[str, float] = defaultdict(float)
        for flow in ranked[LABELLED_TENANTS:]:
            others[names[flow.group]] += flow.executed
        most = ranked[:LABELLED_TENANTS]
        told = [TenantService(flow.tenant, names[flow.group], flow.executed) for flow in most]
        return told + [TenantService(OTHERS, name, units) for name, units in others.items()]
