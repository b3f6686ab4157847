"""Work outside of requests: jobs of one server, periodic work, blocking work on threads, and tenants' shares of them.

A `JobRunner` never runs a job twice at the same time. All its jobs end with the server.

asyncio's default executor has few threads, which tokenizers and everything else share. Work that may wait long for a
store or another machine runs in its own `ThreadPool` and waits for its turn in `TenantSlots`. So the slow transfers of
one tenant delay neither other work nor other tenants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from loramux.common.errors import LoramuxError

logger = logging.getLogger(__name__)


class Job(Protocol):
    """Work that a server has taken on. Its row in the database says so (`records.database`)."""

    @property
    def id(self) -> str:
        """The row's id."""


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class JobRun:
    """A run of a job that has ended."""

    kind: str
    id: str
    began: float
    """The begin of the run. `began` and `ended` are in seconds of the monotonic clock."""
    ended: float


class JobRunner(Generic[J]):
    """Runs the jobs that `find` returns, except those that run already."""

    def __init__(
        self, kind: str, find: Callable[[], Awaitable[Sequence[J]]], run: Callable[[J], Coroutine[None, None, None]]
    ) -> None:
        """`run` handles its own errors. A job that fails is found and run again, unless its row says otherwise."""
        self.kind = kind
        self._find = find
        self._run = run
        self._observers: list[Callable[[JobRun], None]] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_ended(self, observer: Callable[[JobRun], None]) -> None:
        """Call `observer` at the end of each run, also of a cancelled one."""
        self._observers.append(observer)

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or is being looked for."""
        return not self._tasks

    def look(self) -> None:
        """Start the jobs that do not run yet, in the background."""
        self._start(self._look())

    def cancel(self, id: str) -> None:
        """Stop a job whose row is deleted."""
        if running := self._running.get(id):
            running.cancel()

    async def stop(self) -> None:
        """Cancel the running jobs. This server starts them again after a restart, or another server does."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        try:
            found = await self._find()
        except LoramuxError as error:  # the database does not answer; the next look finds them
            logger.error("the jobs of kind %r wait: %s", self.kind, error)
            return
        for job in found:
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


P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` on a thread of the default executor. Return only after it has ended, even if cancelled."""
    return await _ended(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


class ThreadPool:
    """Threads for one kind of work."""

    def __init__(self, kind: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on a thread of this pool. Return only after it has ended, even if cancelled."""
        work = partial(function, *args, **kwargs)
        return await _ended(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def close(self) -> None:
        """Refuse further work; running work ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class TenantSlots:
    """At most `total` jobs at a time, of which one tenant has at most `per_tenant`.

    A free slot goes to the waiting tenant with the fewest jobs; among equals, to the longest waiting job.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._free = total
        self._per_tenant = per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot while the block runs; wait for it first."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled() or not granted.done():
                self._waiting = deque(one for one in self._waiting if one[1] is not granted)
            else:  # the slot was granted at the moment of the cancellation
                self._release(tenant)
            raise
        try:
            yield
        finally:
            self._release(tenant)

    def is_free(self, tenant: str) -> bool:
        """Return whether the tenant would get a slot at once."""
        return self._free > 0 and self._held[tenant] < self._per_tenant and not self._waiting

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        while self._free > 0:
            allowed = [one for one in self._waiting if self._held[one[0]] < self._per_tenant]
            if not allowed:
                return
            tenant, granted = chosen = min(allowed, key=lambda one: self._held[one[0]])
            self._waiting.remove(chosen)
            if not granted.done():
                self._free -= 1
                self._held[tenant] += 1
                granted.set_result(None)


@asynccontextmanager
async def run_periodically(seconds: float, act: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run `act` at once, then every `seconds` seconds while the block runs; its exceptions are logged."""
    task = asyncio.create_task(_repeat(seconds, act))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _repeat(seconds: float, act: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await act()
        except LoramuxError as error:
            if error.retry_after is None:
                logger.exception("a background job failed; it is tried again in %g s", seconds)
            else:  # the database or the storage does not answer at present
                logger.warning("a background job waits; it is tried again in %g s: %s", seconds, error)
        except Exception:
            logger.exception("a background job failed; it is tried again in %g s", seconds)
        await asyncio.sleep(seconds)


async def _ended(running: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # mark the error as retrieved: the caller was cancelled and will not read it
        raise
