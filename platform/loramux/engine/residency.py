"""Which revisions are in the pool: inspected and filled off the step loop, pinned while in use, evicted on demand."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from loramux.engine.pages import PagePool, PageUse
from loramux.engine.request import AdapterRef


class AdapterStore(Protocol):
    """Where weights come from and go to; every method returns at once and works on threads of its own."""

    def inspect(self, ref: AdapterRef) -> Future[int]:
        """Check the files; the result is the number of pages the revision takes."""
        ...

    def fill(self, ref: AdapterRef, pages: list[int]) -> Future[int]:
        """Read the weights into `pages`; the result is the bank slot that serves them."""
        ...

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages are about to be given back."""
        ...


class AdapterState(enum.Enum):
    """A revision's way into the pool."""

    INSPECTING = enum.auto()
    KNOWN = enum.auto()
    """On disk, its size known, no pages held."""
    LOADING = enum.auto()
    """Pages held, weights on their way."""
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(eq=False, slots=True)
class _Resident:
    """One revision; `users` are the sequences admitted under it and not yet ended."""

    ref: AdapterRef
    pending: Future[int] | None
    state: AdapterState = AdapterState.INSPECTING
    num_pages: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    users: int = 0
    interested: int = 0
    last_used: float = 0.0
    loading_since: float = 0.0
    retired: bool = False
    failure: str = ""

    @property
    def idle(self) -> bool:
        """Whether its pages may be taken."""
        return self.users == 0 and self.state is AdapterState.READY


@dataclass(slots=True)
class ResidencyCounters:
    """Since the start."""

    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0
    failures: int = 0


class Residency:
    """The pool's adapters. Questions are pure; `want`, `pin`, `unpin`, `poll`, `make_room` and `retire` act."""

    def __init__(self, pool: PagePool, store: AdapterStore, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        self._known: dict[str, _Resident] = {}
        self.counters = ResidencyCounters()

    # questions

    def state(self, digest: str) -> AdapterState:
        """Where a wanted revision stands."""
        return self._known[digest].state

    def failure(self, digest: str) -> str:
        """Why it FAILED."""
        return self._known[digest].failure

    def slot(self, digest: str) -> int | None:
        """The bank slot of a READY revision, else None."""
        return self._known[digest].slot

    def size(self, digest: str) -> int:
        """Pages it takes; 0 while INSPECTING."""
        return self._known[digest].num_pages

    def pinned_pages(self, candidate: str | None = None) -> int:
        """Pages of every revision in use, and of `candidate` as if it were."""
        return sum(r.num_pages for d, r in self._known.items() if r.users or d == candidate)

    @property
    def num_resident(self) -> int:
        """Revisions that hold pages."""
        return sum(1 for r in self._known.values() if r.pages)

    # acts

    def want(self, ref: AdapterRef) -> None:
        """A request for `ref` is waiting: learn its size, if that is not known. A FAILED one is tried again."""
        resident = self._known.get(ref.digest)
        if resident is None or (resident.state is AdapterState.FAILED and not resident.interested):
            resident = self._known[ref.digest] = _Resident(ref, self._store.inspect(ref))
        resident.interested += 1
        resident.retired = False

    def unwant(self, digest: str) -> None:
        """The request that wanted it has ended, in whatever way."""
        resident = self._known[digest]
        resident.interested -= 1
        self._forget_if_retired(resident)

    def pin(self, digest: str) -> None:
        """A sequence was admitted under the revision: hold its pages and load it if need be."""
        resident = self._known[digest]
        resident.users += 1
        if resident.state is AdapterState.KNOWN:
            self.make_room(resident.num_pages)
            resident.pages = self._pool.take(resident.num_pages, PageUse.ADAPTER)
            resident.state = AdapterState.LOADING
            resident.loading_since = self._clock()
            resident.pending = self._store.fill(resident.ref, resident.pages)

    def unpin(self, digest: str) -> None:
        """A sequence ended or was preempted; the weights stay until somebody needs the room."""
        resident = self._known[digest]
        resident.users -= 1
        resident.last_used = self._clock()
        self._forget_if_retired(resident)

    def poll(self) -> None:
        """Take note of inspections and loads that have ended."""
        for resident in self._known.values():
            if resident.pending is not None and resident.pending.done():
                self._conclude(resident, resident.pending)

    def make_room(self, num_pages: int) -> bool:
        """Evict idle revisions, least recently used first, until `num_pages` are free; whether they are."""
        while self._pool.num_free < num_pages:
            idle = [r for r in self._known.values() if r.idle]
            if not idle:
                return False
            self._evict(min(idle, key=lambda r: r.last_used))
            self.counters.evictions += 1
        return True

    def retire(self, digest: str) -> None:
        """The revision was deleted: free its pages as soon as nothing uses them."""
        if resident := self._known.get(digest):
            resident.retired = True
            self._forget_if_retired(resident)

    def _conclude(self, resident: _Resident, pending: Future[int]) -> None:
        resident.pending = None
        if error := pending.exception():
            self.counters.failures += 1
            resident.failure = str(error)
            self._release(resident, AdapterState.FAILED)
        elif resident.state is AdapterState.INSPECTING:
            resident.num_pages, resident.state = pending.result(), AdapterState.KNOWN
        else:
            resident.slot, resident.state = pending.result(), AdapterState.READY
            self.counters.loads += 1
            self.counters.load_seconds += self._clock() - resident.loading_since
        self._forget_if_retired(resident)

    def _evict(self, resident: _Resident) -> None:
        assert resident.idle, "only an idle revision may lose its pages"
        self._release(resident, AdapterState.KNOWN)

    def _release(self, resident: _Resident, state: AdapterState) -> None:
        if resident.slot is not None:
            self._store.drop(resident.slot)
        self._pool.give_back(resident.pages, PageUse.ADAPTER)
        resident.pages, resident.slot, resident.state = [], None, state

    def _forget_if_retired(self, resident: _Resident) -> None:
        if resident.retired and not (resident.users or resident.interested or resident.pending):
            self._release(resident, AdapterState.KNOWN)
            self._known = {d: r for d, r in self._known.items() if r is not resident}
