"""Drafts of one sequence: tokens that may follow it, by prompt lookup, and how many of them were right so far.

Prompt lookup (Saxena, 2023; vLLM's n-gram speculation) needs no second model: it finds the sequence's last tokens
earlier in it and drafts what followed them there. Extraction, rewriting and code edits copy from their prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH, SHORTEST_MATCH = 4, 2
"""Last tokens that an earlier place must repeat: as many as can be found up to the first, at least the second."""
PRIOR_TOKENS = 2.0
"""Drafted tokens that a first guess of the acceptance counts for."""


@dataclass(eq=False, slots=True)
class Acceptance:
    """Drafted tokens that were verified, the latest counting most, and the totals for statistics."""

    keep: float
    """Share of the past that is kept with every draft."""
    tried: float = 0.0
    accepted: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    def rate(self, first_guess: float) -> float:
        """Return the probability that the next token of a draft is accepted."""
        return (self.accepted + PRIOR_TOKENS * first_guess) / (self.tried + PRIOR_TOKENS)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of which the first `accepted` tokens were right; what lies behind a wrong one says nothing."""
        self.tried = self.keep * self.tried + min(accepted + 1, drafted)
        self.accepted = self.keep * self.accepted + accepted
        self.num_drafted += drafted
        self.num_accepted += accepted

    def fade(self, keep: float) -> None:
        """Forget a part, so that a first guess counts again in time."""
        self.tried *= keep
        self.accepted *= keep


class PromptLookup:
    """The history of one sequence, and the place in it that the sequence repeats from at present."""

    def __init__(self) -> None:
        self._history: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self._length = 0
        self._next: int | None = None
        """The place of the token that is expected next; None while nothing is repeated."""

    def draft(self, token_ids: list[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `token_ids`, which begin with those of the call before.

        A text whose end repeats itself is expected to go on so.
        """
        self._append(token_ids)
        if self._next is None:
            self._next = self._find()
        if self._next is None:
            return []
        followed = self._history[self._next : min(self._next + most, self._length)]
        drafted: list[int] = np.resize(followed, most).tolist()
        return drafted

    def _append(self, token_ids: list[int]) -> None:
        """Take over the new tokens; go on from the place that was found where they are the tokens that stand there."""
        start, stop = self._length, len(token_ids)
        if stop > len(self._history):
            self._history = np.resize(self._history, 2 * stop)
        self._history[start:stop] = token_ids[start:]
        self._length = stop
        if self._next is not None:
            begin, self._next = self._next, self._next + stop - start
            if not np.array_equal(self._history[begin : self._next], self._history[start:stop]):
                self._next = None

    def _find(self) -> int | None:
        """Return the place behind the latest of the longest matches of the last tokens."""
        history, last = self._history[: self._length], self._length - 1
        places = np.flatnonzero(history[:last] == history[last])
        for back in range(1, LONGEST_MATCH):
            longer = places[places >= back]
            longer = longer[history[longer - back] == history[last - back]]
            if not len(longer):
                return int(places[-1]) + 1 if back >= SHORTEST_MATCH else None
            places = longer
        return int(places[-1]) + 1


@dataclass(eq=False, slots=True)
class Drafter:
    """Drafts and acceptance of one sequence."""

    acceptance: Acceptance
    lookup: PromptLookup = field(default_factory=PromptLookup)
