"""Every pool that a request can occupy gives each tenant a share: the source is searched for pools without one."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from listening import until

import loramux
import loramux_adapters
import loramux_api
from loramux.common.jobs import DEFAULT_PER_TENANT, HeldUnits, TenantQueues, TenantSlots, ThreadPool, run_blocking

POOLS = {
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "Semaphore",
    "BoundedSemaphore",
    "CapacityLimiter",
    "to_thread",
    "run_sync",
    "run_in_executor",
    "create_async_engine",
}
"""Names by which threads, processes, connections and places are shared."""
WITHOUT_SHARES = {
    ("loramux/common/jobs.py", "ThreadPoolExecutor"): "ThreadPool and TenantQueues, which have shares",
    ("loramux/common/jobs.py", "to_thread"): "run_blocking, which has shares",
    ("loramux/common/jobs.py", "run_in_executor"): "ThreadPool, which has shares",
    ("loramux/data/records/database.py", "create_async_engine"): "Database, which has shares",
    ("loramux/engine/execution/runner.py", "ThreadPoolExecutor"): "the step's own thread; no request waits in it",
    ("loramux/engine/memory/image_rows.py", "ThreadPoolExecutor"): "one image at a time; tenants take turns before it",
    ("loramux/engine/client.py", "to_thread"): "the end of an engine",
    ("loramux/server/records.py", "to_thread"): "the start of a server",
    ("loramux/server/trainer.py", "to_thread"): "the start of a trainer",
    ("loramux/training/trainer.py", "to_thread"): "the trainer's process, in which no request waits",
    ("loramux/serving/lifecycle.py", "to_thread"): "the start of a base, which an operator orders",
    ("loramux/serving/known_bases.py", "to_thread"): "the check of a base that an operator adds",
    ("loramux_api/app.py", "to_thread"): "the end of a server",
    ("loramux_api/cli/measuring.py", "to_thread"): "a command that measures; no server",
    ("loramux_api/workers.py", "ThreadPoolExecutor"): "a thread for each worker, which waits for its end",
    ("loramux_api/workers.py", "run_in_executor"): "the same",
    ("loramux_api/workers.py", "to_thread"): "the end of the engines",
}
"""The pools that need no share, and why."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    for package in (loramux, loramux_api, loramux_adapters):
        root = Path(package.__path__[0])
        for file in root.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{root.name}/{file.relative_to(root)}", node


def test_no_pool_is_without_tenants_shares() -> None:
    found = {(file, ast.unparse(call.func).rpartition(".")[2]) for file, call in calls()}
    assert {one for one in found if one[1] in POOLS} == set(WITHOUT_SHARES)


