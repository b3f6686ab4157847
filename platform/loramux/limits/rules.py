"""What is admitted: questions over plain numbers, which change nothing."""

from __future__ import annotations

import msgspec

from loramux.limits.bucket import Bucket
from loramux.limits.demand import Demand
from loramux.limits.errors import QueueFull, RateReached, RequestTooLarge, TooManyRunning
from loramux.limits.standing import Rate, Standing

RETRY_SECOND = 1_000_000
"""When a place among the running becomes free is not known: a second is a fair guess."""


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one subject that count requests; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None


class Counter(msgspec.Struct, frozen=True):
    """What one subject has left, and runs."""

    requests: Bucket
    tokens: Bucket
    running: int


def refilled(counter: Counter, caps: Caps, now: int) -> Counter:
    """As of `now`."""
    return Counter(
        _refilled(counter.requests, caps.requests_per_minute, now),
        _refilled(counter.tokens, caps.tokens_per_minute, now),
        counter.running,
    )


def demand_room(whose: str, caps: Caps, counter: Counter, demand: Demand) -> None:
    """Raise unless the request fits now; `counter` is refilled. `whose`: `organization`, say.

    Raises RequestTooLarge, RateReached, TooManyRunning or QueueFull.
    """
    limit, tokens = caps.tokens_per_minute, demand.tokens
    if limit is not None and tokens > limit:
        raise RequestTooLarge(
            f"This request may use {tokens} tokens (prompt and max_tokens), and your {whose} has {limit} a minute "
            "(tokens_per_minute): it would never fit. Lower max_tokens, shorten the prompt, or ask for a higher limit.",
            "max_tokens",
        )
    _demand_rate(whose, "requests", counter.requests, caps.requests_per_minute, 1)
    _demand_rate(whose, "tokens", counter.tokens, limit, tokens)
    most = caps.concurrent_requests
    if most is not None and counter.running >= most:
        raise TooManyRunning(
            f"Your {whose} runs {counter.running} requests at the same time, and may run {most} "
            "(concurrent_requests). Please wait until one has ended.",
            wait=RETRY_SECOND,
        )
    longest = caps.queued_requests
    if longest is not None and demand.waiting >= longest:
        raise QueueFull(
            f"Your {whose} has {demand.waiting} requests that wait for their first token, and may have {longest} "
            "(queued_requests). Please send fewer at a time.",
            wait=RETRY_SECOND,
        )


def taken(counter: Counter, caps: Caps, tokens: int) -> Counter:
    """With a request of so many tokens more; `counter` is refilled and has the room."""
    return Counter(
        counter.requests if caps.requests_per_minute is None else counter.requests.minus(1),
        counter.tokens if caps.tokens_per_minute is None else counter.tokens.minus(tokens),
        counter.running + 1,
    )


def given_back(counter: Counter, tokens: int) -> Counter:
    """With one request less, and so many reserved tokens that it did not use."""
    return Counter(counter.requests, counter.tokens.plus(tokens), max(0, counter.running - 1))


def standing(caps: Caps, counter: Counter) -> Standing:
    """What is left by the minute; `counter` is refilled."""
    return Standing(_rate(counter.requests, caps.requests_per_minute), _rate(counter.tokens, caps.tokens_per_minute))


def _refilled(bucket: Bucket, limit: int | None, now: int) -> Bucket:
    return bucket if limit is None else bucket.refilled(limit, now)


def _demand_rate(whose: str, kind: str, bucket: Bucket, limit: int | None, quantity: int) -> None:
    if limit is None or bucket.whole >= quantity:
        return
    wait = bucket.wait(quantity, limit)
    when = "" if wait is None else f" Please try again in {wait / 1e6:.3f}s."
    raise RateReached(
        f"Rate limit reached for your {whose} on {kind} per minute: limit {limit}, left {bucket.whole}, "
        f"this request {quantity}.{when}",
        kind,
        wait=wait,
    )


def _rate(bucket: Bucket, limit: int | None) -> Rate | None:
    return None if limit is None else Rate(limit, bucket.whole, bucket.wait(limit, limit) or 0)
