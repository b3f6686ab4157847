"""The free space in the pool: evictions when pages are needed, swaps to the host, and pins.

**Room** (`Memory`): one pool for KV and adapters. When pages are needed, the page that saves the least time is evicted
first.

**Cached states** (`cache_state`, `resume`): copies of the states of linear attention and Mamba 2 at ends of cached
pages, in pages of the same pool. The architecture page says which pages have one.

**Swap** (`KvSwap`): KV of preempted sequences is kept in the host's memory if copying it out and back takes less time
than computing it again. This is vLLM's swapping, decided by two measured times (decision 0016). The first time is 2 x
pages x the seconds that a page takes over the link. The second time is that to compute the tokens. A slot belongs to
one waiting sequence, and no other sequence ever reads it.

**Pins** (`AdapterPins`): revisions that an operator or a tenant wants in the pool, even without requests. A pinned
revision is loaded as soon as enough pages are free, without evicting an adapter that a request waits for. The revision
is kept until every owner has unpinned it. All pins together may hold a limited share of the pool; other pages always
remain for traffic.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from loramux.engine.memory.pages import CachedPage, PageCosts, PagePool, PageUse, SequenceKv
from loramux.engine.memory.prefix_cache import PrefixCache
from loramux.engine.memory.residency import AdapterState, Residency, Resident
from loramux.engine.messages import AdapterRef, EngineFault, Evictable, Pinned
from loramux.engine.metrics import Counters

OPERATOR = ""
"""The owner of pins that no tenant made."""
_IN_POOL = (AdapterState.LOADING, AdapterState.READY)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by use at one moment."""

    total: int
    kv: int
    """Pages of running sequences; shared pages count once."""
    kv_cached: int
    """Pages that are cached and not in use."""
    adapters: int
    """Pages of adapters that are in use, claimed or loading."""
    adapters_idle: int
    free: int


