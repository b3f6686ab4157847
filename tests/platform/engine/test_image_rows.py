"""Rows of images: turns of tenants, memory, and failures of the tower."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from manual_clock import ManualClock

from loramux.engine.memory.image_rows import MAX_AHEAD, NICENESS, ImageRows
from loramux.engine.memory.pages import SequenceKv
from loramux.engine.memory.prefix_digests import prefix_digests
from loramux.engine.messages import ImageInput, Request, SamplingParams
from loramux.engine.metrics import Counters


class Encoder:
    """Computes an image, which is its name, when the test lets it; ten bytes a token."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.niceness: list[int] = []
        self.done = threading.Semaphore(0)

    def fault_of(self, image: ImageInput) -> str | None:
        return None

    def bytes_of(self, image: ImageInput) -> int:
        return 10 * image.num_tokens

    def encode(self, image: ImageInput) -> str:
        assert self.done.acquire(timeout=10)
        self.computed.append(image.digest)
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if image.digest.startswith("bad"):
            raise RuntimeError("too odd")
        return f"rows of {image.digest}"


class Harness:
    def __init__(self, max_bytes: int = 1000) -> None:
        self.encoder, self.counters, self.clock = Encoder(), Counters(), ManualClock(0.0)
        self.waiting: set[str] = set()
        self.started: list[str] = []
        self.woken = threading.Semaphore(0)
        self.rows = ImageRows(
            self.encoder,
            max_bytes,
            self.counters,
            self.clock,
            self.woken.release,
            lambda id: id not in self.waiting,
            self.started.append,
        )

    def submit(
        self, name: str, tenant: str, *images: str, num_tokens: int = 10, deadline_ms: int | None = None
    ) -> None:
        made = request(name, tenant, *images, num_tokens=num_tokens, deadline_ms=deadline_ms)
        assert self.rows.submit(made) is None

    def compute(self) -> list[str]:
        """Compute one image; return the requests that are ready after it."""
        ready = self.advance()
        self.encoder.done.release()
        assert self.woken.acquire(timeout=10)
        return ready + self.advance()

    def advance(self) -> list[str]:
        ready, failed = self.rows.advance()
        assert not failed
        return [one.id for one in ready]


def request(name: str, tenant: str, *images: str, num_tokens: int = 10, deadline_ms: int | None = None) -> Request:
    places = [
        ImageInput(digest=digest, patches=b"x", grid=(1, 2, 2 * num_tokens), start=100 * i, num_tokens=num_tokens)
        for i, digest in enumerate(images)
    ]
    return Request(
        id=name,
        tenant=tenant,
        prompt_token_ids=[9] * 100 * len(images),
        images=tuple(places),
        sampling=SamplingParams(max_tokens=3),
        deadline_ms=deadline_ms,
    )


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.encoder.done.release(1000)
    made.rows.close()


def test_tenants_take_turns_image_by_image(harness: Harness) -> None:
    harness.submit("a", "many", "a1", "a2", "a3")
    harness.submit("b", "many", "b1")
    harness.submit("c", "one", "c1")
    assert [harness.compute() for _ in range(5)] == [[], ["c"], [], ["a"], ["b"]]
    assert harness.encoder.computed == ["a1", "c1", "a2", "a3", "b1"]
    assert harness.started == ["a", "c", "a", "a", "b"]
    assert harness.rows.is_idle


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priorities of threads")
def test_images_are_computed_with_a_lower_priority_than_steps(harness: Harness) -> None:
    harness.submit("a", "t", "one")
    harness.compute()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert harness.encoder.niceness == [min(19, own + NICENESS)]


def test_equal_image_is_computed_once_a_tenant(harness: Harness) -> None:
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        harness.submit(name, tenant, "same")
    assert harness.compute() == ["a", "b"]
    assert harness.compute() == ["c"]
    assert (harness.counters.images_encoded, harness.counters.images_found) == (2, 1)
    assert harness.rows.rows_of("x", "same") == "rows of same"


def test_rows_of_open_requests_stay_and_others_leave_by_their_last_use() -> None:
    harness = Harness(max_bytes=300)
    for name in ("a", "b", "c"):
        harness.submit(name, "t", f"image {name}")
        harness.compute()
    harness.submit("d", "t", "image d")
    assert harness.advance() == []
    assert harness.started == ["a", "b", "c"], "all memory is held by requests"
    for name in ("a", "b"):
        harness.rows.release(name)
    harness.submit("again", "u", "image a")
    harness.rows.release("c")
    assert harness.compute() == ["d"], "in the place of the oldest"
    assert harness.rows.num_bytes == 300
    assert harness.compute() == ["again"]
    assert [harness.rows.rows_of("t", "image d"), harness.rows.rows_of("u", "image a")]
    assert harness.rows.num_bytes == 300
    harness.rows.close()


