"""Threads that check lines leave the interpreter to the server, no matter how long one line takes."""

from __future__ import annotations

import itertools
import threading
import time
from weakref import WeakSet

import pytest

from loramux.batches import lines
from loramux.batches.lines import PAUSE, WORK_SECONDS, Pauses


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(lines, "_working", WeakSet[Pauses]())
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_pause_is_as_long_as_the_work_before_it_asks_for(slept: list[float]) -> None:
    times = itertools.chain([0.0, WORK_SECONDS / 2, 0.5, 0.5, 0.75], itertools.repeat(9.0))
    turn = Pauses(lambda: next(times))
    turn.take()
    assert slept == []
    turn.take()
    turn.take()
    assert slept == [PAUSE * 0.5, PAUSE * 0.25]


def test_pauses_grow_with_the_threads_that_work(slept: list[float]) -> None:
    first, *others = [Pauses(itertools.count().__next__) for _ in range(4)]
    first.take()
    others.clear()
    first.take()
    assert slept == [PAUSE * 1.0 * 4, PAUSE * 1.0]


def test_thread_does_not_wait_for_the_pause_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pausing, leave = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if seconds > 100:
            pausing.set()
            leave.wait()

    monkeypatch.setattr(time, "sleep", sleep)
    long = threading.Thread(target=Pauses(itertools.count(step=1000).__next__).take)
    long.start()
    pausing.wait()
    short = threading.Thread(target=Pauses(itertools.count().__next__).take)
    short.start()
    short.join(30)
    is_waiting = short.is_alive()
    leave.set()
    long.join()
    assert not is_waiting
