"""Fair shares over a fleet: engines hear what others served, and admit tenants in the order of all of it.

A few times a second each engine reports what it served to each tenant since its last report (`StepReport.service`), to
one front. The front hands every other engine the sum (`Lift`), and the engine lifts the tenants by it
(`engine.scheduling.fairness`). Nothing is sent twice, so any number of fronts may do this side by side, each with the
reports that it got; what is lost with a front is an interval's worth.

**The bound.** All service is over weight. R engines; B one engine's bound, 2 * (max_service_lead + delta); P the most
that a tenant's admitted requests on one engine are expected to take yet, or have taken beyond what was expected; Q the
affinity window; delta the most that a step serves one tenant; sigma the most that one engine serves one tenant within
the delay between a service and its lift elsewhere, at most twice the interval and a step.

1. *On every engine* the counters of those that wait differ by at most B / 2, as on an engine alone: a lift raises a
   counter no higher than that of the first in order.
2. *On an engine where a tenant T waits*, a step admits a request of another tenant F, or begins to load its adapter,
   only if before that step the fleet has served F at most **P + Q + delta + 2 * (R - 1) * sigma + A** more than T since
   both waited there. A is how far this engine counted T ahead of F when that began: at most 0 where T is new. There are
   two exceptions: F has waited for `max_lift` of service of others, so that it does not wait for ever where T alone
   could fill the engine; and T sits out the step for a third tenant, by 1.
3. *Where both wait on every engine*, the service of the fleet differs by at most **(R + 1) * P + Q + delta + 2 * (R -
   1) * sigma + A**: by 2 at the last admission of the one ahead, and by what it had admitted then on R engines.

*Proof of 2.* For a tenant X on the engine, let c_X be its counter plus its pending lift (`counted`), and p_X what its
admitted requests are expected to take yet; so its place in the order is c_X + p_X.

- F is admitted in its order: c_F + p_F <= c_T + p_T + Q at that moment. Before the step c_F was no greater, and c_T was
  smaller by at most what T was served in this step: c_F - c_T <= P + Q + delta.
- T sits out for F, and came first in the order when the step began. F has no pending lift then, for it would have
  followed T's counter (`FairQueue.spend_lifts`). So c_F is F's counter, which is below T's: c_F - c_T < 0.
- T sits out for F, and came first only after admissions of this step. Before the step F came first: the first case.

While both wait, c_X grows by what X is served here and by what lifts say that it was served elsewhere. For F these lack
at most (R - 1) * sigma of what others have served since. For T they contain at most (R - 1) * sigma that others had
served before. So the difference of the service is at most c_F - c_T + A + 2 * (R - 1) * sigma.

Without pending lift 2 does not hold: T, which comes before F in the order, is soon `max_service_lead` ahead of F's
counter and sits out, and F is admitted however much it had elsewhere.

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
