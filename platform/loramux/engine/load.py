"""What a crowd of waiting requests is expected to ask of the engine, as a sum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Expected work; one request's, or many's."""

    requests: float = 0.0
    prompt: float = 0.0
    """Tokens to prefill."""
    output: float = 0.0
    """Tokens to generate."""
    room: float = 0.0
    """Tokens of KV that they hold at their ends."""

    @property
    def units(self) -> float:
        """Service, as it will be charged."""
        return self.prompt + 2.0 * self.output

    def add(self, other: Load, times: float = 1.0) -> None:
        """Count `other`, or a part of it; -1 takes it out again."""
        self.requests += times * other.requests
        self.prompt += times * other.prompt
        self.output += times * other.output
        self.room += times * other.room

    def share_of(self, units: float) -> float:
        """How much of it (0 to 1) is worth `units`."""
        return min(1.0, max(0.0, units / self.units)) if self.units > 0.0 else 0.0
