"""Who is next: classes share the engine by weight, and within a class it is first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from loramux.engine.request import ServiceClass
from loramux.engine.sequence import Sequence

CLASS_SHARES = {ServiceClass.INTERACTIVE: 8.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 1.0}
"""Shares, never strict priority: every class with work moves."""


class RequestQueue:
    """Waiting sequences in the order in which they should be admitted.

    A class's counter grows by what its requests are charged over its share (virtual time, as in weighted fair
    queueing); the class with the lowest counter goes first. A class that was idle re-enters at the lowest counter
    of the busy ones, so that sleeping earns no credit.
    """

    def __init__(self) -> None:
        self._waiting: dict[ServiceClass, deque[Sequence]] = {c: deque() for c in ServiceClass}
        self._virtual_time = dict.fromkeys(ServiceClass, 0.0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, class by class in the order of their counters."""
        for service_class in sorted(self._busy(), key=self._virtual_time.__getitem__):
            yield from tuple(self._waiting[service_class])

    def push(self, sequence: Sequence) -> None:
        """Queue at the end of its class."""
        self._lift(sequence.request.service_class)
        self._waiting[sequence.request.service_class].append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """Queue again at the head: it was preempted and keeps its place."""
        self._lift(sequence.request.service_class)
        self._waiting[sequence.request.service_class].appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out an admitted, cancelled or failed sequence."""
        self._waiting[sequence.request.service_class].remove(sequence)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Count executed `tokens` against the class of `sequence`."""
        service_class = sequence.request.service_class
        self._virtual_time[service_class] += tokens / CLASS_SHARES[service_class]

    def _busy(self) -> list[ServiceClass]:
        return [c for c, waiting in self._waiting.items() if waiting]

    def _lift(self, service_class: ServiceClass) -> None:
        busy = self._busy()
        if busy and service_class not in busy:
            floor = min(self._virtual_time[c] for c in busy)
            self._virtual_time[service_class] = max(self._virtual_time[service_class], floor)
