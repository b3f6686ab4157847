"""The host's side of the pool: the adapter store of a real engine, and the host's slots for swapped KV.

**Adapters** are PEFT files on disk, copies in the host's memory, and weights in the pool. An inspection brings an
adapter into the host's memory while its requests queue. Reading and copying have separate threads: an adapter that is
in the host's memory never waits for the reading of other adapters. The host's memory keeps adapters that are small, are
used often and take long to read, by GreedyDual-Size-Frequency (Cherkasova, 1998), as `residency` does in the pool.

**KV and states**: `HostPages` holds pages of preempted sequences as tensors; `memory.KvSwap` decides which pages. It
also copies states within the pool for `Memory`.

Only this module of the package needs torch; the scheduler and the simulator run without it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from loramux.engine.memory.ranking import NEVER_USED, used_at
from loramux.engine.memory.residency import Inspected, StoreJob
from loramux.engine.messages import AdapterRef, owner_of
from loramux_adapters.base import BaseDescription
from loramux_adapters.base_weights import BaseWeights, fit_to_base
from loramux_adapters.components import AdapterPlan
from loramux_adapters.plan import PlanLimits, inspect_adapter
from loramux_adapters.prepared import PreparedAdapter
from loramux_adapters.weights import AdapterLayout, AdapterWeights, load_adapter
from loramux_kernels.device import to_device

R = TypeVar("R")
T = TypeVar("T")

MAX_HUNG_READS = 64
"""Maximum number of hanging reads. If more reads hang, the storage counts as down, and loads fail immediately."""
STUCK_SECONDS = 1.0
"""Seconds in which no waiting job begins, after which one more thread does."""
OVERHEAD_BYTES = float(1 << 20)
"""Cost of opening and checking an adapter, in addition to reading it: the bytes that take the same time to read."""


@dataclass(eq=False, slots=True)
class _CachedAdapter:
    adapter: PreparedAdapter
    num_bytes: int
    recency: float = NEVER_USED

    @property
    def retention_score(self) -> float:
        """Score by which adapters are kept: log2 of expected uses x cost of a miss / bytes."""
        return self.recency + math.log2(1.0 + OVERHEAD_BYTES / max(self.num_bytes, 1))


class HostCache:
    """A cache of adapters in the host's memory, with at most `max_bytes`. Any thread may call the cache's methods."""

    def __init__(self, max_bytes: int, clock: Callable[[], float], half_life: float = 300.0) -> None:
        """The parameter `half_life` is the time in seconds after which a use counts half."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._half_life = half_life
        self._kept: dict[str, _CachedAdapter] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def may_take(self, num_bytes: int) -> bool:
        """Return whether this number of bytes could ever be kept."""
        return num_bytes <= self._max_bytes

    def get(self, digest: str) -> PreparedAdapter | None:
        """Return the revision if it is in the cache, and count a use."""
        with self._lock:
            kept = self._kept.get(digest)
            if kept is None:
                return None
            kept.recency = used_at(kept.recency, self._now)
            return kept.adapter

    def put(self, digest: str, adapter: PreparedAdapter) -> None:
        """Keep `adapter`, unless that would remove an adapter that is worth more."""
        kept = _CachedAdapter(adapter, adapter.nbytes, used_at(NEVER_USED, self._now))
        with self._lock:
            self._drop(digest)
            if (leaving := self._displaced_by(kept)) is not None:
                for other in leaving:
                    self._drop(other)
                self._kept[digest] = kept
                self.num_bytes += kept.num_bytes

    def forget(self, digest: str) -> None:
        """Drop a deleted revision."""
        with self._lock:
            self._drop(digest)

    @property
    def _now(self) -> float:
        return self._clock() / self._half_life

    def _displaced_by(self, kept: _CachedAdapter) -> list[str] | None:
        """Return the adapters with the lowest scores to remove for `kept`. Return None if `kept` is too large or has a
        lower score than one of these adapters.
        """
        leaving, excess = [], self.num_bytes + kept.num_bytes - self._max_bytes
        for digest in sorted(self._kept, key=lambda digest: self._kept[digest].retention_score):
            if excess <= 0:
                break
            if self._kept[digest].retention_score > kept.retention_score:
                return None
            leaving.append(digest)
            excess -= self._kept[digest].num_bytes
        return leaving if excess <= 0 else None

    def _drop(self, digest: str) -> None:
        if kept := self._kept.pop(digest, None):
            self.num_bytes -= kept.num_bytes


