"""How long a revision's answers have been, so that memory and shares can be planned for the next one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

WINDOW = 64
"""Answers remembered per revision."""
ENOUGH = 8
"""Answers from which a quantile is worth something."""


@dataclass(frozen=True, slots=True)
class OutputEstimate:
    """Tokens an answer is expected to have."""

    mean: float
    p90: int


@dataclass(eq=False, slots=True)
class _Lengths:
    """The latest lengths, and the same ones in order."""

    latest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, length: int) -> None:
        if len(self.latest) == WINDOW:
            oldest = self.latest.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
        self.latest.append(length)
        insort(self.ordered, length)
        self.total += length

    @property
    def estimate(self) -> OutputEstimate | None:
        if (known := len(self.latest)) < ENOUGH:
            return None
        return OutputEstimate(self.total / known, self.ordered[known * 9 // 10])


class OutputHistory:
    """A revision's own history; before there is enough of it, everybody's; before that, the request's limit."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, _Lengths] = {}
        self._all = _Lengths()

    def record(self, key: Hashable, num_output_tokens: int) -> None:
        """An answer under `key` came to its own end."""
        self._by_key.setdefault(key, _Lengths()).add(num_output_tokens)
        self._all.add(num_output_tokens)

    def expect(self, key: Hashable, max_tokens: int) -> OutputEstimate:
        """What a request under `key` that may generate `max_tokens` is expected to."""
        own = self._by_key.get(key)
        known = (own.estimate if own else None) or self._all.estimate
        if known is None:
            return OutputEstimate(max_tokens, max_tokens)
        return OutputEstimate(min(max_tokens, known.mean), min(max_tokens, known.p90))
