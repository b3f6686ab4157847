"""The engine's own order of admission and FIFO beside it: how requests are put, and whose service is compared."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import msgspec

from loramux.engine.fairness import Account
from loramux.engine.queue import RequestQueue
from loramux.engine.request import Request, ServiceClass
from loramux.engine.step import Step
from loramux.simulator.gap import ServiceGap


class Order(Protocol):
    """What stands between the arrivals and the engine's queue."""

    def file(self, request: Request) -> Request:
        """The request as the engine gets it."""
        ...

    def observe(self, step: Step) -> None:
        """A step was planned; its result is not committed yet."""
        ...

    def end(self, request_id: str) -> None:
        """The request was answered."""
        ...

    @property
    def largest_gap(self) -> float:
        """Between two tenants of a class that wait, in units over weight."""
        ...


class FairOrder:
    """As the engine has it; the gap is that of its own accounts."""

    def __init__(self, queue: RequestQueue) -> None:
        self._gaps = [(group, ServiceGap()) for group in queue.groups]

    def file(self, request: Request) -> Request:
        """As it is."""
        return request

    def observe(self, step: Step) -> None:  # noqa: ARG002  the accounts have been charged
        """Compare those that wait."""
        for group, gap in self._gaps:
            gap.observe(group.contest)

    def end(self, request_id: str) -> None:
        """Nothing to do."""

    @property
    def largest_gap(self) -> float:
        """Of all classes."""
        return max(gap.largest for _, gap in self._gaps)


EVERYBODY = "everybody"


class FifoOrder:
    """The baseline: to the engine everybody is one tenant, served in order of arrival; the accounts are kept here."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[ServiceClass, str], Account] = {}
        self._account_of: dict[str, Account] = {}
        self._computed: dict[str, int] = {}
        self._waiting: Counter[Account] = Counter()
        self._gap = ServiceGap()

    def file(self, request: Request) -> Request:
        """In everybody's name."""
        key = (request.service_class, request.tenant)
        account = self._accounts.setdefault(key, Account(weight=request.weight))
        self._account_of[request.id] = account
        self._waiting[account] += 1
        return msgspec.structs.replace(request, tenant=EVERYBODY, service_class=ServiceClass.STANDARD, weight=1.0)

    def observe(self, step: Step) -> None:
        """Charge what the step computes for the first time, and compare those that wait."""
        for chunk in step.chunks:
            sequence, account = chunk.sequence, self._account_of[chunk.sequence.id]
            if (computed := self._computed.get(sequence.id)) is None:
                self._waiting[account] -= 1
                computed = 0
            account.charge(max(0, min(chunk.end, sequence.num_prompt_tokens) - computed) + 2 * chunk.samples)
            self._computed[sequence.id] = max(computed, chunk.end)
        self._gap.observe(account for account, waiting in self._waiting.items() if waiting)

    def end(self, request_id: str) -> None:
        """One that never ran no longer waits."""
        account = self._account_of.pop(request_id)
        if self._computed.pop(request_id, None) is None:
            self._waiting[account] -= 1

    @property
    def largest_gap(self) -> float:
        """Over all, for there is one line."""
        return self._gap.largest


def make_order(kind: str, queue: RequestQueue) -> Order:
    """`fair` or `fifo`."""
    return FifoOrder() if kind == "fifo" else FairOrder(queue)
