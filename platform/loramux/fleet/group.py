"""The engines of one base, used as one engine. Requests survive the death of an engine.

    EngineGroup.submit ──> an engine ──> Run.note ──> the request's own on_event
         the engine dies: the Run keeps the tokens sent so far ──> another engine continues after them

A `Run` is a submitted request of the group. Its engine may change, which its caller does not notice. The next engine
gets the tokens that were sent as the beginning of the answer, and computes their KV again without charge. The next
engine samples the same next token as the first engine, because a draw depends only on the seed and the token's number.
An engine that is drained gives its requests back: they are cancelled in this engine, and end with its count of tokens.
An engine on another machine does the same when it stops, or when this server reads too slowly. If an engine dies, its
count is computed from its events.

A request may cause the death of an engine. A request is a suspect if MAX_DEATHS consecutive engines died while they had
it and before they sent it a token. The first death always counts. A later death counts only if the engine was working
on the request, in a step or with the load of its adapter, because most requests of a busy engine only wait.
`Request.report_start` makes engines report this. Suspects are tried one at a time, so a suspect that gets a token is
cleared. If MAX_TRIALS more engines die during a suspect's trials, the suspect ends with an error. A request that
MAX_LOST consecutive engines lost without a token also ends with an error.

If no engine serves, a request waits at most `engines.max_wait_s`, and no longer than its deadline. A
suspect waits for its trial as long as engines serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import partial
from secrets import token_bytes
from typing import Any

import msgspec

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings
from loramux.common.units import TokenCounts
from loramux.engine.client import ENGINE_DIED, EngineClient, EngineDied, OnEvent
from loramux.engine.memory.prefix_digests import prefix_digests
from loramux.engine.messages import (
    AdapterRef,
    EngineCount,
    EngineFault,
    EngineStats,
    ModelFacts,
    Request,
    TenantService,
    TokenEvent,
)
from loramux.fleet.autoscaling import Autoscaler, ScalingPolicy
from loramux.fleet.launching import settings_of_engines
from loramux.fleet.member import (
    EngineBusy,
    EngineStatus,
    FleetEngine,
    LaunchEngine,
    UnknownEngine,
    common_facts,
    conflict_of,
)
from loramux.fleet.placement import place_pins
from loramux.fleet.router import Router
from loramux.fleet.shares import ShareExchange
from loramux.fleet.view import EngineState, EngineView, RoutingRequest

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Number of consecutive engines that die while they work on a request, before its first token from them, after which
the request is a suspect.
"""
MAX_TRIALS = 2
"""Number of engines that die during a suspect's trials, after which the suspect counts as the cause. One death is not
enough, because the engine may be killed for another reason, and while there are suspects one of them is always on
trial.
"""
MAX_LOST = 8
"""Maximum number of consecutive engines that may lose a request before they send it a token, even if they had not begun
with it.
"""
SCALE_SECONDS = 5.0
"""Seconds between two decisions on the number of engines."""
DRAIN_SECONDS = 60.0
"""Seconds for the requests of an engine that is no longer needed to end."""
EXCHANGE_SECONDS = 0.25
"""Seconds between two exchanges of service between the engines."""
VIEW_SECONDS = 0.02
"""Seconds for which the router uses the same views, because collecting them takes time: statistics come once a second.
"""


class Choices(dict[str, "Run"]):
    """The choices of one request that have not ended, by their ids."""

    has_started = False
    """True if any choice has a token, of those that have ended too: then no deadline remains."""


