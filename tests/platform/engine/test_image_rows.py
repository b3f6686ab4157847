"""Rows of images: turns of tenants, memory, and failures of the tower."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec
import pytest
import scheduler_harness

from loramux.engine.memory.image_rows import MAX_AHEAD, MAX_READS, MAX_READS_OF_TENANT, NICENESS, ImageRows
from loramux.engine.memory.pages import SequenceKv
from loramux.engine.memory.prefix_digests import prefix_digests
from loramux.engine.memory.residency import Inspected, StoreJob
from loramux.engine.messages import AdapterRef, EngineFault, ImageInput, Request, SamplingParams
from loramux.engine.scheduling import state


class Encoder:
    """Computes an image, which is its name, when the test lets it; ten bytes a token."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.adapter: str | None = None
        self.adapters: list[str | None] = []
        """Revision with which each image was computed."""
        self.slow: dict[str, StoreJob[AbstractContextManager[None]]] = {}
        """Reads of revisions that end when the test says so."""
        self.begun: list[str] = []
        """Revisions whose reads have begun."""
        self.niceness: list[int] = []
        self.done = threading.Semaphore(0)

    def fault_of(self, image: ImageInput) -> str | None:
        return None

    def bytes_of(self, image: ImageInput) -> int:
        return 10 * image.num_tokens

    def read(self, adapter: AdapterRef) -> StoreJob[AbstractContextManager[None]]:
        self.begun.append(adapter.digest)
        if adapter.digest in self.slow:
            return self.slow[adapter.digest]
        job: StoreJob[AbstractContextManager[None]] = StoreJob()
        if adapter.path == "missing":
            job.set_exception(FileNotFoundError("no such file."))
        else:
            job.set_result(self.changed_by(adapter.digest))
        return job

    @contextmanager
    def changed_by(self, digest: str) -> Iterator[None]:
        self.adapter = digest
        yield
        self.adapter = None

    def encode(self, image: ImageInput) -> str:
        assert self.done.acquire(timeout=10)
        self.computed.append(image.digest)
        self.adapters.append(self.adapter)
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if image.digest.startswith("bad"):
            raise RuntimeError("too odd")
        return f"rows of {image.digest}" + (f" by {self.adapter}" if self.adapter else "")


class Harness:
    def __init__(self, max_bytes: int = 1000, load_timeout: float = math.inf) -> None:
        self.encoder = Encoder()
        self.waiting: set[str] = set()
        self.started: list[str] = []
        self.woken = threading.Semaphore(0)
        self.adapters = scheduler_harness.Harness(pace=(0.0, 0.0), load_timeout=load_timeout)
        self.store, self.memory = self.adapters.store, self.adapters.scheduler.memory
        self.counters = self.memory.residency.counters
        self.rows = ImageRows(
            self.encoder,
            self.encoder.read,
            self.memory,
            max_bytes,
            self.woken.release,
            lambda id: id not in self.waiting,
            self.started.append,
            self.adapters.scheduler.miss_deadline,
        )

    def submit(
        self,
        name: str,
        tenant: str,
        *images: str,
        num_tokens: int = 10,
        deadline_ms: int | None = None,
        adapter: str | None = None,
    ) -> None:
        made = request(name, tenant, *images, num_tokens=num_tokens, deadline_ms=deadline_ms, adapter=adapter)
        assert self.rows.submit(made) is None

    def inspect(self, found: Inspected | Exception) -> None:
        """End the first running inspection."""
        job, _ = self.store.pending.pop(0)
        if isinstance(found, Exception):
            job.set_exception(found)
        else:
            job.set_result(found)
        self.memory.residency.poll()

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


def request(
    name: str,
    tenant: str,
    *images: str,
    num_tokens: int = 10,
    deadline_ms: int | None = None,
    adapter: str | None = None,
    group: str = "",
) -> Request:
    places = [
        ImageInput(digest=digest, patches=b"x", grid=(1, 2, 2 * num_tokens), start=100 * i, num_tokens=num_tokens)
        for i, digest in enumerate(images)
    ]
    return Request(
        id=name,
        tenant=tenant,
        prompt_token_ids=[9] * 100 * len(images) or [9],
        images=tuple(places),
        sampling=SamplingParams(max_tokens=3),
        deadline_ms=deadline_ms,
        group_id=group,
        adapter=AdapterRef(digest=adapter, path="missing" if adapter == "huge" else "") if adapter else None,
    )


