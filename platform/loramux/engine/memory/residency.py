"""The adapters in the pool: they are inspected and loaded outside the step loop, pinned while in use, and evicted on
demand.

    INSPECTING -> KNOWN -> LOADING -> READY        FAILED: from an inspection or a load, tried again after a quarantine
                    ^---- evicted ------'

- **A load is a claim.** A load is started for one waiting sequence. The revision stays pinned from the first page taken
  until a sequence runs under it or the claim is released. Without claims, two cold revisions that do not fit together
  would evict each other again and again before either has served a request.
- **Eviction** takes unpinned revisions in order of GreedyDual-Size-Frequency: recency of use, plus the logarithm of the
  cost of a miss per page. A revision with cached KV is evicted after this KV. A revision that a waiting request wants
  is evicted after all other revisions.
- **Bounded time**: an inspection or a load that takes longer than `load_timeout` is cancelled; its revision is FAILED.
- **Bounded memory**: a revision that holds no pages and that no request wants is forgotten after MAX_DORMANT other
  revisions were used. At the revision's next request its size is read again.
"""

from __future__ import annotations

import enum
import heapq
import math
import queue
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from loramux.engine.memory.pages import PagePool, PageUse
from loramux.engine.memory.ranking import NEVER_USED, RankedItems, used_at
from loramux.engine.messages import AdapterRef
from loramux.engine.metrics import Counters

T = TypeVar("T")

MAX_DORMANT = 16_384
"""Maximum number of remembered revisions that hold no pages and that no request wants."""


class Inspected(NamedTuple):
    """Facts of a revision that are known once its files were checked."""

    num_pages: int
    """Pages that the revision takes."""
    invocation: tuple[int, ...] | None = None
    """Tokens that activate an activated LoRA."""
    changes_tower: bool = False
    """True if the revision changes modules that read images."""
    images_refused: str | None = None
    """Reason why requests of the revision with images are refused; None: they are served."""


class StoreJob(Future[T]):
    """A running job of a store. A job can be cancelled until its result is being written into the pool."""

    started_at: float | None = None
    """Time at which a thread began the job, by the engine's clock; None: no thread has begun it."""


class AdapterStore(Protocol):
    """A source of weights. Every method returns at once; other threads do the work."""

    def inspect(self, ref: AdapterRef) -> StoreJob[Inspected]:
        """Check the files, and copy the weights into the host's memory."""
        ...

    def fill(self, ref: AdapterRef, pages: list[int]) -> StoreJob[int]:
        """Read the weights into `pages`. The result is the bank slot from which they are served."""
        ...

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages are about to be given back."""
        ...

    def forget(self, digest: str) -> None:
        """Drop everything that is kept of a deleted revision."""
        ...


class AdapterState(enum.Enum):
    """The stages of a revision's way into the pool."""

    INSPECTING = enum.auto()
    KNOWN = enum.auto()
    """The files are on disk and their size is known; the revision holds no pages."""
    LOADING = enum.auto()
    """The revision holds pages, and its weights are being read or copied."""
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """Times between retries, the number of concurrent loads, and how use is remembered."""

    first_retry: float = 1.0
    """Seconds before a failed revision is tried again (its quarantine); doubled with every consecutive failure."""
    last_retry: float = 600.0
    half_life: float = 300.0
    """Seconds after which a use counts half."""
    max_loading: int = 4
    """Maximum number of loads that run at the same time; other loads wait in the scheduler's order. One tenant has at
    most all but one of these places, because its loads may hang.
    """
    load_timeout: float = 120.0
    """Seconds that an inspection or a load may take after a thread has begun it."""
    overhead_pages: float = 8.0
    """Fixed cost of a load, in addition to the cost of its bytes, in units of the time to copy a page."""

    def quarantine(self, failures: int) -> float:
        """Return the seconds to wait after `failures` failures in a row."""
        return min(self.last_retry, self.first_retry * 2.0 ** min(failures - 1, 64))