def test_no_request_overtakes_one_that_waits_for_memory() -> None:
    harness = Harness(max_bytes=300)
    harness.submit("first", "a", "one", num_tokens=20)
    assert harness.compute() == ["first"]
    harness.submit("large", "b", "two", num_tokens=30)
    harness.submit("small", "c", "three", num_tokens=1)
    assert harness.advance() == []
    assert harness.started == ["first"]
    harness.rows.release("first")
    assert harness.compute() == ["large"]
    harness.rows.close()


def test_request_whose_images_exceed_the_memory_is_refused_at_once(harness: Harness) -> None:
    fault = harness.rows.submit(request("large", "t", "one", "two", num_tokens=60))
    assert fault is not None
    assert fault.message.startswith("The request's images take 1200 bytes, more than the 1000")
    assert harness.rows.submit(request("twice", "t", "one", "one", num_tokens=60)) is None


def test_images_wait_if_many_requests_of_their_tenant_have_theirs_and_wait_to_start(harness: Harness) -> None:
    names = [f"r{i}" for i in range(MAX_AHEAD + 1)]
    harness.waiting.update(names)
    for name in names:
        harness.submit(name, "greedy", name)
    assert [harness.compute() for _ in range(MAX_AHEAD)] == [[name] for name in names[:-1]]
    assert harness.advance() == []
    assert len(harness.started) == MAX_AHEAD
    harness.submit("other", "patient", "other")
    assert harness.compute() == ["other"]
    harness.waiting.discard("r0")
    assert harness.compute() == names[-1:]


def test_failed_image_ends_its_requests_alone(harness: Harness) -> None:
    harness.submit("a", "t", "good", "bad")
    harness.submit("b", "u", "fine")
    assert [harness.compute(), harness.compute()] == [[], ["b"]]
    harness.encoder.done.release()
    assert harness.woken.acquire(timeout=10)
    ready, failed = harness.rows.advance()
    assert not ready
    assert [(one.id, fault.code) for one, fault in failed] == [("a", "internal_error")]
    assert harness.rows.is_idle
    harness.submit("c", "t", "good")
    assert harness.advance() == ["c"], "what was computed is kept"


def test_request_that_is_cancelled_while_its_image_is_computed_leaves_others(harness: Harness) -> None:
    harness.submit("a", "t", "one")
    harness.submit("b", "t", "one")
    assert harness.advance() == []
    cancelled = harness.rows.cancel("a")
    assert cancelled is not None
    assert harness.rows.cancel("a") is None
    assert harness.compute() == ["b"]


def test_deadline_is_shorter_by_the_wait_and_patches_are_dropped(harness: Harness) -> None:
    harness.submit("a", "t", "one", deadline_ms=5000)
    harness.rows.advance()
    harness.clock.now = 2.0
    harness.encoder.done.release()
    assert harness.woken.acquire(timeout=10)
    ready, _ = harness.rows.advance()
    assert ready[0].deadline_ms == 3000
    assert ready[0].images[0].patches == b""


def test_ids_of_placeholders_are_their_image_and_not_their_token() -> None:
    digests = ("ab" * 32, "ab" * 31 + "ac", "cd" * 32)
    kept = [SequenceKv(request("r", "t", digest, "ef" * 32)) for digest in digests]
    pages = [[one.cache_ids(start, start + 16) for start in range(0, 144, 16)] for one in kept]
    assert pages[0][0] != pages[1][0] != pages[2][0]
    assert [page[1:] for page in pages] == [pages[0][1:]] * 3
    assert set(pages[0][1]) == {9}
    plain = SequenceKv(request("r", "t"))
    plain.token_ids = list(range(32))
    assert plain.cache_ids(16, 32) == tuple(range(16, 32))


def test_digests_of_prefixes_include_the_images_before_their_end() -> None:
    def of(*digests: str) -> tuple[int, ...]:
        made = request("r", "t", *digests)
        return prefix_digests(b"key", "t", [9] * 128, 32, made.images)

    first, second, third = of("ab" * 32, "ab" * 32), of("cd" * 32, "ab" * 32), of("ab" * 32, "cd" * 32)
    assert len(first) == 4
    assert not set(first) & set(second)
    assert (first[:3], first[3] == third[3]) == (third[:3], False)
    assert prefix_digests(b"key", "t", [9] * 128, 32) not in (first, second, third)