OFF_THE_TOWER, ON_THE_TOWER = Inspected(2), Inspected(2, changes_tower=True)


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
    assert harness.rows.rows_of("a", "same") == "rows of same"


def test_rows_of_an_adapter_on_the_tower_are_its_revisions_alone(harness: Harness) -> None:
    for digest, inspected in (("a", ON_THE_TOWER), ("b", ON_THE_TOWER), ("c", OFF_THE_TOWER)):
        harness.submit(digest, "t", "same", adapter=digest)
        harness.inspect(inspected)
    harness.submit("base", "t", "same")
    harness.submit("again", "t", "same", adapter="b")
    assert [harness.compute() for _ in range(3)] == [["a"], ["b"], ["c", "base", "again"]]
    assert harness.encoder.adapters == ["a", "b", None]
    found = {name: harness.rows.rows_of(name, "same") for name in ("a", "b", "again", "c", "base")}
    of_b = "rows of same by b"
    assert found == {"a": "rows of same by a", "b": of_b, "again": of_b, "c": "rows of same", "base": "rows of same"}
    harness.submit("other", "u", "same", adapter="b")
    assert harness.compute() == ["other"]
    assert harness.encoder.adapters[-1] == "b", "tenants share no rows"


def test_request_waits_for_the_inspection_of_its_adapter_and_other_turns_go_on(harness: Harness) -> None:
    harness.submit("cached", "t", "same")
    assert harness.compute() == ["cached"]
    harness.submit("adapted", "t", "same", adapter="a")
    harness.submit("other", "u", "one")
    assert harness.compute() == ["other"]
    harness.inspect(ON_THE_TOWER)
    assert harness.compute() == ["adapted"]
    assert harness.encoder.adapters == [None, None, "a"]
    harness.submit("known", "t", "same", adapter="a")
    assert harness.advance() == ["known"]


def test_images_of_other_turns_go_on_while_an_adapter_on_the_tower_is_read(harness: Harness) -> None:
    harness.encoder.slow["a"] = StoreJob()
    harness.submit("adapted", "t", "one", "two", adapter="a")
    harness.inspect(ON_THE_TOWER)
    harness.submit("base", "u", "three", "four")
    assert [harness.compute(), harness.compute()] == [[], ["base"]]
    assert harness.rows.num_bytes == 200, "a request whose adapter is read holds no memory"
    assert harness.encoder.begun == ["a"]
    read = harness.encoder.slow.pop("a")
    read.set_result(harness.encoder.changed_by("a"))
    assert harness.woken.acquire(timeout=10)
    assert [harness.compute(), harness.compute()] == [[], ["adapted"]]
    assert harness.encoder.adapters == [None, None, "a", "a"]
    assert harness.rows._reads == {}


def test_read_for_the_tower_has_its_time_from_its_begin_and_ends_its_requests_alone() -> None:
    harness = Harness(load_timeout=10.0)
    read = harness.encoder.slow["a"] = StoreJob()
    harness.submit("adapted", "t", "one", adapter="a")
    harness.inspect(ON_THE_TOWER)
    for now in (5.0, 30.0):
        harness.adapters.time = now
        harness.memory.residency.poll()
        assert harness.advance() == []
    read.started_at = 30.0
    harness.adapters.time = 45.0
    harness.memory.residency.poll()
    harness.submit("base", "u", "two")
    assert harness.woken.acquire(timeout=10)
    ready, failed = harness.rows.advance()
    assert (ready, [one.id for one, _ in failed]) == ([], ["adapted"])
    assert failed[0][1].code == "adapter_failed"
    assert "could not be read within 10 seconds" in failed[0][1].message
    assert harness.compute() == ["base"]
    del harness.encoder.slow["a"]
    harness.submit("again", "t", "one", adapter="a")
    assert harness.compute() == ["again"]
    harness.rows.close()