class Memory:
    """One pool for KV and adapters. The page that saves the least time is evicted first, for both kinds of content.

    Only leaves are evicted: KV that no other KV builds on, revisions without cached KV under them, and cached states.
    No timer evicts.
    """

    def __init__(self, pool: PagePool, residency: Residency, cache: PrefixCache, swap: KvSwap) -> None:
        self.residency = residency
        self.cache = cache
        self.swap = swap
        self._pool = pool
        self._state_copies: dict[int, int] = {}
        """Pages of states to copy after the step that is being committed: targets and their sources."""

    @property
    def counts(self) -> PageCounts:
        """Pages by use."""
        pool, cached, idle = self._pool, self.cache.num_idle, self.residency.idle_pages
        kv, adapters = pool.num_taken(PageUse.KV), pool.num_taken(PageUse.ADAPTER)
        return PageCounts(pool.num_pages, kv - cached, cached, adapters - idle, idle, pool.num_free)

    def next_evictions(self, limit: int) -> list[Evictable]:
        """Return the contents that would be evicted next, in order, among the contents that can be evicted now. This
        changes no state.
        """
        # More pages than entries, because consecutive pages of one identity become one entry.
        pages, residents = self.cache.eviction_order(4 * limit), self.residency.eviction_order(limit)
        residents = [one for one in residents if not one.num_trees]
        order: list[Evictable] = []
        while len(order) < limit and (pages or residents):
            if residents and (not pages or self._goes_before(residents[0], pages[0])):
                order.append(self._eviction_of_adapter(residents.pop(0)))
                continue
            following = self._eviction_of_page(pages.pop(0))
            last = order[-1] if order else None
            if last and (last.tenant, last.digest, last.is_adapter) == (following.tenant, following.digest, False):
                order[-1] = msgspec.structs.replace(last, pages=last.pages + following.pages)
            else:
                order.append(following)
        return order

    def _eviction_of_adapter(self, one: Resident) -> Evictable:
        uses = 2.0 ** min(one.recency - self.residency.now, 64.0)
        score = self.residency.retention_score(one) - self.residency.now
        return Evictable(None, one.ref.digest, True, one.num_pages, uses, score, one.wanted_by > 0)

    def _eviction_of_page(self, page: CachedPage) -> Evictable:
        uses = 2.0 ** min(page.recency - self.residency.now, 64.0)
        score = self.cache.retention_score(page) - self.residency.now
        identity = page.tree.identity
        return Evictable(identity.tenant, identity.digest, False, len(page.state) or 1, uses, score, False)

    @property
    def num_kv(self) -> int:
        """Pages of KV that running sequences hold; shared pages count once."""
        return self._pool.num_taken(PageUse.KV) - self.cache.num_idle

    @property
    def num_spare(self) -> int:
        """Pages that are free, or hold cached KV that no sequence uses."""
        return self._pool.num_free + self.cache.num_idle

    def give_back_kv(self, pages: Iterable[int]) -> None:
        """Return pages of KV that do not belong to a cached prefix."""
        self._pool.give_back(pages, PageUse.KV)

    def take_kv(self, num_pages: int) -> list[int] | None:
        """Take pages for KV, and evict idle contents if necessary. Return None if there are still not enough pages."""
        return self._pool.take(num_pages, PageUse.KV) if self._make_room(num_pages) else None

    # states

    @property
    def caches_states(self) -> bool:
        """True if the model has states, and their copies are cached for sequences with the same beginning."""
        return self.cache.is_enabled and self.swap.state_pages > 0

    def resume(self, sequence: SequenceKv) -> None:
        """Begin to run `sequence` after its cached pages, with a copy of the states at their end."""
        self.cache.acquire(sequence)
        if not self.caches_states:
            return
        size, prefix, matched = self.cache.block_size, sequence.prefix_pages, sequence.matched_pages
        if prefix:
            cached = self.cache.take_state(prefix[-1])
            assert cached, "a look-up ends at a page with a cached state"
            # If there is no room for two, the sequence runs on the cached pages themselves.
            if own := self.take_kv(len(cached)):
                self.swap.copy(cached, own)
                self.cache.put_state(prefix[-1], cached, stays=True)
            sequence.pages[:0] = array("i", own or cached)
        # The next turn of a conversation begins with this prompt, and another prompt where two have differed before.
        borders = {len(matched), min(len(sequence.token_ids) - 1, self.cache.num_shareable(sequence)) // size}
        asks = sequence.request.pooling is None
        sequence.borders = tuple(size * pages for pages in sorted(borders) if asks and pages > len(prefix))
        sequence.matched_pages, sequence.latest_state = [], None

    def cache_state(self, sequence: SequenceKv) -> None:
        """Cache the states of `sequence` at the end of the page that it has just filled and published.

        The pages of an earlier state that does not stay are used again.
        """
        computed, prefix, latest = sequence.num_computed, sequence.prefix_pages, sequence.latest_state
        if len(prefix) * self.cache.block_size != computed or prefix[-1].tree.closed:
            return
        page, stays = prefix[-1], computed in sequence.borders
        free = self.cache.take_state(latest) if latest is not None and not latest.state_stays else []
        if page.state:
            self.give_back_kv(free)
            page.state_stays |= stays
        elif pages := free or self._take_for_state(page):
            self._state_copies |= zip(pages, sequence.pages[: len(pages)], strict=True)
            self.cache.put_state(page, pages, stays=stays)
        sequence.latest_state = page

    def copy_states(self) -> None:
        """Copy what `cache_state` has cached since the last call; later steps change the sequences' own states."""
        if self._state_copies:
            self.swap.copy(list(self._state_copies.values()), list(self._state_copies))
            self._state_copies.clear()

    def _take_for_state(self, page: CachedPage) -> list[int] | None:
        """Take pages for the states after `page` that are free or hold contents which save less. Return None if there
        are too few."""
        wanted, score = self.swap.state_pages, self.cache.score_of_state(page)
        while self._pool.num_free < wanted and self._evict_one(below=score):
            pass
        return self._pool.take(wanted, PageUse.KV) if self._pool.num_free >= wanted else None

    # adapters

    def load(self, digest: str, tenant: str, *, claimed: bool, spare_wanted: bool, leave_free: int = 0) -> bool:
        """Start to load a KNOWN revision for `tenant`; return False if its pages or a place among the running loads are
        not available now.

        In addition, `leave_free` pages must remain free. With `spare_wanted`, a revision that a request waits for is
        not evicted.
        """
        if not self.residency.may_load(tenant):
            return False
        if not self._make_room(self.residency.num_pages(digest) + leave_free, spare_wanted=spare_wanted):
            return False
        self.residency.load(digest, tenant, claimed=claimed)
        return True

    def retire(self, digest: str) -> None:
        """Free the pages of a deleted revision, and of its KV, as soon as nothing uses them."""
        self.cache.retire(digest)
        self.residency.retire(digest)

    def release(self, digest: str) -> None:
        """Note that a request for a revision has ended; the last request of a retired revision frees its KV as well."""
        self.residency.release(digest)
        if not self.residency.is_known(digest):
            self.cache.retire(digest)

    def _make_room(self, num_pages: int, *, spare_wanted: bool = False) -> bool:
        """Evict until `num_pages` are free; if that cannot be reached, evict nothing and return False."""
        pool, residency = self._pool, self.residency
        if (missing := num_pages - pool.num_free) <= 0:
            return True
        idle_adapters = residency.unwanted_pages if spare_wanted else residency.idle_pages
        if self.cache.num_idle + idle_adapters < missing:
            return False
        while pool.num_free < num_pages:
            evicted = self._evict_one()
            assert evicted, "idle pages have leaves"
        return True

    def _evict_one(self, below: float = math.inf) -> bool:
        """Evict the leaf that saves least; return False if it saves as much as `below`. A revision that a request waits
        for is evicted only if no other content is left.
        """
        page, resident = self.cache.eviction_candidate, self.residency.eviction_candidate
        if resident is not None and not resident.num_trees and (page is None or self._goes_before(resident, page)):
            if below < math.inf and (resident.wanted_by or self.residency.retention_score(resident) >= below):
                return False
            self.residency.evict(resident)
        elif page is None or self.cache.retention_score(page) >= below:
            return False
        else:
            self.cache.evict(page)
        return True

    def _goes_before(self, resident: Resident, page: CachedPage) -> bool:
        return not resident.wanted_by and self.residency.retention_score(resident) < self.cache.retention_score(page)


class HostKv(Protocol):
    """Copies of pages: within the pool, and to slots outside the pool, numbered from 0.

    Copies keep the order of the steps: a copy runs after the steps launched before its call and before the steps
    launched later. So the caller may give the pages or the slots to another sequence immediately.
    """

    num_slots: int
    seconds_per_page: float
    """Measured seconds to copy a page one way."""

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""

    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each page to another page of the pool. No page is in both lists."""


class KvSwap:
    """Saves the KV of sequences that are preempted and restores it when they run again."""

    def __init__(self, host: HostKv | None, costs: PageCosts, counters: Counters) -> None:
        """Without a `host`, or before steps were measured, no KV is swapped."""
        self.num_slots = host.num_slots if host else 0
        self._host = host
        self._costs = costs
        self._counters = counters
        self._free = list(range(self.num_slots - 1, -1, -1))

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return self.num_slots - len(self._free)

    @property
    def state_pages(self) -> int:
        """Pages of a sequence's states if pages can be copied, else 0."""
        return self._costs.state_pages if self._host is not None else 0

    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each page to another page of the pool."""
        assert self._host is not None, "without it nothing is copied"
        self._host.copy(pages, targets)

    def pays(self, sequence: SequenceKv) -> bool:
        """Return whether copying the KV of `sequence` out and back takes less time than computing it again."""
        if (copying := self._costs.copy_seconds) is None:
            return False
        # Two copies: out now, and back later.
        return 2.0 * self._num_pages(sequence) * copying < self._costs.compute_seconds(sequence.num_computed)

    def save(self, sequence: SequenceKv) -> None:
        """Copy out the KV of a `sequence` that is about to lose its pages, if this saves time and slots are free."""
        pages = sequence.pages[: self._num_pages(sequence)]
        if self._host is None or not (0 < len(pages) <= len(self._free) and self.pays(sequence)):
            return
        assert not sequence.swap_slots, "saved KV is restored before it is saved again"
        split = len(self._free) - len(pages)
        sequence.swap_slots, sequence.num_saved = self._free[split:], sequence.num_computed
        del self._free[split:]
        self._host.save(pages, sequence.swap_slots)
        self._counters.kv_pages_swapped_out += len(pages)

    def restore(self, sequence: SequenceKv) -> None:
        """Fill the pages of a `sequence` that runs again, except pages that the prefix cache had."""
        # The prefix cache may have found more tokens than were saved.
        if self._host is not None and sequence.num_computed < sequence.num_saved:
            slots, states = sequence.swap_slots, self._costs.state_pages
            first = states + len(sequence.prefix_pages)
            pages = sequence.pages[:states] + sequence.pages[first : len(slots)]
            self._host.restore(slots[:states] + slots[first:], pages)
            self._counters.kv_pages_swapped_in += len(pages)
            sequence.num_computed = sequence.num_saved
        self.discard(sequence)

    def discard(self, sequence: SequenceKv) -> None:
        """Free the slots of `sequence`."""
        self._free += reversed(sequence.swap_slots)
        sequence.swap_slots, sequence.num_saved = [], 0

    def _num_pages(self, sequence: SequenceKv) -> int:
        """Return the pages with KV and states of `sequence`."""
        pages = -(-sequence.num_computed // self._costs.block_size)
        return self._costs.state_pages + pages if pages else 0


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Bounds on the pages and revisions that pins may hold."""

    max_pages: int
    """Maximum number of pages of all pins together."""
    leave_free: int = 0
    """Pages that must stay free when a pin is loaded."""
    per_tenant: int = 2
    """Maximum number of revisions that one tenant may pin; the operator's pins are not limited."""


@dataclass(eq=False, slots=True)
class _Pin:
    owners: set[str] = field(default_factory=set)
    is_in_pool: bool = False
    claims: bool = False
    """True if the load was started for this pin: the claim keeps the revision in the pool until it is pinned."""


class AdapterPins:
    """The pins. `advance` acts between steps and reports the outcome of each pin once."""

    def __init__(self, limits: PinLimits, memory: Memory) -> None:
        self._limits = limits
        self._memory = memory
        self._residency = memory.residency
        self._pins: dict[str, _Pin] = {}
        self._outcomes: list[Pinned] = []

    def __len__(self) -> int:
        return sum(pin.is_in_pool for pin in self._pins.values())

    def pin(self, ref: AdapterRef, owner: str) -> None:
        """Keep `ref` for `owner`; a second call changes nothing."""
        held = sum(owner in pin.owners for digest, pin in self._pins.items() if digest != ref.digest)
        if owner != OPERATOR and held >= self._limits.per_tenant:
            message = f"The tenant has {held} pins; the maximum is {self._limits.per_tenant}. Unpin one first."
            self._outcomes.append(Pinned(ref.digest, owner, EngineFault("pin_limit", message)))
            return
        pin = self._pins.get(ref.digest)
        if pin is None:
            pin = self._pins[ref.digest] = _Pin()
            # A pin counts like a request: its revision is inspected, and stays known until the pin is released.
            self._residency.acquire(ref)
        pin.owners.add(owner)
        if pin.is_in_pool:
            self._outcomes.append(Pinned(ref.digest, owner))

    def unpin(self, digest: str, owner: str) -> None:
        """Release `owner`'s pin; the weights stay until their pages are needed. An unknown pin is ignored."""
        if (pin := self._pins.get(digest)) and owner in pin.owners:
            pin.owners.remove(owner)
            if not pin.owners:
                self._drop(digest)

    def retire(self, digest: str) -> None:
        """Drop the pin of a deleted revision."""
        if digest in self._pins:
            self._give_up(digest, EngineFault("adapter_failed", "The revision was deleted."))

    def advance(self) -> list[Pinned]:
        """Load pins that have room now; return the outcomes since the last call."""
        for digest, pin in list(self._pins.items()):
            if not pin.is_in_pool:
                self._advance(digest, pin)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _advance(self, digest: str, pin: _Pin) -> None:
        match self._residency.state(digest):
            case AdapterState.FAILED:
                self._give_up(digest, EngineFault("adapter_failed", self._residency.failure(digest)))
            case AdapterState.KNOWN if reason := self._excess(digest):
                self._give_up(digest, EngineFault("pin_limit", reason))
            case AdapterState.KNOWN:
                owner, free = min(pin.owners), self._limits.leave_free
                pin.claims = self._memory.load(digest, owner, claimed=True, spare_wanted=True, leave_free=free)
            case AdapterState.READY:
                pin.is_in_pool = True
                self._residency.keep(digest)
                self._release_claim(digest, pin)
                self._outcomes += [Pinned(digest, owner) for owner in sorted(pin.owners)]
            case _:
                pass

    def _excess(self, digest: str) -> str | None:
        """Return the reason why `digest` does not fit together with the pins that are loaded or loading; None if it
        fits.
        """
        limit, size = self._limits.max_pages, self._residency.num_pages(digest)
        others = [other for other in self._pins if other != digest and self._residency.state(other) in _IN_POOL]
        taken = sum(map(self._residency.num_pages, others))
        if taken + size <= limit:
            return None
        return f"The adapter takes {size} pages; {taken} of the {limit} that may be pinned are. Unpin others first."

    def _give_up(self, digest: str, fault: EngineFault) -> None:
        self._outcomes += [Pinned(digest, owner, fault) for owner in sorted(self._pins[digest].owners)]
        self._drop(digest)

    def _drop(self, digest: str) -> None:
        pin = self._pins.pop(digest)
        if pin.is_in_pool:
            self._residency.unkeep(digest)
        self._release_claim(digest, pin)
        self._memory.release(digest)

    def _release_claim(self, digest: str, pin: _Pin) -> None:
        if pin.claims:
            pin.claims = False
            self._residency.release_claim(digest)
