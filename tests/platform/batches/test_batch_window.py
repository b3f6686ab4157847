"""The number of lines in the engine at a time: few with other requests, many alone, shared by tenants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from loramux.batches import run as run_module
from loramux.batches.run import Place, Window
from loramux.common.settings.server import BatchSettings
from loramux.common.units import QUIET_SECONDS

SETTINGS = BatchSettings(max_in_flight=6, max_in_flight_per_tenant=4, max_in_flight_beside_others=2)
TURNS = 50


@dataclass
class Others:
    """The requests that are no lines of batches."""

    waiting: bool = False
    quiet: float = QUIET_SECONDS

    def window(self) -> Window:
        return Window(SETTINGS, lambda: self.waiting, lambda: self.quiet)


class Lines:
    """A line for each letter, a tenant; each stays in its place until it is told to go."""

    def __init__(self, window: Window, tenants: str, *, starts: bool = True) -> None:
        self.placed: list[str] = []
        self.places: list[Place] = []
        self._window = window
        self._starts = starts
        self._tasks = [asyncio.create_task(self._line(tenant)) for tenant in tenants]

    async def settled(self) -> list[str]:
        """The tenants that have a place once nothing moves any more."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return self.placed

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _line(self, tenant: str) -> None:
        async with self._window.place(tenant) as place:
            self.placed.append(tenant)
            self.places.append(place)
            if self._starts:
                place.note_started()
            await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def looks_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "WINDOW_LOOK_SECONDS", 0)


@pytest.mark.anyio
async def test_window_is_small_with_other_requests_and_opens_after_a_quiet_time() -> None:
    others = Others(quiet=0.0)
    window = others.window()
    lines = Lines(window, "aabbcc")
    assert len(await lines.settled()) == 2
    others.quiet = QUIET_SECONDS - 0.1
    assert len(await lines.settled()) == 2, "between two questions of a conversation the engine is not idle"
    others.quiet = QUIET_SECONDS
    assert len(await lines.settled()) == 6
    await lines.stop()
    again = Lines(window, "abc")
    assert sorted(await again.settled()) == ["a", "b", "c"], "places were not given back"
    await again.stop()


@pytest.mark.anyio
async def test_window_lets_one_line_through_while_others_wait_for_a_first_token() -> None:
    others = Others(waiting=True, quiet=0.0)
    lines = Lines(others.window(), "aabb")
    assert len(await lines.settled()) == 1, "a batch moves however busy the engine is"
    others.waiting = False
    assert len(await lines.settled()) == 2
    await lines.stop()


@pytest.mark.anyio
async def test_window_lets_few_lines_wait_for_their_first_token_on_an_idle_engine_too() -> None:
    lines = Lines(Others().window(), "abcabc", starts=False)
    assert len(await lines.settled()) == 2
    lines.places[0].note_started()
    lines.places[0].note_started()  # counts once
    assert len(await lines.settled()) == 3
    await lines.stop()


@pytest.mark.anyio
async def test_window_leaves_room_for_other_tenants() -> None:
    lines = Lines(Others().window(), "aaaaaab")
    assert sorted(await lines.settled()) == ["a"] * 4 + ["b"]
    await lines.stop()
