"""Adapters in the host's memory: read and checked once, so that one that comes back is copied and not read again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from loramux.engine.ranking import COLD, warmed
from loramux_adapters.weights import AdapterWeights

OVERHEAD_BYTES = float(1 << 20)
"""What opening and checking an adapter costs beside reading it, in the time that so many bytes take."""


@dataclass(eq=False, slots=True)
class _Kept:
    weights: AdapterWeights
    num_bytes: int
    heat: float = COLD

    @property
    def worth(self) -> float:
        """log2 of expected uses x cost of a miss / bytes."""
        return self.heat + math.log2(1.0 + OVERHEAD_BYTES / max(self.num_bytes, 1))


class HostTier:
    """Keeps those that are used often, dear to read and small. Any thread may call it."""

    def __init__(self, max_bytes: int, clock: Callable[[], float], half_life: float = 300.0) -> None:
        """`half_life`: seconds after which a use counts half."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._half_life = half_life
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def may_take(self, num_bytes: int) -> bool:
        """Whether so many bytes could ever be kept."""
        return num_bytes <= self._max_bytes

    def get(self, digest: str) -> AdapterWeights | None:
        """The revision's weights, if they are here; a use."""
        with self._lock:
            kept = self._kept.get(digest)
            if kept is None:
                return None
            kept.heat = warmed(kept.heat, self._now)
            return kept.weights

    def put(self, digest: str, weights: AdapterWeights) -> None:
        """Keep `weights`, unless what would have to go for them is worth more."""
        num_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in weights.modules.values())
        kept = _Kept(weights, num_bytes, warmed(COLD, self._now))
        with self._lock:
            self._drop(digest)
            if (leaving := self._displaced_by(kept)) is not None:
                for other in leaving:
                    self._drop(other)
                self._kept[digest] = kept
                self.num_bytes += num_bytes

    def forget(self, digest: str) -> None:
        """The revision was deleted."""
        with self._lock:
            self._drop(digest)

    @property
    def _now(self) -> float:
        return self._clock() / self._half_life

    def _displaced_by(self, kept: _Kept) -> list[str] | None:
        """The least worthy that must go for it; None where it is too large, or one of them is worth more."""
        leaving, excess = [], self.num_bytes + kept.num_bytes - self._max_bytes
        for digest in sorted(self._kept, key=lambda digest: self._kept[digest].worth):
            if excess <= 0:
                break
            if self._kept[digest].worth > kept.worth:
                return None
            leaving.append(digest)
            excess -= self._kept[digest].num_bytes
        return leaving if excess <= 0 else None

    def _drop(self, digest: str) -> None:
        if kept := self._kept.pop(digest, None):
            self.num_bytes -= kept.num_bytes
