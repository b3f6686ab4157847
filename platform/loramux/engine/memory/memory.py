"""The room in the pool: free pages, and what can be freed of cached KV and idle adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from loramux.engine.memory.kv_swap import KvSwap
from loramux.engine.memory.pages import CachedPage, PagePool, PageUse
from loramux.engine.memory.prefix_cache import PrefixCache
from loramux.engine.memory.residency import Residency, Resident
from loramux.engine.messages import Evictable


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by use at one moment."""

    total: int
    kv: int
    """Pages of running sequences, shared ones counted once."""
    kv_cached: int
    """Cached, and not in use."""
    adapters: int
    """Pages of adapters that are in use, claimed or loading."""
    adapters_idle: int
    free: int


class Memory:
    """One pool for KV and adapters: the page that saves least goes first, whichever it is.

    Only leaves go: KV that nothing builds on, and revisions without cached KV under them. On demand only, no timers.
    """

    def __init__(self, pool: PagePool, residency: Residency, cache: PrefixCache, swap: KvSwap) -> None:
        self.residency = residency
        self.cache = cache
        self.swap = swap
        self._pool = pool

    @property
    def counts(self) -> PageCounts:
        """Pages by use."""
        pool, cached, idle = self._pool, self.cache.num_idle, self.residency.idle_pages
        kv, adapters = pool.num_taken(PageUse.KV), pool.num_taken(PageUse.ADAPTER)
        return PageCounts(pool.num_pages, kv - cached, cached, adapters - idle, idle, pool.num_free)

    def next_evictions(self, limit: int) -> list[Evictable]:
        """Return what would be evicted next, in order, of what can be evicted now. Changes nothing."""
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
                order[-1] = msgspec.structs.replace(last, pages=last.pages + 1)
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
        return Evictable(identity.tenant, identity.digest, False, 1, uses, score, False)

    @property
    def num_kv(self) -> int:
        """Pages of KV that running sequences hold, shared ones counted once."""
        return self._pool.num_taken(PageUse.KV) - self.cache.num_idle

    @property
    def num_spare(self) -> int:
        """Pages that are free, or hold cached KV that no sequence uses."""
        return self._pool.num_free + self.cache.num_idle

    def give_back_kv(self, pages: Iterable[int]) -> None:
        """Return pages of KV that no cached prefix is in."""
        self._pool.give_back(pages, PageUse.KV)

    def take_kv(self, num_pages: int) -> list[int] | None:
        """Take pages for KV, evicting what is idle; None where that is not enough."""
        return self._pool.take(num_pages, PageUse.KV) if self._make_room(num_pages) else None

    def load(self, digest: str, *, claimed: bool, spare_wanted: bool, leave_free: int = 0) -> bool:
        """Start to load a KNOWN revision; False when its pages, or a place among the loads, cannot be had now.

        `leave_free` more pages must be left; with `spare_wanted` no revision that a request waits for is evicted for
        it.
        """
        if self.residency.is_saturated:
            return False
        if not self._make_room(self.residency.num_pages(digest) + leave_free, spare_wanted=spare_wanted):
            return False
        self.residency.load(digest, claimed=claimed)
        return True

    def retire(self, digest: str) -> None:
        """Free the pages of a deleted revision, and those of its KV, as soon as nothing uses them."""
        self.cache.retire(digest)
        self.residency.retire(digest)

    def release(self, digest: str) -> None:
        """Note that a request for a revision has ended; the last one of a retired revision frees its KV as well."""
        self.residency.release(digest)
        if not self.residency.is_known(digest):
            self.cache.retire(digest)

    def _make_room(self, num_pages: int, *, spare_wanted: bool = False) -> bool:
        """Evict until `num_pages` are free, or evict nothing and return False where that would not be enough."""
        pool, residency = self._pool, self.residency
        if (missing := num_pages - pool.num_free) <= 0:
            return True
        idle_adapters = residency.unwanted_pages if spare_wanted else residency.idle_pages
        if self.cache.num_idle + idle_adapters < missing:
            return False
        while pool.num_free < num_pages:
            self._evict_one()
        return True

    def _evict_one(self) -> None:
        """Evict the leaf that saves least; a revision that a request waits for only where there is nothing else."""
        page, resident = self.cache.eviction_candidate, self.residency.eviction_candidate
        if resident is not None and not resident.num_trees and (page is None or self._goes_before(resident, page)):
            self.residency.evict(resident)
        else:
            assert page is not None, "idle pages have leaves"
            self.cache.evict(page)

    def _goes_before(self, resident: Resident, page: CachedPage) -> bool:
        return not resident.wanted_by and self.residency.retention_score(resident) < self.cache.retention_score(page)
