"""The one pool of pages that KV and adapters share, as plain integers: memory itself is the runner's."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PageUse(enum.StrEnum):
    """What a page is taken for."""

    KV = "kv"
    ADAPTER = "adapter"


class OutOfPages(RuntimeError):
    """More pages were taken than are free: the caller did not ask the budget first."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by use at one moment."""

    total: int
    kv: int
    adapters: int

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self.total - self.kv - self.adapters


class PagePool:
    """Hands out page ids; every page has exactly one holder or none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = dict.fromkeys(PageUse, 0)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def num_taken(self, use: PageUse) -> int:
        """Pages held for `use`."""
        return self._taken[use]

    @property
    def counts(self) -> PoolCounts:
        """Pages by use."""
        return PoolCounts(self.num_pages, self._taken[PageUse.KV], self._taken[PageUse.ADAPTER])

    def take(self, count: int, use: PageUse) -> list[int]:
        """`count` page ids; raises OutOfPages and takes none when fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted for {use}, {len(self._free)} of {self.num_pages} free")
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        self._taken[use] += count
        return taken

    def give_back(self, pages: list[int], use: PageUse) -> None:
        """Return pages taken for `use`."""
        self._free.extend(reversed(pages))
        self._taken[use] -= len(pages)
        assert self._taken[use] >= 0, "a page was given back twice"
