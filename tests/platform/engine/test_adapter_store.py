"""Adapters in the host's memory: the dear, small and often used stay, and what is there is never read again."""

from __future__ import annotations

import math
import shutil
from functools import partial
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapter_zoo import Asked, Zoo, make_engine, serve
from listening import until_true
from manual_clock import ManualClock
from scheduler_harness import Harness

from loramux.engine.memory import host_memory
from loramux.engine.memory.host_memory import DiskStore, HostCache, LoaderThreads
from loramux.engine.memory.residency import AdapterState, StoreJob
from loramux.engine.messages import AdapterRef
from loramux_adapters.components import AdapterPlan
from loramux_adapters.prepared import PreparedAdapter
from loramux_adapters.weights import AdapterLayout, AdapterWeights, LoraWeights

KIB = 1 << 10


def prepared(weights: AdapterWeights) -> PreparedAdapter:
    return PreparedAdapter(weights.plan, AdapterLayout((), 0, 0), {}, weights)


def adapter(num_bytes: int) -> PreparedAdapter:
    half = torch.zeros(1, num_bytes // 8)
    return prepared(AdapterWeights(AdapterPlan((), num_bytes), {"m": LoraWeights(half, half, 1.0)}))


def test_host_cache_evicts_the_lowest_score_and_counts_bytes() -> None:
    tier = HostCache(3000 * KIB, clock := ManualClock(0.0))
    for name in ("often", "once", "third"):
        tier.put(name, adapter(1000 * KIB))
    tier.get("often")
    clock.now = 600.0
    tier.put("new", adapter(1000 * KIB))
    assert tier.get("once") is None
    assert tier.get("often") is not None
    assert tier.get("new") is not None
    assert tier.num_bytes == 3000 * KIB
    tier.forget("new")
    assert tier.num_bytes == 2000 * KIB


def test_host_cache_keeps_often_used_adapters_over_a_single_use() -> None:
    tier = HostCache(1000 * KIB, ManualClock(0.0))
    tier.put("often", adapter(1000 * KIB))
    for _ in range(3):
        tier.get("often")
    tier.put("passing", adapter(1000 * KIB))
    assert tier.get("passing") is None
    assert tier.get("often") is not None


def test_host_cache_keeps_the_smaller_of_equally_used_adapters() -> None:
    tier = HostCache(4100 * KIB, clock := ManualClock(0.0))
    tier.put("large", adapter(4000 * KIB))
    tier.put("small", adapter(100 * KIB))
    clock.now = 1.0
    tier.put("next", adapter(100 * KIB))
    assert tier.get("large") is None
    assert tier.get("small") is not None


def test_host_cache_counts_every_tensor_of_an_adapter() -> None:
    tensor = torch.zeros(2, 16)
    parts = ("columns", "inputs", "rows", "magnitudes", "biases", "norms", "copies")
    pair = LoraWeights(tensor, tensor, 1.0)
    full = AdapterWeights(AdapterPlan((), 0), {"m": pair}, **{part: {"m": tensor} for part in parts})
    tier = HostCache(10_000, ManualClock(0.0))
    tier.put("full", prepared(full))
    assert tier.num_bytes == (2 + len(parts)) * tensor.nbytes


def test_loader_thread_that_hangs_is_replaced_and_writes_nothing_later() -> None:
    threads, written = LoaderThreads("test", 1, ManualClock(0.0)), []
    hangs, begun, ended = Event(), Event(), Event()

    def read() -> str:
        begun.set()
        hangs.wait(60)
        return "late"

    hung = threads.submit("hung", read, written.append)
    assert begun.wait(60)
    waiting = threads.submit("other", lambda: "in time", written.append)
    assert hung.cancel()
    waiting.result(20)
    assert isinstance(threads.submit("hung", read, written.append).exception(20), TimeoutError)
    hangs.set()
    while isinstance(threads.submit("hung", lambda: "again", written.append).exception(20), TimeoutError):
        ended.wait(0.01)
    assert written == ["in time", "again"]
    threads.close()


def test_loader_threads_have_a_watcher_only_after_more_jobs_than_threads() -> None:
    """So the threads that copy adapters, which never get more, have none."""
    name, go_on = "test-watched", Event()
    threads = LoaderThreads(name, 2, ManualClock(0.0))

    def count() -> int:
        return sum(thread.name == name for thread in enumerate_threads())

    def submit(number: int) -> StoreJob[bool]:
        return threads.submit(f"{number}/{number}", lambda: go_on.wait(60), bool)

    jobs = [submit(0), submit(1)]
    assert count() == 2
    jobs.append(submit(2))
    assert count() == 3
    jobs.append(submit(3))
    assert count() == 3
    go_on.set()
    assert all(job.result(30) for job in jobs)
    threads.close()
    until_true(lambda: not count())


@pytest.mark.parametrize("owners", [("a", "b", "c", "d"), ("a",) * 8], ids=["four", "one"])
def test_loads_from_storage_that_hangs_delay_no_loads_of_other_owners(
    monkeypatch: pytest.MonkeyPatch, owners: tuple[str, ...]
) -> None:
    """Neither those of many owners, nor the many of one, which has no more threads than there are without others."""
    monkeypatch.setattr(host_memory, "STUCK_SECONDS", 0.02)
    threads, go_on, begun = LoaderThreads("test", 4, ManualClock(0.0)), Event(), list[int]()

    def hang(number: int) -> int:
        begun.append(number)
        assert go_on.wait(60)
        return number

    hanging = [
        threads.submit(f"{number}/{owner}", partial(hang, number), lambda found: found)
        for number, owner in enumerate(owners)
    ]
    for number in range(3):
        assert threads.submit(f"{number}/other", lambda: "in time", lambda found: found).result(30) == "in time"
    until_true(lambda: len(begun) >= 4)
    assert sorted(begun) == [0, 1, 2, 3]
    go_on.set()
    assert [job.result(30) for job in hanging] == list(range(len(owners)))
    assert threads.submit("last/other", lambda: "still", lambda found: found).result(30) == "still"
    threads.close()


def test_loads_while_others_hang_wait_for_one_more_thread_and_not_each_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "STUCK_SECONDS", 0.2)
    threads, go_on, ran_on = LoaderThreads("test", 2, ManualClock(0.0)), Event(), list[Thread]()

    def submit(number: int) -> StoreJob[None]:
        return threads.submit(f"{number}/{number}", lambda: ran_on.append(current_thread()), lambda found: found)

    hanging = [threads.submit(f"{number}/a", partial(go_on.wait, 60), lambda found: found) for number in range(2)]
    for number in range(10):
        submit(number).result(30)
    for job in [submit(number) for number in range(10, 20)]:
        job.result(30)
    assert len(ran_on) == 20
    assert len(set(ran_on)) < 10
    go_on.set()
    assert all(job.result(30) for job in hanging)
    until_true(lambda: threads._num_spare == 0)
    threads.close()


