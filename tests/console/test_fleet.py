"""The operator's page of a fleet: two real engines side by side, one restarted by its button, one killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from console_fleet import NAMES, ConsoleFleet
from console_site import Visit, visiting
from playwright.sync_api import Browser, Locator, expect
from server_process import spawned_by

pytestmark = pytest.mark.slow

STARTS_MS = 120_000
"""An engine that starts while other tests run."""
READY, STARTS, LAST_END = 2, 7, 8
"""Columns of the table of engines."""


@contextmanager
def load(fleet: ConsoleFleet) -> Iterator[None]:
    """Ask for answers, four at a time, while the block runs. A request that fails fails the test."""
    ended = threading.Event()

    def ask(first: int) -> None:
        number = first
        while not ended.is_set():
            fleet.ask(number)
            number += 4

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, first) for first in range(4)]
        try:
            yield
        finally:
            ended.set()
    for one in asking:
        one.result()


def row_of(visit: Visit, number: int) -> Locator:
    return visit.page.get_by_role("row", name=f"{NAMES['base']}-{number}")


def cell(visit: Visit, number: int, column: int) -> Locator:
    return row_of(visit, number).get_by_role("cell").nth(column)


def test_engines_work_at_the_same_time(long_fleet: ConsoleFleet, browser: Browser) -> None:
    with visiting(browser, long_fleet.url) as visit, load(long_fleet):
        visit.sign_in(long_fleet.key)
        page = visit.go("/operator", "System")
        expect(page.get_by_role("table", name="Engines").locator("tbody tr")).to_have_count(2)
        for number in (0, 1):
            expect(cell(visit, number, READY)).to_have_text("ready")
            section = page.locator(f"[id='engine-{NAMES['base']}-{NAMES['base']}-{number}']")
            expect(section.get_by_role("figure", name="Timeline of steps")).to_be_visible()
            expect(section.get_by_role("img", name="KV of running sequences")).to_be_visible()
            row_of(visit, number).get_by_role("link").click()
            expect(section).to_be_in_viewport()
        expect(page.get_by_text("All is well")).to_be_visible()
        assert visit.barriers() == []


def test_engine_is_restarted_by_its_button_while_the_other_answers(long_fleet: ConsoleFleet, browser: Browser) -> None:
    before = {engine["engine"]: engine["starts"] for engine in long_fleet.engines()}
    other, name = (f"{NAMES['base']}-{number}" for number in (0, 1))
    with visiting(browser, long_fleet.url) as visit, load(long_fleet):
        visit.sign_in(long_fleet.key)
        page = visit.go("/operator", "System")
        section = page.locator(f"[id='engine-{NAMES['base']}-{name}']")
        visit.press(section.get_by_role("button", name="Restart"))
        visit.press(page.get_by_role("dialog").get_by_role("button", name="Restart"))
        expect(page.get_by_text(f"{name} restarts")).to_be_visible()
        expect(cell(visit, 1, STARTS)).to_have_text(f"{before[name] + 1}", timeout=STARTS_MS)
        expect(cell(visit, 1, READY)).to_have_text("ready", timeout=STARTS_MS)
        expect(cell(visit, 0, STARTS)).to_have_text(f"{before[other]}")


def test_killed_engine_comes_back_and_its_end_is_told(long_fleet: ConsoleFleet, browser: Browser) -> None:
    before = sum(engine["starts"] for engine in long_fleet.engines())
    with visiting(browser, long_fleet.url) as visit, load(long_fleet):
        visit.sign_in(long_fleet.key)
        page = visit.go("/operator", "System")
        os.kill(spawned_by(os.getpid())[-1], signal.SIGKILL)
        ends = page.get_by_role("table", name="Engines").get_by_text("exit code -9")
        expect(ends).to_be_visible(timeout=STARTS_MS)
        for number in (0, 1):
            expect(cell(visit, number, READY)).to_have_text("ready", timeout=STARTS_MS)
    assert sum(engine["starts"] for engine in long_fleet.engines()) == before + 1
