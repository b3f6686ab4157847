"""Eight processes on one database: no tenant overspends, and rates are exact to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flat_prices import give_flat_plan

from loramux.common.identity import Principal
from loramux.data.records.database import Database
from loramux.data.records.limits import CounterRow
from loramux.money.limits.definitions import PART
from loramux.money.limits.limits import Limits

pytestmark = pytest.mark.anyio

RACER = Path(__file__).with_name("racer.py")
PROCESSES = 8
T0 = 1_700_000_000_000_000

Enrol = Callable[[str], Any]
Race = Callable[..., dict[str, int]]


@contextmanager
def racers(url: str) -> Iterator[Race]:
    """Processes that begin every race together."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, RACER, url, str(n)], **pipes) for n in range(PROCESSES)]

    numbers = count()

    def race(principal: Principal, **facts: object) -> dict[str, int]:
        who = {"tenant": principal.tenant, "key": principal.key_id, "project": principal.project}
        told = json.dumps(who | facts | {"name": f"race{next(numbers)}"}) + "\n"
        for racer in running:
            racer.stdin.write(told)
        for racer in running:
            racer.stdin.flush()
        results = [json.loads(racer.stdout.readline()) for racer in running]
        return {name: sum(result[name] for result in results) for name in results[0]}

    try:
        for racer in running:
            assert racer.stdout.readline() == "ready\n"
        yield race
    finally:
        for racer in running:
            racer.kill()
            racer.communicate()  # closes the pipes, too


async def counters(database: Database) -> dict[str, Any]:
    async with database.read() as session:
        return {row.subject: row for row in await session.scalars(sa.select(CounterRow))}


async def test_limits_hold_over_eight_processes(url: str, enrol: Enrol, limits: Limits, database: Database) -> None:
    database.now = lambda: T0
    with racers(url) as race:
        spender = await enrol("spender")
        await give_flat_plan(database, "spender")
        await nobody_overspends(race, spender, limits)
        await tokens_are_exact(race, await enrol("talker"), limits, database)
        await requests_and_places_are_exact(race, await enrol("crowd"), limits, database)


async def nobody_overspends(race: Race, spender: Principal, limits: Limits) -> None:
    """Five hundred requests against a budget for ten, twice: the second time what counts is there already."""
    for amount in (10 * 2, 20 * 2):
        await limits.put_budget(spender.tenant, spender.tenant, "month", amount)
        totals = race(spender, requests=63, sizes=1, settle="all")
        assert (totals["admitted"], totals["refused"]) == (10, PROCESSES * 63 - 10)
        (state,) = await limits.budgets(spender.tenant)
        assert (state.spent, state.held) == (amount, 0)


async def tokens_are_exact(race: Race, talker: Principal, limits: Limits, database: Database) -> None:
    """With sizes that vary, and half of each given back: what is left is what was not used, to the token."""
    await limits.put(talker.tenant, talker.tenant, "tokens_per_minute", 700)
    totals = race(talker, requests=60, sizes=7, settle="half")
    assert totals["used"] <= 700
    assert totals["refused"] > 0
    left = (await counters(database))[talker.tenant]
    assert (left.tokens_free, left.running) == ((700 - totals["used"]) * PART, 0)


async def requests_and_places_are_exact(race: Race, crowd: Principal, limits: Limits, database: Database) -> None:
    await limits.put(crowd.tenant, crowd.tenant, "requests_per_minute", 100)
    await limits.put(crowd.tenant, crowd.project, "concurrent_requests", 37)
    assert race(crowd, requests=20, sizes=1, settle="never")["admitted"] == 37
    left = await counters(database)
    assert left[crowd.tenant].requests_free == (100 - 37) * PART
    assert left[crowd.project].running == 37
