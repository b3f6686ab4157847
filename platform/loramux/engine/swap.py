"""KV of preempted sequences in the host's memory, where the way there and back takes less than computing it again."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from loramux.engine.page_costs import PageCosts
from loramux.engine.sequence import Sequence


class HostKv(Protocol):
    """Places for pages of KV outside the pool, numbered from 0.

    A copy is in the order of the steps: behind those that were launched before it was asked for, and before those that
    are launched later. So whoever asked may give the pages, or the places, to somebody else at once.
    """

    num_places: int
    seconds_per_page: float
    """Of a copy one way, as measured."""

    def save(self, pages: Items[int], places: Items[int]) -> None:
        """Copy each page to its place."""

    def restore(self, places: Items[int], pages: Items[int]) -> None:
        """Copy each place to its page."""


class Swap:
    """Who has KV in the host's memory. A place belongs to one sequence at a time, which alone ever reads it."""

    def __init__(self, host: HostKv | None, costs: PageCosts) -> None:
        """Before the steps' pace is known nothing is swapped. Without a `host` nothing ever is."""
        self.num_out = 0
        """Pages copied to the host since the start."""
        self.num_back = 0
        """Pages copied back into the pool since the start."""
        self.num_places = host.num_places if host else 0
        self._host = host
        self._costs = costs
        self._free = list(range(self.num_places - 1, -1, -1))

    @property
    def num_held(self) -> int:
        """Places in use."""
        return self.num_places - len(self._free)

    def pays(self, sequence: Sequence) -> bool:
        """Whether the KV of `sequence` is sooner carried out and back than computed again."""
        if (carrying := self._costs.carrying_seconds) is None:
            return False
        return 2.0 * self._pages_of(sequence) * carrying < self._costs.computing_seconds(sequence.num_computed)

    def save(self, sequence: Sequence) -> None:
        """`sequence` is about to lose its pages: keep what is in them, where that pays and there is room."""
        pages = sequence.pages[: self._pages_of(sequence)]
        if self._host is None or not (0 < len(pages) <= len(self._free) and self.pays(sequence)):
            return
        assert not sequence.places, "what was carried out has come back before it is carried out again"
        split = len(self._free) - len(pages)
        sequence.places, sequence.num_saved = self._free[split:], sequence.num_computed
        del self._free[split:]
        self._host.save(pages, sequence.places)
        self.num_out += len(pages)

    def restore(self, sequence: Sequence) -> None:
        """`sequence` runs again and has pages for all that was saved: fill those that the prefix cache had not."""
        found = len(sequence.trail)
        if self._host is not None and (places := sequence.places[found:]):
            self._host.restore(places, sequence.pages[found : found + len(places)])
            self.num_back += len(places)
        sequence.num_computed = max(sequence.num_computed, sequence.num_saved)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """What `sequence` has in the host's memory is needed no more."""
        self._free += reversed(sequence.places)
        sequence.places, sequence.num_saved = [], 0

    def _pages_of(self, sequence: Sequence) -> int:
        return -(-sequence.num_computed // self._costs.block_size)
