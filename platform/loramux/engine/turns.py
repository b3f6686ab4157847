"""From a planned step to its events: each step awaited, or one running while the next is planned.

A device that works on its own should never wait for the host. So `OneAhead` commits a step when it is launched, with
PENDING for the tokens that only the device knows; the next step is planned and launched on that, the device putting
its own tokens in; then the first step's tokens are read and take their places. What ended with one of them has run a
row too many, whose result nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from loramux.engine.messages import TokenEvent
from loramux.engine.runner import Launched, Runner
from loramux.engine.scheduler import Scheduler
from loramux.engine.step import PENDING, Chunk, Step


class Turns(Protocol):
    """How steps follow each other."""

    @property
    def idle(self) -> bool:
        """Whether no step's events are still to come."""

    def take(self, step: Step) -> list[TokenEvent]:
        """Run `step`, which may be empty; the events that are known by now."""


class InTurn:
    """A step ends before the next is planned."""

    idle = True

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def take(self, step: Step) -> list[TokenEvent]:
        """The step's own events."""
        if step.empty:
            return []
        return self._scheduler.commit(step, self._runner.launch(step).events())


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose tokens are not known yet, and what was committed in their place."""

    launched: Launched
    sampling: list[Chunk]
    committed: dict[str, TokenEvent]
    """By request; without those that had ended before it."""


class OneAhead:
    """A step is launched before the tokens of the one before it are known."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._flight: _Flight | None = None

    @property
    def idle(self) -> bool:
        """Whether no step's events are still to come."""
        return self._flight is None

    def take(self, step: Step) -> list[TokenEvent]:
        """The events of the step before."""
        sampling = step.sampling
        launched = None if step.empty else self._runner.launch(step)
        events = [] if self._flight is None else self._land(self._flight)
        self._flight = None if launched is None else _Flight(launched, sampling, self._commit(step))
        return events

    def _commit(self, step: Step) -> dict[str, TokenEvent]:
        """Commit what has not ended since it was planned."""
        alive = Step(tuple(chunk for chunk in step.chunks if self._scheduler.holds(chunk.sequence)))
        if alive.empty:
            return {}
        unknown = [TokenEvent(request_id=chunk.sequence.id, token_id=PENDING) for chunk in alive.sampling]
        return {event.request_id: event for event in self._scheduler.commit(alive, unknown)}

    def _land(self, flight: _Flight) -> list[TokenEvent]:
        events = []
        for chunk, event in zip(flight.sampling, flight.launched.events(), strict=True):
            committed = flight.committed.get(event.request_id)
            if committed is None or not (committed.finish_reason or self._scheduler.holds(chunk.sequence)):
                continue  # it ended, or its client left, while the step was on its way
            self._scheduler.reveal(chunk, event)
            events.append(
                msgspec.structs.replace(
                    committed,
                    token_id=event.token_id,
                    logprob=event.logprob,
                    top_logprobs=event.top_logprobs,
                    finish_reason=event.finish_reason or committed.finish_reason,
                )
            )
        return events
