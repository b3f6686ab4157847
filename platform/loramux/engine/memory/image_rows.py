"""Rows of images: requests wait here until the vision tower has computed their images.

One thread computes one image at a time, next to the steps. Its priority is low: while a step computes on a core, the
thread gets about a tenth of the core's time (`NICENESS`), so decoding rows are delayed by that share at most. On a GPU
it launches operators on a separate stream, and waits for them.

Tenants take turns, image by image (one turn for each class of service), so many or huge images of one tenant delay
another tenant's image by one image of each tenant that waits. A tenant whose images are computed waits for its requests
to start before more of its images are computed (`MAX_AHEAD`).

The rows of an image are kept under its tenant and digest, so the same image of two tenants is computed twice. If an
adapter changes the tower, its revision is part of the key. Such rows are no other revision's, and rows of the base are
shared by all adapters that leave the tower alone. An adapter's files tell which of both it is, so a request waits until
they have been inspected. The weights that change the tower are read when an image's turn comes. Other turns pass until
the read has ended, so storage that is slow delays the images of its adapter alone.

The rows of a request stay until the request ends, because a preempted request computes its prompt again. Other rows
stay until their memory is needed, the least recently used first. A request begins only if all its rows fit: requests
that hold rows never wait for others, so every request progresses.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from loramux.engine.memory.memory import Memory
from loramux.engine.memory.ranking import RankedItems
from loramux.engine.memory.residency import StoreJob
from loramux.engine.messages import AdapterRef, EngineFault, ImageInput, Request, ServiceClass

logger = logging.getLogger(__name__)

NICENESS = 10
"""Niceness that the thread has more than others; Linux then gives it a tenth of a core that another one uses too."""
MAX_AHEAD = 4
"""Requests of a tenant and class whose images are computed and that have not started."""

MAX_READS, MAX_READS_OF_TENANT = 16, 3
"""Adapters that are read, or whose weights wait for their turn, before requests of further adapters begin: of all
tenants, and of one. So slow storage of a tenant's adapters leaves room for the reads of others."""

Turn = tuple[ServiceClass, str]
Rows = TypeVar("Rows")
Rows_co = TypeVar("Rows_co", covariant=True)


class Key(NamedTuple):
    """Identity of an image's rows."""

    tenant: str
    digest: str
    """Digest of the image."""
    revision: str
    """Digest of the revision whose tower computes the rows; empty: the base's tower."""


class Encoder(Protocol[Rows_co]):
    """The vision tower."""

    def fault_of(self, image: ImageInput) -> str | None:
        """Return why the tower cannot compute `image`."""

    def bytes_of(self, image: ImageInput) -> int:
        """Return the bytes of the rows of `image`."""

    def encode(self, image: ImageInput) -> Rows_co:
        """Compute the rows of `image`."""


TowerOf = Callable[[AdapterRef], StoreJob[AbstractContextManager[None]]]
"""Function that begins to read an adapter. The result is a context in which the encoder computes one image as the
adapter changes it."""


@dataclass(slots=True)
class _Held(Generic[Rows]):
    num_bytes: int
    rows: Rows | None = None
    """None: not computed yet."""
    users: int = 0
    """Requests that need the rows."""


class _Read(NamedTuple):
    """A read of an adapter that changes the tower."""

    tenant: str
    job: StoreJob[AbstractContextManager[None]]


@dataclass(eq=False, slots=True)
class _Waiting:
    request: Request
    arrival: float
    start_by: float
    """Deadline of the request, by the clock; inf: it has none."""


