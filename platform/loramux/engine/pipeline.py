"""Two ways to run planned steps: wait for each, or run one while the next is planned.

A device that works by itself should never wait for the host. So `AsyncPipeline` commits a step when it is launched,
with PENDING for the tokens that only the device knows. The next step is planned and launched on that, and the device
puts its own tokens in. Then the tokens of the first step are read and take their places:

    advance(k):   launch k  ->  complete k-1 (wait, fill its PENDING tokens)  ->  sample k  ->  commit k with PENDING

The tokens of k are chosen with its launch, unless a constraint needs those of k-1 for it.

Completing k-1 before committing k means that KV which a commit publishes for reuse never stands for an unknown token.
A sequence that ended with a token of k-1 has run one row too many in k; that row's result is dropped and not billed.
vLLM (async scheduling) and SGLang (overlap schedule) hide the host's time in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from loramux.engine.execution.runner import LaunchedStep, Runner
from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.step import PENDING, Chunk, Step


class StepPipeline(Protocol):
    """Runs planned steps one after the other and commits their results."""

    @property
    def is_idle(self) -> bool:
        """Are no events of a step still to come?"""

    def advance(self, step: Step) -> list[TokenEvent]:
        """Run `step`, which may be empty; return the events that are known by now."""


class SyncPipeline:
    """A step ends before the next is planned."""

    is_idle = True

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def advance(self, step: Step) -> list[TokenEvent]:
        """Return the step's own events."""
        if step.empty:
            return []
        launched = self._runner.launch(step)
        events = launched.events() + launched.pooled_events()
        return launched.prompt_events() + self._scheduler.commit(step, events)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and committed with PENDING in place of its tokens."""

    launched: LaunchedStep
    sampling: list[Chunk]
    committed: dict[str, TokenEvent]
    """Events by request, without requests that had ended before the commit."""


class AsyncPipeline:
    """A step is launched before the tokens of the one before it are known."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: InFlightStep | None = None

    @property
    def is_idle(self) -> bool:
        """Are no events of a step still to come?"""
        return self._in_flight is None

    def advance(self, step: Step) -> list[TokenEvent]:
        """Return the events of the step before."""
        sampling = step.sampling
        launched = None if step.empty else self._runner.launch(step)
        events = [] if self._in_flight is None else self._complete(self._in_flight)
        if launched is not None:
            launched.sample()
        self._in_flight = None if launched is None else InFlightStep(launched, sampling, self._commit(step))
        return events

    def _commit(self, step: Step) -> dict[str, TokenEvent]:
        """Commit the chunks whose sequences have not ended since they were planned."""
        alive = Step(tuple(chunk for chunk in step.chunks if self._scheduler.is_open(chunk.sequence)))
        if alive.empty:
            return {}
        unknown = [TokenEvent(request_id=chunk.sequence.id, token_id=PENDING) for chunk in alive.sampling]
        return {event.request_id: event for event in self._scheduler.commit(alive, unknown)}

    def _complete(self, step: InFlightStep) -> list[TokenEvent]:
        """Wait for the step's tokens and put them where PENDING stands."""
        sampled = step.launched.events()
        events = step.launched.prompt_events() + self._scheduler.end_pooled(step.launched.pooled_events())
        for chunk, event in zip(step.sampling, sampled, strict=True):
            committed = step.committed.get(event.request_id)
            if committed is None or not (committed.finish_reason or self._scheduler.is_open(chunk.sequence)):
                continue  # it ended, or its client left, while the step was in flight
            self._scheduler.fill_pending(chunk, event)
            events.append(
                msgspec.structs.replace(
                    committed,
                    token_id=event.token_id,
                    logprob=event.logprob,
                    top_logprobs=event.top_logprobs,
                    finish_reason=event.finish_reason or committed.finish_reason,
                    fault=event.fault,
                )
            )
        return events