def test_reads_for_the_tower_are_few_and_a_request_with_rows_waits_for_none_of_them() -> None:
    harness = Harness(max_bytes=300)
    names = [f"r{i}" for i in range(MAX_READS + 2)]
    harness.store.sizes.update(dict.fromkeys([*names, "first"], 2))
    harness.encoder.slow = {name: StoreJob() for name in names}
    harness.submit("first", "first", "one", "two", "three", adapter="first")
    harness.inspect(ON_THE_TOWER)
    assert harness.advance() == []
    for name in names:
        harness.submit(name, name, "one", adapter=name)
        harness.inspect(ON_THE_TOWER)
    assert [harness.compute(), harness.compute()] == [[], []]
    assert harness.encoder.begun == ["first", "first", *names[:MAX_READS], "first"]
    assert harness.compute() == ["first"]
    harness.rows.release("first")
    harness.encoder.slow["r0"].set_result(harness.encoder.changed_by("r0"))
    assert harness.woken.acquire(timeout=10)
    assert harness.compute() == ["r0"]
    assert harness.encoder.begun[-1] == names[MAX_READS], "one ended, and one began"
    assert harness.rows.cancel("r1") is not None
    harness.encoder.slow["r1"].set_result(harness.encoder.changed_by("r1"))
    assert harness.woken.acquire(timeout=10)
    assert harness.advance() == []
    assert list(harness.rows._reads) == names[2:], "nothing waits for the read of the cancelled request"
    harness.rows.close()


def test_reads_for_the_tower_that_hang_leave_room_for_those_of_other_tenants(harness: Harness) -> None:
    """Also those of requests that were cancelled since, which end no read."""
    names = [f"r{i}" for i in range(MAX_READS_OF_TENANT + 2)]
    harness.store.sizes.update(dict.fromkeys([*names, "other"], 2))
    harness.encoder.slow = {name: StoreJob() for name in names}
    for name in names:
        harness.submit(name, "slow", name, adapter=name)
        harness.inspect(ON_THE_TOWER)
        assert harness.advance() == []
        assert harness.rows.cancel(name) is not None
    assert list(harness.rows._reads) == names[:MAX_READS_OF_TENANT]
    harness.submit("other", "other", "one", adapter="other")
    harness.inspect(ON_THE_TOWER)
    assert harness.compute() == ["other"]


def test_requests_of_an_adapter_that_is_not_served_end_with_its_reason(harness: Harness) -> None:
    refused = Inspected(2, changes_tower=True, images_refused="It replaces a norm.")
    for adapter, inspected in (("a", refused), ("b", ValueError("no such file.")), ("huge", ON_THE_TOWER)):
        harness.submit(adapter, "t", "image", adapter=adapter)
        harness.inspect(inspected)
    harness.submit("last", "t", "fine")
    ready, failed = harness.rows.advance()
    assert not ready
    assert harness.woken.acquire(timeout=10)
    failed += harness.rows.advance()[1]
    assert [one.id for one, _ in failed] == ["a", "b", "huge"]
    faults = [fault for _, fault in failed]
    assert faults[0] == EngineFault("images_not_supported", "It replaces a norm.", field="messages")
    assert [fault.code for fault in faults[1:]] == ["adapter_failed", "adapter_failed"]
    assert all("no such file." in fault.message for fault in faults[1:])
    assert harness.compute() == ["last"]
    assert harness.memory.residency._awaited == set(), "ended requests want no revision"


def test_rows_of_a_deleted_revision_are_dropped_after_its_last_request(harness: Harness) -> None:
    for name, adapter in (("base", None), ("running", "a"), ("ended", "b")):
        harness.submit(name, "t", "same", adapter=adapter)
        if adapter is not None:
            harness.inspect(ON_THE_TOWER)
        assert harness.compute() == [name]
    harness.rows.release("ended")
    for digest in ("a", "b"):
        harness.memory.retire(digest)
        harness.rows.retire(digest)
    assert harness.rows.num_bytes == 200
    assert harness.rows.rows_of("running", "same") == "rows of same by a"
    harness.rows.release("running")
    assert harness.rows.num_bytes == 100
    assert harness.rows.rows_of("base", "same") == "rows of same"


def test_rows_of_a_deleted_revision_are_dropped_although_a_request_without_images_ends_later(harness: Harness) -> None:
    harness.submit("image", "t", "same", adapter="a")
    harness.inspect(ON_THE_TOWER)
    assert harness.compute() == ["image"]
    harness.adapters.submit("text", prompt=4, output=1, adapter="a")
    harness.memory.retire("a")
    harness.rows.retire("a")
    harness.rows.release("image")
    assert harness.rows.num_bytes == 0
    harness.adapters.run()
    assert harness.store.forgotten == ["a"]


def test_revision_that_is_deleted_while_a_request_waits_for_its_images_is_forgotten_after_this_request(
    harness: Harness,
) -> None:
    harness.submit("image", "t", "same", adapter="a")
    harness.inspect(ON_THE_TOWER)
    harness.memory.retire("a")
    harness.rows.retire("a")
    assert harness.compute() == ["image"]
    harness.adapters.submit("image", prompt=4, output=1, adapter="a")
    harness.adapters.run()
    harness.rows.release("image")
    assert harness.rows.num_bytes == 0
    assert harness.store.forgotten == ["a"]


