"""Time that passes only when the simulation says so."""

from __future__ import annotations

from dataclasses import dataclass

MOMENT = 1e-6
"""Seconds; what is nearer than that is the same time."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start of the simulation; calling it reads it, as with time.monotonic."""

    now: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Let time pass; the clock never goes back."""
        assert when >= self.now, "time does not go back"
        self.now = when