def test_loader_job_that_ends_while_it_is_cancelled_does_not_count_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled job is first marked, and then its callbacks are called: its thread may end it in between."""
    threads, go_on, begun = LoaderThreads("test", 1, ManualClock(0.0)), Event(), list[Thread]()
    replace, others = threads._replace_hung_thread, list[StoreJob[str]]()

    def replace_late(key: str, job: StoreJob[Any]) -> None:
        if job.cancelled():
            others.append(threads.submit("other", lambda: "other", lambda found: found))
            go_on.set()
            until_true(lambda: others[0].done() or not begun[0].is_alive())
        replace(key, job)

    def read() -> None:
        begun.append(current_thread())
        assert go_on.wait(60)

    monkeypatch.setattr(threads, "_replace_hung_thread", replace_late)
    job = threads.submit("a", read, lambda found: found)
    until_true(lambda: bool(begun))
    assert job.cancel()
    assert others[0].result(30) == "other"
    assert threads.submit("a", lambda: "again", lambda found: found).result(30) == "again"
    threads.close()


def test_loader_job_cannot_be_cancelled_while_it_writes() -> None:
    threads, writing, go_on = LoaderThreads("test", 1, ManualClock(0.0)), Event(), Event()

    def write(found: int) -> int:
        writing.set()
        assert go_on.wait(60)
        return found

    job = threads.submit("a", lambda: 7, write)
    assert writing.wait(60)
    assert not job.cancel()
    go_on.set()
    assert job.result(20) == 7
    threads.close()


def test_weights_in_the_hosts_memory_are_given_to_the_tower_at_once_and_others_are_read_by_a_thread() -> None:
    loaded: list[str] = []

    def load(ref: AdapterRef) -> AdapterWeights:
        loaded.append(ref.digest)
        if ref.digest == "other":
            assert go_on.wait(60)
        return AdapterWeights(AdapterPlan((), 0), {"m": LoraWeights(factor, factor, 1.0)})

    factor, go_on = torch.zeros(1, 5 * KIB // 4), Event()
    bank, source = cast(Any, SimpleNamespace(prepare=prepared)), cast(Any, SimpleNamespace(load=load))
    store = DiskStore(bank, source, HostCache(100 * KIB, ManualClock(0.0)), 1)
    assert store.read(AdapterRef("a", ""), lambda weights: weights.nbytes).result(20) == 10 * KIB
    other = store.read(AdapterRef("other", ""), lambda weights: weights.nbytes)
    again = store.read(AdapterRef("a", ""), lambda weights: weights.nbytes)
    assert (again.done(), other.done()) == (True, False)
    go_on.set()
    assert (again.result(), other.result(20)) == (10 * KIB, 10 * KIB)
    assert loaded == ["a", "other"]
    store.close()


def test_weights_for_the_tower_are_read_once_if_the_cache_keeps_pages_alone() -> None:
    """The contents of pages are kept, as on a GPU."""
    loaded: list[str] = []

    def load(ref: AdapterRef) -> AdapterWeights:
        loaded.append(ref.digest)
        return AdapterWeights(AdapterPlan((), 0), {"m": LoraWeights(factor, factor, 1.0)})

    def pages_alone(weights: AdapterWeights) -> PreparedAdapter:
        return PreparedAdapter(weights.plan, AdapterLayout((), 0, 0), {}, (factor,))

    factor = torch.zeros(1, 5 * KIB // 4)
    bank, source = cast(Any, SimpleNamespace(prepare=pages_alone)), cast(Any, SimpleNamespace(load=load))
    store = DiskStore(bank, source, HostCache(100 * KIB, ManualClock(0.0)), 1)
    assert store.read(AdapterRef("a", ""), lambda weights: weights.nbytes).result(20) == 10 * KIB
    assert loaded == ["a"]
    store.close()


def test_load_that_never_ends_fails_its_own_requests_and_gives_back_its_pages() -> None:
    harness = Harness(num_pages=8, max_num_seqs=4, pace=(0.01, 0.0), max_loading=1, load_timeout=120.0)
    harness.submit("hung", 4, 2, adapter="b")
    harness.submit("next", 4, 2, adapter="a")
    harness.store.finish_all()
    harness.step()
    [(hung, _)] = harness.store.pending
    hung.started_at = harness.time
    while harness.scheduler.next_plan_at == -math.inf:
        harness.step()
    assert harness.time < harness.scheduler.next_plan_at < math.inf
    harness.time = harness.scheduler.next_plan_at + 1.0
    harness.step()
    assert hung.cancelled()
    harness.store.pending.pop(0)
    assert harness.finished == {"hung": "error"}
    assert harness.faults["hung"].code == "adapter_failed"
    assert "within 120 seconds" in harness.faults["hung"].message
    harness.run()
    assert harness.finished["next"] == "length"
    assert harness.residency.has_failed("b")
    counts = harness.scheduler.memory.counts
    assert counts.adapters == counts.kv == 0


def test_host_cache_never_keeps_an_adapter_larger_than_itself() -> None:
    tier = HostCache(100 * KIB, ManualClock(0.0))
    assert not tier.may_take(200 * KIB)
    tier.put("large", adapter(200 * KIB))
    assert len(tier) == tier.num_bytes == 0


def test_adapter_store_reads_a_returning_adapter_once_and_drops_a_deleted_one(zoo_of, tmp_path) -> None:
    zoo: Zoo = zoo_of("llama")
    engine = make_engine(zoo.base)
    ref = zoo.ref("plain")
    copy = tmp_path / "plain"
    shutil.copytree(ref.path, copy)
    zoo.ref = lambda name: type(ref)(digest=ref.digest, path=str(copy))  # type: ignore[method-assign]
    try:
        asked = Asked("first", "plain", (5, 6, 7), 4)
        assert serve(zoo, engine, [asked])["first"] == zoo.answer(asked)
        shutil.rmtree(copy)
        residency = engine.scheduler.memory.residency
        residency.evict(residency._known[ref.digest])
        again = Asked("again", "plain", (5, 6, 7), 4)
        assert serve(zoo, engine, [again])["again"] == zoo.answer(asked)
        engine.retire(ref.digest)
        assert engine.stats().adapters_host == 0
    finally:
        del zoo.ref
        engine.close()


@pytest.mark.parametrize("max_loading", [1, 2])
def test_loads_beyond_the_limit_wait_in_order_and_keep_no_other_out(max_loading: int) -> None:
    harness = Harness(num_pages=60, max_num_seqs=8, max_tokens=64, max_loading=max_loading)
    for name in ("a", "b", "c"):
        harness.submit(name, 4, 2, adapter=name, tenant=name)
    harness.store.finish_all()
    harness.step()
    states = [harness.residency.state(name) for name in ("a", "b", "c")]
    assert states.count(AdapterState.LOADING) == max_loading
    assert states[0] is AdapterState.LOADING
    harness.submit("base", 4, 2, tenant="z")
    harness.step()
    harness.step()
    assert harness.finished["base"] == "length"
    harness.run()
    assert set(harness.finished.values()) == {"length"}


def test_loads_of_one_tenant_that_hang_leave_a_place_to_other_tenants() -> None:
    harness = Harness(num_pages=60, max_num_seqs=8, max_tokens=64, max_loading=3)
    for name in ("a", "b", "c"):
        harness.submit(name, 4, 2, adapter=name, tenant="slow")
    harness.store.finish_all()
    harness.step()
    assert harness.residency.num_loading == 2
    harness.submit("other", 4, 2, adapter="switched", tenant="other")
    harness.store.finish(-1)
    harness.step()
    assert harness.residency.state("switched") is AdapterState.LOADING
    harness.store.finish(-1)
    while "other" not in harness.finished:
        harness.step()
    assert harness.residency.state("c") is AdapterState.KNOWN
    harness.run()
    assert set(harness.finished.values()) == {"length"}
