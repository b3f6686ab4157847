"""The page budget: the most pages that a set of sequences will hold at once, exactly, and whether one more fits.

The bound of vLLM and S-LoRA is every sequence at its longest, which leaves a third of a pool unused. The peak of
sequences that grow by a token a step and end one after the other is lower, and can be computed exactly: see `kv_peak`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from loramux.engine.memory.pages import CachedPage
from loramux.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The pool's size and the shares that admission leaves free. Every question is pure."""

    num_pages: int
    block_size: int
    state_pages: int = 0
    """Pages in front of a sequence's KV, which hold its recurrent states (`execution.linear_attention`)."""
    watermark_share: float = 0.01
    """Share of the pool kept free at admission, so that rounding and outlived estimates rarely cost a preemption."""
    reserve_share: float = 0.05
    """Share of the pool, and of the rows, that only flows holding less than that may take: a flow that comes newly into
    a full pool gets in without waiting for, or preempting, another."""

    @property
    def watermark(self) -> int:
        """Pages kept free at admission."""
        return int(self.num_pages * self.watermark_share)

    @property
    def reserve(self) -> int:
        """Pages kept for flows that hold few."""
        return int(self.num_pages * self.reserve_share)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence, and its states."""
        return self.state_pages - (-num_tokens // self.block_size)

    def tokens_in(self, num_pages: int) -> int:
        """Tokens of one sequence that `num_pages` pages hold."""
        return max(0, num_pages - self.state_pages) * self.block_size

    def kv_peak(self, sequences: Iterable[Sequence], reused: Items[CachedPage] = ()) -> int:
        """The most pages the sequences hold at once if each generates what is expected of it, one token a step.

        The sum peaks when one of them ends: when the i-th longest ends, it and the i - 1 longer ones have all grown by
        the `left` tokens that it had left. A sequence of q full pages and r tokens then holds
        q + ceil((r + left) / block_size), so it is enough to count the longer ones by r. O(n log n + n * block_size).

        A page that several of them share is counted for the one that holds it longest, so the sum stays exact. `reused`
        are pages that one of them does not hold yet and will. Sequences whose drafts are accepted grow faster than the
        others and are counted at their ends; then the sum is an upper bound. Drafts themselves hold no page from one
        plan to the next.
        """
        size = self.block_size
        remainders = [0] * size
        full_pages, peak, already, count = 0, 0, 0, 0
        counted: set[CachedPage] = set()
        about_to = set(reused)
        runs = sorted(
            ((s.outruns_others, s.likely_left, len(s.token_ids), s.prefix_pages) for s in sequences),
            key=itemgetter(0, 1),
            reverse=True,
        )
        for outruns, left, held, prefix in runs:
            growth = 0 if outruns else left
            if outruns:
                full_pages += self.pages_for(held + left)
            else:
                full_pages += self.state_pages + held // size
                remainders[held % size] += 1
                count += 1
            if prefix and (prefix[0].users > 1 or prefix[0] in about_to):
                already = _length_inside(prefix, counted, already)
                full_pages -= already
                for page in islice(prefix, already, None):
                    if page.users < 2 and page not in about_to:
                        break
                    counted.add(page)
            grown, rest = divmod(growth, size)
            over = sum(remainders[size - rest + 1 :]) if rest else -remainders[0]
            peak = max(peak, full_pages + count * (grown + 1) + over)
        return peak

    def fits_alone(self, num_tokens: int, adapter_pages: int) -> bool:
        """Could a request of `num_tokens` (prompt and output) ever run, in an otherwise empty pool?"""
        return self.pages_for(num_tokens) + adapter_pages <= self.num_pages

    def holds_all(self, most_pages: int, candidate: Sequence, reserved: int) -> bool:
        """Is there room however long `candidate` gets, and the others, which then hold `most_pages`?"""
        return most_pages + self.pages_for(candidate.max_len) <= self.num_pages - self.watermark - reserved

    def admits(self, candidate: Sequence, running: Items[Sequence], adapter_pages: int, reserved: int = 0) -> bool:
        """May `candidate` join: do the peak of KV and the pinned adapters (its own included) stay in the pool?

        Adapters and cached KV that are not in use are evictable and therefore not counted, unless the candidate would
        use them; pages that it shares with running sequences cost it nothing. `reserved` pages are kept from it. An
        empty pool admits whatever fits alone.
        """
        if not running:
            return self.kv_peak([candidate]) + adapter_pages <= self.num_pages
        limit = self.num_pages - self.watermark - reserved - adapter_pages
        found = bisect_left(candidate.prefix_pages, True, key=_unused)
        if sum(map(_own_pages, running)) + self.pages_for(len(candidate.token_ids)) - found > limit:
            return False  # spares most of the peaks in a full pool
        if sum(map(self._pages_at_end, running)) + self._pages_at_end(candidate) <= limit:
            return True  # and most of them in an empty one: no sequence holds more than at its end
        return self.kv_peak([*running, candidate], candidate.prefix_pages[:found]) <= limit

    def _pages_at_end(self, sequence: Sequence) -> int:
        return self.pages_for(len(sequence.token_ids) + sequence.likely_left)


def _unused(page: CachedPage) -> bool:
    return not page.users


def _unshared(page: CachedPage) -> bool:
    return page.users < 2


def _own_pages(sequence: Sequence) -> int:
    """Pages that no other sequence uses."""
    prefix = sequence.prefix_pages
    shared = bisect_left(prefix, True, key=_unshared) if prefix and prefix[0].users > 1 else 0
    return len(sequence.pages) - shared


def _length_inside(prefix: Items[CachedPage], counted: set[CachedPage], guess: int) -> int:
    """Count the leading pages of `prefix` that are in `counted`; cheap where they are as many as guessed."""
    if guess < len(prefix) and prefix[guess] not in counted and (not guess or prefix[guess - 1] in counted):
        return guess
    return bisect_left(prefix, True, key=lambda page: page not in counted)