class AdapterTarget(Protocol):
    """The place from which adapters are served: an AdapterBank, or the banks of several ranks."""

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Lay out the blocks of a validated adapter. Raises AdapterRejected if the adapter's rank is too large."""

    def fence(self) -> Any:
        """Return the end of all steps launched so far, as `install` takes it; its form is the target's own."""

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        """Return an adapter, fitted to the base, as `install` takes it. Raises AdapterRejected as `plan_layout`
        does."""

    def install(self, adapter: PreparedAdapter, pages: list[int], fence: Any) -> int:
        """Copy an adapter into `pages` after `fence`, and return the slot that serves it."""

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages may be overwritten as soon as this returns."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The base that adapters are read for, and the limits that adapters must keep."""

    base: BaseDescription
    weights: BaseWeights
    limits: PlanLimits
    dtype: torch.dtype

    def inspect(self, ref: AdapterRef) -> AdapterPlan:
        """Check the files without reading the weights. Raises AdapterRejected."""
        return inspect_adapter(Path(ref.path), self.base, self.limits)

    def load(self, ref: AdapterRef) -> AdapterWeights:
        """Read and check the files, and fit their weights to the base. Raises AdapterRejected."""
        return fit_to_base(load_adapter(Path(ref.path), self.base, self.limits, self.dtype), self.weights)


class LoaderThreads:
    """Threads that run jobs, those of each owner in order. The owner with the fewest running jobs is next, and has at
    most as many of them as there are threads.

    A job has two parts. `read` waits for files and may hang; `write` does not wait. A job can be cancelled until
    `write` begins, and then the pages that it would write to are free again. A thread whose job is cancelled during its
    read hangs, and another replaces it. Before that, reads that hang delay the jobs of other owners by STUCK_SECONDS:
    if jobs wait and none has begun in this time, one more thread begins, until there are MAX_HUNG_READS of them.
    """

    def __init__(self, name: str, threads: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Callable[[], bool]]] = OrderedDict()
        """Jobs by their owner."""
        self._running: Counter[str] = Counter()
        """Running jobs of each owner, without those that were cancelled."""
        self._num_begun = 0
        self._hung: set[str] = set()
        """Keys of jobs that were cancelled and are still reading."""
        self._reading: set[StoreJob[Any]] = set()
        """Jobs that a thread has begun and has neither ended nor lost to another thread."""
        self._threads = threads
        self._num_spare = 0
        """Threads beyond `threads`. They end when fewer than `threads` jobs run."""
        self._is_closed = False
        self._is_watched = False
        for _ in range(threads):
            self._start_thread(self._work)

    def submit(self, key: str, read: Callable[[], R], write: Callable[[R], T]) -> StoreJob[T]:
        """Queue a job for the adapter `key`. The job fails immediately if a read of the same key hangs, or if too many
        reads hang.
        """
        job: StoreJob[T] = StoreJob()
        if key in self._hung or len(self._hung) >= MAX_HUNG_READS:
            job.set_exception(TimeoutError("the storage does not answer: earlier reads of it have not ended."))
            return job
        job.add_done_callback(lambda _: self._replace_hung_thread(key, job))
        with self._changed:
            self._waiting.setdefault(owner_of(key), deque()).append(lambda: self._run(key, job, read, write))
            # Copies are never more than threads (`Residency.may_load`), so that they usually need no watcher.
            if not self._is_watched and self._running.total() + sum(map(len, self._waiting.values())) > self._threads:
                self._is_watched = True
                self._start_thread(self._watch)
            self._changed.notify_all()
        return job

    def close(self) -> None:
        """End the threads after their current jobs, without waiting for threads that hang."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start_thread(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True, name=self._name).start()

    def _next_owner(self) -> str | None:
        """Return the owner whose job is next; None if no job may begin."""
        allowed = [owner for owner in self._waiting if self._running[owner] < self._threads]
        return min(allowed, key=self._running.__getitem__, default=None)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            owner, run = taken
            if not run():
                return
            with self._changed:
                self._end_job(owner)
                if self._num_spare and self._running.total() < self._threads:
                    self._num_spare -= 1
                    return

    def _take(self) -> tuple[str, Callable[[], bool]] | None:
        """Wait for a job and count it as running; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next_owner() is not None)
            if (owner := self._next_owner()) is None:
                return None
            jobs = self._waiting.pop(owner)
            run = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # after the owners that have as few running jobs
            self._running[owner] += 1
            self._num_begun += 1
            self._changed.notify_all()
            return owner, run

    def _end_job(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._changed.notify_all()

    def _watch(self) -> None:
        """Start one more thread whenever jobs wait and none has begun for STUCK_SECONDS."""
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_closed or self._next_owner() is not None)
                begun = partial(self._has_begun_since, self._num_begun)
                if self._changed.wait_for(begun, STUCK_SECONDS):
                    continue
                if self._next_owner() is not None and self._num_spare + len(self._hung) < MAX_HUNG_READS:
                    self._num_spare += 1
                    self._start_thread(self._work)

    def _has_begun_since(self, num_begun: int) -> bool:
        return self._is_closed or self._num_begun > num_begun

    def _run(self, key: str, job: StoreJob[T], read: Callable[[], R], write: Callable[[R], T]) -> bool:
        """Run a job. Return False if another thread has replaced this thread, because the job was cancelled."""
        with self._changed:
            if job.cancelled():
                return True
            job.started_at = self._clock()
            self._reading.add(job)
        try:
            found = read()
            if job.set_running_or_notify_cancel():
                job.set_result(write(found))
        except Exception as error:
            if job.running() or job.set_running_or_notify_cancel():
                job.set_exception(error)
        with self._changed:
            self._hung.discard(key)
            is_replaced = job not in self._reading
            self._reading.discard(job)
            return not is_replaced

    def _replace_hung_thread(self, key: str, job: StoreJob[T]) -> None:
        with self._changed:  # a cancelled job may have ended before this call
            if job.cancelled() and job in self._reading:
                self._reading.remove(job)
                self._hung.add(key)
                self._end_job(owner_of(key))
                if self._num_spare:
                    self._num_spare -= 1
                else:
                    self._start_thread(self._work)


