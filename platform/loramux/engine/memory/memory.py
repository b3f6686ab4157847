"""The room in the pool: free pages, and what can be freed of cached KV and idle adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loramux.engine.memory.kv_swap import KvSwap
from loramux.engine.memory.pages import CachedPage, PagePool, PageUse
from loramux.engine.memory.prefix_cache import PrefixCache
from loramux.engine.memory.residency import Residency, Resident


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
