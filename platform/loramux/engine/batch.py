"""The sequences that hold memory, what they hold, and the step that is being planned for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.fairness import Flow
from loramux.engine.memory import Memory
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
        start = sequence.num_computed
        self.chunks[sequence] = Chunk(sequence, start, length, sequence.slot_at(start))
        self.tokens_left -= length
        self.rows_left -= 1

    def finish(self) -> Step:
        """The step."""
        return Step.lay_out(self.chunks.values())


class Batch:
    """The running sequences, in order of admission, and their pages and adapters."""

    def __init__(self, memory: Memory, block_size: int) -> None:
        self.running: list[Sequence] = []
        self.num_departures = 0
        """Since the start."""
        self.most_pages = 0
        """That those that run could ever hold, each at its longest."""
        self._memory = memory
        self._block_size = block_size

    def held_by(self, flow: Flow) -> tuple[int, int]:
        """Rows and pages of `flow`."""
        held = [len(sequence.pages) for sequence in self.running if sequence.flow is flow]
        return len(held), sum(held)

    def join(self, sequence: Sequence) -> None:
        """Admit `sequence`, behind the KV that was looked up or saved for it; its adapter is READY."""
        residency = self._memory.residency
        sequence.slot = BASE_SLOT if sequence.digest is None else residency.pin(sequence.digest)
        self._memory.cache.hold(sequence)
        if sequence.places:
            extended = self.extend(sequence, sequence.num_saved)
            assert extended, "the budget counts every token that there is, so that what was saved has its pages"
            self._memory.swap.restore(sequence)
        self.running.append(sequence)
        self.most_pages += self._most_pages_of(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give back what `sequence` held."""
        self.running.remove(sequence)
        self.most_pages -= self._most_pages_of(sequence)
        self.num_departures += 1
        self._memory.cache.release(sequence)
        if sequence.digest is not None:
            self._memory.residency.unpin(sequence.digest)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages for the first `num_tokens` tokens, evicting what is idle; False where that is not enough."""
        missing = -(-num_tokens // self._block_size) - len(sequence.pages)
        if missing > 0:
            if (pages := self._memory.take_kv(missing)) is None:
                return False
            sequence.pages += pages
        return True

    def commit(self, step: Step) -> None:
        """The step has run: its KV is in the pages, and the full ones are there for others."""
        size, cache = self._block_size, self._memory.cache
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.end
            sequence.num_computed = end
            if end // size > len(sequence.trail):
                cache.publish(sequence)

    def _most_pages_of(self, sequence: Sequence) -> int:
        return -(-sequence.max_len // self._block_size)
