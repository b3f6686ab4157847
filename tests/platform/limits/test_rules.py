"""Limits over plain numbers: exact to the token, whatever the order and the clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.limits import BudgetSpent, Demand, QueueFull, RateReached, RequestTooLarge, TooManyRunning
from loramux.limits.bucket import PART, Bucket
from loramux.limits.budgets import Budget, Spent, crossed, demand_money, period_end, period_start
from loramux.limits.rules import Caps, Counter, demand_room, given_back, refilled, taken
from loramux.records import TenantId

MINUTE = 60_000_000
T0 = 1_700_000_000_000_000


def demand(tokens: int = 10, waiting: int = 0) -> Demand:
    return Demand(
        request_id="r",
        tenant=TenantId("t"),
        tier="standard",
        project=None,
        key="k",
        prompt_tokens=tokens,
        max_tokens=0,
        waiting=waiting,
    )


def counter(caps: Caps, running: int = 0) -> Counter:
    full = (Bucket.full(limit or 0, T0) for limit in (caps.requests_per_minute, caps.tokens_per_minute))
    return Counter(*full, running)


asks = st.lists(st.tuples(st.integers(0, 3 * MINUTE), st.integers(1, 400), st.integers(0, 400)), max_size=60)


@given(limit=st.integers(1, 300), asks=asks)
def test_no_window_ever_gets_more_than_a_full_bucket_and_its_refill(
    limit: int, asks: list[tuple[int, int, int]]
) -> None:
    """Net of what is given back, in every stretch of time between two requests."""
    caps = Caps(tokens_per_minute=limit)
    now, state = T0, counter(caps)
    taken_at: list[tuple[int, int]] = []
    for gap, tokens, used in asks:
        now += gap
        state = refilled(state, caps, now)
        try:
            demand_room("organization", caps, state, demand(tokens))
        except (RateReached, RequestTooLarge):
            continue
        unused = max(0, tokens - used)
        state = given_back(taken(state, caps, tokens), unused)
        taken_at.append((now, tokens - unused))
        for first in range(len(taken_at)):
            total = sum(tokens for _, tokens in taken_at[first:])
            assert total * PART <= limit * PART + (now - taken_at[first][0]) * limit


@given(limit=st.integers(1, 10**6), tokens=st.integers(1, 10**6), elapsed=st.integers(0, MINUTE))
def test_the_wait_is_exact(limit: int, tokens: int, elapsed: int) -> None:
    bucket = Bucket(0, T0).refilled(limit, T0 + elapsed)
    wait = bucket.wait(tokens, limit)
    if tokens > limit:
        assert wait is None
        return
    assert wait is not None
    assert bucket.refilled(limit, T0 + elapsed + wait).whole >= tokens
    assert wait == 0 or bucket.refilled(limit, T0 + elapsed + wait - 1).whole < tokens


@given(back=st.integers(1, 10**12))
def test_a_clock_that_goes_back_gives_nothing(back: int) -> None:
    bucket = Bucket(5, T0)
    assert bucket.refilled(100, T0 - back) == bucket


def test_each_limit_is_refused_by_its_name() -> None:
    cases = [
        (Caps(requests_per_minute=0), 0, demand(), RateReached, "requests per minute"),
        (Caps(tokens_per_minute=9), 0, demand(10), RequestTooLarge, "it would never fit"),
        (Caps(concurrent_requests=2), 2, demand(), TooManyRunning, "may run 2"),
        (Caps(queued_requests=3), 0, demand(waiting=3), QueueFull, "may have 3"),
    ]
    for caps, running, asked, error, told in cases:
        with pytest.raises(error, match=told):
            demand_room("organization", caps, counter(caps, running), asked)
    caps = Caps(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=3, queued_requests=4)
    demand_room("organization", caps, counter(caps, 2), demand(10, 3))


def test_a_refusal_says_when() -> None:
    caps = Caps(tokens_per_minute=60)
    state = taken(counter(caps), caps, 60)
    with pytest.raises(RateReached, match=r"try again in 10\.000s") as refusal:
        demand_room("project", caps, state, demand(10))
    assert (refusal.value.retry_after, refusal.value.kind) == (10, "tokens")


@given(at=st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2200, 1, 1)))
def test_periods_follow_each_other_without_a_gap(at: datetime) -> None:
    now = int(at.replace(tzinfo=UTC).timestamp()) * 1_000_000
    for period in ("day", "month"):
        start = period_start(period, now)
        end = period_end(period, start)
        assert end is not None
        assert start <= now < end
        assert period_start(period, end - 1) == start
        assert period_start(period, end) == end
    assert (period_start("total", now), period_end("total", 0)) == (0, None)


def budget(amount: int, *thresholds: int) -> Budget:
    return Budget(id="b", tenant=TenantId("t"), subject="t", period="day", amount=amount, thresholds=thresholds)


def test_money_is_exact() -> None:
    nano = 1_000_000_000
    demand_money("organization", budget(10 * nano), Spent(3 * nano, 4 * nano), 3 * nano, T0)
    with pytest.raises(BudgetSpent, match=r"day budget of your organization is 10: 3 are.*3\.000000001"):
        demand_money("organization", budget(10 * nano), Spent(3 * nano, 4 * nano), 3 * nano + 1, T0)
    with pytest.raises(BudgetSpent):
        demand_money("organization", budget(nano), Spent(nano, 0), 0, T0)


@given(amount=st.integers(1, 10**6), steps=st.lists(st.integers(0, 10**5), max_size=40))
def test_every_threshold_is_told_once(amount: int, steps: list[int]) -> None:
    spent, told = 0, []
    for step in steps:
        told += crossed(budget(amount, 50, 80, 100), spent, spent + step)
        spent += step
    assert told == [percent for percent in (50, 80, 100) if spent * 100 >= amount * percent]
