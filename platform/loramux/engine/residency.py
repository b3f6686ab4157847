"""Which revisions are in the pool: inspected and filled off the step loop, pinned while in use, evicted on demand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from loramux.engine.counters import ResidencyCounters
from loramux.engine.pages import PagePool, PageUse
from loramux.engine.ranking import Ranking
from loramux.engine.request import AdapterRef
from loramux.engine.resident import AdapterState, AdapterStore, Inspected, Patience, Resident


class Residency:
    """The pool's adapters. Questions are pure; everything under `acts` acts."""

    def __init__(
        self, pool: PagePool, store: AdapterStore, clock: Callable[[], float], patience: Patience | None = None
    ) -> None:
        self._pool = pool
        self._store = store
        self.clock = clock
        self._patience = patience or Patience()
        self._known: dict[str, Resident] = {}
        self._pending: dict[str, Resident] = {}
        self._idle: dict[str, Resident] = {}
        self._idle_pages = 0
        self._by_worth: Ranking[Resident, tuple[bool, bool, float]] = Ranking(
            lambda resident: (resident.num_trees > 0, resident.interested > 0, self.worth(resident))
        )
        self.num_resident = 0
        """Revisions that hold pages."""
        self.counters = ResidencyCounters()

    # questions

    def state(self, digest: str) -> AdapterState:
        """Where a wanted revision stands."""
        return self._known[digest].state

    def knows(self, digest: str) -> bool:
        """Whether it was wanted, and not forgotten since."""
        return digest in self._known

    def failed(self, digest: str) -> bool:
        """Whether it is known and FAILED."""
        return digest in self._known and self._known[digest].state is AdapterState.FAILED

    def failure(self, digest: str) -> str:
        """Why it FAILED, and when it is tried again."""
        failed = self._known[digest]
        wait = max(0.0, failed.retry_at - self.clock())
        return f"{failed.reason} It failed {failed.failures} times in a row and is tried again in {wait:.0f} s."

    def in_use(self, digest: str) -> bool:
        """Whether a running sequence pins it."""
        return digest in self._known and self._known[digest].users > 0

    def size(self, digest: str) -> int:
        """Pages it takes; 0 while INSPECTING."""
        return self._known[digest].num_pages

    def invocation(self, digest: str) -> tuple[int, ...] | None:
        """The tokens that switch it on, where it is an activated LoRA; its files have been checked."""
        return self._known[digest].invocation

    def expected_wait(self, digest: str) -> float:
        """Seconds that a wanted revision is likely to take yet until it is READY, by the mean of the loads so far."""
        resident, counters = self._known.get(digest), self.counters
        if not counters.loads or (resident and resident.state is AdapterState.READY):
            return 0.0
        loading = resident if resident and resident.state is AdapterState.LOADING else None
        spent = self.clock() - loading.loading_since if loading else 0.0
        return max(0.0, counters.load_seconds.total / counters.loads - spent)

    @property
    def saturated(self) -> bool:
        """Whether as many loads are under way as may be."""
        loading = sum(resident.state is AdapterState.LOADING for resident in self._pending.values())
        return loading >= self._patience.max_loading

    @property
    def now(self) -> float:
        """Half-lives: the clock that heat is measured by."""
        return self.clock() / self._patience.half_life

    @property
    def idle_pages(self) -> int:
        """Pages of revisions out of use."""
        return self._idle_pages

    @property
    def unwanted_pages(self) -> int:
        """Pages of revisions out of use that nobody waits for either."""
        return sum(resident.num_pages for resident in self._idle.values() if not resident.interested)

    @property
    def least_worthy(self) -> Resident | None:
        """The first to evict: a leaf (no KV under it) before others, one that nobody waits for before others."""
        return self._by_worth.first()

    def worth(self, resident: Resident) -> float:
        """What a page of it is expected to save."""
        return resident.worth(self._patience.overhead_pages)

    def pinned_pages(self, candidate: str | None = None) -> int:
        """Pages of every revision in use or loading, and of `candidate` as if it were."""
        pinned = self._pool.num_taken(PageUse.ADAPTER) - self._idle_pages
        resident = self._known.get(candidate) if candidate else None
        if resident is None or (resident.pages and candidate not in self._idle):
            return pinned
        return pinned + resident.num_pages

    # acts

    def want(self, ref: AdapterRef) -> None:
        """A request for `ref` waits: learn its size, if that is not known. A FAILED one is tried again in its time."""
        resident = self._known.get(ref.digest)
        if resident is None:
            resident = self._known[ref.digest] = Resident(ref)
            self._inspect(resident)
        elif resident.state is AdapterState.FAILED and self.clock() >= resident.retry_at:
            self._inspect(resident)
        self.counters.hits += resident.state is AdapterState.READY
        self.counters.misses += resident.state is not AdapterState.READY
        resident.interested += 1
        resident.retired = False
        resident.warm(self.now)

    def unwant(self, digest: str) -> None:
        """The request that wanted it has ended, in whatever way."""
        resident = self._known[digest]
        resident.interested -= 1
        self._rank(resident)
        self._forget_if_retired(resident)

    def load(self, digest: str) -> None:
        """Start to load a KNOWN revision; the pages it takes are free."""
        resident = self._known[digest]
        resident.pages = self._pool.take(resident.num_pages, PageUse.ADAPTER)
        self.num_resident += 1
        resident.state = AdapterState.LOADING
        resident.loading_since = self.clock()
        self._start(resident, self._store.fill(resident.ref, resident.pages))

    def pin(self, digest: str) -> int:
        """A sequence was admitted under a READY revision, which stays until it is unpinned; returns its slot."""
        resident = self._known[digest]
        assert resident.slot is not None, "only a READY revision is pinned"
        self._set_idle(resident, False)
        resident.users += 1
        return resident.slot

    def unpin(self, digest: str) -> None:
        """A sequence ended or was preempted; the weights stay until somebody needs the room."""
        resident = self._known[digest]
        resident.users -= 1
        self._set_idle(resident, resident.users == 0)
        self._forget_if_retired(resident)

    def poll(self) -> list[str]:
        """Take note of inspections and loads that have ended, and say of which revisions."""
        ended = [resident for resident in self._pending.values() if resident.pending and resident.pending.done()]
        for resident in ended:
            self._conclude(resident)
        return [resident.ref.digest for resident in ended]

    def evict(self, resident: Resident) -> None:
        """Give back the pages of an idle revision; it is loaded again when it is wanted."""
        self._release(resident, AdapterState.KNOWN)
        self.counters.evictions += 1

    def cover(self, digest: str) -> None:
        """A tree of KV has begun under it."""
        self._known[digest].num_trees += 1

    def uncover(self, digest: str) -> None:
        """A tree of KV under it has become empty."""
        if resident := self._known.get(digest):
            resident.num_trees -= 1
            self._rank(resident)

    def retire(self, digest: str) -> None:
        """The revision was deleted: free its pages as soon as nothing uses them."""
        if resident := self._known.get(digest):
            resident.retired = True
            self._forget_if_retired(resident)

    def _inspect(self, resident: Resident) -> None:
        resident.state = AdapterState.INSPECTING
        self._start(resident, self._store.inspect(resident.ref))

    def _start(self, resident: Resident, pending: Future[Inspected] | Future[int]) -> None:
        resident.pending = pending
        self._pending[resident.ref.digest] = resident

    def _conclude(self, resident: Resident) -> None:
        pending, resident.pending = self._pending.pop(resident.ref.digest).pending, None
        assert pending is not None
        if error := pending.exception():
            self._fail(resident, error)
        elif isinstance(result := pending.result(), Inspected):
            resident.num_pages, resident.invocation = result
            resident.state = AdapterState.KNOWN
        else:
            resident.slot, resident.state, resident.failures = result, AdapterState.READY, 0
            self._set_idle(resident, True)
            self.counters.loads += 1
            self.counters.load_seconds.observe(self.clock() - resident.loading_since)
        self._forget_if_retired(resident)

    def _fail(self, resident: Resident, error: BaseException) -> None:
        self.counters.failures += 1
        resident.failures += 1
        resident.retry_at = self.clock() + self._patience.quarantine(resident.failures)
        resident.reason = str(error)
        self._release(resident, AdapterState.FAILED)

    def _set_idle(self, resident: Resident, idle: bool) -> None:
        digest = resident.ref.digest
        if idle == (digest in self._idle):
            return
        if idle:
            self._idle[digest] = resident
            self._idle_pages += resident.num_pages
            self._by_worth.put(resident)
        else:
            del self._idle[digest]
            self._idle_pages -= resident.num_pages
            self._by_worth.drop(resident)

    def _rank(self, resident: Resident) -> None:
        """Something made it easier to evict."""
        if resident in self._by_worth:
            self._by_worth.put(resident)

    def _release(self, resident: Resident, state: AdapterState) -> None:
        assert not resident.users, "only a revision out of use may lose its pages"
        self._set_idle(resident, False)
        if resident.slot is not None:
            self._store.drop(resident.slot)
        self.num_resident -= bool(resident.pages)
        self._pool.give_back(resident.pages, PageUse.ADAPTER)
        resident.pages, resident.slot, resident.state = [], None, state

    def _forget_if_retired(self, resident: Resident) -> None:
        if resident.retired and not (resident.users or resident.interested or resident.pending):
            self._release(resident, AdapterState.KNOWN)
            del self._known[resident.ref.digest]
            self._store.forget(resident.ref.digest)
