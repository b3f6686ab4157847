"""What a page of KV costs to compute, and to carry over the host link, by measured figures."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.pace import Pace


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Pure questions; the pace goes on being measured."""

    pace: Pace
    block_size: int
    carrying_seconds: float | None
    """Of a page one way, as measured; None where nothing is carried."""
    assumed: float
    """`recomputing` before both are known."""

    def computing_seconds(self, num_tokens: int) -> float:
        """Seconds that `num_tokens` tokens take in steps that run anyway; 0 before the pace is known."""
        return self.pace.seconds(0, num_tokens)

    @property
    def recomputing(self) -> float:
        """What computing a page's tokens takes, in the time that the page takes over the link."""
        seconds = self.computing_seconds(self.block_size)
        return seconds / self.carrying_seconds if seconds and self.carrying_seconds else self.assumed
