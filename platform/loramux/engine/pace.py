"""How long steps take, as measured: seconds = fixed + per_token * tokens."""

from __future__ import annotations

MEMORY = 64.0
"""Steps after which a measurement counts for 1/e."""
ENOUGH = 4.0
"""Measured steps from which a prediction is worth something."""
SPREAD = 1e-3
"""Relative variance of the tokens in a step below which the two terms cannot be told apart."""


class Pace:
    """A line through the latest steps, by least squares with exponentially fading weights."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether enough steps were measured."""
        return self._weight >= ENOUGH

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`."""
        keep = 1.0 - 1.0 / MEMORY
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + tokens
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + tokens * tokens
        self._xy = keep * self._xy + tokens * seconds

    def seconds(self, steps: float, tokens: float) -> float:
        """What `steps` steps with `tokens` tokens in all are expected to take; 0 before enough is known."""
        if not self.known:
            return 0.0
        fixed, per_token = self._line()
        return steps * fixed + tokens * per_token

    def _line(self) -> tuple[float, float]:
        """(fixed, per_token), neither of them negative."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = (self._xy / self._weight - x * y) / variance if variance > SPREAD * x * x else 0.0
        per_token = min(max(slope, 0.0), y / x)
        return y - per_token * x, per_token
