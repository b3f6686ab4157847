"""One writer, many waiters: operations that arrive during a commit are committed together by the next.

A durable commit costs a sync of the disk however little it holds. No timer is involved: an idle writer commits a
lone operation at once, a busy one takes everything that was queued meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from loramux.records import RecordsUnavailable
from loramux.usage.errors import UsageClosed

Operation = TypeVar("Operation")
Outcome = TypeVar("Outcome")

MAX_BATCH = 1024

PAUSES = (0.05, 0.25, 1.0, 3.0)
"""Seconds between attempts while the database does not answer."""

Commit = Callable[[Sequence[Operation]], Awaitable[Sequence[Outcome | Exception]]]
"""Commit all of a batch and return each operation's outcome in order, or raise and have committed nothing."""


class GroupCommit(Generic[Operation, Outcome]):
    """Commits operations in batches. A batch that fails is split and tried again, so that only bad operations fail."""

    def __init__(self, commit: Commit[Operation, Outcome], max_batch: int = MAX_BATCH) -> None:
        self._commit = commit
        self._max_batch = max_batch
        self._queue: asyncio.Queue[tuple[Operation, asyncio.Future[Outcome]] | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the writer task; needs a running event loop."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="group-commit")

    async def stop(self) -> None:
        """Commit everything that was submitted, then end."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._queue.put_nowait(None)
            await writer

    async def submit(self, operation: Operation) -> Outcome:
        """Commit the operation and return its outcome; raises what it failed with, or UsageClosed.

        A caller that is cancelled stops waiting; the operation is committed all the same.
        """
        return await self.post(operation)

    def post(self, operation: Operation) -> asyncio.Future[Outcome]:
        """Queue the operation for the next commit; the future has its outcome. Raises UsageClosed."""
        if self._writer is None:
            raise UsageClosed("usage is not being written: start() has not run, or stop() has")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((operation, outcome))
        return outcome

    async def _write(self) -> None:
        running = True
        while running:
            taken = [await self._queue.get()]
            with suppress(asyncio.QueueEmpty):
                while len(taken) < self._max_batch:
                    taken.append(self._queue.get_nowait())
            waiting = [item for item in taken if item is not None]
            running = len(waiting) == len(taken)
            if waiting:
                outcomes = await self._commit_or_split([operation for operation, _ in waiting])
                for (_, future), outcome in zip(waiting, outcomes, strict=True):
                    _answer(future, outcome)

    async def _commit_or_split(self, batch: Sequence[Operation]) -> Sequence[Outcome | Exception]:
        try:
            return await self._attempt(batch)
        except RecordsUnavailable as error:
            return [error] * len(batch)
        except Exception as error:  # the caller gets any failure; the writer must live on
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