def test_request_with_images_counts_one_use_of_its_adapter(harness: Harness) -> None:
    residency = harness.memory.residency
    harness.adapters.submit("text", prompt=4, output=1, adapter="a")
    harness.submit("image", "t", "same", adapter="b")
    harness.inspect(OFF_THE_TOWER)
    harness.inspect(Inspected(3))
    harness.adapters.submit("image", prompt=4, output=1, adapter="b")
    assert residency._known["a"].recency == residency._known["b"].recency


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
    assert [harness.rows.rows_of("d", "image d"), harness.rows.rows_of("again", "image a")]
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
    harness.adapters.time = 2.0
    harness.encoder.done.release()
    assert harness.woken.acquire(timeout=10)
    ready, _ = harness.rows.advance()
    assert ready[0].deadline_ms == 3000
    assert ready[0].images[0].patches == b""


def test_deadlines_end_requests_that_wait_for_an_inspection_or_an_image_as_they_end_others(harness: Harness) -> None:
    harness.submit("image", "t", "one", deadline_ms=4000)
    harness.submit("adapted", "u", "one", deadline_ms=2000, adapter="a")
    harness.submit("patient", "t", "one")
    assert harness.advance() == []
    assert harness.rows.next_deadline == 2.0
    harness.adapters.time = 1.9
    assert harness.advance() == []
    harness.adapters.time = 2.0
    ready, failed = harness.rows.advance()
    assert (ready, [one.id for one, _ in failed]) == ([], ["adapted"])
    harness.adapters.scheduler.add(request("text", "v", deadline_ms=2000))
    harness.adapters.time = 4.0
    harness.encoder.done.release()
    assert harness.woken.acquire(timeout=10)
    ready, late = harness.rows.advance()
    assert ([one.id for one in ready], [one.id for one, _ in late]) == (["patient"], ["image"])
    harness.adapters.step()
    assert failed[0][1] == harness.adapters.faults["text"]
    assert failed[0][1].code == "deadline_exceeded"
    assert late[0][1] == failed[0][1]
    assert harness.counters.missed_deadlines == 3
    assert harness.rows.next_deadline == math.inf
    harness.inspect(OFF_THE_TOWER)
    assert harness.rows.is_idle
    assert harness.memory.residency._awaited == set(), "ended requests want no revision"


@pytest.mark.parametrize("begins", [True, False])
def test_deadline_ends_a_choice_that_waits_for_its_image_if_no_other_choice_has_begun(
    harness: Harness, begins: bool
) -> None:
    first, second = (request(name, "t", deadline_ms=2000, group="g") for name in ("first", "second"))
    harness.store.sizes["slow"] = 2
    slow = msgspec.structs.replace(first, adapter=None if begins else AdapterRef(digest="slow", path=""))
    harness.adapters.scheduler.add(msgspec.structs.replace(slow, deadline_ms=2001))
    harness.adapters.step()
    assert harness.rows.submit(msgspec.structs.replace(second, images=request("", "t", "one").images)) is None
    harness.adapters.time = 2.0
    ready, failed = harness.rows.advance()
    assert (ready, [one.id for one, _ in failed]) == ([], [] if begins else ["second"])
    assert harness.rows.next_deadline == math.inf
    harness.adapters.step()
    assert list(harness.adapters.faults) == ([] if begins else ["first"])
    assert harness.rows.is_idle is not begins


def test_choice_that_waits_for_its_image_until_its_group_is_forgotten_is_not_refused(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another choice of the group had begun when the deadline passed, so that the deadline ends none."""
    monkeypatch.setattr(state, "MAX_ENDED_GROUPS", 0)
    scheduler = harness.adapters.scheduler
    scheduler.add(request("first", "t", group="g"))
    harness.adapters.step()
    second = request("second", "t", "one", deadline_ms=2000)
    assert harness.rows.submit(msgspec.structs.replace(second, group_id="g")) is None
    harness.advance()
    harness.adapters.time = 2.0
    harness.advance()
    scheduler.cancel("first")
    harness.encoder.done.release()
    assert harness.woken.acquire(timeout=10)
    [ready], failed = harness.rows.advance()
    assert not failed
    scheduler.add(msgspec.structs.replace(ready, prompt_token_ids=[9], images=()))
    harness.adapters.step()
    assert "second" not in harness.adapters.faults
    assert harness.adapters.generated["second"] == 1


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
