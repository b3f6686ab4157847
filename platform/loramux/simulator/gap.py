"""How far service drifts apart between parties that wait at the same time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loramux.engine.fairness import Account

WATCHED = 256
"""Parties watched at once: the work grows with the square. Where more wait, the first that came are watched."""


class ServiceGap:
    """The largest difference, over any interval in which two parties both waited, between what they received.

    In units over weight. VTC (OSDI 2024) calls it the accumulated service difference of backlogged clients. What one
    pair's difference was when both began to wait matters not, its range since then does.
    """

    def __init__(self, watched: int = WATCHED) -> None:
        self.largest = 0.0
        self._places: dict[Account, int] = {}
        self._free = list(range(watched - 1, -1, -1))
        self._lifted = np.zeros(watched)
        self._highest = np.zeros((watched, watched))
        """Of row minus column; the lowest is minus the highest of column minus row."""

    def observe(self, waiting: Iterable[Account]) -> None:
        """Once a step, with those that have eligible work waiting."""
        accounts = list(waiting)
        self._forget_all_but(accounts)
        if len(accounts) < 2:
            return
        news = [account for account in accounts if account not in self._places][: len(self._free)]
        for account in news:
            self._places[account] = self._free.pop()
        watched = [account for account in accounts if account in self._places]
        self._measure(watched, news)

    def _forget_all_but(self, accounts: list[Account]) -> None:
        if self._places and self._places.keys() - (staying := set(accounts)):
            for account in [account for account in self._places if account not in staying]:
                self._free.append(self._places.pop(account))

    def _measure(self, watched: list[Account], news: list[Account]) -> None:
        places = np.array([self._places[account] for account in watched])
        received = np.array([account.received for account in watched])
        lifted = np.array([account.lifted for account in watched])
        differences = received[:, None] - received[None, :]
        square = (places[:, None], places[None, :])
        highest = np.maximum(self._highest[square], differences)
        began = lifted != self._lifted[places]
        if news:
            fresh = set(news)
            began |= np.array([account in fresh for account in watched])
        if began.any():
            anew = began[:, None] | began[None, :]
            highest = np.where(anew, differences, highest)
            self._lifted[places] = lifted
        self._highest[square] = highest
        self.largest = max(self.largest, float((highest + highest.T).max()))
