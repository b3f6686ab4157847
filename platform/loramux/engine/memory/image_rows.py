"""Rows of images: requests wait here until the vision tower has computed their images.

One thread computes one image at a time, next to the steps. Its priority is low: while a step computes on a core, the
thread gets about a tenth of the core's time (`NICENESS`), so decoding rows are delayed by that share at most.

Tenants take turns, image by image (one turn for each class of service), so many or huge images of one tenant delay
another tenant's image by one image of each tenant that waits. A tenant whose images are computed waits for its requests
to start before more of its images are computed (`MAX_AHEAD`).

The rows of an image are kept under its tenant and digest, so the same image of two tenants is computed twice. The rows
of a request stay until the request ends, because a preempted request computes its prompt again. Other rows stay until
their memory is needed, the least recently used first. A request begins only if all its rows fit: requests that hold
rows never wait for others, so every request progresses.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from loramux.engine.messages import EngineFault, ImageInput, Request, ServiceClass
from loramux.engine.metrics import Counters

logger = logging.getLogger(__name__)

NICENESS = 10
"""Niceness that the thread has more than others; Linux then gives it a tenth of a core that another one uses too."""
MAX_AHEAD = 4
"""Requests of a tenant and class whose images are computed and that have not started."""

Key = tuple[str, str]
"""Tenant and digest of an image."""
Turn = tuple[ServiceClass, str]
Rows = TypeVar("Rows")
Rows_co = TypeVar("Rows_co", covariant=True)


class Encoder(Protocol[Rows_co]):
    """The vision tower."""

    def fault_of(self, image: ImageInput) -> str | None:
        """Return why the tower cannot compute `image`."""

    def bytes_of(self, image: ImageInput) -> int:
        """Return the bytes of the rows of `image`."""

    def encode(self, image: ImageInput) -> Rows_co:
        """Compute the rows of `image`."""


@dataclass(slots=True)
class _Held(Generic[Rows]):
    num_bytes: int
    rows: Rows | None = None
    """None: not computed yet."""
    users: int = 0
    """Requests that need the rows."""


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    request: Request
    arrival: float


class ImageRows(Generic[Rows]):
    """The rows of images, and the requests that wait for theirs. Used by the engine's thread alone."""

    def __init__(
        self,
        encoder: Encoder[Rows],
        max_bytes: int,
        counters: Counters,
        clock: Callable[[], float],
        wake: Callable[[], None],
        has_started: Callable[[str], bool],
        on_start: Callable[[str], None],
    ) -> None:
        """`wake` is called from the thread after each image. `has_started` tells if a request, by its id, has begun to
        run or has ended. `on_start` is called with a request's id before an image of it is computed."""
        self.num_bytes = 0
        """Bytes of rows, computed or reserved."""
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._counters = counters
        self._clock = clock
        self._wake = wake
        self._has_started = has_started
        self._on_start = on_start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images", initializer=_lower_priority)
        self._held: OrderedDict[Key, _Held[Rows]] = OrderedDict()
        """The last used last."""
        self._pinned: dict[str, tuple[Turn, list[Key]]] = {}
        """The turn of a request and the rows that it needs, by its id."""
        self._turns: OrderedDict[Turn, deque[_Waiting]] = OrderedDict()
        """Waiting requests by tenant and class, the next turn first."""
        self._job: tuple[Key, Future[Rows]] | None = None
        self._has_news = False
        """True if a request may have all its rows that had not before."""

    # questions

    @property
    def is_idle(self) -> bool:
        """True if no request waits."""
        return not self._turns

    def rows_of(self, tenant: str, digest: str) -> Rows:
        """Return the rows of an image of a request that has not ended."""
        rows = self._held[tenant, digest].rows
        assert rows is not None, "a request runs after its images are computed"
        return rows

    # a request's way

    def submit(self, request: Request) -> EngineFault | None:
        """Let `request` wait for its images. Return the fault if the tower cannot compute them."""
        for image in request.images:
            if fault := self._encoder.fault_of(image):
                return EngineFault("internal_error", fault, field="messages")
        if (needed := sum(self._sizes(request).values())) > self._max_bytes:
            message = (
                f"The request's images take {needed} bytes, more than the {self._max_bytes} that this server keeps for "
                f"images. Send fewer or smaller images, or ask the operator for a larger engine.image_bytes."
            )
            return EngineFault("context_length_exceeded", message, field="messages")
        self._has_news = True
        turn = request.service_class, request.tenant
        self._turns.setdefault(turn, deque()).append(_Waiting(request, self._clock()))
        return None

    def cancel(self, request_id: str) -> Request | None:
        """Drop a waiting request and return it; None if no such request waits."""
        for turn, waiting in self._turns.items():
            if found := next((one for one in waiting if one.request.id == request_id), None):
                waiting.remove(found)
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

    def advance(self) -> tuple[list[Request], list[tuple[Request, EngineFault]]]:
        """Start the next image if none is being computed. Return the requests whose images are computed now, and those
        whose images have failed.

        Returned requests hold no patches, and their deadline is shortened by their wait here.
        """
        failed = self._take_result()
        turns, self._has_news = list(self._turns) if self._has_news else [], False
        ready = [self._without_patches(one) for turn in turns for one in self._take_ready(turn)]
        if self._job is None:
            self._start_next()
        return ready, failed

    def close(self) -> None:
        """Stop the thread after its current image."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # the parts

    def _sizes(self, request: Request) -> dict[Key, int]:
        return {(request.tenant, image.digest): self._encoder.bytes_of(image) for image in request.images}

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
        waiting = [one.request for turn in self._turns.values() for one in turn]
        failed = [request for request in waiting if key in self._pinned.get(request.id, (None, ()))[1]]
        for request in failed:
            self.cancel(request.id)
        if key in self._held:
            self._drop(key)
        fault = EngineFault("internal_error", "An image of the request could not be computed.", field="messages")
        return [(request, fault) for request in failed]

    def _take_ready(self, turn: Turn) -> list[_Waiting]:
        """Take the leading requests of `turn` whose images are computed."""
        waiting, ready = self._turns[turn], []
        while waiting and self._is_computed(waiting[0].request):
            ready.append(waiting.popleft())
        if not waiting:
            del self._turns[turn]
        return ready

    def _is_computed(self, request: Request) -> bool:
        if request.id not in self._pinned:
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
            if request.id not in self._pinned:
                if is_full or ahead[turn] >= MAX_AHEAD:
                    continue
                if not self._begin(request):
                    is_full = True  # no request overtakes one that waits for memory
                    continue
            image = next(i for i in request.images if self._held[request.tenant, i.digest].rows is None)
            self._on_start(request.id)
            job = self._thread.submit(self._encoder.encode, image)
            self._job = (request.tenant, image.digest), job
            job.add_done_callback(lambda _: self._wake())
            self._turns.move_to_end(turn)
            return

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


def _lower_priority() -> None:
    """Lower the priority of this thread, and of the threads that it will start to compute."""
    if sys.platform == "linux":  # other systems have one priority for all threads of a process
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
