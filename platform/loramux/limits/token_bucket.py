"""A limit by the minute as a token bucket that refills evenly, in exact integers.

The bucket counts in parts of a minute's microseconds: a limit of L a minute adds L parts every microsecond, and one
request (or token) costs PART parts. Nothing is ever rounded, so the bucket is exact to the token.
"""

from __future__ import annotations

import msgspec

from loramux.units import MINUTE

PART = MINUTE
"""Parts of one request or token: the microseconds of a minute."""


class TokenBucket(msgspec.Struct, frozen=True):
    """`free` parts as of the microsecond `at`. A clock that goes back refills nothing."""

    free: int
    at: int

    @classmethod
    def full(cls, limit: int, now: int) -> TokenBucket:
        """Return a bucket with a whole minute's worth."""
        return cls(limit * PART, now)

    def refilled(self, limit: int, now: int) -> TokenBucket:
        """Return the bucket as of `now`."""
        elapsed = max(0, now - self.at)
        return TokenBucket(min(limit * PART, self.free + elapsed * limit), self.at + elapsed)

    @property
    def whole(self) -> int:
        """The whole units that can be taken."""
        return max(0, self.free) // PART

    def minus(self, quantity: int) -> TokenBucket:
        """Return the bucket after taking `quantity`; the caller has checked that they are there."""
        return TokenBucket(self.free - quantity * PART, self.at)

    def plus(self, quantity: int) -> TokenBucket:
        """Return the bucket after giving back `quantity`; `refilled` cuts what exceeds the limit."""
        return TokenBucket(self.free + quantity * PART, self.at)

    def wait(self, quantity: int, limit: int) -> int | None:
        """Return the microseconds until `quantity` can be taken; None for never."""
        if quantity > limit:
            return None
        missing = quantity * PART - self.free
        return max(0, -(-missing // limit)) if limit else 0


class RateLimit(msgspec.Struct, frozen=True):
    """One limit by the minute: its value, what is left, and the microseconds until all of it is there again."""

    limit: int
    remaining: int
    reset: int


class RateLimitStatus(msgspec.Struct, frozen=True):
    """The tightest limits by the minute that a request met, for the x-ratelimit headers; None where there is none."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None

    def tightest(self, other: RateLimitStatus) -> RateLimitStatus:
        """Return, for requests and for tokens, the limit with less left."""
        return RateLimitStatus(_tighter(self.requests, other.requests), _tighter(self.tokens, other.tokens))


def _tighter(one: RateLimit | None, other: RateLimit | None) -> RateLimit | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda rate: rate.remaining)
