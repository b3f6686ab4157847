"""One budget for KV and adapters, in pages. Every question here is pure; only the scheduler acts on the answers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from loramux.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Budget:
    """What the pool can still promise.

    `watermark` pages stay free at admission, so that rounding and uneven progress rarely cost a preemption.
    """

    num_pages: int
    block_size: int
    watermark: int = 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def kv_peak(self, sequences: Iterable[Sequence]) -> int:
        """The most pages the sequences hold at once if each generates all it may, one token a step.

        The sum peaks when one of them ends, so it is enough to look at those moments: when the i-th longest
        ends, it and the i - 1 longer ones have all grown by what it had left.
        """
        runs = sorted(((s.max_tokens_left, len(s.token_ids)) for s in sequences), reverse=True)
        return max(
            (
                sum(self.pages_for(held + left) for _, held in runs[: i + 1])
                for i, (left, _) in enumerate(runs)
                if i + 1 == len(runs) or runs[i + 1][0] < left
            ),
            default=0,
        )

    def fits_alone(self, num_tokens: int, adapter_pages: int) -> bool:
        """Whether a request of `num_tokens` (prompt and output) could ever run, in an otherwise empty pool."""
        return self.pages_for(num_tokens) + adapter_pages <= self.num_pages

    def admits(self, candidate: Sequence, running: Items[Sequence], pinned_pages: int) -> bool:
        """Whether `candidate` may join: the peak of KV and the adapters in use (its own included) stay in the pool.

        Adapters that nobody uses are evictable and therefore not counted. An empty house admits whatever fits alone.
        """
        watermark = self.watermark if running else 0
        return self.kv_peak([*running, candidate]) + pinned_pages + watermark <= self.num_pages
