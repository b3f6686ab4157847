"""Blocking work off the event loop, and the share of it that one tenant may have.

asyncio's default executor has few threads, which tokenizers and everything else share. Work that may wait long for a
store or another machine runs in a `ThreadPool` of its own, and takes its turn in `TenantSlots`, so that one tenant's
slow transfers delay neither other work nor other tenants.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` on a thread of the default executor; return only when it has ended, even when cancelled."""
    return await _ended(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


class ThreadPool:
    """Threads for one kind of work."""

    def __init__(self, kind: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on a thread of this pool; return only when it has ended, even when cancelled."""
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
            else:  # granted at the moment of the cancellation
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


async def _ended(running: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved: the caller was cancelled, and its error has no reader
        raise
