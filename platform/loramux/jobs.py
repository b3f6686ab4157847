"""Background jobs of one server: each runs once at a time, and all of them end with the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """Work that a server has taken on; its row in the database says so (`records.leases`)."""

    @property
    def id(self) -> str:
        """The row's id."""


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job, as it ended."""

    kind: str
    id: str
    began: float
    """By the monotonic clock, in seconds; `ended` too."""
    ended: float


class JobRunner(Generic[J]):
    """Runs the jobs that `find` returns, those that do not run already."""

    def __init__(
        self, kind: str, find: Callable[[], Awaitable[Sequence[J]]], run: Callable[[J], Coroutine[None, None, None]]
    ) -> None:
        """`run` handles its own errors: a job that fails is found and run again, unless its row says otherwise."""
        self.kind = kind
        self._find = find
        self._run = run
        self._observers: list[Callable[[JobRun], None]] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_ended(self, observer: Callable[[JobRun], None]) -> None:
        """Call `observer` at the end of each run, a cancelled one too."""
        self._observers.append(observer)

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or is being looked for."""
        return not self._tasks

    def look(self) -> None:
        """Start the jobs that do not run yet, in the background."""
        self._start(self._look())

    def cancel(self, id: str) -> None:
        """Stop a job whose row is gone."""
        if running := self._running.get(id):
            running.cancel()

    async def stop(self) -> None:
        """Cancel the running jobs; this server's next life, or another server, starts them again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        for job in await self._find():
            if job.id not in self._running:
                self._running[job.id] = self._start(self._run_one(job))

    async def _run_one(self, job: J) -> None:
        began = time.monotonic()
        try:
            await self._run(job)
        finally:
            self._running.pop(job.id, None)
            ended = JobRun(self.kind, job.id, began, time.monotonic())
            for observer in self._observers:
                observer(ended)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=Context())  # a job belongs to no request, so it inherits none's ids
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
