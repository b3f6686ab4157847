"""The pool's room: what is free, and what can be freed of cached KV and idle adapters, the least worthy first."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.pages import PagePool, PageUse
from loramux.engine.prefix_cache import PrefixCache
from loramux.engine.prefix_tree import CachedPage
from loramux.engine.residency import Residency
from loramux.engine.resident import Resident
from loramux.engine.swap import Swap


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by use at one moment."""

    total: int
    kv: int
    """Of running sequences, shared ones counted once."""
    kv_cached: int
    """Kept, and in nobody's use."""
    adapters: int
    """In use or loading."""
    adapters_idle: int
    free: int


class Memory:
    """KV and adapters compete for the same pages: whatever saves least, for the pages it takes, goes first.

    Only leaves go: KV that nothing builds on, and revisions without cached KV under them. On demand only, no timers.
    """

    def __init__(self, pool: PagePool, residency: Residency, cache: PrefixCache, swap: Swap) -> None:
        self.residency = residency
        self.cache = cache
        self.swap = swap
        self._pool = pool
        self._kept: dict[str, int] = {}

    @property
    def counts(self) -> PageCounts:
        """Pages by use."""
        pool, cached, idle = self._pool.counts, self.cache.num_idle, self.residency.idle_pages
        return PageCounts(pool.total, pool.kv - cached, cached, pool.adapters - idle, idle, pool.free)

    @property
    def num_kv(self) -> int:
        """Pages of KV that running sequences hold, shared ones counted once."""
        return self._pool.num_taken(PageUse.KV) - self.cache.num_idle

    def take_kv(self, num_pages: int) -> list[int] | None:
        """Pages for KV, evicting what is idle; None where that is not enough."""
        return self._pool.take(num_pages, PageUse.KV) if self._make_room(num_pages) else None

    def load(self, digest: str, *, spare_wanted: bool, leave_free: int) -> bool:
        """Start to load a KNOWN revision; False when its pages, or a turn, cannot be had at this moment.

        `leave_free` more pages must be left; with `spare_wanted` no revision that others wait for is evicted for it.
        """
        if self.residency.saturated:
            return False
        if not self._make_room(self.residency.size(digest) + leave_free, spare_wanted=spare_wanted):
            return False
        self.residency.load(digest)
        return True

    def keep(self, digest: str) -> None:
        """Pin a READY revision, whether it is asked for or not, until `let_go`."""
        self._kept[digest] = self.residency.size(digest)
        self.residency.pin(digest)

    def let_go(self, digest: str) -> None:
        """It is as any other again."""
        del self._kept[digest]
        self.residency.unpin(digest)

    def kept_pages(self, besides: str | None = None) -> int:
        """Pages that revisions hold whether they are asked for or not."""
        return sum(pages for digest, pages in self._kept.items() if digest != besides)

    def retire(self, digest: str) -> None:
        """The revision was deleted: free its pages, and those of its KV, as soon as nothing uses them."""
        self.cache.retire(digest)
        self.residency.retire(digest)

    def unwant(self, digest: str) -> None:
        """A request that wanted the revision has ended; a retired one's last takes with it what it left cached."""
        self.residency.unwant(digest)
        if not self.residency.knows(digest):
            self.cache.retire(digest)

    def _make_room(self, num_pages: int, *, spare_wanted: bool = False) -> bool:
        """Evict until `num_pages` are free; whether they are. Nothing is evicted where that would not do."""
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
        """The least worthy leaf; a revision that somebody waits for only where there is no other."""
        page, resident = self.cache.least_worthy, self.residency.least_worthy
        if resident is not None and not resident.num_trees and (page is None or self._rather(resident, page)):
            self.residency.evict(resident)
        else:
            assert page is not None, "whatever is idle has leaves"
            self.cache.evict(page)

    def _rather(self, resident: Resident, page: CachedPage) -> bool:
        """Whether the revision is to go before the page."""
        return not resident.interested and self.residency.worth(resident) < self.cache.worth(page)
