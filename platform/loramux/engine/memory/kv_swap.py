"""KV of preempted sequences in the host's memory, where copying it out and back takes less than computing it again.

vLLM's swapping, with the choice made by two measured times (decision 0016): 2 x pages x seconds a page takes over the
link against the seconds that the tokens take to compute. A slot belongs to one waiting sequence, which alone ever reads
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loramux.engine.memory.pages import PageCosts, SequenceKv
from loramux.engine.metrics import Counters


class HostKv(Protocol):
    """Slots for pages of KV outside the pool, numbered from 0.

    A copy is in the order of the steps: behind those that were launched before it was asked for, and before those that
    are launched later. So the caller may give the pages, or the slots, to another sequence at once.
    """

    num_slots: int
    seconds_per_page: float
    """Measured seconds to copy a page one way."""

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""


class KvSwap:
    """Saves the KV of sequences that are preempted and restores it when they run again."""

    def __init__(self, host: HostKv | None, costs: PageCosts, counters: Counters) -> None:
        """Nothing is swapped before the steps' time is known, or without a `host`."""
        self.num_slots = host.num_slots if host else 0
        self._host = host
        self._costs = costs
        self._counters = counters
        self._free = list(range(self.num_slots - 1, -1, -1))

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return self.num_slots - len(self._free)

    def pays(self, sequence: SequenceKv) -> bool:
        """Is the KV of `sequence` sooner copied out and back than computed again?"""
        if (copying := self._costs.copy_seconds) is None:
            return False
        return 2.0 * self._num_pages(sequence) * copying < self._costs.compute_seconds(sequence.num_computed)

    def save(self, sequence: SequenceKv) -> None:
        """Copy out the KV of a `sequence` that is about to lose its pages, where that pays and slots are free."""
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
        """Fill the pages of a `sequence` that runs again, but for those that the prefix cache had."""
        found = len(sequence.prefix_pages)
        if self._host is not None and (slots := sequence.swap_slots[found:]):
            self._host.restore(slots, sequence.pages[found : found + len(slots)])
            self._counters.kv_pages_swapped_in += len(slots)
        sequence.num_computed = max(sequence.num_computed, sequence.num_saved)
        self.discard(sequence)

    def discard(self, sequence: SequenceKv) -> None:
        """Free the slots of `sequence`."""
        self._free += reversed(sequence.swap_slots)
        sequence.swap_slots, sequence.num_saved = [], 0

    def _num_pages(self, sequence: SequenceKv) -> int:
        return -(-sequence.num_computed // self._costs.block_size)
