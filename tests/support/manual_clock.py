"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class ManualClock(Generic[T]):
    """Return `now`, in the unit of what reads it: microseconds for records, seconds for engines."""

    now: T

    def __call__(self) -> T:
        return self.now
