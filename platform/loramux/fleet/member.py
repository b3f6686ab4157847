"""One engine of a group over its lives. An engine is started, watched, restarted after a pause, and drained.

    STARTING ──> READY ──> LOST ──pause──> STARTING          the engine died, or did not load its model
                   ├─> DRAINING ──> LOST ──restart──> ...    an operator took it out of service
                   └─> DRAINING ──> RESTING ──> STARTING     it was not needed, and is again

A pause grows with each consecutive failure. An engine that fails to start MAX_FAILED_STARTS times is still tried while
other engines serve. The group has ended if all engines of a base fail in this way and no engine has served for
`engines.max_wait_s`.

Refusals of an operator's orders to engines:

    LoramuxError(message, field)
    └── FleetError
        ├── UnknownEngine   404  no engine has this name
        └── EngineBusy      409  it is being drained or restarted already
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.settings.file import Settings
from loramux.engine.client import EngineClient, EngineDied
from loramux.engine.messages import EngineStats, LinearFacts, ModelFacts, StepLimits
from loramux.fleet.view import EngineState, EngineView, view_of

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds between an engine's end and its next start."""
MAX_FAILED_STARTS = 3
SOUND_SECONDS = 60.0
"""Seconds of service after which an engine has recovered: its next pause is FIRST_PAUSE again."""
DRAINED = "drained"

LaunchEngine = Callable[[str, Settings], EngineClient]
"""Makes the client of one life of an engine, by the engine's name; the engine is not yet started."""


class FleetError(LoramuxError):
    """Base class of refusals of orders to engines."""


class UnknownEngine(FleetError):
    """No engine has this name; the message lists the engines."""

    code = "engine_not_found"
    status = HTTPStatus.NOT_FOUND


class EngineBusy(FleetError):
    """The engine is already being drained or restarted; the message names the action."""

    code = "engine_busy"
    status = HTTPStatus.CONFLICT


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine, which operators see."""

    engine: str
    base_model: str
    state: EngineState
    requests: int
    """Number of requests that wait or run in the engine."""
    starts: int
    """Number of times that the engine was started."""
    problem: str | None
    """Reason why the engine does not serve, or did not serve before its last start."""
    step_graphs_missing: int = 0
    """Recordings of steps that run without a CUDA graph; 0 on a CPU."""
    linears: LinearFacts | None = None
    """The linears' format and the floor of a step; None on a GPU, and before the engine's first start."""
    limits: StepLimits | None = None
    """Limits of a step; None before the engine's first start."""
    weights_s: float = 0.0
    """Seconds of a step in which the weights are read, by the measured steps; 0 before steps were measured."""


