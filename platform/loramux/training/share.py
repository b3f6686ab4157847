"""The share of the time for which the jobs of a server's own trainer compute while the server answers requests.

A job's process has the kernel's lowest priority (SCHED_IDLE), so an engine never waits for its processor. That does
not protect an engine from a job on the next core: both share the memory's bandwidth, the last cache and the clock rate.
So the trainer stops the process (SIGSTOP) while requests run, except for short bursts:

    no request runs      the job computes
    requests run         the job computes for BURST_SECONDS, and then waits until these are `training.share` of the time

Time between requests counts: after it, a job has had more than its share, and is stopped for the whole of the next
requests. So a job slows the answers of a machine down only if requests leave hardly a pause. A burst is shorter than a
step of most models: the steps are then equally slower by the share, and none is much slower than the others.
"""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

BUSY, QUIET = b"1", b"0"
"""Notes of a server to its trainer: requests run; none does."""
BURST_SECONDS = 0.005
MAX_CREDIT_SECONDS = 1.0
"""The largest time beyond its share that is held against a job."""


class ComputeShare:
    """Stops and continues processes. It does so while `enforced` is open."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: from 0, never while requests run, to 1, always."""
        self._share = share
        self._clock = clock
        self._processes: set[Process] = set()
        self._is_busy = False
        self._changed = asyncio.Event()
        self._is_computing = True
        self._since = clock()
        self._owed = 0.0
        """Seconds that the processes may compute while requests run; negative if they had more than their share."""

    def note_busy(self, is_busy: bool) -> None:
        """Note if the server answers requests."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._changed.set()

    @contextmanager
    def limiting(self, process: Process) -> Iterator[None]:
        """Limit a process while the block runs, or until it is released."""
        self._processes.add(process)
        self._changed.set()
        try:
            yield
        finally:
            self.release(process)

    def release(self, process: Process) -> None:
        """Let a process compute from now on: it is to end soon."""
        if process in self._processes:
            self._processes.remove(process)
            if not self._is_computing:
                _send(process, signal.SIGCONT)

    @asynccontextmanager
    async def enforced(self, notes: int | None) -> AsyncIterator[None]:
        """Stop and continue the processes while the block runs. `notes`: the file descriptor of a server's notes."""
        tasks = [asyncio.create_task(self._enforce())]
        if notes is not None:
            tasks.append(asyncio.create_task(self._follow(notes)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for process in list(self._processes):
                self.release(process)

    async def _follow(self, notes: int) -> None:
        """Follow the notes to their end: then there is no server that answers requests."""
        reader = asyncio.StreamReader()
        with open(notes, "rb", buffering=0, closefd=False) as pipe:  # noqa: ASYNC230  nothing is read here
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            while noted := await reader.read(1 << 10):
                self.note_busy(noted.endswith(BUSY))
        self.note_busy(False)

    async def _enforce(self) -> None:
        while True:
            self._changed.clear()
            seconds = self.next_turn()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    def next_turn(self) -> float | None:
        """Stop or continue the processes; return the seconds until the next turn, or None if it needs a change."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        earned = elapsed * (self._share - self._is_computing)
        self._owed = min(BURST_SECONDS, max(-MAX_CREDIT_SECONDS, self._owed + earned))
        if not self._is_busy or self._share == 1:
            self._let(True)
            return None
        if self._owed >= BURST_SECONDS:
            self._let(True)
            return BURST_SECONDS
        self._let(False)
        if not self._processes or not self._share:
            return None
        return (BURST_SECONDS - self._owed) / self._share

    def _let(self, compute: bool) -> None:
        self._is_computing = compute
        for process in self._processes:  # all of them: one may be new
            _send(process, signal.SIGCONT if compute else signal.SIGSTOP)


def _send(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        process.send_signal(number)
