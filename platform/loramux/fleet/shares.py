"""Fair shares over a fleet: engines learn the service of other engines, and admit tenants in the order of the total
service.

A few times per second each engine reports to one server its service to each tenant since its last report
(`StepReport.service`). The server sends every other engine the sum (`Lift`), and that engine lifts the tenants by it
(`engine.scheduling.fairness`). No service is sent twice, so any number of servers may do this at the same time, each
with the reports that it received. If a server is lost, the service of one interval is lost with it.

**The bound.** All service is divided by the tenant's weight. R is the number of engines. B is one engine's bound, 2 *
(max_service_lead + delta). P is the maximum service that a tenant's admitted requests on one engine are still expected
to take, or have taken above their expectation. Q is the affinity window; delta is the maximum service of one step to
one tenant. sigma is the maximum service of one engine to one tenant within the delay between a service and its lift on
other engines, which is at most twice the interval and a step.

1. *On every engine* the counters of the tenants that wait differ by at most B / 2, as on an engine alone: a lift raises
   a counter no higher than that of the first in order.
2. *On an engine where a tenant T waits*, a step may admit a request of another tenant F, or begin to load its adapter.
   It does so only if before that step the fleet has served F at most **P + Q + delta + 2 * (R - 1) * sigma + A** more
   than T since both waited there. A is how far this engine counted T ahead of F when that began: at most 0 if T is new.
   There are two exceptions. F has waited for `max_lift` of service of others: this keeps F from waiting for ever if T
   alone could fill the engine. And T sits out the step for a third tenant, by 1.
3. *If both wait on every engine*, the service of the fleet differs by at most **(R + 1) * P + Q + delta + 2 * (R - 1) *
   sigma + A**: by 2 at the last admission of the one ahead, and by what it had admitted at that time on R engines.

*Proof of 2.* For a tenant X on the engine, let c_X be its counter plus its pending lift (`counted`), and p_X what its
admitted requests are still expected to take. So its place in the order is c_X + p_X.

- F is admitted in its order: c_F + p_F <= c_T + p_T + Q at that moment. Before the step c_F was no greater, and c_T was
  smaller by at most what T was served in this step: c_F - c_T <= P + Q + delta.
- T sits out for F, and came first in the order when the step began. F then has no pending lift, because F would have
  followed T's counter (`FairQueue.spend_lifts`). So c_F is F's counter, which is below T's: c_F - c_T < 0.
- T sits out for F, and came first only after admissions of this step. Before the step F came first: the first case.

While both wait, c_X grows by what X is served here and by what lifts say that it was served elsewhere. For F these lack
at most (R - 1) * sigma, which others have served since. For T they contain at most (R - 1) * sigma that others had
served before. So the difference of the service is at most c_F - c_T + A + 2 * (R - 1) * sigma.

Without the pending lift, 2 would not hold: T, which comes before F in the order, would soon be `max_service_lead` ahead
of F's counter and sit out, and F would be admitted however much service it had elsewhere.

So a tenant that floods R engines does not get R shares. If other tenants wait, it comes after them until they have had
the same service. An engine on which only this tenant waits serves only this tenant; no engine idles for fairness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from loramux.engine.messages import TenantService


class ShareExchange:
    """One server's part of the exchange: `report` takes the service of engines, and `collect` returns the service of
    the other engines.
    """

    def __init__(self) -> None:
        self._served: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        """Units by (tenant, class), then by engine."""

    def report(self, engine: str, services: Iterable[TenantService]) -> None:
        """Count the service of `engine` since its last report."""
        for service in services:
            by_engine = self._served[service.tenant, service.service_class]
            by_engine[engine] = by_engine.get(engine, 0.0) + service.units

    def collect(self, engines: Iterable[str]) -> dict[str, list[TenantService]]:
        """Return, for each of `engines`, the service of the other engines since the last call. Engines without such
        service are left out.
        """
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