class DiskStore:
    """An `AdapterStore` over PEFT files. A load checks the files again, except the values, which the digest fixes."""

    def __init__(
        self,
        bank: AdapterTarget,
        source: AdapterSource,
        host: HostCache,
        max_loading: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bank = bank
        self._source = source
        self._host = host
        self._readers = LoaderThreads("adapter-read", max_loading, clock)
        self._copiers = LoaderThreads("adapter-copy", max_loading, clock)

    @property
    def num_cached(self) -> int:
        """Adapters in the host's memory."""
        return len(self._host)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the adapters in the host's memory."""
        return self._host.num_bytes

    def inspect(self, ref: AdapterRef) -> StoreJob[Inspected]:
        """Check the files."""
        return self._readers.submit(ref.digest, partial(self._inspect, ref), lambda inspected: inspected)

    def fill(self, ref: AdapterRef, pages: list[int]) -> StoreJob[int]:
        """Copy the weights into `pages`, and return their slot."""
        fence = self._bank.fence()  # steps launched until now may still read the pages' old content; later steps do not
        return self._copiers.submit(ref.digest, partial(self._prepared, ref), partial(self._install, pages, fence))

    def read(self, ref: AdapterRef, use: Callable[[AdapterWeights], T]) -> StoreJob[T]:
        """Read the weights, and call `use` with them on the CPU. The job has ended already if the weights are in the
        host's memory."""
        kept = self._host.get(ref.digest)
        if kept is None or not isinstance(kept.source, AdapterWeights):
            return self._readers.submit(ref.digest, partial(self._weights, ref), use)
        job: StoreJob[T] = StoreJob()
        job.set_result(use(kept.source))
        return job

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        self._bank.drop(slot)

    def forget(self, digest: str) -> None:
        """Drop a deleted revision from the host's memory."""
        self._host.forget(digest)

    def close(self) -> None:
        """Stop the threads after their current jobs."""
        for threads in (self._readers, self._copiers):
            threads.close()

    def _inspect(self, ref: AdapterRef) -> Inspected:
        plan = self._source.inspect(ref)
        if self._host.may_take(plan.file_bytes):
            self._prepared(ref)
        num_pages = self._bank.plan_layout(plan).num_pages
        return Inspected(num_pages, plan.invocation, plan.changes_tower, plan.images_refused)

    @torch.inference_mode()
    def _install(self, pages: list[int], fence: Any, adapter: PreparedAdapter) -> int:
        return self._bank.install(adapter, pages, fence)

    @torch.inference_mode()
    def _weights(self, ref: AdapterRef) -> AdapterWeights:
        kept = self._host.get(ref.digest)
        if kept is not None and isinstance(kept.source, AdapterWeights):
            return kept.source
        # For a GPU the cache keeps the contents of pages. These lack the weights that no step reads.
        weights = self._source.load(ref)
        if kept is None:
            self._host.put(ref.digest, self._bank.prepare(weights))
        return weights

    @torch.inference_mode()
    def _prepared(self, ref: AdapterRef) -> PreparedAdapter:
        adapter = self._host.get(ref.digest)
        if adapter is None:
            adapter = self._bank.prepare(self._source.load(ref))
            self._host.put(ref.digest, adapter)
        return adapter


COPY_BYTES = 64 << 20
"""Bytes of pages that are copied at once. A copy takes as many bytes outside the pool, which no plan counts."""
SAMPLE_PAGES = 16
"""Pages that are copied once each way to measure the time of a page."""


class HostPages:
    """A `HostKv` for a bank's pool: the pages are tensors on a CPU; on a GPU they are pinned memory, copied in the
    order of the GPU's stream.

    The host does not wait for copies. The device waits for copies before its next step. This is a short time: a page
    takes some tens of microseconds over the link, and few steps preempt sequences.
    """

    def __init__(self, pool: torch.Tensor, page_elements: int, num_bytes: int) -> None:
        """The parameter `pool` is flat. The host keeps at most `num_bytes` bytes, and never more pages than the pool
        has.
        """
        self._pool = pool[: pool.numel() // page_elements * page_elements].view(-1, page_elements)
        self.num_slots = min(num_bytes // (page_elements * pool.element_size()), len(self._pool))
        # Uninitialised on purpose, because a CPU allocates memory only when it is first written.
        shape = (self.num_slots, page_elements)
        self._slots = torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
        self.seconds_per_page = self._measured()

    @torch.inference_mode()
    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""
        for page, slot in zip(pages, slots, strict=True):
            self._slots[slot].copy_(self._pool[page], non_blocking=True)

    @torch.inference_mode()
    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""
        for slot, page in zip(slots, pages, strict=True):
            self._pool[page].copy_(self._slots[slot], non_blocking=True)

    @torch.inference_mode()
    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each page to another page of the pool. No page is in both lists."""
        sources, places = to_device(np.array((pages, targets), dtype=np.int64), self._pool.device)
        at_once = max(1, COPY_BYTES // self._pool[0].nbytes)
        for some, there in zip(sources.split(at_once), places.split(at_once), strict=True):
            self._pool.index_copy_(0, there, self._pool[some])

    @torch.inference_mode()
    def _measured(self) -> float:
        """Return the seconds for one page one way, measured in a second round: the first round touches the memory."""
        pages = self._pool[:SAMPLE_PAGES]
        slots = torch.empty_like(pages, device="cpu", pin_memory=pages.device.type == "cuda")
        seconds = 0.0
        for _ in range(2):
            self._wait()
            start = time.perf_counter()
            for page, slot in zip(pages, slots, strict=True):
                slot.copy_(page, non_blocking=True)
                page.copy_(slot, non_blocking=True)
            self._wait()
            seconds = time.perf_counter() - start
        return seconds / (2 * len(pages))

    def _wait(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
