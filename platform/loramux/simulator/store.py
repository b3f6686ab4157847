"""The devices of a simulated engine: a clock, and a disk and a host link, each with a queue and its own time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from loramux.engine.memory.residency import Inspected, StoreJob
from loramux.engine.request import AdapterRef
from loramux.simulator.hardware import Device

MOMENT = 1e-6
"""Seconds; what is nearer than that is the same time."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start of the simulation; calling it reads it, as with time.monotonic."""

    now: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Let time pass; the clock never goes back."""
        assert when >= self.now, "time does not go back"
        self.now = when


T = TypeVar("T")


class SimulatedStore:
    """An AdapterStore whose work ends when the clock says so: one transfer at a time over disk and link.

    The storage adds a latency of its own to each load, and some loads fail; both are drawn from a fixed seed.
    """

    def __init__(self, clock: VirtualClock, device: Device, sizes: dict[str, tuple[int, int]]) -> None:
        """`sizes`: pages and bytes of every revision, by digest."""
        self._clock = clock
        self._device = device
        self._sizes = sizes
        self._random = random.Random(0)  # noqa: S311  a simulation, repeatable
        self.num_loads: Counter[str] = Counter()
        """Loads that were started, by digest."""
        self._due: list[tuple[float, int, StoreJob[Any], Any]] = []
        self._tickets = count()
        self._free_slots: list[int] = []
        self._digests: list[str | None] = []
        self._disk_free_at = 0.0
        self._link_free_at = 0.0

    # what the engine asks for

    def inspect(self, ref: AdapterRef) -> StoreJob[Inspected]:
        """Read the files into the host's memory."""
        pages, size = self._sizes[ref.digest]
        self._disk_free_at = max(self._clock.now, self._disk_free_at) + size / self._device.disk_bandwidth
        return self._later(self._disk_free_at, Inspected(pages))

    def fill(self, ref: AdapterRef, pages: list[int]) -> StoreJob[int]:
        """Copy the weights over the link; the result is a slot."""
        size = self._sizes[ref.digest][1]
        assert len(pages) == self._sizes[ref.digest][0], "the engine takes the pages it was told"
        seconds = self._device.load_overhead_s + size / self._device.link_bandwidth
        self._link_free_at = max(self._clock.now, self._link_free_at) + seconds
        self.num_loads[ref.digest] += 1
        ends_at = self._link_free_at + self._random.uniform(*self._device.load_latency_s)
        if self._random.random() < self._device.load_failures:
            return self._later(ends_at, OSError("the storage does not answer"))
        return self._later(ends_at, self._slot_for(ref.digest))

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        assert self._digests[slot] is not None, "a slot is dropped once"
        self._digests[slot] = None
        heapq.heappush(self._free_slots, slot)

    def forget(self, digest: str) -> None:
        """The revision was deleted; a simulation's are read again when they are wanted again."""

    # what the simulation asks for

    @property
    def next_due(self) -> float | None:
        """The end of the next transfer; None where none is under way."""
        return self._due[0][0] if self._due else None

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second that come over the link at this moment."""
        return self._device.link_bandwidth if self._link_free_at > self._clock.now else 0.0

    def settle(self) -> None:
        """Give out the results of what has ended by now."""
        while self._due and self._due[0][0] <= self._clock.now + MOMENT:
            _, _, future, result = heapq.heappop(self._due)
            _conclude(future, result)

    def settle_all(self) -> None:
        """Everything under way ends at once, as before the first request comes."""
        for _, _, future, result in self._due:
            _conclude(future, result)
        self._due.clear()
        self._disk_free_at = self._link_free_at = self._clock.now

    def digest_of(self, slot: int) -> str:
        """The revision that a slot serves."""
        digest = self._digests[slot]
        assert digest is not None, "a step runs only adapters that are in the pool"
        return digest

    def _slot_for(self, digest: str) -> int:
        if not self._free_slots:
            self._free_slots.append(len(self._digests))
            self._digests.append(None)
        slot = heapq.heappop(self._free_slots)
        self._digests[slot] = digest
        return slot

    def _later(self, when: float, result: T | OSError) -> StoreJob[T]:
        future: StoreJob[T] = StoreJob()
        heapq.heappush(self._due, (when, next(self._tickets), future, result))
        return future


def _conclude(future: StoreJob[Any], result: object) -> None:
    if isinstance(result, OSError):
        future.set_exception(result)
    else:
        future.set_result(result)


class SimulatedHost:
    """A HostKv whose copies take their time over the link before the next step."""

    def __init__(self, num_bytes: int, page_bytes: int, device: Device) -> None:
        self.num_slots = num_bytes // page_bytes
        self.seconds_per_page = page_bytes / device.link_bandwidth
        self._due = 0.0

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Pages to the host."""
        self._carry(pages, places)

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """And back."""
        self._carry(places, pages)

    def spend(self) -> float:
        """Seconds that the copies take which were asked for since this was called last."""
        due, self._due = self._due, 0.0
        return due

    def _carry(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(sources) == len(targets), "every page has its place"
        self._due += len(sources) * self.seconds_per_page