class ImageRows(Generic[Rows]):
    """The rows of images, and the requests that wait for theirs. Used by the engine's thread alone."""

    def __init__(
        self,
        encoder: Encoder[Rows],
        tower_of: TowerOf,
        memory: Memory,
        max_bytes: int,
        wake: Callable[[], None],
        has_started: Callable[[str], bool],
        on_start: Callable[[str], None],
        miss_deadline: Callable[[Request], EngineFault | None],
    ) -> None:
        """`memory` has the adapters, the counters and the clock. `wake` is called from the thread after each image.
        `has_started` tells if a request, by its id, has begun to run or has ended. `on_start` is called with a
        request's id before an image of it is computed. `miss_deadline` is called with a request whose deadline has
        passed, and returns its fault; None: the request goes on without a deadline."""
        self.num_bytes = 0
        """Bytes of rows, computed or reserved."""
        self._encoder = encoder
        self._tower_of = tower_of
        self._memory = memory
        self._residency = memory.residency
        self._max_bytes = max_bytes
        self._counters = self._residency.counters
        self._clock = self._residency.clock
        self._wake = wake
        self._has_started = has_started
        self._on_start = on_start
        self._miss_deadline = miss_deadline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images", initializer=_lower_priority)
        self._held: OrderedDict[Key, _Held[Rows]] = OrderedDict()
        """The last used last."""
        self._pinned: dict[str, tuple[Turn, list[Key]]] = {}
        """The turn of a request and the rows that it needs, by its id."""
        self._wanted: dict[str, str] = {}
        """The revision of a request with an adapter, by the request's id."""
        self._inspecting: set[str] = set()
        """Revisions whose inspection the first request of a turn waits for."""
        self._reads: dict[str, _Read] = {}
        """Reads of revisions that change the tower, by the revision. Each read serves one image."""
        self._turns: OrderedDict[Turn, deque[_Waiting]] = OrderedDict()
        """Waiting requests by tenant and class, the next turn first."""
        self._deadlines: RankedItems[_Waiting, float] = RankedItems(attrgetter("start_by"))
        """Waiting requests whose deadline has not passed, the next deadline first."""
        self._job: tuple[Key, Future[Rows]] | None = None
        self._has_news = False
        """True if a request may have all its rows that had not before."""

    # questions

    @property
    def is_idle(self) -> bool:
        """True if no request waits."""
        return not self._turns

    @property
    def next_deadline(self) -> float:
        """The next deadline of a waiting request, by the clock; inf if there is none."""
        waiting = self._deadlines.first()
        return math.inf if waiting is None else waiting.start_by

    def rows_of(self, request_id: str, digest: str) -> Rows:
        """Return the rows of an image of a request that has not ended."""
        rows = next(self._held[key].rows for key in self._pinned[request_id][1] if key.digest == digest)
        assert rows is not None, "a request runs after its images are computed"
        return rows

    # a request's way

    def submit(self, request: Request) -> EngineFault | None:
        """Let `request` wait for its images. Return the fault if the tower cannot compute them."""
        for image in request.images:
            if fault := self._encoder.fault_of(image):
                return EngineFault("internal_error", fault, field="messages")
        needed = sum({image.digest: self._encoder.bytes_of(image) for image in request.images}.values())
        if needed > self._max_bytes:
            message = (
                f"The request's images take {needed} bytes, more than the {self._max_bytes} that this server keeps for "
                f"images. Send fewer or smaller images, or ask the operator for a larger engine.image_bytes."
            )
            return EngineFault("context_length_exceeded", message, field="messages")
        if (adapter := request.adapter) is not None:
            self._residency.want(adapter)
            self._wanted[request.id] = adapter.digest
        self._has_news = True
        turn, now, deadline = (request.service_class, request.tenant), self._clock(), request.deadline_ms
        waiting = _Waiting(request, now, math.inf if deadline is None else now + deadline / 1000.0)
        self._turns.setdefault(turn, deque()).append(waiting)
        if deadline is not None:
            self._deadlines.put(waiting)
        return None

    def cancel(self, request_id: str) -> Request | None:
        """Drop a waiting request and return it; None if no such request waits."""
        for turn, waiting in self._turns.items():
            if found := next((one for one in waiting if one.request.id == request_id), None):
                waiting.remove(found)
                self._deadlines.drop(found)
                if not waiting:
                    del self._turns[turn]
                self.release(request_id)
                self._has_news = True
                return found.request
        return None

    def release(self, request_id: str) -> None:
        """Let the rows of a request that has ended be dropped when their memory is needed."""
        for key in self._pinned.pop(request_id, (None, ()))[1]:
            self._held[key].users -= 1
        if (digest := self._wanted.pop(request_id, None)) is not None:
            self._memory.release(digest)
            if self._residency.is_retired(digest):
                self.retire(digest)

    def retire(self, digest: str) -> None:
        """Drop the rows of a deleted revision that no request needs."""
        for key in [key for key, held in self._held.items() if key.revision == digest and not held.users]:
            self._drop(key)

    def advance(self) -> tuple[list[Request], list[tuple[Request, EngineFault]]]:
        """Start the next image if none is being computed. Return the requests whose images are computed now, and those
        whose images or adapters have failed or whose deadline has passed.

        Returned requests hold no patches, and their deadline is shortened by their wait here.
        """
        failed = self._take_result() + self._take_expired()
        if inspected := {digest for digest in self._inspecting if not self._residency.is_inspecting(digest)}:
            self._inspecting -= inspected
            self._has_news = True
        ended = [digest for digest, read in self._reads.items() if read.job.done()]
        turns, self._has_news = list(self._turns) if self._has_news or ended else [], False
        ready: list[Request] = []
        for turn in turns:
            self._take_leading(turn, ready, failed)
        self._drop_unneeded(ended)
        if self._job is None:
            self._start_next()
        return ready, failed

    def close(self) -> None:
        """Stop the thread after its current image."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # the parts

    def _is_inspected(self, request: Request) -> bool:
        """Return whether it is known if the adapter of `request` changes the tower."""
        return request.adapter is None or self._residency.changes_tower(request.adapter.digest) is not None

    def _tower_adapter(self, request: Request) -> AdapterRef | None:
        """Return the adapter of `request`, whose files have been inspected, if it changes the tower."""
        adapter = request.adapter
        return adapter if adapter is not None and self._residency.changes_tower(adapter.digest) else None

    def _key(self, request: Request, image: ImageInput) -> Key:
        adapter = self._tower_adapter(request)
        return Key(request.tenant, image.digest, "" if adapter is None else adapter.digest)

    def _sizes(self, request: Request) -> dict[Key, int]:
        return {self._key(request, image): self._encoder.bytes_of(image) for image in request.images}

    def _fault_of_adapter(self, request: Request) -> EngineFault | None:
        if request.adapter is None:
            return None
        digest = request.adapter.digest
        if self._residency.has_failed(digest):
            reason = self._residency.failure(digest)
            return _adapter_failed(reason)
        job = None if (read := self._reads.get(digest)) is None else read.job
        if job is not None and job.done() and (error := self._residency.error_of(job)):
            return _adapter_failed(str(error))
        refused = self._residency.images_refused(digest)
        return None if refused is None else EngineFault("images_not_supported", refused, field="messages")

    def _take_result(self) -> list[tuple[Request, EngineFault]]:
        """Keep the rows that the thread has computed. If it has failed, return the requests that need them."""
        if self._job is None or not self._job[1].done():
            return []
        (key, job), self._job = self._job, None
        self._has_news = True
        if (error := job.exception()) is None:
            self._counters.images_encoded += 1
            if held := self._held.get(key):  # None: its request was cancelled, and others needed the memory
                held.rows = job.result()
            return []
        logger.error("an image could not be computed", exc_info=error)
        fault = EngineFault("internal_error", "An image of the request could not be computed.", field="messages")
        waiting = [one.request for turn in self._turns.values() for one in turn]
        failed = [request for request in waiting if key in self._pinned.get(request.id, (None, ()))[1]]
        for request in failed:
            self.cancel(request.id)
        if key in self._held:
            self._drop(key)
        return [(request, fault) for request in failed]

    def _take_expired(self) -> list[tuple[Request, EngineFault]]:
        """Take the requests whose deadline has passed before a choice of their group began."""
        failed: list[tuple[Request, EngineFault]] = []
        now = self._clock()
        while (waiting := self._deadlines.first()) is not None and waiting.start_by <= now:
            self._deadlines.drop(waiting)
            if fault := self._miss_deadline(waiting.request):
                failed.append((waiting.request, fault))
                self.cancel(waiting.request.id)
            else:  # the group may be forgotten before this choice is added
                waiting.request = msgspec.structs.replace(waiting.request, group_started=True)
        return failed

    def _take_leading(self, turn: Turn, ready: list[Request], failed: list[tuple[Request, EngineFault]]) -> None:
        """Take the leading requests of `turn` whose images are computed, and those whose adapter is not served."""
        while waiting := self._turns.get(turn):
            request = waiting[0].request
            if fault := self._fault_of_adapter(request):
                failed.append((request, fault))
                self.cancel(request.id)
            elif self._is_computed(request):
                self._deadlines.drop(waiting[0])
                ready.append(self._without_patches(waiting.popleft()))
                if not waiting:
                    del self._turns[turn]
            else:
                if request.adapter is not None and not self._is_inspected(request):
                    self._inspecting.add(request.adapter.digest)
                return

    def _is_computed(self, request: Request) -> bool:
        if request.id not in self._pinned:
            if not self._is_inspected(request):
                return False
            found = [self._held.get(key) for key in self._sizes(request)]
            if any(held is None or held.rows is None for held in found):
                return False
            self._counters.images_found += len(found)
            self._pin(request)
        return all(self._held[key].rows is not None for key in self._pinned[request.id][1])

    def _start_next(self) -> None:
        """Begin the next image of the first turn that has one and may go on."""
        ahead = Counter(turn for request_id, (turn, _) in self._pinned.items() if not self._has_started(request_id))
        is_full = False
        for turn, waiting in self._turns.items():
            request = waiting[0].request
            is_new = request.id not in self._pinned
            if is_new and (is_full or ahead[turn] >= MAX_AHEAD or not self._is_inspected(request)):
                continue
            adapter = self._tower_adapter(request)
            if (context := nullcontext() if adapter is None else self._read(adapter, request)) is None:
                continue
            if is_new and not self._begin(request):
                is_full = True  # no request overtakes one that waits for memory
                continue
            image = next(i for i in request.images if self._held[self._key(request, i)].rows is None)
            self._on_start(request.id)
            if adapter is not None:
                del self._reads[adapter.digest]
            job = self._thread.submit(self._encode, image, context)
            self._job = self._key(request, image), job
            job.add_done_callback(lambda _: self._wake())
            self._turns.move_to_end(turn)
            return

    def _encode(self, image: ImageInput, context: AbstractContextManager[None]) -> Rows:
        with context:
            return self._encoder.encode(image)

    def _read(self, adapter: AdapterRef, request: Request) -> AbstractContextManager[None] | None:
        """Return the context in which the next image of `request` is computed; None until the read of its adapter,
        which begins here, has ended.
        """
        read = self._reads.get(adapter.digest)
        is_new = read is None
        if read is None:
            # A request that holds rows waits for no other read, because that read may wait for these rows' memory.
            if request.id not in self._pinned and not self._may_read(request.tenant):
                return None
            read = self._reads[adapter.digest] = _Read(request.tenant, self._tower_of(adapter))
        if read.job.done() and self._residency.error_of(read.job) is None:
            return read.job.result()
        if is_new:
            self._residency.limit(read.job)
            read.job.add_done_callback(lambda _: self._wake())
        return None

    def _may_read(self, tenant: str) -> bool:
        """Return whether a read of an adapter may begin for `tenant`."""
        own = sum(read.tenant == tenant for read in self._reads.values())
        return len(self._reads) < MAX_READS and own < MAX_READS_OF_TENANT

    def _drop_unneeded(self, ended: list[str]) -> None:
        """Drop the `ended` reads that have failed, or that the first request of no turn waits for."""
        first = [waiting[0].request.adapter for waiting in self._turns.values()] if ended else []
        needed = {adapter.digest for adapter in first if adapter is not None}
        for digest in ended:
            if digest not in needed or self._residency.error_of(self._reads[digest].job):
                del self._reads[digest]

    def _begin(self, request: Request) -> bool:
        """Reserve the memory of the rows of `request`. Return False if other requests hold too much."""
        sizes = self._sizes(request)
        new = {key: size for key, size in sizes.items() if key not in self._held}
        excess = self.num_bytes + sum(new.values()) - self._max_bytes
        idle = [key for key, held in self._held.items() if not held.users and key not in sizes]
        for key in idle:
            if excess <= 0:
                break
            excess -= self._held[key].num_bytes
            self._drop(key)
        if excess > 0:
            return False
        self._counters.images_found += sum(held.rows is not None for key in sizes if (held := self._held.get(key)))
        for key, size in new.items():
            self._held[key] = _Held(size)
            self.num_bytes += size
        self._pin(request)
        return True

    def _pin(self, request: Request) -> None:
        keys = list(self._sizes(request))
        for key in keys:
            self._held[key].users += 1
            self._held.move_to_end(key)
        self._pinned[request.id] = (request.service_class, request.tenant), keys

    def _drop(self, key: Key) -> None:
        self.num_bytes -= self._held.pop(key).num_bytes

    def _without_patches(self, waiting: _Waiting) -> Request:
        request = waiting.request
        deadline = request.deadline_ms
        if deadline is not None:
            deadline = max(0, deadline - int(1000 * (self._clock() - waiting.arrival)))
        images = tuple(msgspec.structs.replace(image, patches=b"") for image in request.images)
        return msgspec.structs.replace(request, images=images, deadline_ms=deadline)


def _adapter_failed(reason: str) -> EngineFault:
    return EngineFault("adapter_failed", f"The adapter could not be loaded: {reason}")


def _lower_priority() -> None:
    """Lower the priority of this thread, and of the threads that it will start to compute."""
    if sys.platform == "linux":  # other systems have one priority for all threads of a process
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
