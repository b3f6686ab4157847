"""Items in order of a number of their own, the lowest first, and how use makes that number grow."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    """What can be ranked by."""

    def __lt__(self, other: Any, /) -> bool: ...


ItemT = TypeVar("ItemT")
RankT = TypeVar("RankT", bound=Ordered)


class Ranking(Generic[ItemT, RankT]):
    """Items by a rank that mostly grows; one that has grown is mended when it surfaces.

    Whoever lowers an item's rank puts it again.
    """

    def __init__(self, rank: Callable[[ItemT], RankT]) -> None:
        self._rank = rank
        self._heap: list[tuple[RankT, int, ItemT]] = []
        self._tickets: dict[ItemT, int] = {}
        self._next_ticket = count()

    def __contains__(self, item: ItemT) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, item: ItemT) -> None:
        """Rank `item`, or rank it anew."""
        ticket = self._tickets[item] = next(self._next_ticket)
        heapq.heappush(self._heap, (self._rank(item), ticket, item))
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._sweep()

    def drop(self, item: ItemT) -> None:
        """Take `item` out; nothing happens where it is not in."""
        self._tickets.pop(item, None)

    def first(self) -> ItemT | None:
        """The lowest; of equals, the one put first."""
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
        """The lowest that `suits`, of the `limit` lowest whose rank is not above `up_to`."""
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

    def _sweep(self) -> None:
        """Forget what was dropped or put again and has never surfaced since."""
        self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


def warmed(heat: float, now: float, use: float = 0.0) -> float:
    """`heat` after a use at `now`; `use` is its log2, where it counts for more or less than one.

    Heat is log2 of a thing's uses, each counted 2 ** when, times in half-lives: as time passes, all things cool at the
    same rate, so that their order changes only by use.
    """
    now += use
    high, low = (heat, now) if heat > now else (now, heat)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))


COLD = float("-inf")
"""The heat of what was never used."""
