"""Limits over plain numbers: exact to the token, whatever the order and the clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.common.identity import TenantId
from loramux.data.records.requests import OpenedRequest
from loramux.money.limits.admission import SubjectCounter, SubjectLimits, ensure_admits
from loramux.money.limits.budgets import (
    Budget,
    BudgetState,
    crossed_thresholds,
    ensure_affordable,
    format_money,
    period_end,
    period_start,
)
from loramux.money.limits.definitions import PART, TokenBucket
from loramux.money.limits.errors import BudgetSpent, QueueFull, RateReached, RequestTooLarge, TooManyRunning

MINUTE = 60_000_000
T0 = 1_700_000_000_000_000


def demand(tokens: int = 10, waiting: int = 0) -> OpenedRequest:
    return OpenedRequest(
        id="r",
        tenant_id=TenantId("t"),
        key_id="k",
        model="m",
        adapter_digest=None,
        tier="standard",
        prompt_tokens=tokens,
        max_tokens=0,
        waiting=waiting,
    )


def counter(caps: SubjectLimits, running: int = 0) -> SubjectCounter:
    full = (TokenBucket.full(limit or 0, T0) for limit in (caps.requests_per_minute, caps.tokens_per_minute))
    return SubjectCounter(*full, running)


asks = st.lists(st.tuples(st.integers(0, 3 * MINUTE), st.integers(1, 400), st.integers(0, 400)), max_size=60)


@given(limit=st.integers(1, 300), asks=asks)
def test_token_bucket_never_exceeds_a_full_bucket_and_its_refill(limit: int, asks: list[tuple[int, int, int]]) -> None:
    """Net of what is given back, in every stretch of time between two requests."""
    caps = SubjectLimits(tokens_per_minute=limit)
    now, state = T0, counter(caps)
    taken_at: list[tuple[int, int]] = []
    for gap, tokens, used in asks:
        now += gap
        state = state.refilled(caps, now)
        try:
            ensure_admits("organization", caps, state, demand(tokens))
        except (RateReached, RequestTooLarge):
            continue
        unused = max(0, tokens - used)
        state = state.with_request(caps, tokens).without_request(unused)
        taken_at.append((now, tokens - unused))
        for first in range(len(taken_at)):
            total = sum(tokens for _, tokens in taken_at[first:])
            assert total * PART <= limit * PART + (now - taken_at[first][0]) * limit


@given(limit=st.integers(1, 10**6), tokens=st.integers(1, 10**6), elapsed=st.integers(0, MINUTE))
def test_token_bucket_wait_is_exact(limit: int, tokens: int, elapsed: int) -> None:
    bucket = TokenBucket(0, T0).refilled(limit, T0 + elapsed)
    wait = bucket.wait(tokens, limit)
    if tokens > limit:
        assert wait is None
        return
    assert wait is not None
    assert bucket.refilled(limit, T0 + elapsed + wait).whole >= tokens
    assert wait == 0 or bucket.refilled(limit, T0 + elapsed + wait - 1).whole < tokens


@given(back=st.integers(1, 10**12))
def test_token_bucket_with_a_clock_that_goes_back_refills_nothing(back: int) -> None:
    bucket = TokenBucket(5, T0)
    assert bucket.refilled(100, T0 - back) == bucket


def test_refusal_names_its_limit() -> None:
    cases = [
        (SubjectLimits(requests_per_minute=0), 0, demand(), RateReached, "requests per minute"),
        (SubjectLimits(tokens_per_minute=9), 0, demand(10), RequestTooLarge, "it would never fit"),
        (SubjectLimits(concurrent_requests=2), 2, demand(), TooManyRunning, "may run 2"),
        (SubjectLimits(queued_requests=3), 0, demand(waiting=3), QueueFull, "may have 3"),
    ]
    for caps, running, asked, error, told in cases:
        with pytest.raises(error, match=told):
            ensure_admits("organization", caps, counter(caps, running), asked)
    caps = SubjectLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=3, queued_requests=4)
    ensure_admits("organization", caps, counter(caps, 2), demand(10, 3))


def test_rate_refusal_says_when_to_retry() -> None:
    caps = SubjectLimits(tokens_per_minute=60)
    state = counter(caps).with_request(caps, 60)
    with pytest.raises(RateReached, match=r"try again in 10\.000s") as refusal:
        ensure_admits("project", caps, state, demand(10))
    assert (refusal.value.retry_after, refusal.value.kind) == (10, "tokens")


@given(at=st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2200, 1, 1)))
def test_budget_periods_follow_each_other_without_a_gap(at: datetime) -> None:
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


def state(amount: int, spent: int, held: int) -> BudgetState:
    start = period_start("day", T0)
    return BudgetState(budget=budget(amount), currency="USD", start=start, spent=spent, held=held)


def test_budget_refusal_names_exact_amounts_with_their_currency() -> None:
    nano = 1_000_000_000
    ensure_affordable("organization", state(10 * nano, 3 * nano, 4 * nano), 3 * nano, T0)
    with pytest.raises(BudgetSpent) as refusal:
        ensure_affordable("organization", state(10 * nano, 3 * nano, 4 * nano), 3 * nano + 1, T0)
    assert refusal.value.message == (
        "The day budget of your organization is 10.00 USD: 3.00 USD is spent, 4.00 USD is held by running requests, "
        "and this request may cost 3.000000001 USD. Lower max_tokens, or raise the budget."
    )
    with pytest.raises(BudgetSpent):
        ensure_affordable("organization", state(nano, nano, 0), 0, T0)


@pytest.mark.parametrize(
    ("nanos", "currency", "text"),
    [
        (0, "USD", "0.00 USD"),
        (500_000, "EUR", "0.0005 EUR"),
        (12_500_000_000, "USD", "12.50 USD"),
        (1, "", "0.000000001"),
    ],
)
def test_format_money_is_exact(nanos: int, currency: str, text: str) -> None:
    assert format_money(nanos, currency) == text


@given(amount=st.integers(1, 10**6), steps=st.lists(st.integers(0, 10**5), max_size=40))
def test_budget_threshold_is_crossed_once(amount: int, steps: list[int]) -> None:
    spent, told = 0, []
    for step in steps:
        told += crossed_thresholds(budget(amount, 50, 80, 100), spent, spent + step)
        spent += step
    assert told == [percent for percent in (50, 80, 100) if spent * 100 >= amount * percent]
