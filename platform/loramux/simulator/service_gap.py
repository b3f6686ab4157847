"""The order of admission and the service gap: the engine's own, and FIFO as the baseline.

VTC (OSDI 2024) calls the gap the accumulated service difference of backlogged clients: the largest difference, over any
interval in which two parties both waited, between what they received.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from loramux.engine.messages import Request, ServiceClass
from loramux.engine.scheduling.fairness import VirtualTokenCounter
from loramux.engine.scheduling.queue import RequestQueue
from loramux.engine.scheduling.sequence import Step

WATCHED = 256
"""Parties watched at once: the work grows with the square. Where more wait, the first that came are watched."""


class ServiceGap:
    """The largest difference, over any interval in which two parties both waited, between what they received.

    In units over weight. A pair's difference when both began to wait does not matter, its range since then does.
    """

    def __init__(self, watched: int = WATCHED) -> None:
        self.largest = 0.0
        self._places: dict[VirtualTokenCounter, int] = {}
        self._free = list(range(watched - 1, -1, -1))
        self._lifted = np.zeros(watched)
        self._highest = np.zeros((watched, watched))
        """The highest difference of row minus column; the lowest is minus the highest of column minus row."""

    def observe(self, waiting: Iterable[VirtualTokenCounter]) -> None:
        """Note a step, with the parties that have eligible work waiting."""
        counters = list(waiting)
        self._forget_all_but(counters)
        if len(counters) < 2:
            return
        news = [counter for counter in counters if counter not in self._places][: len(self._free)]
        for counter in news:
            self._places[counter] = self._free.pop()
        watched = [counter for counter in counters if counter in self._places]
        self._measure(watched, news)

    def _forget_all_but(self, counters: list[VirtualTokenCounter]) -> None:
        if self._places and self._places.keys() - (staying := set(counters)):
            for counter in [counter for counter in self._places if counter not in staying]:
                self._free.append(self._places.pop(counter))

    def _measure(self, watched: list[VirtualTokenCounter], news: list[VirtualTokenCounter]) -> None:
        places = np.array([self._places[counter] for counter in watched])
        received = np.array([counter.received for counter in watched])
        lifted = np.array([counter.credited for counter in watched])
        differences = received[:, None] - received[None, :]
        square = (places[:, None], places[None, :])
        highest = np.maximum(self._highest[square], differences)
        began = lifted != self._lifted[places]
        if news:
            fresh = set(news)
            began |= np.array([counter in fresh for counter in watched])
        if began.any():
            anew = began[:, None] | began[None, :]
            highest = np.where(anew, differences, highest)
            self._lifted[places] = lifted
        self._highest[square] = highest
        self.largest = max(self.largest, float((highest + highest.T).max()))


class FleetGap:
    """The largest difference of service over the fleet between two tenants of a class that wait on every engine."""

    def __init__(self) -> None:
        self._gaps: defaultdict[str, ServiceGap] = defaultdict(ServiceGap)
        self._totals: dict[tuple[str, str], VirtualTokenCounter] = {}

    @property
    def largest(self) -> float:
        """The largest of all classes, in units over weight."""
        return max((gap.largest for gap in self._gaps.values()), default=0.0)

    def observe(self, queues: Sequence[RequestQueue]) -> None:
        """Compare the tenants that wait in all of `queues`."""
        for service_class in queues[0].classes:
            flows = [{flow.tenant: flow for flow in queue.classes[service_class].tenants} for queue in queues]
            waiting = []
            for tenant in flows[0]:
                if all(tenant in others for others in flows):
                    total = self._totals.setdefault((service_class, tenant), VirtualTokenCounter())
                    total.credited = sum(others[tenant].credited for others in flows)
                    total.served = total.credited + sum(others[tenant].received for others in flows)
                    waiting.append(total)
            self._gaps[service_class].observe(waiting)


class AdmissionOrder(Protocol):
    """The order in which arrivals enter the engine's queue."""

    def file(self, request: Request) -> Request:
        """Return the request as the engine gets it."""
        ...

    def observe(self, step: Step) -> None:
        """Note a planned step; its result is not committed yet."""
        ...

    def end(self, request_id: str) -> None:
        """Note that the request was answered."""
        ...

    @property
    def largest_gap(self) -> float:
        """The largest gap between two waiting tenants of a class, in units over weight."""
        ...


class FairAdmission:
    """The engine's own order; the gap is that of its own counters."""

    def __init__(self, queue: RequestQueue) -> None:
        self._gaps = [(group, ServiceGap()) for group in queue.groups]

    def file(self, request: Request) -> Request:
        """Return the request unchanged."""
        return request

    def observe(self, step: Step) -> None:  # noqa: ARG002  the counters have been charged
        """Compare the waiting tenants."""
        for group, gap in self._gaps:
            gap.observe(group.tenants)

    def end(self, request_id: str) -> None:
        """Do nothing."""

    @property
    def largest_gap(self) -> float:
        """The largest gap of all classes."""
        return max(gap.largest for _, gap in self._gaps)


SHARED_TENANT = "all-tenants"


class FifoAdmission:
    """The baseline: to the engine all tenants are one, served in order of arrival; their counters are kept here."""

    def __init__(self) -> None:
        self._counters: dict[tuple[ServiceClass, str], VirtualTokenCounter] = {}
        self._counter_of: dict[str, VirtualTokenCounter] = {}
        self._computed: dict[str, int] = {}
        self._waiting: Counter[VirtualTokenCounter] = Counter()
        self._gap = ServiceGap()

    def file(self, request: Request) -> Request:
        """Return the request under the shared tenant."""
        key = (request.service_class, request.tenant)
        counter = self._counters.setdefault(key, VirtualTokenCounter(weight=request.weight))
        self._counter_of[request.id] = counter
        self._waiting[counter] += 1
        return msgspec.structs.replace(request, tenant=SHARED_TENANT, service_class=ServiceClass.STANDARD, weight=1.0)

    def observe(self, step: Step) -> None:
        """Charge the tokens that the step computes for the first time, and compare the waiting tenants."""
        for chunk in step.chunks:
            sequence, counter = chunk.sequence, self._counter_of[chunk.sequence.id]
            if (computed := self._computed.get(sequence.id)) is None:
                self._waiting[counter] -= 1
                computed = 0
            counter.charge(max(0, min(chunk.end, sequence.num_prompt_tokens) - computed) + 2 * chunk.samples)
            self._computed[sequence.id] = max(computed, chunk.end)
        self._gap.observe(counter for counter, waiting in self._waiting.items() if waiting)

    def end(self, request_id: str) -> None:
        """Drop the request from the waiting ones, if it never ran."""
        counter = self._counter_of.pop(request_id)
        if self._computed.pop(request_id, None) is None:
            self._waiting[counter] -= 1

    @property
    def largest_gap(self) -> float:
        """The largest gap over all tenants, for there is one queue."""
        return self._gap.largest


def make_admission_order(kind: str, queue: RequestQueue) -> AdmissionOrder:
    """`fair` or `fifo`."""
    return FifoAdmission() if kind == "fifo" else FairAdmission(queue)
