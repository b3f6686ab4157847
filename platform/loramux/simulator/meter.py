"""Every request under way: what it will generate, and when its tokens came."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import msgspec

from loramux.engine.messages import TokenEvent
from loramux.engine.step import Step
from loramux.simulator.measures import Tally
from loramux.simulator.traffic import Source


@dataclass(slots=True)
class _Run:
    """One request on its way."""

    tally: Tally
    arrived: float
    deadline_s: float | None
    output_left: int
    next_token: TokenEvent
    """The same for all but the last, which is made when it comes."""
    last_token_at: float | None = None


@dataclass(slots=True)
class Share:
    """The mean of a share over time."""

    integral: float = 0.0
    seconds: float = 0.0

    def add(self, share: float, seconds: float) -> None:
        """It was `share` for so long."""
        self.integral += share * seconds
        self.seconds += seconds

    @property
    def mean(self) -> float:
        """0 where nothing was added."""
        return self.integral / self.seconds if self.seconds else 0.0


class Meter:
    """Stands in for the sampler, and keeps the times."""

    def __init__(self) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.num_answered = 0
        self.last_token_at = 0.0
        self._runs: dict[str, _Run] = {}

    def arrive(self, request_id: str, at: float, source: Source, output_tokens: int) -> None:
        """A request that will generate `output_tokens` came `at`, which may be before the loop saw it."""
        token = TokenEvent(request_id=request_id, token_id=0)
        self._runs[request_id] = _Run(self.tallies[source.tenant], at, source.deadline_s, output_tokens, token)

    def sample(self, step: Step, now: float) -> list[TokenEvent]:
        """The tokens of a step that ended `now`, one for each of `step.sampling`."""
        self.last_token_at = now
        return [self._next_token(self._runs[chunk.sequence.request.id], now) for chunk in step.sampling]

    def end(self, event: TokenEvent, prompt_tokens: int) -> None:
        """A request was answered by `event`, which ends it."""
        run = self._runs.pop(event.request_id)
        self.num_answered += 1
        if event.fault is not None and event.fault.code != "deadline_exceeded":
            run.tally.refused += 1
            return
        run.tally.accepted += 1
        run.tally.prompt_tokens += prompt_tokens
        run.tally.with_deadline += run.deadline_s is not None

    def _next_token(self, run: _Run, now: float) -> TokenEvent:
        if run.last_token_at is None:
            self._first_token(run, now)
        else:
            run.tally.itl.add(now - run.last_token_at)
        run.last_token_at = now
        run.tally.output_tokens += 1
        run.output_left -= 1
        return run.next_token if run.output_left else msgspec.structs.replace(run.next_token, finish_reason="stop")

    def _first_token(self, run: _Run, now: float) -> None:
        waited = now - run.arrived
        run.tally.ttft.add(waited)
        run.tally.in_deadline += run.deadline_s is not None and waited <= run.deadline_s
