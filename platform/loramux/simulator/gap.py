"""How far service drifts apart between parties that wait at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from loramux.engine.fairness import Account


@dataclass(slots=True)
class _Pair:
    """One pair's difference of received service since both wait: where it started from matters not, its range does."""

    lifts: tuple[float, float]
    lowest: float
    highest: float


class ServiceGap:
    """The largest difference, over any interval in which two parties both waited, between what they received.

    In units over weight. VTC (OSDI 2024) calls it the accumulated service difference of backlogged clients.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._pairs: dict[tuple[Account, Account], _Pair] = {}

    def observe(self, waiting: Iterable[Account]) -> None:
        """Once a step, with those that have eligible work waiting, in an order that stays the same."""
        pairs = {}
        for one, other in combinations(waiting, 2):
            difference = one.received - other.received
            pair = self._pairs.get((one, other))
            if pair is None or pair.lifts != (one.lifted, other.lifted):
                pair = _Pair((one.lifted, other.lifted), difference, difference)
            pair.lowest, pair.highest = min(pair.lowest, difference), max(pair.highest, difference)
            self.largest = max(self.largest, pair.highest - pair.lowest)
            pairs[one, other] = pair
        self._pairs = pairs
