"""Histories of a fleet whose engines are killed again and again, written by hand: every request is answered."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.database import Template
from simulation.plan import ADAPTERS, Call, Plan, make_plan
from simulation.world import run_plan

KILLS, STREAMS = 10, 64


def quiet_plan(seed: int) -> Plan:
    """Two engines of a server in which only the faults fail that a test adds."""
    return replace(
        make_plan(seed),
        num_engines=2,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        pages=256,
        block_size=16,
        adapter_pages=(2,) * ADAPTERS,
        load_seconds=(0.001, 0.01),
        load_failures=0.0,
        load_hangs=0.0,
        database_outages=(),
        database_stalls=(),
        clock_jumps=(),
        engine_deaths=(),
        engine_restarts=(),
        start_failures=0.0,
        drains_at=None,
        cancels_unread=False,
        uploads=(),
    )


def crowd(chosen: random.Random) -> tuple[Call, ...]:
    """Streams that begin at once; their prompts alone take some seconds of an engine."""
    return tuple(
        Call(
            at=0.0,
            tenant=number % 3,
            adapter=None if number % 7 == 6 else number % 7 % ADAPTERS,
            prompt=[chosen.randint(97, 110) for _ in range(40)],
            max_tokens=60,
        )
        for number in range(STREAMS)
    )


@pytest.mark.parametrize("seed", range(4))
def test_crowd_is_answered_while_engines_are_killed_faster_than_they_reach_the_end_of_their_queue(
    seed: int, template: Template, folder: Path
) -> None:
    """Most requests lose several engines in a row while they wait: that makes none of them the cause."""
    chosen = random.Random(seed)
    kills = tuple((1.5 * (number + 1), chosen.randrange(2)) for number in range(KILLS))
    plan = replace(
        quiet_plan(seed), step_seconds=0.1, start_seconds=0.3, engine_deaths=kills, calls=crowd(random.Random(seed))
    )
    world = run_plan(plan, template, folder)
    assert [outcome.error for outcome in world.outcomes] == [None] * STREAMS


def test_engines_that_are_killed_while_they_start_come_back_before_their_requests_give_up(
    template: Template, folder: Path
) -> None:
    """Each start but the last is killed: that is no reason to end the server."""
    kills = tuple((0.5 + 2.0 * number, number % 2) for number in range(KILLS))
    plan = replace(
        quiet_plan(1), step_seconds=0.05, start_seconds=5.0, engine_deaths=kills, calls=crowd(random.Random(1))
    )
    world = run_plan(plan, template, folder)
    assert len(world.lives) >= KILLS, "the kills met engines"
    assert [outcome.error for outcome in world.outcomes] == [None] * STREAMS