@dataclass(eq=False, slots=True)
class Resident:
    """One revision that was requested."""

    ref: AdapterRef
    pending: StoreJob[Inspected] | StoreJob[int] | None = None
    """A running inspection or load; None: no job runs."""
    state: AdapterState = AdapterState.INSPECTING
    num_pages: int = 0
    invocation: tuple[int, ...] | None = None
    changes_tower: bool | None = None
    images_refused: str | None = None
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    users: int = 0
    """Number of running sequences that use the revision; a permanent pin counts as one."""
    wanted_by: int = 0
    """Waiting and running requests, and permanent pins."""
    is_claimed: bool = False
    """True while the revision is loaded or loading for a sequence that has not run yet."""
    num_trees: int = 0
    """Number of prefix trees with cached KV of the revision. The revision can be evicted only if there are none."""
    recency: float = NEVER_USED
    loading_for: str = ""
    """Tenant of the latest load."""
    loading_since: float = 0.0
    ready_at: float = 0.0
    """End of the revision's latest load."""
    is_retired: bool = False
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def retention_score(self, overhead_pages: float) -> float:
        """Return log2 of (expected uses x cost of a miss / pages). Copying a page over the host link costs 1."""
        return self.recency + math.log2(1.0 + overhead_pages / max(self.num_pages, 1))