class Run:
    """One request, and the tokens that engines have sent for it."""

    __slots__ = (
        "_submitted_at",
        "cached_tokens",
        "choices",
        "count",
        "engine",
        "has_begun",
        "is_cancelled",
        "is_moving",
        "left",
        "num_before",
        "num_deaths",
        "num_lost",
        "on_event",
        "request",
        "routed",
        "timeout",
        "token_ids",
    )

    def __init__(
        self, request: Request, on_event: OnEvent, now: float, choices: Choices, routed: RoutingRequest | None = None
    ) -> None:
        self.request = request
        self.choices = choices
        """This request and the other choices of its group."""
        self.routed = routed
        """The request's properties for the router; None if the group has one engine."""
        self.on_event = on_event
        self.engine: FleetEngine | None = None
        """Engine that has the request; None while the request waits for an engine."""
        self.left: EngineClient | None = None
        """Life of an engine that had the request last, and gave it back. The request goes to another if it can."""
        self.token_ids: list[int] = []
        """Tokens of the answer so far."""
        self.num_deaths = 0
        """Number of consecutive engines that died while they worked on the request, before they sent it a token."""
        self.num_lost = 0
        """Engines in a row that died before they had sent it a token."""
        self.has_begun = False
        """True if the engine is known to work on the request now."""
        self.is_moving = False
        """True if the engine was told to give the request back."""
        self.is_cancelled = False
        """True if the caller has cancelled the request."""
        self.timeout: asyncio.TimerHandle | None = None
        """Timer that ends the request while it waits for an engine."""
        self._submitted_at = now
        self.num_before = 0
        """Tokens of the answer that earlier engines have sent."""
        self.cached_tokens = 0
        """Prompt tokens that the engine of the first token found in its cache."""
        self.count = EngineCount()
        """Usage on earlier engines."""

    def rest(self, now: float) -> Request:
        """Return the remaining part of the request."""
        has_started = self.choices.has_started
        if not (has_started or self.num_lost or round(1000 * (now - self._submitted_at))):
            return self.request
        return msgspec.structs.replace(
            self.request,
            output_token_ids=list(self.token_ids),
            deadline_ms=self.deadline_ms(now),
            group_started=has_started,
            report_start=self.num_lost > 0,
        )

    def deadline_ms(self, now: float) -> int | None:
        """Return the remaining milliseconds to the deadline of the first token; None without a deadline."""
        if self.request.deadline_ms is None:
            return None
        return max(1, self.request.deadline_ms - round(1000 * (now - self._submitted_at)))

    def counted(self, event: TokenEvent) -> TokenEvent:
        """Return the last event with the usage of all engines."""
        if event.count is None or self.count == EngineCount():
            return event
        return msgspec.structs.replace(event, count=self._with(event.count))

    def _with(self, count: EngineCount) -> EngineCount:
        """Return the usage on earlier engines together with an engine's `count`. As long as none of them had sent a
        token, each began the prompt anew, and the prompt counts once: as that of the engine that got furthest."""
        if self.num_before:
            return self.count + count
        return max(count, self.count, key=lambda one: (one.tokens.output, one.tokens.prompt))

    def leave_engine(self, count: EngineCount | None) -> None:
        """Note that the engine has sent the last event. Without a count the engine has died, and its events are counted
        instead.
        """
        num_sent = len(self.token_ids) - self.num_before
        if num_sent:
            self.num_deaths = self.num_lost = 0
        elif count is None:
            self.num_deaths += self.has_begun or not self.num_lost
            self.num_lost += 1
        if count is None and num_sent:
            is_first = self.num_before == 0
            prompt, cached = (len(self.request.prompt_token_ids), self.cached_tokens) if is_first else (0, 0)
            count = EngineCount(tokens=TokenCounts(prompt=prompt, cached=cached, output=num_sent))
        self.count = self._with(count or EngineCount())
        self.num_before = len(self.token_ids)
        self.left = self.engine.client if self.engine is not None else None
        self.engine, self.is_moving, self.has_begun = None, False, False

    @property
    def is_suspect(self) -> bool:
        """True if the request may be the cause of engines' deaths."""
        return self.num_deaths >= MAX_DEATHS

    @property
    def is_cause(self) -> bool:
        """True if too many engines have died under it."""
        return self.num_deaths >= MAX_DEATHS + MAX_TRIALS or self.num_lost >= MAX_LOST


