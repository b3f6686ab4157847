"""Fair shares over a fleet: engines hear what others served, and admit tenants in the order of all of it.

A few times a second each engine reports what it served to each tenant since its last report (`StepReport.service`), to
one front. The front hands every other engine the sum (`Lift`), and the engine lifts the tenants by it
(`engine.scheduling.fairness`). Nothing is sent twice, so any number of fronts may do this side by side, each with the
reports that it got; what is lost with a front is an interval's worth.

**The bound.** All service is over weight. R engines; B one engine's bound, 2 * (max_service_lead + delta); P the most
that a tenant's admitted requests on one engine are expected to take yet; Q the affinity window; sigma the most that one
engine serves one tenant within the delay between a service and its lift elsewhere, at most twice the interval.

1. *On every engine* the counters of those that wait differ by at most B / 2, as on an engine alone: a lift raises a
   counter no higher than that of the first in order.
2. *On an engine where a tenant T waits*, another is admitted only while its service of the whole fleet, since both
   waited there, exceeds that of T by at most **P + Q + 2 * (R - 1) * sigma**: by the order of admission its projected
   service was not above that of T, which contains P, and each counter lacks at most (R - 1) * sigma of what others
   served. The exception is a tenant that has waited for `max_lift` of service of others: it is admitted, so that it
   does not wait for ever where T alone could fill the engine.
3. *Where both wait on every engine*, the service of the fleet differs by at most **(R + 1) * P + Q + 2 * (R - 1) *
   sigma**: by 2 at the last admission of the one ahead, and by what it had admitted then on R engines.

So a tenant that floods R engines does not get R shares: where others wait it comes after them until they have had as
much. An engine where it waits alone is its own; no engine idles for fairness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from loramux.engine.messages import TenantService


class ShareExchange:
    """One front's part of the exchange: `report` what engines served, then `collect` what others served."""

    def __init__(self) -> None:
        self._served: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        """Units by (tenant, class), then by engine."""

    def report(self, engine: str, services: Iterable[TenantService]) -> None:
        """Count what `engine` has served since it reported last."""
        for service in services:
            by_engine = self._served[service.tenant, service.service_class]
            by_engine[engine] = by_engine.get(engine, 0.0) + service.units

    def collect(self, engines: Iterable[str]) -> dict[str, list[TenantService]]:
        """Return, for each of `engines`, what the others served since the last call; those without any are left out."""
        served, self._served = self._served, defaultdict(dict)
        totals = {key: sum(by_engine.values()) for key, by_engine in served.items()}
        lifts = {
            engine: [
                TenantService(*key, units)
                for key, by_engine in served.items()
                if (units := totals[key] - by_engine.get(engine, 0.0)) > 0.0
            ]
            for engine in engines
        }
        return {engine: services for engine, services in lifts.items() if services}
