"""A virtual clock: an asyncio event loop whose time jumps to the next timer, and threads that are greenlets on it.

Nothing in a simulation waits for real time. The loop runs every callback that is ready and then moves its clock to the
next timer, so an hour of virtual time takes as long as its events. Code that expects threads (the engine's worker loop,
aiosqlite's connections) runs unchanged in greenlets: if it would block on a queue, it switches back to the loop.

One thread runs everything, in the order that the timers give, and the timers' delays come from one seeded generator. So
a seed is a whole history, and the same seed gives the same history again (FoundationDB's and TigerBeetle's idea).
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TURNS_AT_ONE_INSTANT = 20_000
"""More loop turns or queue reads than this without any time passing is a program that spins."""


class Spinning(AssertionError):
    """Something runs for ever without waiting for anything."""


class Stalled(AssertionError):
    """Nothing is ready and no timer is set, but the main task has not ended."""


class _NoFiles:
    """A selector without files: waiting for them moves the clock."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stalled("nothing can happen any more, and the simulation has not ended")
        self._loop.pass_time(timeout)
        return []


class SimulationLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time. `run_in_executor` runs its function after `thread_delay()` seconds, inline."""

    def __init__(self, thread_delay: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self._selector = _NoFiles(self)
        self._clock_resolution = 1e-9
        self._now = 0.0
        self._turns = 0
        self._hub: greenlet | None = None
        self._thread_delay = thread_delay

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Move the clock; count the turns in which it stands still."""
        self.count_turn(moved=seconds > 0)
        self._now += seconds

    def count_turn(self, *, moved: bool = False) -> None:
        self._turns = 0 if moved else self._turns + 1
        if self._turns > MAX_TURNS_AT_ONE_INSTANT:
            raise Spinning(f"{self._turns} turns at {self._now:.6f} s and no time passes")

    @property
    def hub(self) -> greenlet:
        """The greenlet that runs the loop; simulated threads switch to it when they wait."""
        assert self._hub is not None, "the loop is not running"
        return self._hub

    def run_forever(self) -> None:
        self._hub = getcurrent()
        super().run_forever()

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self._thread_delay(), _run_into, future, func, args)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        """Do nothing: no other thread wakes this loop."""


def _run_into(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except Exception as error:
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)


def current_loop() -> SimulationLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulationLoop)
    return loop


def sleep(seconds: float) -> None:
    """Let virtual time pass in a simulated thread."""
    loop, me = current_loop(), getcurrent()
    assert me is not loop.hub, "only a simulated thread may block"
    timer = loop.call_later(seconds, me.switch)
    try:
        loop.hub.switch()
    except GreenletExit:
        timer.cancel()
        raise


class Thread:
    """Replacement of `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., object] | None = None,
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self.error: BaseException | None = None
        self._target = target
        self._args = args
        self._greenlet: greenlet | None = None

    def start(self) -> None:
        loop = current_loop()
        self._greenlet = greenlet(self._run, parent=loop.hub)
        loop.call_soon(self._greenlet.switch)

    def is_alive(self) -> bool:
        return self._greenlet is not None and not self._greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        """Threads of a simulation end by themselves or are killed."""

    def kill(self) -> None:
        """End the thread while it waits, as `kill -9` ends a process. Call it from the loop."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _run(self) -> None:
        try:
            assert self._target is not None
            self._target(*self._args)
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
            raise


class Queue(Generic[T]):
    """Replacement of `queue.SimpleQueue`. Looking into it costs `look_seconds`, so polling takes time."""

    def __init__(self, look_seconds: float = 0.0) -> None:
        self._items: deque[T] = deque()
        self._waiting: Any = None  # a greenlet that waits, which has no types
        self._look_seconds = look_seconds

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            current_loop().call_soon(waiting.switch)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        current_loop().count_turn()
        if not self._items and block and timeout != 0:
            self._wait(timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        current_loop().count_turn()
        if self._look_seconds and not self._items:
            sleep(self._look_seconds)
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def _wait(self, timeout: float | None) -> None:
        loop, me = current_loop(), getcurrent()
        assert me is not loop.hub, "only a simulated thread may block"
        assert self._waiting is None, "one thread reads a queue"
        self._waiting = me
        timer = None if timeout is None else loop.call_later(timeout, self._time_out, me)
        try:
            loop.hub.switch()
        finally:
            if timer is not None:
                timer.cancel()
            if self._waiting is me:
                self._waiting = None

    def _time_out(self, me: greenlet) -> None:
        if self._waiting is me:
            self._waiting = None
            me.switch()
