"""Threads that check lines leave the interpreter to the server, no matter how long one line takes."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from loramux.batches.lines import PAUSE, WORK_SECONDS, Pauses


def test_pause_is_as_long_as_the_work_before_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, times = list[float](), itertools.chain([0.0, WORK_SECONDS / 2, 0.5, 0.5, 0.75], itertools.repeat(9.0))
    monkeypatch.setattr(time, "sleep", pauses.append)
    turn = Pauses(lambda: next(times))
    turn.take()
    assert pauses == []
    turn.take()
    turn.take()
    assert pauses == [PAUSE * 0.5, PAUSE * 0.25]


def test_threads_pause_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pausing, most, wait = list[int](), list[int](), threading.Event().wait

    def sleep(_: float) -> None:
        pausing.append(1)
        most.append(len(pausing))
        wait(0.01)
        pausing.pop()

    monkeypatch.setattr(time, "sleep", sleep)
    with ThreadPoolExecutor(4) as threads:
        clocks = [itertools.count() for _ in range(8)]
        for _ in threads.map(lambda clock: Pauses(lambda: next(clock)).take(), clocks):
            pass
    assert most == [1] * 8
