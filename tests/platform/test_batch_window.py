"""How many lines of batches are in the engine at a time: few beside other requests, many alone, shares for tenants."""

from __future__ import annotations

import asyncio

import pytest

from loramux.batches import window as window_module
from loramux.batches.window import Window
from loramux.settings import BatchSettings

SETTINGS = BatchSettings(max_in_flight=6, max_in_flight_per_tenant=4, max_in_flight_beside_others=2)


async def under_way(window: Window, tenants: str) -> tuple[list[asyncio.Task[None]], list[str]]:
    """Start a line for each letter, a tenant; return the tasks, and the tenants of those that have a place."""
    placed: list[str] = []

    async def line(tenant: str) -> None:
        async with window.place(tenant):
            placed.append(tenant)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(line(tenant)) for tenant in tenants]
    await asyncio.sleep(0.05)
    return tasks, placed


@pytest.mark.anyio
async def test_window_is_small_beside_other_requests_and_opens_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "LOOK_SECONDS", 0.01)
    shared = [True]
    window = Window(SETTINGS, lambda: shared[0])
    tasks, placed = await under_way(window, "aabbcc")
    assert len(placed) == 2
    shared[0] = False
    await asyncio.sleep(0.05)
    assert len(placed) == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks, placed = await under_way(window, "abc")
    assert sorted(placed) == ["a", "b", "c"], "places were not given back"
    for task in tasks:
        task.cancel()


@pytest.mark.anyio
async def test_window_leaves_room_for_other_tenants() -> None:
    tasks, placed = await under_way(Window(SETTINGS, lambda: False), "aaaaaab")
    assert sorted(placed) == ["a"] * 4 + ["b"]
    for task in tasks:
        task.cancel()