def test_every_thread_pool_says_its_shares() -> None:
    pools = [(file, call) for file, call in calls() if ast.unparse(call.func) in ("ThreadPool", "TenantQueues")]
    assert len(pools) >= 10
    for file, call in pools:
        assert len(call.args) + len(call.keywords) == 3, f"{file}:{call.lineno}: kind, threads, per_tenant"
        threads, share = call.args[1], [*call.args, *(keyword.value for keyword in call.keywords)][2]
        same = ast.unparse(threads) == ast.unparse(share)
        assert not same or ast.unparse(threads) == "1", f"{file}:{call.lineno}: a tenant may have every thread"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_blocked_work_of_one_tenant_leaves_threads_to_others(anyio_backend: str) -> None:
    pool, release = ThreadPool("test", 4, 2), threading.Event()
    blocked = [asyncio.create_task(pool.run("a", release.wait)) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert await pool.run("b", lambda: 7) == 7
    assert not any(task.done() for task in blocked)
    release.set()
    await asyncio.gather(*blocked)
    pool.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_caller_keeps_its_thread_until_the_work_has_ended(anyio_backend: str) -> None:
    """Callers that leave in the middle could otherwise occupy every thread."""
    pool, begun, release = ThreadPool("test", 2, 1), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()

    first = asyncio.create_task(pool.run("a", block))
    await until(begun.is_set)
    first.cancel()
    second = asyncio.create_task(pool.run("a", lambda: 1))
    await asyncio.sleep(0.05)
    assert not second.done()
    release.set()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    pool.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_default_executor_has_shares_too(anyio_backend: str) -> None:
    release, begun = threading.Event(), list[int]()

    def block(number: int) -> None:
        begun.append(number)
        release.wait()

    blocked = [asyncio.create_task(run_blocking("a", block, number)) for number in range(100)]
    try:
        await until(lambda: len(begun) == DEFAULT_PER_TENANT)
        async with asyncio.timeout(30):
            assert await run_blocking("b", lambda: 7) == 7
        assert sorted(begun) == list(range(DEFAULT_PER_TENANT))
    finally:
        release.set()
        await asyncio.gather(*blocked)


def test_queues_give_a_tenant_its_share_and_run_what_waits() -> None:
    queues, release, done = TenantQueues("test", 2, 1), threading.Event(), threading.Event()
    ran: list[int] = []
    for number in range(5):
        queues.submit("a", lambda number=number: (release.wait(30), ran.append(number)))  # type: ignore[misc]
    queues.submit("b", done.set)
    assert done.wait(30), "the other tenant's work waits for no more than one piece"
    release.set()
    ended = threading.Event()
    queues.submit("a", ended.set)
    assert ended.wait(30)
    assert ran == [0, 1, 2, 3, 4]
    queues.close()


def test_work_that_raises_gives_its_place_back() -> None:
    queues, ended = TenantQueues("test", 1, 1), threading.Event()
    queues.submit("a", lambda: 1 / 0)
    queues.submit("a", ended.set)
    assert ended.wait(30)
    queues.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_units_are_bounded_by_tenant_and_in_all(anyio_backend: str) -> None:
    slots = TenantSlots(100, 60)
    assert slots.try_acquire("a", 60)
    assert not slots.try_acquire("a", 1)
    assert slots.try_acquire("b", 40)
    assert not slots.try_acquire("c", 1)
    waiting = asyncio.create_task(slots.acquire("c", 50))
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.release("a", 60)
    await waiting
    assert (slots.held_by("a"), slots.held_by("c")) == (0, 50)


def test_tenants_at_their_share_leave_room_for_the_next_tenant() -> None:
    slots = TenantSlots(768, 192)
    taken = {}
    for tenant in "abcdef":
        held, taken[tenant] = HeldUnits(slots, tenant), 0
        while held.try_add(1):
            taken[tenant] += 1
    assert taken == {"a": 192, "b": 192, "c": 192, "d": 96, "e": 48, "f": 24}
    slots.release("a", 192)
    assert HeldUnits(slots, "f").try_add(96), "f holds 24, and 216 are free"
    assert not HeldUnits(slots, "f").try_add(1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_grant_and_a_cancellation_cost_the_same_however_many_jobs_wait(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, looked = TenantSlots(3, 1), list[tuple[str, int]]()
    fits = slots._fits
    monkeypatch.setattr(slots, "_fits", lambda *group: looked.append(group) or fits(*group))
    assert slots.try_acquire("a")
    assert slots.try_acquire("b")
    waiting = [asyncio.create_task(slots.acquire(tenant)) for _ in range(500) for tenant in ("a", "b")]
    await asyncio.sleep(0)
    looked.clear()
    slots.release("a")
    await waiting[0]
    assert len(looked) <= 8
    for task in waiting[2:]:
        task.cancel()
    await asyncio.gather(*waiting[2:], return_exceptions=True)
    assert len(looked) <= 4 * len(waiting)
    assert not waiting[1].done()
    slots.release("b")
    await waiting[1]
    slots.release("a")
    slots.release("b")
    assert slots.is_free("a")
    assert slots.is_free("b")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_job_larger_than_a_share_gets_its_turn_when_its_tenant_holds_nothing(anyio_backend: str) -> None:
    slots = TenantSlots(100, 60)
    assert slots.try_acquire("a", 1)
    large = asyncio.create_task(slots.acquire("a", 5000))
    await asyncio.sleep(0)
    assert not large.done()
    slots.release("a", 1)
    await large
    slots.release("a", 5000)
    assert slots.is_free("a")
    assert slots.held_by("a") == 0
