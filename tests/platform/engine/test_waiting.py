"""When the engine may wait: never while a plan could hold something, and without a limit only for an event."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from adapter_zoo import Asked, to_request
from event_stream import stream
from scheduler_harness import Harness

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.client import EngineClient, spawn_engine

Fill = Callable[[Harness], None]


def serve_as_worker(harness: Harness, limit: int = 2000) -> None:
    """Plan only when the scheduler says so; let time pass, or a load end, if it says to wait."""
    for _ in range(limit):
        if harness.scheduler.is_idle:
            return
        at = harness.scheduler.next_plan_at
        if at == math.inf:
            assert harness.store.pending, "the scheduler waits for an event, and none is to come"
            harness.store.finish()
        elif at > harness.time:
            harness.time = at
        harness.step()
    raise AssertionError("the harness did not come to rest")


@pytest.mark.parametrize(
    ("harness", "fill"),
    [
        (Harness(max_num_seqs=1), lambda h: [h.submit(f"r{i}", 4, 2) for i in range(3)]),
        (Harness(num_pages=3, max_num_seqs=8), lambda h: [h.submit(f"r{i}", 4, 4) for i in range(3)]),
        (Harness(num_pages=200, max_num_seqs=64), lambda h: [h.submit(f"c{i}", 4, 1) for i in range(100)]),
        (Harness(max_num_seqs=1), lambda h: [h.submit(f"a{i}", 4, 1, adapter=a) for i, a in enumerate("abcabc")]),
        (Harness(num_pages=6), lambda h: [h.submit(f"a{i}", 4, 1, adapter=a) for i, a in enumerate("abcabc")]),
    ],
    ids=["one row", "room for one", "a hundred choices of one token", "one row, adapters", "room for one adapter"],
)
def test_quiet_scheduler_answers_every_request_without_another_arriving(harness: Harness, fill: Fill) -> None:
    fill(harness)
    serve_as_worker(harness)
    assert set(harness.finished.values()) == {"length"}


def test_settled_scheduler_waits_for_an_event_and_an_event_ends_the_wait() -> None:
    harness = Harness()
    harness.step()
    assert harness.scheduler.next_plan_at == math.inf
    harness.submit("cold", 4, 1, adapter="a")
    assert harness.scheduler.next_plan_at == -math.inf
    harness.step()
    harness.step()
    assert harness.scheduler.next_plan_at == math.inf, "its files are being read"
    harness.scheduler.cancel("cold")
    assert harness.scheduler.next_plan_at == -math.inf, "its end has to be reported"


@pytest.mark.parametrize(
    ("rows", "pool_pages", "count", "output"),
    [(1, 64, 3, 2), (8, 2, 3, 4), (64, 256, 100, 1)],
    ids=["one row", "room for one", "a hundred choices of one token"],
)
def test_quiet_worker_answers_every_request(zoo_of, rows: int, pool_pages: int, count: int, output: int) -> None:
    zoo = zoo_of("llama")
    page_bytes = 16 * 3 * 2 * 2 * 16 * 4
    settings = Settings(
        model=ModelSettings(path=str(zoo.base), served_model_name="base", dtype="float32"),
        engine=EngineSettings(
            num_threads=1, pool_bytes=pool_pages * page_bytes, in_process=True, max_num_seqs=rows, prefix_cache=False
        ),
    )

    async def ask(engine: EngineClient, name: str) -> str | None:
        last = None
        async for event in stream(engine, to_request(zoo, Asked(name, None, (5, 6, 7), output))):
            last = event.finish_reason
        return last

    async def main() -> None:
        engine = spawn_engine(settings)
        await engine.start()
        try:
            ends = await asyncio.wait_for(asyncio.gather(*(ask(engine, f"q{i}") for i in range(count))), 120)
            assert ends == ["length"] * count
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 240))
