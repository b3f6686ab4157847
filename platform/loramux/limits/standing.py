"""What is left of the limits by the minute: the x-ratelimit headers."""

from __future__ import annotations

import msgspec


class Rate(msgspec.Struct, frozen=True):
    """One limit: the whole, what is left, and microseconds until all of it is there again."""

    limit: int
    remaining: int
    reset: int


class Standing(msgspec.Struct, frozen=True):
    """The tightest limits that a request met; None where there is none."""

    requests: Rate | None = None
    tokens: Rate | None = None


def tighter(one: Rate | None, other: Rate | None) -> Rate | None:
    """The one with less left."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda rate: rate.remaining)
