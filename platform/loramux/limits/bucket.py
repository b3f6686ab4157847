"""A limit by the minute as a bucket that refills evenly, in exact integers.

What is free is kept in parts of a minute's microseconds: a limit of L a minute adds L parts every microsecond, and one
request (or token) is PART parts. Nothing is ever rounded, so that the bucket is exact to the token.
"""

from __future__ import annotations

import msgspec

PART = 60_000_000
"""Microseconds in a minute."""


class Bucket(msgspec.Struct, frozen=True):
    """`free` parts as of the microsecond `at`. A clock that goes back refills nothing."""

    free: int
    at: int

    @classmethod
    def full(cls, limit: int, now: int) -> Bucket:
        """A whole minute's worth."""
        return cls(limit * PART, now)

    def refilled(self, limit: int, now: int) -> Bucket:
        """As of `now`."""
        elapsed = max(0, now - self.at)
        return Bucket(min(limit * PART, self.free + elapsed * limit), self.at + elapsed)

    @property
    def whole(self) -> int:
        """How many could be taken."""
        return max(0, self.free) // PART

    def minus(self, quantity: int) -> Bucket:
        """With so many taken; the caller has looked whether they are there."""
        return Bucket(self.free - quantity * PART, self.at)

    def plus(self, quantity: int) -> Bucket:
        """With so many given back; `refilled` cuts what is too much."""
        return Bucket(self.free + quantity * PART, self.at)

    def wait(self, quantity: int, limit: int) -> int | None:
        """Microseconds until so many are there; None for never."""
        if quantity > limit:
            return None
        missing = quantity * PART - self.free
        return max(0, -(-missing // limit)) if limit else 0
