"""One writer with many waiting callers: operations that arrive during a commit are committed together by the next
commit.

A durable commit costs a sync of the disk, even for one operation. An idle writer commits a single operation
immediately. A busy writer next commits everything that was queued during its commit. So an operation waits for one
commit before its own.

No caller waits for the lines of a batch. If these lines were committed immediately, other operations would nearly
always wait for such a commit. So lines are *patient*: if another operation arrived less than QUIET_SECONDS ago, lines
wait for PATIENCE. Then all waiting lines are committed together, separately from other operations and after operations
that wait at that moment.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from loramux.common.units import QUIET_SECONDS
from loramux.data.records.errors import RecordsUnavailable
from loramux.money.usage.errors import UsageClosed

Operation = TypeVar("Operation")
Outcome = TypeVar("Outcome")

MAX_BATCH = 1024

PATIENCE = 0.25
"""Seconds that patient operations wait for other patient operations."""
PAUSES = (0.05, 0.25, 1.0, 3.0)
"""Seconds between attempts if the database does not answer."""

Commit = Callable[[Sequence[Operation]], Awaitable[Sequence[Outcome | Exception]]]
"""Function that commits a whole batch and returns each operation's outcome in order, or raises and commits nothing."""


class GroupCommit(Generic[Operation, Outcome]):
    """Commits operations in batches. A failing batch is split and tried again, so that only bad operations fail."""

    def __init__(self, commit: Commit[Operation, Outcome], max_batch: int = MAX_BATCH) -> None:
        self._commit = commit
        self._max_batch = max_batch
        self._waiting: deque[tuple[Operation, asyncio.Future[Outcome]]] = deque()
        self._patient: deque[tuple[Operation, asyncio.Future[Outcome]]] = deque()
        self._patience: asyncio.TimerHandle | None = None
        """Timer that runs while patient operations wait for more."""
        self._last_at = -math.inf
        """Arrival of the latest operation that is not patient, in the loop's time."""
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the writer task; needs a running event loop."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="group-commit")

    async def stop(self) -> None:
        """Commit everything that was submitted, then end."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._end_patience()
            await writer

    async def submit(self, operation: Operation, *, patient: bool = False) -> Outcome:
        """Commit the operation and return its outcome; raises the operation's error, or UsageClosed.

        A cancelled caller stops waiting, but the operation is still committed.
        """
        return await self.post(operation, patient=patient)

    def post(self, operation: Operation, *, patient: bool = False) -> asyncio.Future[Outcome]:
        """Queue the operation for the next commit, or for a later commit if `patient`. The future gets the operation's
        outcome. Raises UsageClosed.
        """
        if self._writer is None:
            raise UsageClosed("usage is not being written: start() has not run, or stop() has")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        if patient and (
            self._patient or loop.time() - self._last_at < QUIET_SECONDS
        ):  # patient operations keep their order
            if not self._patient:
                self._patience = loop.call_later(PATIENCE, self._end_patience)
            self._patient.append((operation, outcome))
        else:
            self._waiting.append((operation, outcome))
            self._wake.set()
        if not patient:
            self._last_at = loop.time()
        return outcome

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._wake.set()

    async def _write(self) -> None:
        """Commit waiting operations until `stop` has forgotten the writer and none waits."""
        while self._writer is not None or self._waiting or self._patient:
            await self._wake.wait()
            self._wake.clear()
            await self._commit_some(self._waiting)
            if self._patience is None:
                await self._commit_some(self._patient)
            if self._waiting or (self._patient and self._patience is None):
                self._wake.set()

    async def _commit_some(self, queue: deque[tuple[Operation, asyncio.Future[Outcome]]]) -> None:
        taken = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
        if taken:
            outcomes = await self._commit_or_split([operation for operation, _ in taken])
            for (_, future), outcome in zip(taken, outcomes, strict=True):
                _answer(future, outcome)

    async def _commit_or_split(self, batch: Sequence[Operation]) -> Sequence[Outcome | Exception]:
        try:
            return await self._attempt(batch)
        except RecordsUnavailable as error:
            return [error] * len(batch)
        except Exception as error:  # the caller gets any failure; the writer must go on
            if len(batch) == 1:
                return [error]
        half = len(batch) // 2
        return [*await self._commit_or_split(batch[:half]), *await self._commit_or_split(batch[half:])]

    async def _attempt(self, batch: Sequence[Operation]) -> Sequence[Outcome | Exception]:
        for pause in PAUSES:
            try:
                return await self._commit(batch)
            except RecordsUnavailable:
                await asyncio.sleep(pause)
        return await self._commit(batch)


def _answer(future: asyncio.Future[Outcome], outcome: Outcome | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
