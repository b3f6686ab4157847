"""How long a revision's answers have been, so that memory and shares can be planned for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

WINDOW = 64
"""Answers remembered per revision."""
ENOUGH = 8
"""Answers from which a mean is worth something."""


@dataclass(eq=False, slots=True)
class _Lengths:
    """The latest lengths, and their sum."""

    latest: deque[int] = field(default_factory=deque)
    total: int = 0

    def add(self, length: int) -> None:
        if len(self.latest) == WINDOW:
            self.total -= self.latest.popleft()
        self.latest.append(length)
        self.total += length

    @property
    def mean(self) -> float | None:
        return self.total / len(self.latest) if len(self.latest) >= ENOUGH else None


class OutputHistory:
    """A revision's own history; before there is enough of it, everybody's; before that, the request's limit.

    The mean, because what is planned for is a sum: the requests that run together outlive and undercut it in turn. A
    high quantile of each leaves a twentieth of the pool to nobody, and spares no preemption (decision 0004).
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, _Lengths] = {}
        self._all = _Lengths()

    def record(self, key: Hashable, num_output_tokens: int) -> None:
        """An answer under `key` came to its own end."""
        self._by_key.setdefault(key, _Lengths()).add(num_output_tokens)
        self._all.add(num_output_tokens)

    def expect(self, key: Hashable, max_tokens: int) -> float:
        """Tokens that a request under `key` that may generate `max_tokens` is expected to."""
        own = self._by_key.get(key)
        known = (own.mean if own else None) or self._all.mean
        return max_tokens if known is None else min(max_tokens, known)