class EngineGroup:
    """The engines of one base, with the methods of an `EngineClient`; `stats` returns the statistics of each engine."""

    def __init__(
        self,
        base: BaseSettings,
        settings: Settings,
        launch: LaunchEngine,
        prefix_key: bytes | None = None,
        bases: Iterable[BaseSettings] = (),
    ) -> None:
        """`settings` are those of an engine of `base`; `bases` are all bases of the server. Servers with the same
        `prefix_key` find the prompts' beginnings that engines have cached for each other; None: a random key.
        """
        num_at_start = max(1, base.engines.min)
        self._members = {
            name: FleetEngine(name, base.name, own, self._heard(launch), is_wanted=number < num_at_start)
            for number, (name, own) in enumerate(settings_of_engines(base, settings, bases).items())
        }
        self._base = base.name
        self._range = base.engines
        self._class_deadlines = settings.scheduler.deadlines_ms
        self._scaler: Autoscaler | None = None
        """Autoscaler; None before the start, and if the number of engines is fixed."""
        self._runs: dict[str, Run] = {}
        """Requests that have not ended, by id."""
        self._waiting: dict[str, Run] = {}
        """Requests that wait for an engine, by id."""
        self._trial: Run | None = None
        """The one suspect that an engine has, if any."""
        self._groups: dict[str, Choices] = {}
        """Requests by their group: the choices of one API request share a prompt and a deadline."""
        self._pins: dict[tuple[str, str], tuple[AdapterRef, FleetEngine]] = {}
        self._router = Router()
        self._views: tuple[EngineView, ...] = ()
        self._viewed_at = -math.inf
        self._prefix_key = prefix_key or token_bytes(32)
        self._block_size = 1
        """Tokens of a page; known after the start."""
        self._exchange = ShareExchange()
        self._next_exchange: asyncio.TimerHandle | None = None
        self._orders: dict[str, asyncio.Task[EngineStatus]] = {}
        """Engines that are being drained or restarted for an operator."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._is_stopping = False

    def _heard(self, launch: LaunchEngine) -> LaunchEngine:
        """Return `launch` for engines whose reports of service the group receives."""

        def launch_heard(name: str, settings: Settings) -> EngineClient:
            client = launch(name, settings)
            client.on_service = partial(self._note_service, name)
            return client

        return launch_heard

    # the life of the group

    async def start(self) -> ModelFacts:
        """Start `min` engines. Return when each engine serves or has failed to start, and at least one serves. Raises
        EngineDied.

        With `min` = 0 one engine is started too, because only an engine knows the model's facts.
        """
        wanted = [member for member in self._members.values() if member.state is not EngineState.RESTING]
        outcomes = await asyncio.gather(*(member.start() for member in wanted), return_exceptions=True)
        facts = [outcome for outcome in outcomes if isinstance(outcome, ModelFacts)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and (not facts or not isinstance(outcome, EngineDied)):
                self._ended.set()
                raise outcome
        common = common_facts(facts)
        self._block_size = common.block_size
        for member, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, ModelFacts) and (conflict := conflict_of(outcome, common)) is not None:
                logger.error("the engine %s is not used: %s", member.name, conflict)
                await member.refuse(conflict)
        for member in self._members.values():
            supervised = member.supervise(common, self._serve_with, self._note_failing)
            self._tasks.append(asyncio.create_task(supervised, name=f"engine {member.name}"))
        if self._range.most > self._range.min:
            policy = ScalingPolicy(
                min_engines=self._range.min, max_engines=self._range.most, target_wait_s=self._range.target_wait_s
            )
            self._scaler = Autoscaler(policy, self._now())
            self._tasks.append(asyncio.create_task(self._scale_periodically(), name="scaling"))
        return common

    async def stop(self) -> None:
        """Let running requests end, then stop every engine."""
        self._is_stopping = True
        if self._next_exchange is not None:
            self._next_exchange.cancel()
        tasks = [*self._tasks, *self._orders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in list(self._waiting.values()):
            self._end(run, EngineFault(ENGINE_DIED, "the engines are stopped"))
        await asyncio.gather(*(member.client.stop() for member in self._members.values()))
        self._ended.set()

    async def wait_end(self) -> str:
        """Wait until no engine serves and no engine will be restarted automatically; return the reason."""
        await self._ended.wait()
        return next((member.problem for member in self._members.values() if member.problem), "the engines were stopped")

    @property
    def alive(self) -> bool:
        """True if an engine serves, or will serve when a request comes."""
        return bool(self._ready) or all(m.state is EngineState.RESTING for m in self._members.values())

    @property
    def _ready(self) -> list[FleetEngine]:
        """Engines that may be given requests."""
        return [member for member in self._members.values() if member.is_ready]

    @property
    def _silence(self) -> float:
        """Seconds since an engine last served, if none serves."""
        return self._now() - max(member.served_until for member in self._members.values())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def has_ended(self) -> bool:
        """True if no engine serves and none will be started again automatically."""
        return self._ended.is_set()

    @property
    def unclaimed_tokens(self) -> int:
        """Tokens of requests that ended without a listener; no bill can contain them."""
        return sum(member.unclaimed_tokens for member in self._members.values())

    async def _serve_with(self, member: FleetEngine) -> None:
        """Give an engine that serves again the waiting requests, and the pins that it should hold."""
        self._router.forget(member.name)
        self._collect_views(self._now())
        if self._scaler is not None:
            self._scaler.changed(self._now())
        for run in sorted(self._waiting.values(), key=lambda run: not run.token_ids):
            self._place(run)
        for (_, owner), (ref, holder) in list(self._pins.items()):
            if holder is member or not holder.is_ready:
                with suppress(EngineDied):
                    await self._pin_on(member, ref, owner)

    @property
    def _is_lost(self) -> bool:
        """True if no engine has served for `engines.max_wait_s`, and each has failed to start too often in a row."""
        members = [member for member in self._members.values() if member.state is not EngineState.RESTING]
        is_failing = bool(members) and all(member.is_failing for member in members)
        return is_failing and self._silence >= self._range.max_wait_s

    def _note_failing(self) -> None:
        if self._range.addresses:
            return  # these engines are started by other machines, so a new server would find the same engines
        if self._is_lost:
            self._ended.set()
            for run in list(self._waiting.values()):
                self._end(run, EngineFault(ENGINE_DIED, "no engine serves, and none is started again"))

    # requests

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Give the request to an engine, or let it wait for an engine. Raises EngineDied if none will be started."""
        assert request.id not in self._runs, f"request {request.id} was submitted before"
        if self.has_ended or self._is_lost:
            raise EngineDied("no engine serves, and none could be started for longer than a request waits")
        if self._scaler is not None:
            self._scaler.requested(self._now())
        deadline_ms = getattr(self._class_deadlines, request.service_class)
        if request.deadline_ms is None and deadline_ms is not None:  # it counts the wait for an engine, too
            request = msgspec.structs.replace(request, deadline_ms=deadline_ms)
        routed = None
        if len(self._members) > 1:
            tokens, images = request.prompt_token_ids, request.images
            digests = prefix_digests(self._prefix_key, request.tenant, tokens, self._block_size, images)
            request = msgspec.structs.replace(request, prefix_digests=digests)
            routed = RoutingRequest.of(request, self._block_size)
        choices = self._groups.get(request.group_id) or Choices()
        run = Run(request, on_event, self._now(), choices, routed)
        self._place(run)
        self._runs[request.id] = choices[request.id] = run
        if request.group_id:
            self._groups[request.group_id] = choices
        if run.engine is None:
            self._scale()

    def cancel(self, request_id: str) -> None:
        """End a request, on an engine or waiting."""
        run = self._runs.get(request_id)
        if run is None:
            return
        if run.engine is None:
            self._end(run, None)
        else:
            run.is_cancelled = True
            run.engine.client.cancel(request_id)

    def forget(self, request_id: str) -> None:
        """End a request and stop calling its `on_event`."""
        run = self._runs.get(request_id)
        if run is not None:
            engine = run.engine
            self._drop(run)
            if engine is not None:
                engine.client.forget(request_id)

    def _place(self, run: Run) -> None:
        """Give the request to an engine, or let it wait for an engine."""
        if self._send(run):
            if run.timeout is not None:
                run.timeout.cancel()
                run.timeout = None
            self._waiting.pop(run.request.id, None)
        elif run.timeout is None:
            self._waiting[run.request.id] = run
            self._limit_wait(run)

    def _limit_wait(self, run: Run) -> None:
        """Limit the time for which the request waits for an engine."""
        seconds = self._range.max_wait_s
        deadline_ms = None if run.choices.has_started else run.deadline_ms(self._now())
        if deadline_ms is not None and deadline_ms / 1000 < seconds:
            run.timeout = asyncio.get_running_loop().call_later(deadline_ms / 1000, self._end_deadline, run)
        else:
            run.timeout = asyncio.get_running_loop().call_later(seconds, self._end_wait, run)

    def _end_deadline(self, run: Run) -> None:
        if run.choices.has_started:  # another choice has got a token since
            self._limit_wait(run)
        else:
            message = (
                "The request's deadline passed while it waited for an engine, and nothing of it was delivered. Retry "
                "later, or allow more time."
            )
            self._end(run, EngineFault("deadline_exceeded", message, retry_after=1))

    def _end_wait(self, run: Run) -> None:
        if run.is_suspect and (self._ready or self._silence < self._range.max_wait_s):
            self._limit_wait(run)  # the request waits for its trial
        else:
            message = f"no engine has served for {self._range.max_wait_s:g} seconds"
            self._end(run, EngineFault(ENGINE_DIED, message))

    def _send(self, run: Run) -> bool:
        """Give the remaining part of the request to an engine; return False if no engine serves."""
        if run.is_suspect and self._trial not in (None, run):
            return False
        engine = self._choose(run)
        if engine is None:
            return False
        if run.is_suspect:
            self._trial = run
        rest = run.rest(self._now())
        engine.client.submit(rest, partial(self._on_event, run, engine))
        run.engine = engine
        engine.requests.add(run.request.id)
        if run.routed is not None:
            self._router.sent(run.routed, engine.name, self._now())
        return True

    def _choose(self, run: Run) -> FleetEngine | None:
        """Return the engine for a request: the engine of its group's other choices, or the router's choice."""
        for choice in run.choices.values():
            if choice.engine is not None and choice.engine.is_ready:
                return choice.engine
        if run.routed is None:
            return next(iter(self._ready), None)
        now = self._now()
        if now - self._viewed_at >= VIEW_SECONDS:
            self._collect_views(now)
        chosen = self._router.choose(run.routed, self._views_for(run), now)
        if chosen is None or not self._members[chosen].is_ready:  # an engine has come or gone since
            self._collect_views(now)
            chosen = self._router.choose(run.routed, self._views_for(run), now)
        assert chosen is None or self._members[chosen].is_ready, f"the router has chosen {chosen}, which does not serve"
        return None if chosen is None else self._members[chosen]

    def _views_for(self, run: Run) -> tuple[EngineView, ...]:
        """Return the views of the engines that the request may go to. An engine that died and came back is another."""
        if run.left is None:
            return self._views
        others = tuple([view for view in self._views if self._members[view.engine].client is not run.left])
        return others if 0 < len(others) < len(self._views) else self._views

    def _collect_views(self, now: float) -> None:
        self._views, self._viewed_at = tuple(member.view for member in self._ready), now

    def _on_event(self, run: Run, engine: FleetEngine, event: TokenEvent) -> None:
        if event.token_id is not None:
            run.token_ids.append(event.token_id)
        elif event.is_worked_on is not None:
            run.has_begun = event.is_worked_on
            return
        # Every token of every request comes through here. The rest is needed only for an engine's first token and last
        # event.
        if len(run.token_ids) == run.num_before + 1:
            run.choices.has_started = True
            if run.routed is not None:
                self._router.started(run.request.id, self._now())
            run.cached_tokens = max(run.cached_tokens, event.cached_tokens)
            self._end_trial(run)
        if event.finish_reason is not None:
            self._leave(run, engine)
            died = event.fault is not None and event.fault.code == ENGINE_DIED
            given_back = event.finish_reason == "cancelled" and (run.is_moving or not run.is_cancelled)
            if died or given_back:
                run.leave_engine(None if died else event.count)
                self._continue(run, event.fault)
                return
            event = run.counted(event)
            self._drop(run)
        try:
            run.on_event(event)
        except BaseException:
            self._drop(run)
            raise

    def _continue(self, run: Run, fault: EngineFault | None) -> None:
        """Continue a request on another engine after its engine gave it back or died."""
        if run.is_cancelled:
            self._end(run, None)
        elif run.is_cause:
            logger.error(
                "request %s ends: %d engines died under it before they had sent it a token",
                run.request.id,
                run.num_lost,
            )
            self._end(run, fault)
        elif self.has_ended or self._is_stopping:
            self._end(run, fault or EngineFault(ENGINE_DIED, "the engines are stopped"))
        else:
            if self._trial is run:
                self._try_next()  # the other suspects first, because this suspect may not have caused the death
            self._place(run)

    def _end_trial(self, run: Run) -> None:
        """Note that a request has got a token, or has ended: it is no longer a suspect. The next suspect is tried."""
        run.num_deaths = run.num_lost = 0
        if self._trial is run:
            self._try_next()

    def _try_next(self) -> None:
        self._trial = None
        for other in [waiting for waiting in self._waiting.values() if waiting.is_suspect]:
            self._place(other)

    def _leave(self, run: Run, engine: FleetEngine) -> None:
        engine.requests.discard(run.request.id)
        if run.routed is not None:
            self._router.ended(run.request.id, self._now())
        if not engine.requests:
            engine.idle.set()

    def _end(self, run: Run, fault: EngineFault | None) -> None:
        """End a request that is on no engine: with a fault, or cancelled."""
        self._drop(run)
        reason = "cancelled" if fault is None else "error"
        event = TokenEvent(request_id=run.request.id, finish_reason=reason, fault=fault, count=run.count)
        run.on_event(event)

    def _drop(self, run: Run) -> None:
        """Forget the request."""
        if run.timeout is not None:
            run.timeout.cancel()
        if run.engine is not None:
            self._leave(run, run.engine)
        self._runs.pop(run.request.id, None)
        self._waiting.pop(run.request.id, None)
        self._end_trial(run)
        run.choices.pop(run.request.id, None)
        if not run.choices:
            self._groups.pop(run.request.group_id, None)

    # revisions

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages in every engine."""
        for member in self._members.values():
            member.client.retire(digest)

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        """Keep a revision in the pool of one engine; wait until it is in the pool."""
        if (known := self._pins.get((ref.digest, owner))) and known[1].is_ready:
            return await self._pin_on(known[1], ref, owner)
        if not self._ready:
            raise EngineDied("no engine serves")
        digests = {ref.digest, *(digest for digest, _ in self._pins)}
        pages = {digest: pages for member in self._ready for digest, pages in member.view.resident.items()}
        placed = place_pins(digests, [member.name for member in self._ready], pages)
        engine = next(engine for engine, held in placed.items() if ref.digest in held)
        return await self._pin_on(self._members[engine], ref, owner)

    def unpin(self, digest: str, owner: str = "") -> None:
        """Release `owner`'s pin."""
        if (pinned := self._pins.pop((digest, owner), None)) is not None:
            pinned[1].client.unpin(digest, owner)

    async def _pin_on(self, member: FleetEngine, ref: AdapterRef, owner: str) -> EngineFault | None:
        self._pins[ref.digest, owner] = ref, member
        return await member.client.pin(ref, owner)

    # shares

    def _note_service(self, engine: str, services: list[TenantService]) -> None:
        """Count an engine's service, and send it to the other engines within EXCHANGE_SECONDS."""
        if len(self._members) == 1:
            return
        self._exchange.report(engine, services)
        if self._next_exchange is None:
            loop = asyncio.get_running_loop()
            self._next_exchange = loop.call_later(EXCHANGE_SECONDS, self._exchange_service)

    def _exchange_service(self) -> None:
        self._next_exchange = None
        for engine, services in self._exchange.collect([member.name for member in self._ready]).items():
            self._members[engine].client.lift(services)

    # engines

    @property
    def names(self) -> tuple[str, ...]:
        """The engines' names."""
        return tuple(self._members)

    def stats(self) -> dict[str, EngineStats]:
        """Return the latest statistics of each engine, by its name."""
        return {name: member.stats for name, member in self._members.items()}

    def statuses(self) -> list[EngineStatus]:
        """Describe the engines for operators."""
        return [member.status() for member in self._members.values()]

    def order(self, name: str, *, restart: bool, seconds: float) -> EngineStatus:
        """Begin to drain or restart an engine. Raises UnknownEngine or EngineBusy."""
        member = self._member(name)
        if name in self._orders:
            raise EngineBusy(f"the engine {name} is being drained already; wait until that has ended", "engine")
        work = self.restart(name, seconds) if restart else self.drain(name, seconds)
        self._begin(name, work)
        member.withdraw()
        return member.status()

    def _begin(self, name: str, work: Coroutine[Any, Any, EngineStatus]) -> None:
        self._orders[name] = order = asyncio.create_task(work, name=f"order to {name}")
        order.add_done_callback(lambda _: self._orders.pop(name))

    # scaling

    async def _scale_periodically(self) -> None:
        while True:
            await asyncio.sleep(SCALE_SECONDS)
            self._scale()

    def _scale(self) -> None:
        """Start resting engines, or drain engines, as the autoscaler decides."""
        if self._scaler is None:
            return
        now = self._now()
        decision = self._scaler.decide(self._base, [member.view for member in self._members.values()], now)
        resting = [m for m in self._members.values() if m.state is EngineState.RESTING and m.name not in self._orders]
        changed = resting[: decision.start]
        for member in changed:
            self._begin(member.name, self._revive(member))
        for name in decision.drain:
            if name not in self._orders:
                self._members[name].withdraw(rest=True)
                self._begin(name, self.drain(name, DRAIN_SECONDS, rest=True))
                changed.append(self._members[name])
        if changed:
            logger.info("%s; engines that change: %s", decision.reason, ", ".join(member.name for member in changed))
            self._scaler.changed(now)

    async def _revive(self, member: FleetEngine) -> EngineStatus:
        await member.revive()
        return member.status()

    async def drain(self, name: str, seconds: float, *, rest: bool = False) -> EngineStatus:
        """Take an engine out of service: it gets no more requests, and is stopped once it has none.

        Requests that still run after `seconds` continue on other engines. With `rest`, the engine may be restarted
        automatically. Raises UnknownEngine.
        """
        member = self._member(name)
        member.withdraw(rest=rest)
        if member.requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(_until_idle(member), seconds)
            for request_id in list(member.requests):
                self._runs[request_id].is_moving = True
                member.client.cancel(request_id)
            await _until_idle(member)
        await member.stop()
        return member.status()

    async def restart(self, name: str, seconds: float) -> EngineStatus:
        """Drain an engine and start it again; return when it serves or has failed to start. Raises UnknownEngine."""
        member = self._member(name)
        await self.drain(name, seconds)
        await member.revive()
        return member.status()

    def _member(self, name: str) -> FleetEngine:
        if (member := self._members.get(name)) is None:
            raise UnknownEngine(f"there is no engine {name[:80]!r}; there are {', '.join(self._members)}", "engine")
        return member


async def _until_idle(member: FleetEngine) -> None:
    while member.requests:
        member.idle.clear()
        await member.idle.wait()
