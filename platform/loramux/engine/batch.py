"""The sequences that hold memory, what they hold, and the step that is being planned for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.fairness import Flow
from loramux.engine.pages import PagePool, PageUse
from loramux.engine.residency import Residency
from loramux.engine.sequence import BASE_SLOT, Sequence
from loramux.engine.step import Chunk, Step


@dataclass(slots=True)
class Draft:
    """A step in the making."""

    tokens_left: int
    rows_left: int
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)

    def lay(self, sequence: Sequence, length: int) -> None:
        """Give `sequence` the next `length` of its tokens; it has the pages."""
        self.chunks[sequence] = Chunk(sequence, sequence.num_computed, length, sequence.slot)
        self.tokens_left -= length
        self.rows_left -= 1

    def finish(self) -> Step:
        """The step."""
        return Step.lay_out(self.chunks.values())


class Batch:
    """The running sequences, in order of admission, and their pages and adapters."""

    def __init__(self, pool: PagePool, residency: Residency, block_size: int) -> None:
        self.running: list[Sequence] = []
        self._pool = pool
        self._residency = residency
        self._block_size = block_size

    def held_by(self, flow: Flow) -> tuple[int, int]:
        """Rows and pages of `flow`."""
        held = [len(sequence.pages) for sequence in self.running if sequence.flow is flow]
        return len(held), sum(held)

    def join(self, sequence: Sequence) -> None:
        """Admit `sequence`; its adapter is READY."""
        sequence.slot = BASE_SLOT if sequence.digest is None else self._residency.pin(sequence.digest)
        self.running.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give back what `sequence` held."""
        self.running.remove(sequence)
        self._pool.give_back(sequence.forget_kv(), PageUse.KV)
        if sequence.digest is not None:
            self._residency.unpin(sequence.digest)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages for the first `num_tokens` tokens, evicting what is idle; False where that is not enough."""
        missing = -(-num_tokens // self._block_size) - len(sequence.pages)
        if missing > 0:
            if not self._residency.make_room(missing):
                return False
            sequence.pages += self._pool.take(missing, PageUse.KV)
        return True
