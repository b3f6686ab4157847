"""Work outside of requests: jobs of one server, periodic work, blocking work on threads, and tenants' shares of the
threads.

A `JobRunner` never runs a job twice at the same time. All jobs of the runner end with the server.

asyncio's default executor has few threads, which everything shares. Work that may wait long for a store or another
machine runs in its own `ThreadPool`. Every pool that a request can occupy gives each tenant a share (`ThreadPool`,
`TenantQueues`, `run_blocking`, and the connections of `records.database`), so that one tenant's slow work delays
neither other work nor other tenants. The same `TenantSlots` bound memory that waits: its units are then bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from loramux.common.errors import LoramuxError

SERVER = ""
"""The tenant of work that the server does for itself."""
ANYONE = "anyone"
"""The tenant of all requests without a key together."""
DEFAULT_THREADS = min(32, (os.cpu_count() or 1) + 4) - 1
"""Number of threads of asyncio's default executor that tenants' work may occupy: all but one."""
DEFAULT_PER_TENANT = 2

P = ParamSpec("P")
T = TypeVar("T")
_tenant: ContextVar[str] = ContextVar("tenant", default=SERVER)
logger = logging.getLogger(__name__)


def work_for(tenant: str) -> None:
    """Note that the running task, and the tasks that it starts, work for this tenant."""
    _tenant.set(tenant)


def tenant_of_work() -> str:
    """Return the tenant for which the running task works, or SERVER."""
    return _tenant.get()


class Job(Protocol):
    """Work of one server, which is recorded in a row of the database (`records.leases`)."""

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
    """Runs the jobs that `find` returns, except jobs that are already running."""

    def __init__(
        self, kind: str, find: Callable[[], Awaitable[Sequence[J]]], run: Callable[[J], Coroutine[None, None, None]]
    ) -> None:
        """`run` handles its own errors. A job that fails is found and run again, unless its row was changed."""
        self.kind = kind
        self._find = find
        self._run = run
        self._observers: list[Callable[[JobRun], None]] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_ended(self, observer: Callable[[JobRun], None]) -> None:
        """Call `observer` at the end of each run, including cancelled runs."""
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
        """Cancel the running jobs. After a restart this server starts the jobs again, or another server does."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        try:
            found = await self._find()
        except LoramuxError as error:  # the database does not answer; the next search finds the jobs
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


