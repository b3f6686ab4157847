"""First-token deadlines: who is refused when it comes because it would miss its own, and who has missed it waiting."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from loramux.engine.fairness import Flow
from loramux.engine.forecast import Forecast
from loramux.engine.messages import EngineFault
from loramux.engine.policy import Policy
from loramux.engine.ranking import Ranking
from loramux.engine.sequence import Sequence

MEMORY = 0.95
"""Of what was learned before, with every request."""

MARGIN = 1.1


@dataclass(slots=True)
class _Experience:
    """How much longer a flow's requests wait than was forecast: who comes later, and goes first, is in no forecast."""

    waited: float = 1.0
    foretold: float = 1.0

    @property
    def lateness(self) -> float:
        """A factor, at least 1, with a margin: half of all requests wait longer than the mean."""
        return max(1.0, MARGIN * self.waited / self.foretold)

    def add(self, waited: float, foretold: float) -> None:
        """One request's seconds."""
        self.waited = MEMORY * self.waited + waited
        self.foretold = MEMORY * self.foretold + foretold


class Deadlines:
    """Those that wait, by when they must have started."""

    def __init__(self, policy: Policy, forecast: Forecast) -> None:
        self._policy = policy
        self._forecast = forecast
        self._waiting: Ranking[Sequence, float] = Ranking(self._must_begin_by)
        self._experience: defaultdict[Flow, _Experience] = defaultdict(_Experience)

    def refusal(self, sequence: Sequence) -> EngineFault | None:
        """Why `sequence`, which has just come and is not queued yet, should not be; None where it may."""
        if (deadline := self._milliseconds(sequence)) is None:
            return None
        sequence.foretold = self._forecast.first_token(sequence)
        wait = 1000.0 * sequence.foretold * self._experience[sequence.flow].lateness
        if wait <= deadline:
            return None
        return EngineFault(
            "engine_overloaded",
            f"The server is over capacity: the first token is expected in {wait:.0f} ms and the request's deadline is "
            f"{deadline} ms. Retry later, or allow more time.",
            retry_after=max(1, math.ceil((wait - deadline) / 1000.0)),
        )

    def watch(self, sequence: Sequence) -> None:
        """`sequence` is being queued."""
        if self._milliseconds(sequence) is not None:
            self._waiting.put(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """`sequence` has started, or ended."""
        self._waiting.drop(sequence)

    def learn(self, sequence: Sequence, now: float) -> None:
        """`sequence` has waited until now, and does no longer."""
        if sequence.foretold is not None:
            self._experience[sequence.flow].add(now - sequence.arrival, sequence.foretold)

    def missed(self, now: float) -> list[Sequence]:
        """Let go of those whose time has come."""
        due = []
        while (sequence := self._waiting.first()) is not None and self._must_begin_by(sequence) < now:
            self._waiting.drop(sequence)
            due.append(sequence)
        return due

    @property
    def next(self) -> float | None:
        """When the next one's time comes."""
        sequence = self._waiting.first()
        return None if sequence is None else self._must_begin_by(sequence)

    def fault(self, sequence: Sequence) -> EngineFault:
        """What one that has missed its deadline is told."""
        return EngineFault(
            "deadline_exceeded",
            f"The request's deadline of {self._milliseconds(sequence)} ms passed while it waited, and nothing of it "
            f"was run. Retry later, or allow more time.",
            retry_after=1,
        )

    def _must_begin_by(self, sequence: Sequence) -> float:
        milliseconds = self._milliseconds(sequence)
        assert milliseconds is not None, "only those that have a deadline are watched"
        return sequence.arrival + milliseconds / 1000.0

    def _milliseconds(self, sequence: Sequence) -> int | None:
        asked = sequence.request.deadline_ms
        return self._policy.deadlines_ms.get(sequence.request.service_class) if asked is None else asked