class Residency:
    """The revisions that were requested, and the pages of those that are in the pool."""

    def __init__(
        self,
        pool: PagePool,
        store: AdapterStore,
        clock: Callable[[], float],
        policy: ResidencyPolicy | None = None,
        counters: Counters | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called from the store's threads when an inspection or a load has ended and `poll` would return
        it."""
        self.clock = clock
        self.counters = Counters() if counters is None else counters
        self._pool = pool
        self._store = store
        self._policy = policy or ResidencyPolicy()
        self._wake = wake
        self._known: dict[str, Resident] = {}
        self._resident: dict[str, None] = {}
        self._loading: Counter[str] = Counter()
        """Running loads of each tenant."""
        self._ended: queue.SimpleQueue[Resident] = queue.SimpleQueue()
        self._awaited: set[str] = set()
        """Revisions that are wanted and not READY."""
        self._timeouts: list[tuple[float, int, StoreJob[Any]]] = []
        """A heap of the times at which running jobs are checked; a number makes equal times distinct."""
        self._num_jobs = 0
        self._idle: dict[str, Resident] = {}
        self.idle_pages = 0
        """Pages of unpinned revisions."""
        self.unwanted_pages = 0
        """Pages of unpinned revisions that no request waits for either."""
        self._kept: dict[str, int] = {}
        self._dormant: OrderedDict[str, Resident] = OrderedDict()
        self._by_score: RankedItems[Resident, tuple[bool, bool, float]] = RankedItems(
            lambda resident: (resident.num_trees > 0, resident.wanted_by > 0, self.retention_score(resident))
        )

    # questions

    def state(self, digest: str) -> AdapterState:
        """Return the stage of a wanted revision."""
        return self._known[digest].state

    def is_known(self, digest: str) -> bool:
        """Return whether the revision was requested and has not been forgotten since."""
        return digest in self._known

    def is_retired(self, digest: str) -> bool:
        """Return whether the revision was deleted, or was forgotten."""
        return digest not in self._known or self._known[digest].is_retired

    def has_failed(self, digest: str) -> bool:
        """Return whether the revision is known and FAILED."""
        return digest in self._known and self._known[digest].state is AdapterState.FAILED

    def failure(self, digest: str) -> str:
        """Return the reason why the revision FAILED, and the time of the next attempt."""
        failed = self._known[digest]
        wait = max(0.0, failed.retry_at - self.clock())
        return f"{failed.reason} It failed {failed.failures} times in a row and is tried again in {wait:.0f} s."

    def load_times(self, digest: str) -> tuple[float, float]:
        """Return the begin and the end of the revision's latest load, by the clock; zeros if no load has ended."""
        resident = self._known[digest]
        return resident.loading_since, resident.ready_at

    def is_in_use(self, digest: str) -> bool:
        """Return whether a running sequence, or a permanent pin, uses it."""
        return digest in self._known and self._known[digest].users > 0

    def num_pages(self, digest: str) -> int:
        """Return the number of pages that the revision takes; 0 while INSPECTING."""
        return self._known[digest].num_pages

    def invocation(self, digest: str) -> tuple[int, ...] | None:
        """Return the tokens that activate the revision if it is an activated LoRA and its files have been checked."""
        return self._known[digest].invocation

    def is_inspecting(self, digest: str) -> bool:
        """Return whether the files of the revision are being checked."""
        return digest in self._known and self._known[digest].state is AdapterState.INSPECTING

    def changes_tower(self, digest: str) -> bool | None:
        """Return whether the revision changes modules that read images; None: its files have not been checked."""
        return self._known[digest].changes_tower

    def images_refused(self, digest: str) -> str | None:
        """Return why requests of the revision with images are refused, if its files have been checked."""
        return self._known[digest].images_refused

    def expected_wait(self, digest: str) -> float:
        """Return the seconds until a wanted revision is likely to be READY, estimated from the mean time of all loads
        so far.
        """
        resident, counters = self._known.get(digest), self.counters
        if not counters.adapter_loads or (resident and resident.state is AdapterState.READY):
            return 0.0
        loading = resident if resident and resident.state is AdapterState.LOADING else None
        spent = self.clock() - loading.loading_since if loading else 0.0
        return max(0.0, counters.adapter_load_seconds.total / counters.adapter_loads - spent)

    @property
    def resident(self) -> Collection[str]:
        """Revisions that hold pages: READY or LOADING."""
        return self._resident.keys()

    def resident_pages(self) -> dict[str, int]:
        """Return the pages of every revision that is READY or LOADING."""
        return {digest: self._known[digest].num_pages for digest in self._resident}

    def activated(self) -> list[str]:
        """Return the revisions among them that are activated LoRAs."""
        return [digest for digest in self._resident if self._known[digest].invocation is not None]

    @property
    def kept(self) -> Collection[str]:
        """Revisions that permanent pins hold."""
        return self._kept.keys()

    @property
    def awaits_any(self) -> bool:
        """True if a request waits for a revision that is not READY."""
        return bool(self._awaited)

    @property
    def num_loading(self) -> int:
        """Number of running loads."""
        return self._loading.total()

    def may_load(self, tenant: str) -> bool:
        """Return whether a place among the loads is free for `tenant`."""
        places = self._policy.max_loading
        return self.num_loading < places and self._loading[tenant] < max(1, places - 1)

    @property
    def now(self) -> float:
        """The present time in half-lives, the unit of recency."""
        return self.clock() / self._policy.half_life

    @property
    def eviction_candidate(self) -> Resident | None:
        """The unpinned revision to evict first: if possible a revision without cached KV, then a revision that no
        request waits for.
        """
        return self._by_score.first()

    def eviction_order(self, limit: int) -> list[Resident]:
        """Return the `limit` unpinned revisions to evict first."""
        return self._by_score.peek(limit)

    def retention_score(self, resident: Resident) -> float:
        """Return the expected saving of one of its pages, as log2."""
        return resident.retention_score(self._policy.overhead_pages)

    def pinned_pages(self, candidate: str | None = None) -> int:
        """Return the number of pages of all revisions in use, claimed or loading, including `candidate`."""
        pinned = self._pool.num_taken(PageUse.ADAPTER) - self.idle_pages
        resident = self._known.get(candidate) if candidate else None
        if resident is None or (resident.pages and candidate not in self._idle):
            return pinned
        return pinned + resident.num_pages

    def kept_pages(self, besides: str | None = None) -> int:
        """Return the pages that permanent pins hold, without those of `besides`."""
        if not self._kept:
            return 0
        return sum(pages for digest, pages in self._kept.items() if digest != besides)

    # requests come and go

    def acquire(self, ref: AdapterRef) -> None:
        """Note a use of `ref`, as `want` does, and count the use and if the revision was READY."""
        self.want(ref)
        resident = self._known[ref.digest]
        resident.recency = used_at(resident.recency, self.now)
        is_ready = resident.state is AdapterState.READY
        self.counters.adapter_hits += is_ready
        self.counters.adapter_misses += not is_ready

    def want(self, ref: AdapterRef) -> None:
        """Keep `ref` known until `release`: start an inspection if the revision's size is unknown, and retry a FAILED
        revision after its quarantine. A retired revision stays retired while an earlier request wants it.
        """
        resident = self._known.get(ref.digest)
        if resident is None:
            resident = self._known[ref.digest] = Resident(ref)
            self._inspect(resident)
        elif resident.state is AdapterState.FAILED and self.clock() >= resident.retry_at:
            self._inspect(resident)
        self._count_unwanted(resident, -1)
        resident.is_retired = resident.is_retired and resident.wanted_by > 0
        resident.wanted_by += 1
        self._count_unwanted(resident, +1)
        self._note_awaited(resident)
        self._dormant.pop(ref.digest, None)

    def release(self, digest: str) -> None:
        """Note that a request for the revision has ended."""
        resident = self._known[digest]
        self._count_unwanted(resident, -1)
        resident.wanted_by -= 1
        self._count_unwanted(resident, +1)
        self._note_awaited(resident)
        self._rank(resident)
        self._forget_if_unneeded(resident)

    def load(self, digest: str, tenant: str, *, claimed: bool = False) -> None:
        """Start to load a KNOWN revision for `tenant`. The revision's pages must be free."""
        resident = self._known[digest]
        resident.pages = self._pool.take(resident.num_pages, PageUse.ADAPTER)
        self._resident[digest] = None
        self._loading[tenant] += 1
        resident.state = AdapterState.LOADING
        resident.loading_for = tenant
        resident.is_claimed = claimed
        resident.loading_since = self.clock()
        self._start(resident, self._store.fill(resident.ref, resident.pages))

    def release_claim(self, digest: str) -> None:
        """Unpin a revision that was loaded for a sequence: the sequence runs now, or will not run."""
        if (resident := self._known.get(digest)) is not None and resident.is_claimed:
            resident.is_claimed = False
            self._update_idle(resident)
            self._forget_if_unneeded(resident)

    def pin(self, digest: str) -> int:
        """Keep a READY revision until it is unpinned as often as pinned; return its slot."""
        resident = self._known[digest]
        assert resident.slot is not None, "only a READY revision is pinned"
        resident.users += 1
        self._update_idle(resident)
        return resident.slot

    def unpin(self, digest: str) -> None:
        """Undo one `pin`; the weights stay until their pages are needed."""
        resident = self._known[digest]
        resident.users -= 1
        self._update_idle(resident)
        self._forget_if_unneeded(resident)

    def keep(self, digest: str) -> None:
        """Pin a READY revision permanently, until `unkeep`."""
        self.pin(digest)
        self._kept[digest] = self.num_pages(digest)

    def unkeep(self, digest: str) -> None:
        """Undo `keep`."""
        del self._kept[digest]
        self.unpin(digest)

    @property
    def next_timeout(self) -> float:
        """Time of the next check of a running job; inf if there is none."""
        return self._timeouts[0][0] if self._timeouts else math.inf

    def poll(self) -> list[str]:
        """Take over inspections and loads that have ended; return their revisions."""
        self._cancel_expired()
        digests = []
        while not self._ended.empty():
            resident = self._ended.get()
            self._conclude(resident)
            digests.append(resident.ref.digest)
        while self._timeouts and self._timeouts[0][2].done():
            heapq.heappop(self._timeouts)
        return digests

    def evict(self, resident: Resident) -> None:
        """Give back the pages of an unpinned revision; a later request loads it again."""
        self._release_pages(resident, AdapterState.KNOWN)
        self.counters.adapter_evictions += 1
        self._forget_if_unneeded(resident)

    def add_tree(self, digest: str) -> None:
        """Count a new prefix tree with cached KV of the revision."""
        self._known[digest].num_trees += 1

    def remove_tree(self, digest: str) -> None:
        """Count off a prefix tree under it that has become empty."""
        if resident := self._known.get(digest):
            resident.num_trees -= 1
            self._rank(resident)
            self._forget_if_unneeded(resident)

    def retire(self, digest: str) -> None:
        """Free the pages of a deleted revision as soon as nothing uses them."""
        if resident := self._known.get(digest):
            resident.is_retired = True
            self._forget_if_unneeded(resident)

    # loads and inspections

    def limit(self, job: StoreJob[Any]) -> None:
        """Cancel a job of the store if it takes longer than `load_timeout` after a thread has begun it."""
        self._look_again(self.clock() + self._policy.load_timeout, job)

    def error_of(self, job: StoreJob[Any]) -> BaseException | None:
        """Return why a job that has ended failed; None: it has a result."""
        if job.cancelled():
            return TimeoutError(f"its files could not be read within {self._policy.load_timeout:g} seconds.")
        return job.exception()

    def _inspect(self, resident: Resident) -> None:
        resident.state = AdapterState.INSPECTING
        self._start(resident, self._store.inspect(resident.ref))

    def _start(self, resident: Resident, pending: StoreJob[Inspected] | StoreJob[int]) -> None:
        resident.pending = pending

        def end(_: Future[Inspected] | Future[int]) -> None:
            # The entry is added before the wake-up. In the opposite order the loop could find no entry and sleep.
            self._ended.put(resident)
            self._wake()

        pending.add_done_callback(end)
        self.limit(pending)

    def _look_again(self, at: float, pending: StoreJob[Any]) -> None:
        self._num_jobs += 1
        heapq.heappush(self._timeouts, (at, self._num_jobs, pending))

    def _cancel_expired(self) -> None:
        """Cancel jobs that began too long ago. A job that is writing cannot be cancelled; it ends soon, because writing
        does not wait.
        """
        now, timeout = self.clock(), self._policy.load_timeout
        while self.next_timeout <= now:
            _, _, pending = heapq.heappop(self._timeouts)
            if pending.done():
                continue
            started_at = pending.started_at
            ends_at = (now if started_at is None else started_at) + timeout
            if ends_at > now or not pending.cancel():
                self._look_again(max(ends_at, now + timeout / 8), pending)

    def _conclude(self, resident: Resident) -> None:
        pending, resident.pending = resident.pending, None
        assert pending is not None, "a resident has one task at a time"
        if resident.state is AdapterState.LOADING:
            self._loading[resident.loading_for] -= 1
            self._loading += Counter()  # removes tenants without loads
        if error := self.error_of(pending):
            self._fail(resident, error)
        elif isinstance(result := pending.result(), Inspected):
            resident.num_pages, resident.invocation, resident.changes_tower, resident.images_refused = result
            resident.state = AdapterState.KNOWN
        else:
            resident.slot, resident.state, resident.failures = result, AdapterState.READY, 0
            self._update_idle(resident)
            self.counters.adapter_loads += 1
            resident.ready_at = self.clock()
            self.counters.adapter_load_seconds.observe(resident.ready_at - resident.loading_since)
        self._note_awaited(resident)
        self._forget_if_unneeded(resident)

    def _fail(self, resident: Resident, error: BaseException) -> None:
        self.counters.adapter_load_failures += 1
        resident.failures += 1
        resident.retry_at = self.clock() + self._policy.quarantine(resident.failures)
        resident.reason = str(error)
        resident.is_claimed = False
        self._release_pages(resident, AdapterState.FAILED)

    # which pages may be evicted

    def _update_idle(self, resident: Resident) -> None:
        digest = resident.ref.digest
        idle = resident.state is AdapterState.READY and not (resident.users or resident.is_claimed)
        if idle == (digest in self._idle):
            return
        if idle:
            self._idle[digest] = resident
            self.idle_pages += resident.num_pages
            self._count_unwanted(resident, +1)
            self._by_score.put(resident)
        else:
            self._count_unwanted(resident, -1)
            del self._idle[digest]
            self.idle_pages -= resident.num_pages
            self._by_score.drop(resident)

    def _count_unwanted(self, resident: Resident, times: int) -> None:
        if not resident.wanted_by and resident.ref.digest in self._idle:
            self.unwanted_pages += times * resident.num_pages

    def _note_awaited(self, resident: Resident) -> None:
        if resident.wanted_by and resident.state is not AdapterState.READY:
            self._awaited.add(resident.ref.digest)
        else:
            self._awaited.discard(resident.ref.digest)

    def _rank(self, resident: Resident) -> None:
        """Rank the revision again after a change that made it easier to evict."""
        if resident in self._by_score:
            self._by_score.put(resident)

    def _release_pages(self, resident: Resident, state: AdapterState) -> None:
        assert not resident.users, "only an unpinned revision may lose its pages"
        resident.state = state
        self._update_idle(resident)
        if resident.slot is not None:
            self._store.drop(resident.slot)
        self._resident.pop(resident.ref.digest, None)
        self._pool.give_back(resident.pages, PageUse.ADAPTER)
        resident.pages, resident.slot = [], None
        self._note_awaited(resident)

    def _forget_if_unneeded(self, resident: Resident) -> None:
        """Forget a retired revision. Make a revision dormant if it holds no pages and no KV, and forget the revision
        that has been dormant longest.
        """
        if resident.users or resident.wanted_by or resident.pending or resident.is_claimed:
            return
        digest = resident.ref.digest
        if resident.is_retired:
            self._release_pages(resident, AdapterState.KNOWN)
            del self._known[digest]
            self._dormant.pop(digest, None)
            self._store.forget(digest)
        elif not (resident.pages or resident.num_trees):
            self._dormant[digest] = resident
            self._dormant.move_to_end(digest)
            if len(self._dormant) > MAX_DORMANT:
                oldest, _ = self._dormant.popitem(last=False)
                del self._known[oldest]
