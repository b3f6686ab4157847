"""What a step's adapters hold beside pairs on linears; most steps hold nothing of it and pay nothing for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loramux_adapters.token_rows import VocabularyPart
from loramux_kernels import Segments

Ints = NDArray[np.signedinteger[Any]]

PartSpan = tuple[VocabularyPart, int, int]
"""A part, and the rows `[first, last)` that it changes."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one resident adapter holds."""

    num_bytes: int = 0
    """Bytes of weights that a step with rows of it reads."""
    max_rank: int = 0
    """Of its pairs on linears."""
    columns: bool = False
    """Whether it scales or shifts a linear's outputs."""
    inputs: bool = False
    """Whether it scales a linear's inputs."""
    embedding: VocabularyPart | None = None
    head: VocabularyPart | None = None

    @property
    def is_more_than_pairs(self) -> bool:
        """Whether any of it stands beside pairs on linears."""
        return self.columns or self.inputs or self.embedding is not None or self.head is not None


@dataclass(frozen=True, slots=True)
class Beyond:
    """One step's share of it."""

    columns: Segments | None
    """The step's segments, where any of them scales or shifts outputs."""
    inputs: Segments | None
    embedding: tuple[PartSpan, ...]
    """Of the step's rows."""
    head: tuple[PartSpan, ...]
    """Of the sampled rows."""

    @classmethod
    def of_step(cls, held: Mapping[int, Held], segments: Segments, sampled_rows: Ints) -> Beyond | None:
        """What `segments` need of `held`, by slot; None where pairs are all. `sampled_rows` int64`[n]`, rising."""
        found = [held[slot] for slot in segments.slots if slot in held]
        if not any(one.is_more_than_pairs for one in found):
            return None
        embedding = ((held[slot].embedding, first, last) for slot, first, last in segments.spans)
        head = ((held[slot].head, *_among(sampled_rows, first, last)) for slot, first, last in segments.spans)
        return cls(
            columns=segments if any(one.columns for one in found) else None,
            inputs=segments if any(one.inputs for one in found) else None,
            embedding=tuple(_present(embedding)),
            head=tuple(_present(head)),
        )


def _among(sampled_rows: Ints, first: int, last: int) -> tuple[int, int]:
    """Which of `sampled_rows` are of the rows `[first, last)`."""
    start, stop = np.searchsorted(sampled_rows, (first, last)).tolist()
    return start, stop


def _present(spans: Iterator[tuple[VocabularyPart | None, int, int]]) -> Iterator[PartSpan]:
    for part, first, last in spans:
        if part is not None and last > first:
            yield part, first, last
