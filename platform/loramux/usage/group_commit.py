"""One writer, many waiters: what arrives during a commit is committed together by the next.

A durable commit costs a sync of the disk however little it holds. No timer is involved: an idle writer commits a
lone operation at once, a busy one takes along whatever queued meanwhile.
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
    """Commits operations in batches; one that fails is halved and done again, so that only the guilty fail."""

    def __init__(self, commit: Commit[Operation, Outcome], max_batch: int = MAX_BATCH) -> None:
        self._commit = commit
        self._max_batch = max_batch
        self._queue: asyncio.Queue[tuple[Operation, asyncio.Future[Outcome]] | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write; needs a running event loop."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="group-commit")

    async def stop(self) -> None:
        """Write everything that was submitted, then end."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._queue.put_nowait(None)
            await writer

    async def submit(self, operation: Operation) -> Outcome:
        """Have the operation committed, and wait until it is; raises what it failed with, or UsageClosed.

        A caller that is cancelled stops waiting; the operation is committed all the same.
        """
        return await self.post(operation)

    def post(self, operation: Operation) -> asyncio.Future[Outcome]:
        """Have the operation committed; the future tells how it went. Raises UsageClosed."""
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
                outcomes = await self._settle([operation for operation, _ in waiting])
                for (_, future), outcome in zip(waiting, outcomes, strict=True):
                    _answer(future, outcome)

    async def _settle(self, batch: Sequence[Operation]) -> Sequence[Outcome | Exception]:
        try:
            return await self._attempt(batch)
        except RecordsUnavailable as error:
            return [error] * len(batch)
        except Exception as error:  # whatever it was, its caller gets it, and the writer lives
            if len(batch) == 1:
                return [error]
        half = len(batch) // 2
        return [*await self._settle(batch[:half]), *await self._settle(batch[half:])]

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
