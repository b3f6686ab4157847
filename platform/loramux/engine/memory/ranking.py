"""A priority queue whose ranks change while items are queued, and a measure of recent use that needs no refresh.

`RankedItems` is a binary heap with lazy repair. An entry whose rank has grown since it was pushed is pushed down again
when it reaches the top; a dropped entry is discarded when it reaches the top. So a growing rank costs nothing, and
`first` is O(log n) amortised. If a rank falls, the caller must call `put`.

`recency` is the logarithm of a use count that decays by half every half-life (the "aging" of
GreedyDual-Size-Frequency). Because all items decay at the same rate, the number is stored relative to a fixed origin:
it changes only when the item is used, and items keep their order while time passes. With this measure, eviction is
O(log n) and needs no timer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    """A rank."""

    def __lt__(self, other: Any, /) -> bool: ...


ItemT = TypeVar("ItemT")
RankT = TypeVar("RankT", bound=Ordered)


class RankedItems(Generic[ItemT, RankT]):
    """Items by a rank that mostly grows, the lowest first."""

    def __init__(self, rank: Callable[[ItemT], RankT]) -> None:
        self._rank = rank
        self._heap: list[tuple[RankT, int, ItemT]] = []
        self._tickets: dict[ItemT, int] = {}
        """The number of each item's valid entry; an entry with another number is stale."""
        self._next_ticket = count()

    def __contains__(self, item: ItemT) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, item: ItemT) -> None:
        """Add `item`, or rank it again after its rank has fallen."""
        ticket = self._tickets[item] = next(self._next_ticket)
        heapq.heappush(self._heap, (self._rank(item), ticket, item))
        # A rebuild removes more than half of the entries, so its cost for each `put` is constant, amortised.
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._discard_stale_entries()

    def drop(self, item: ItemT) -> None:
        """Remove `item` if the queue contains it."""
        self._tickets.pop(item, None)

    def first(self) -> ItemT | None:
        """Return the lowest item; among equal items, the item that was put first."""
        while self._heap:
            rank, ticket, item = self._heap[0]
            if self._tickets.get(item) != ticket:
                heapq.heappop(self._heap)
            elif rank < (now := self._rank(item)):
                heapq.heapreplace(self._heap, (now, ticket, item))
            else:
                return item
        return None

    def lowest(self, suits: Callable[[ItemT], bool], limit: int, up_to: RankT) -> ItemT | None:
        """Return the lowest item that `suits`, among the `limit` lowest whose rank is at most `up_to`."""
        passed: list[tuple[RankT, int, ItemT]] = []
        found = None
        while len(passed) < limit and (item := self.first()) is not None and not up_to < self._heap[0][0]:
            if suits(item):
                found = item
                break
            passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def peek(self, limit: int) -> list[ItemT]:
        """Return the `limit` lowest items, the lowest first, and change nothing: a best-first walk down the heap.

        A stored rank is a lower bound of the current rank, and no entry is below its parent. So an item whose current
        rank has reached the front of the walk is the next item. The walk is bounded: if many entries are stale, it
        returns fewer items.
        """
        front: list[tuple[RankT, int, int, bool]] = []  # rank, ticket, place in the heap, is the rank current?
        if self._heap:
            front.append((self._heap[0][0], self._heap[0][1], 0, False))
        found: list[ItemT] = []
        for _ in range(16 * limit + 64):
            if not front or len(found) == limit:
                break
            _, ticket, place, is_present = heapq.heappop(front)
            item = self._heap[place][2]
            if is_present:
                found.append(item)
                continue
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap):
                    heapq.heappush(front, (self._heap[child][0], self._heap[child][1], child, False))
            if self._tickets.get(item) == ticket:
                heapq.heappush(front, (self._rank(item), ticket, place, True))
        return found

    def _discard_stale_entries(self) -> None:
        self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


NEVER_USED = float("-inf")
"""Recency of an item that was never used."""


def used_at(recency: float, now: float, log2_uses: float = 0.0) -> float:
    """Return the new recency of an item that had `recency` and is used 2**log2_uses times at `now`.

    A recency is log2 of the sum of 2**(time) over the item's uses. Times are in half-lives.
    """
    now += log2_uses
    high, low = (recency, now) if recency > now else (now, recency)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))