class FleetEngine:
    """One engine of a group; each life of the engine has a new client."""

    def __init__(
        self, name: str, base: str, settings: Settings, launch: LaunchEngine, *, is_wanted: bool = True
    ) -> None:
        """If `is_wanted`, the engine should serve from the group's start on; otherwise it rests until `revive`."""
        self.name = name
        self.state = EngineState.LOST if is_wanted else EngineState.RESTING
        self.served_until = -math.inf
        """Time, by the event loop, at which the engine last stopped serving."""
        self.requests: set[str] = set()
        """Ids of the engine's requests that have not ended."""
        self.idle = asyncio.Event()
        """Set whenever the engine has no request."""
        self.problem: str | None = None
        """Reason of the engine's last end."""
        self.client = launch(name, settings)
        self._facts: ModelFacts | None = None
        """Facts of the engine's latest start; None before the first."""
        self._view: EngineView | None = None
        self._viewed: EngineStats | None = None
        """Statistics from which the view was made."""
        self._base = base
        self._settings = settings
        self._launch = launch
        self._num_starts = 0
        self._num_failures = 0
        """Number of times that the engine ended since it last served for SOUND_SECONDS."""
        self._num_failed_starts = 0
        """Number of failed starts in a row."""
        self._unclaimed = 0
        self._is_wanted = asyncio.Event()
        """Set while the engine should serve."""
        if is_wanted:
            self._is_wanted.set()
        self._withdrawn_to = EngineState.LOST
        """State of the engine after it is stopped."""
        self._started = asyncio.Event()
        """Set after each start, both successful and failed."""

    @property
    def is_ready(self) -> bool:
        """True if the engine may get requests."""
        return self.state is EngineState.READY and self.client.alive

    @property
    def stats(self) -> EngineStats:
        """The latest statistics of the engine's current life."""
        return self.client.stats()

    @property
    def unclaimed_tokens(self) -> int:
        """Tokens of requests that ended without a listener, over all lives."""
        return self._unclaimed + self.client.unclaimed_tokens

    @property
    def view(self) -> EngineView:
        """Facts about the engine for routing. The view is kept until statistics arrive or the state changes, because
        making it takes time: it names every resident adapter.
        """
        stats = self.stats
        if self._view is None or self._viewed is not stats or self._view.state is not self.state:
            self._view = view_of(self.name, self._base, self.state, stats, self.client.stats_at)
            self._viewed = stats
        return self._view

    def status(self) -> EngineStatus:
        """Describe the engine for operators."""
        facts = self._facts
        return EngineStatus(
            engine=self.name,
            base_model=self._base,
            state=self.state,
            requests=len(self.requests),
            starts=self._num_starts,
            problem=self.problem,
            step_graphs_missing=self.stats.step_graphs_missing,
            linears=None if facts is None else facts.linears,
            limits=None if facts is None else facts.limits,
            weights_s=self.stats.routing.weights_s,
        )

    async def start(self, others: ModelFacts | None = None) -> ModelFacts:
        """Start the engine's current life, and wait until it serves.

        Raises EngineDied, also if the engine's facts conflict with the facts of `others` of its base.
        """
        self.state, self._num_starts = EngineState.STARTING, self._num_starts + 1
        try:
            facts = await self.client.start()
        except EngineDied as died:
            self._note_failed_start(str(died))
            raise
        if others is not None and (conflict := conflict_of(facts, others)) is not None:
            await self.refuse(conflict)
            raise EngineDied(conflict)
        self._num_failed_starts, self._facts = 0, facts
        # The engine may have been withdrawn during the start. Its end, which comes soon, is then no failure.
        self.state = EngineState.READY if self._is_wanted.is_set() else EngineState.DRAINING
        return facts

    async def refuse(self, conflict: str) -> None:
        """Stop an engine that cannot serve together with the others. Its start is repeated as after a failed start."""
        await self.client.stop()
        self._note_failed_start(conflict)

    async def supervise(
        self, others: ModelFacts, on_ready: Callable[[FleetEngine], Awaitable[None]], on_failing: Callable[[], None]
    ) -> None:
        """Watch the life that `start` began, and begin another life whenever it ends; run until cancelled.

        `others` are the facts with which each life must agree. `on_failing` is called before each start after too many
        failed starts.
        """
        while True:
            if self.state not in (EngineState.LOST, EngineState.RESTING):
                await self._watch()
            if self.is_failing:
                logger.error("the engine %s cannot be started: %s", self.name, self.problem)
                on_failing()
                if self._settings.engine.in_process:
                    self._is_wanted.clear()
            if self._is_wanted.is_set():
                await asyncio.sleep(_pause(self._num_failures))
            await self._is_wanted.wait()
            self._unclaimed += self.client.unclaimed_tokens
            self.client = self._launch(self.name, self._settings)
            with suppress(EngineDied):
                await self.start(others)
                await on_ready(self)
            self._started.set()

    def withdraw(self, *, rest: bool = False) -> None:
        """Take the engine out of service: it gets no more requests, and is not restarted until `revive`.

        With `rest`, the engine is not needed now, and may be restarted automatically.
        """
        self._is_wanted.clear()
        self.problem, self._withdrawn_to = (None, EngineState.RESTING) if rest else (DRAINED, EngineState.LOST)
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING

    async def stop(self) -> None:
        """Stop the engine, which has no requests."""
        await self.client.stop()
        self.state = self._withdrawn_to

    async def revive(self) -> None:
        """Restart an engine that was drained or has failed; return when it serves or has failed to start."""
        self._num_failures = self._num_failed_starts = 0
        self._started.clear()
        self._is_wanted.set()
        await self._started.wait()

    @property
    def is_failing(self) -> bool:
        """True if too many consecutive starts failed. A thread that ended may have harmed its process, so for a thread
        one end is enough.
        """
        most = 0 if self._settings.engine.in_process else MAX_FAILED_STARTS
        return self.state is EngineState.LOST and self.problem != DRAINED and self._num_failed_starts >= most

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        reason = await self.client.wait_end()
        if self.state is not EngineState.READY:
            self.state = self._withdrawn_to
            return
        self.state = EngineState.LOST
        self.served_until = -math.inf if self._settings.engine.in_process else loop.time()
        await self.client.stop()
        if loop.time() - began >= SOUND_SECONDS:
            self._num_failures = 0
        logger.error("the engine %s has ended: %s", self.name, reason)
        self._note_failure(reason)

    def _note_failed_start(self, reason: str) -> None:
        self._note_failure(reason)
        self._num_failed_starts += 1

    def _note_failure(self, reason: str) -> None:
        self.state, self.problem = EngineState.LOST, reason
        self._num_failures += 1


def conflict_of(facts: ModelFacts, others: ModelFacts) -> str | None:
    """Return the reason why an engine cannot continue answers of other engines of its base, as a sentence for an
    operator; otherwise None.

    The engine must compute the same tokens, and hold every request that the serving layer accepts.
    """
    alike = ("dtype", "weights", "vocab_size", "eos_token_ids", "sampling_defaults", "block_size", "kv_cache_dtype")
    for name in alike:
        mine, theirs = getattr(facts, name), getattr(others, name)
        if mine != theirs:
            return (
                f"it differs from the base's other engines in {name}: {mine} against {theirs}; give all of them the "
                "same checkpoint, [model] settings, block_size and kv_cache_dtype"
            )
    if facts.context < others.context:
        return (
            f"it takes {facts.context} tokens a request, and the base's other engines {others.context}; give it a "
            "larger engine.pool_bytes, or all of them the same engine.max_model_len"
        )
    return None


def common_facts(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Return the facts that requests are checked against: the first engine's, with the shortest context of all
    engines."""
    first = facts[0]
    alike = [one for one in facts if conflict_of(one, msgspec.structs.replace(first, max_model_len=0)) is None]
    shortest = min(alike, key=lambda one: one.context)
    return msgspec.structs.replace(first, max_model_len=shortest.max_model_len, pages_total=shortest.pages_total)


def _pause(num_failures: int) -> float:
    """Return the seconds to wait after `num_failures` failures in a row."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** max(0, num_failures - 1)) if num_failures else 0.0
