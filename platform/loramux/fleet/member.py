"""One engine of a group over its lives: started, watched, started again after a pause, drained.

    STARTING ──> READY ──> LOST ──pause──> STARTING          the engine died, or did not load its model
                   ├─> DRAINING ──> LOST ──restart──> ...    an operator took it out of service
                   └─> DRAINING ──> RESTING ──> STARTING     it was not needed, and is again

A pause grows with each failure in a row. An engine that fails to start MAX_FAILED_STARTS times in a row is still tried
while others serve. The group has ended if all engines of a base fail in this way and none has served for
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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.settings.file import Settings
from loramux.engine.client import EngineClient, EngineDied
from loramux.engine.messages import EngineStats, ModelFacts
from loramux.fleet.view import EngineState, EngineView, view_of

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds between an engine's end and its next start."""
MAX_FAILED_STARTS = 3
SOUND_SECONDS = 60.0
"""Seconds of service after which an engine has recovered: its next pause is the first one again."""
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
    """The engine is being drained or restarted already; the message says which."""

    code = "engine_busy"
    status = HTTPStatus.CONFLICT


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine as operators see it."""

    engine: str
    base_model: str
    state: EngineState
    requests: int
    """Requests that wait or run in it."""
    starts: int
    """Number of times that it was started."""
    problem: str | None
    """Reason why it does not serve, or did not before its last start."""
    step_graphs_missing: int = 0
    """Recordings of steps that run without a CUDA graph; 0 on a CPU."""


class FleetEngine:
    """One engine of a group; each of its lives has a new client."""

    def __init__(
        self, name: str, base: str, settings: Settings, launch: LaunchEngine, *, is_wanted: bool = True
    ) -> None:
        """`is_wanted`: it should serve from the group's start on; else it rests until `revive`."""
        self.name = name
        self.state = EngineState.LOST if is_wanted else EngineState.RESTING
        self.served_until = -math.inf
        """Event loop's time at which its last life that served ended."""
        self.requests: set[str] = set()
        """Ids of the requests that it was given and has not ended."""
        self.idle = asyncio.Event()
        """Set whenever it has no request left."""
        self.problem: str | None = None
        """Reason of its last end."""
        self.client = launch(name, settings)
        self._view: EngineView | None = None
        self._viewed: EngineStats | None = None
        """Statistics from which the view was made."""
        self._base = base
        self._settings = settings
        self._launch = launch
        self._num_starts = 0
        self._num_failures = 0
        """Number of its ends since it last served for SOUND_SECONDS."""
        self._num_failed_starts = 0
        """Number of failed starts in a row."""
        self._unclaimed = 0
        self._is_wanted = asyncio.Event()
        """Set while it should serve."""
        if is_wanted:
            self._is_wanted.set()
        self._withdrawn_to = EngineState.LOST
        """Its state once it is stopped."""
        self._started = asyncio.Event()
        """Set after each start, whether it succeeded or not."""

    @property
    def is_ready(self) -> bool:
        """True if it may be given requests."""
        return self.state is EngineState.READY and self.client.alive

    @property
    def stats(self) -> EngineStats:
        """The latest statistics of its present life."""
        return self.client.stats()

    @property
    def unclaimed_tokens(self) -> int:
        """Tokens of requests that ended without a listener, over all lives."""
        return self._unclaimed + self.client.unclaimed_tokens

    @property
    def view(self) -> EngineView:
        """Facts that routing knows of it. Kept until statistics arrive or its state changes, because making it takes
        time: it names every resident adapter."""
        stats = self.stats
        if self._view is None or self._viewed is not stats or self._view.state is not self.state:
            self._view = view_of(self.name, self._base, self.state, stats, self.client.stats_at)
            self._viewed = stats
        return self._view

    def status(self) -> EngineStatus:
        """Describe it for operators."""
        return EngineStatus(
            engine=self.name,
            base_model=self._base,
            state=self.state,
            requests=len(self.requests),
            starts=self._num_starts,
            problem=self.problem,
            step_graphs_missing=self.stats.step_graphs_missing,
        )

    async def start(self, others: ModelFacts | None = None) -> ModelFacts:
        """Start its present life, and wait until it serves.

        Raises EngineDied, also if its facts are in conflict with those of the `others` of its base.
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
        self._num_failed_starts = 0
        # It may have been withdrawn during the start. Its end, which comes soon, is then no failure.
        self.state = EngineState.READY if self._is_wanted.is_set() else EngineState.DRAINING
        return facts

    async def refuse(self, conflict: str) -> None:
        """Stop an engine that cannot serve together with the others; it is retried like one that failed to start."""
        await self.client.stop()
        self._note_failed_start(conflict)

    async def supervise(
        self, others: ModelFacts, on_ready: Callable[[FleetEngine], Awaitable[None]], on_failing: Callable[[], None]
    ) -> None:
        """Watch the life that `start` began, and begin another one whenever it ends; run until cancelled.

        `others`: the facts that each life must agree with. `on_failing` is called before each start that follows too
        many failed ones.
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
        """Take it out of service: it is given no more requests, and is not started again until `revive`.

        `rest`: it is not needed now, and may be started again automatically.
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
        """Start again an engine that was drained or has given up; return once it serves or has failed to."""
        self._num_failures = self._num_failed_starts = 0
        self._started.clear()
        self._is_wanted.set()
        await self._started.wait()

    @property
    def is_failing(self) -> bool:
        """True if it failed to start too often in a row. A thread that ended may have harmed its process, so one end
        counts."""
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
    """Return why an engine cannot continue answers that others of its base began, as a sentence for an operator; else
    None.

    It has to compute the same tokens, and to hold every request that the serving layer accepts.
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


def _pause(num_failures: int) -> float:
    """Return the seconds to wait after `num_failures` failures in a row."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** max(0, num_failures - 1)) if num_failures else 0.0
