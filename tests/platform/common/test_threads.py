"""Slots and threads: one tenant's work delays another tenant's by its share at most."""

import asyncio
import threading

import pytest

from loramux.common.jobs import TenantSlots, ThreadPool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Jobs:
    """Jobs that hold a slot until they are told to end."""

    def __init__(self, slots: TenantSlots) -> None:
        self._slots = slots
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, *names: str) -> None:
        """Start jobs; a name's first letter is its tenant."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def _run(self, name: str) -> None:
        async with self._slots.slot(name[0]):
            self.running.append(name)
            await self._ends[name].wait()
            self.running.remove(name)


async def test_a_tenant_has_its_share_of_the_slots_only() -> None:
    jobs = Jobs(TenantSlots(3, 2))
    jobs.start("a1", "a2", "a3", "a4", "b1")
    await settle()
    assert jobs.running == ["a1", "a2", "b1"]


async def test_a_free_slot_goes_to_the_tenant_with_the_fewest_jobs() -> None:
    jobs = Jobs(TenantSlots(3, 2))
    jobs.start("a1", "a2", "b1", "a3", "b2", "c1")
    await settle()
    await jobs.end("b1")
    assert jobs.running == ["a1", "a2", "b2"], "b waited longer than c, and had no job either"
    await jobs.end("a1")
    assert jobs.running == ["a2", "b2", "c1"]


async def test_a_cancelled_job_gives_its_slot_and_its_place_back() -> None:
    slots = TenantSlots(1, 1)
    jobs = Jobs(slots)
    jobs.start("a1", "a2", "b1")
    await settle()
    jobs.tasks["a2"].cancel()
    jobs.tasks["a1"].cancel()
    await settle()
    assert jobs.running[-1] == "b1"
    await jobs.end("b1")
    assert slots.is_free("a")


async def test_a_blocked_pool_leaves_the_default_executor_alone() -> None:
    pool, release = ThreadPool("test", 2, 2), threading.Event()
    blocked = [asyncio.create_task(pool.run("a", release.wait)) for _ in range(50)]
    assert await asyncio.to_thread(lambda: 7) == 7
    release.set()
    await asyncio.gather(*blocked)
    pool.close()