class TenantSlots:
    """At most `total` units at a time, of which one tenant holds at most `per_tenant`: jobs, threads, or bytes.

    Free units go to the waiting tenant that holds the fewest; among equal tenants, to the job that has waited longest.
    A job that needs more units than a tenant may hold gets its turn when its tenant holds none.

    A grant looks at the waiting tenants and not at their jobs, because a tenant's batches have thousands that wait.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._free = total
        self.per_tenant = min(per_tenant, total)
        """Units that one tenant may hold."""
        self._held: Counter[str] = Counter()
        self._numbers = count()
        self._waiting: dict[tuple[str, int], OrderedDict[int, asyncio.Future[None]]] = {}
        """Waiting jobs in the order of their arrival, by tenant and units, each with its number."""

    @asynccontextmanager
    async def slot(self, tenant: str, units: int = 1) -> AsyncIterator[None]:
        """Wait for units, and hold them while the block runs."""
        await self.acquire(tenant, units)
        try:
            yield
        finally:
            self.release(tenant, units)

    async def acquire(self, tenant: str, units: int = 1) -> None:
        """Wait for units and take them; `release` returns them."""
        granted = asyncio.get_running_loop().create_future()
        group, number = (tenant, self._capped(units)), next(self._numbers)
        self._waiting.setdefault(group, OrderedDict())[number] = granted
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled() or not granted.done():
                self._forget(group, number)
                self._grant()  # a smaller job may have waited for this one
            else:  # granted at the moment of the cancellation
                self.release(tenant, units)
            raise

    def try_acquire(self, tenant: str, units: int = 1) -> bool:
        """Take units if they are free and the tenant may hold them; return whether they are taken."""
        units = self._capped(units)
        if not self._fits(tenant, units) or units > self._free:
            return False
        self._take(tenant, units)
        return True

    def release(self, tenant: str, units: int = 1) -> None:
        """Return units that `acquire` or `try_acquire` took."""
        units = self._capped(units)
        self._free += units
        self._held[tenant] -= units
        assert self._held[tenant] >= 0, "a tenant returns what it holds"
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def is_free(self, tenant: str) -> bool:
        """Return whether the tenant would get a unit at once."""
        return self._free > 0 and self._fits(tenant, 1) and not self._waiting

    def leaves_room(self, tenant: str, units: int = 1) -> bool:
        """Return whether the tenant would hold no more than what is free after it has taken so many units.

        So few tenants never take all units: each next tenant gets up to half of the rest. (Choudhury and Hahne, Dynamic
        queue length thresholds for shared-memory packet switches, ToN 6(2), 1998.)
        """
        units = self._capped(units)
        return self.held_by(tenant) + units <= self._free - units

    def held_by(self, tenant: str) -> int:
        """Return the units that the tenant holds."""
        return self._held.get(tenant, 0)

    def _capped(self, units: int) -> int:
        return min(units, self.per_tenant)

    def _fits(self, tenant: str, units: int) -> bool:
        return self.held_by(tenant) + units <= self.per_tenant

    def _take(self, tenant: str, units: int) -> None:
        self._free -= units
        self._held[tenant] += units

    def _turn(self, group: tuple[str, int]) -> tuple[int, int]:
        """Return the key by which the next group is chosen: units that its tenant holds, then its first job."""
        return self.held_by(group[0]), next(iter(self._waiting[group]))

    def _forget(self, group: tuple[str, int], number: int) -> None:
        """Remove a job that no longer waits, if it has not been removed yet."""
        jobs = self._waiting.get(group, OrderedDict())
        jobs.pop(number, None)
        if not jobs:
            self._waiting.pop(group, None)

    def _grant(self) -> None:
        while self._free > 0:
            allowed = [group for group in self._waiting if self._fits(*group)]
            if not allowed:
                return
            tenant, units = group = min(allowed, key=self._turn)
            if units > self._free:
                return  # no job overtakes the first one, so that small jobs cannot keep a large job waiting for ever
            number, granted = next(iter(self._waiting[group].items()))
            self._forget(group, number)
            if not granted.done():
                self._take(tenant, units)
                granted.set_result(None)


class HeldUnits:
    """Units of a tenant that one piece of work takes little by little, and returns together."""

    def __init__(self, slots: TenantSlots, tenant: str) -> None:
        self._slots, self._tenant, self._held = slots, tenant, 0

    def try_add(self, units: int) -> bool:
        """Take more units, if the tenant may hold them and leaves room for others; return whether they are taken."""
        units = min(units, self.most)
        is_taken = self._slots.leaves_room(self._tenant, units) and self._slots.try_acquire(self._tenant, units)
        self._held += units if is_taken else 0
        return is_taken

    @property
    def most(self) -> int:
        """Units that the tenant may hold."""
        return self._slots.per_tenant

    @property
    def is_all(self) -> bool:
        """True if the tenant holds no other units."""
        return self._held == self._slots.held_by(self._tenant)

    def release(self, units: int | None = None) -> None:
        """Return so many units; None: all units."""
        units = self._held if units is None else units
        self._held -= units
        if units:
            self._slots.release(self._tenant, units)


class ThreadPool:
    """Threads for one kind of work, of which one tenant occupies at most `per_tenant`."""

    def __init__(self, kind: str, threads: int, per_tenant: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)
        self._slots = TenantSlots(threads, per_tenant)

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on a thread, when it is the tenant's turn; return only when it has ended, even when cancelled.

        `tenant` is the tenant for which the function runs, or SERVER.
        """
        async with self._slots.slot(tenant):
            work = partial(function, *args, **kwargs)
            return await _ended(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def of(self, tenant: str) -> Threads:
        """Return the tenant's share of this pool."""
        return Threads(self, tenant)

    def close(self) -> None:
        """Refuse new work. Running work ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Threads:
    """One tenant's share of a pool, used by code that serves one tenant."""

    pool: ThreadPool
    tenant: str

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` as the pool does."""
        return await self.pool.run(self.tenant, function, *args, **kwargs)


class TenantQueues:
    """Threads for callers without an event loop, of which one tenant occupies at most `per_tenant`.

    When a piece of a tenant's work has ended, the tenant's next piece is queued after the work that other tenants have
    queued.
    """

    def __init__(self, kind: str, threads: int, per_tenant: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)
        self._per_tenant = per_tenant
        self._lock = threading.Lock()
        self._queued: Counter[str] = Counter()
        """Work of each tenant that the executor has."""
        self._waiting: dict[str, deque[Callable[[], object]]] = {}

    def submit(self, tenant: str, work: Callable[[], object]) -> None:
        """Run `work`, which handles its own errors, when it is the tenant's turn."""
        with self._lock:
            if self._queued[tenant] >= self._per_tenant:
                self._waiting.setdefault(tenant, deque()).append(work)
                return
            self._queued[tenant] += 1
            self._executor.submit(self._run, tenant, work)

    def close(self) -> None:
        """Refuse new work. Running work ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, tenant: str, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            with self._lock, suppress(RuntimeError):  # the executor was closed since
                self._run_next(tenant)

    def _run_next(self, tenant: str) -> None:
        if (own := self._waiting.get(tenant)) is not None:
            self._executor.submit(self._run, tenant, own.popleft())
            if not own:
                del self._waiting[tenant]
            return
        self._queued[tenant] -= 1
        if not self._queued[tenant]:
            del self._queued[tenant]


_default_shares: WeakKeyDictionary[asyncio.AbstractEventLoop, TenantSlots] = WeakKeyDictionary()
"""Shares of each event loop's default executor, which is as global as they are."""


async def run_blocking(tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` on a thread of the default executor, of which a tenant occupies at most DEFAULT_PER_TENANT.

    Returns only when the function has ended, even if the caller is cancelled. `tenant` is the tenant for which the
    function runs, or SERVER.
    """
    loop = asyncio.get_running_loop()
    shares = _default_shares.setdefault(loop, TenantSlots(DEFAULT_THREADS, DEFAULT_PER_TENANT))
    async with shares.slot(tenant):
        return await _ended(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


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
