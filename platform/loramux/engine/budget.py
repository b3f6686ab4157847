"""One budget for KV and adapters, in pages. Every question here is pure; only the scheduler acts on the answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from loramux.engine.prefix_tree import CachedPage
from loramux.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Budget:
    """What the pool can still promise."""

    num_pages: int
    block_size: int
    watermark_share: float = 0.01
    """Share of the pool kept free at admission, so that rounding and outlived estimates rarely cost a preemption."""
    reserve_share: float = 0.05
    """Share of the pool, and of the rows, that only those may take who hold less than that: whoever comes newly into a
    full house gets in without waiting for, or preempting, anybody."""

    @property
    def watermark(self) -> int:
        """Pages kept free at admission."""
        return int(self.num_pages * self.watermark_share)

    @property
    def reserve(self) -> int:
        """Pages kept for small holders."""
        return int(self.num_pages * self.reserve_share)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def kv_peak(self, sequences: Iterable[Sequence], reused: Items[CachedPage] = ()) -> int:
        """The most pages the sequences hold at once if each generates what it is expected to, one token a step.

        The sum peaks when one of them ends: when the i-th longest ends, it and the i - 1 longer ones have all grown by
        the `left` tokens that it had left. A sequence of q full pages and r tokens then holds
        q + ceil((r + left) / block_size), so it is enough to count the longer ones by r. O(n log n + n * block_size).

        A page that several of them share is counted for the one that holds it longest, so the sum stays exact. `reused`
        are pages that one of them does not hold yet and will.
        """
        size = self.block_size
        remainders = [0] * size
        full_pages, peak, already = 0, 0, 0
        counted: set[CachedPage] = set()
        about_to = set(reused)
        runs = sorted(((s.likely_left, len(s.token_ids), s.trail) for s in sequences), key=itemgetter(0), reverse=True)
        for count, (left, held, trail) in enumerate(runs, start=1):
            full_pages += held // size
            remainders[held % size] += 1
            if trail and (trail[0].users > 1 or trail[0] in about_to):
                already = _length_inside(trail, counted, already)
                full_pages -= already
                for page in islice(trail, already, None):
                    if page.users < 2 and page not in about_to:
                        break
                    counted.add(page)
            grown, rest = divmod(left, size)
            over = sum(remainders[size - rest + 1 :]) if rest else -remainders[0]
            peak = max(peak, full_pages + count * (grown + 1) + over)
        return peak

    def fits_alone(self, num_tokens: int, adapter_pages: int) -> bool:
        """Whether a request of `num_tokens` (prompt and output) could ever run, in an otherwise empty pool."""
        return self.pages_for(num_tokens) + adapter_pages <= self.num_pages

    def holds_all(self, most_pages: int, candidate: Sequence, reserved: int) -> bool:
        """Whether there is room however long `candidate` gets, and those that run, which then hold `most_pages`."""
        return most_pages + self.pages_for(candidate.max_len) <= self.num_pages - self.watermark - reserved

    def admits(self, candidate: Sequence, running: Items[Sequence], adapter_pages: int, reserved: int = 0) -> bool:
        """Whether `candidate` may join: the peak of KV, and the adapters in use (its own included), stay in the pool.

        Adapters and cached KV that nobody uses are evictable and therefore not counted, unless they are what the
        candidate would use; what it shares with those that run costs it nothing. `reserved` pages are kept from it. An
        empty house admits whatever fits alone.
        """
        if not running:
            return self.kv_peak([candidate]) + adapter_pages <= self.num_pages
        limit = self.num_pages - self.watermark - reserved - adapter_pages
        found = bisect_left(candidate.trail, True, key=_unused)
        if sum(map(_own_pages, running)) + self.pages_for(len(candidate.token_ids)) - found > limit:
            return False  # spares most of the asking in a full house
        if sum(map(self._pages_at_end, running)) + self._pages_at_end(candidate) <= limit:
            return True  # and most of it in an empty one: nobody can hold more than what it ends with
        return self.kv_peak([*running, candidate], candidate.trail[:found]) <= limit

    def _pages_at_end(self, sequence: Sequence) -> int:
        return self.pages_for(len(sequence.token_ids) + sequence.likely_left)


def _unused(page: CachedPage) -> bool:
    return not page.users


def _unshared(page: CachedPage) -> bool:
    return page.users < 2


def _own_pages(sequence: Sequence) -> int:
    """Pages that no other sequence uses."""
    trail = sequence.trail
    shared = bisect_left(trail, True, key=_unshared) if trail and trail[0].users > 1 else 0
    return len(sequence.pages) - shared


def _length_inside(trail: Items[CachedPage], counted: set[CachedPage], guess: int) -> int:
    """How many pages of `trail`, from its beginning, are in `counted`; cheap where it is as many as guessed."""
    if guess < len(trail) and trail[guess] not in counted and (not guess or trail[guess - 1] in counted):
        return guess
    return bisect_left(trail, True, key=lambda page: page not in counted)
