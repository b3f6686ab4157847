"""One seed, from an empty server to quiescence, and the invariants that must hold on the way.

The serving layer, the mailbox, the worker's loop, the engine, its scheduler and residency, usage, limits and the ledger
are the product's own. Simulated are the clock, the threads, the model's arithmetic, the adapters' files and the time
and the faults of the database.

Invariants
    after every event   a row reads only KV and weights that were written for it; time passes (nothing spins)
    for every request   it ends within END_SECONDS with an answer or an error; its tokens are its adapter's
    at quiescence       no row, hold, page, slot or place is left; the ledger equals what was delivered
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from tiny_base import byte_tokenizer

from loramux.catalog.registry.resolver import ResolvedModel
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineRange
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.database import Database
from loramux.engine import worker as worker_module
from loramux.engine.client import EngineClient
from loramux.engine.engine import Engine, EngineParts
from loramux.engine.messages import Command, Report, SamplingParams, Stopped
from loramux.engine.scheduling.policy import step_limits
from loramux.fleet.group import EngineGroup
from loramux.money.limits.errors import LimitsError
from loramux.money.usage.errors import IdempotencyMismatch, StillRunning
from loramux.money.usage.idempotency import AnswerStorage
from loramux.money.usage.service import UsageService
from loramux.serving.bases import ServedBase, ServedBases
from loramux.serving.errors import ServingError
from loramux.serving.formats import GrammarTrials
from loramux.serving.generation import Generation
from loramux.serving.messages import GenerationRequest
from loramux.serving.service import CompletionService
from loramux.serving.tokenizer import Tokenizer
from simulation.database import PEPPER, Faults, Template, seeded_names, simulated_database
from simulation.loop import Queue, SimulationLoop, Thread, current_loop, sleep
from simulation.model import SimulatedHost, SimulatedRunner, SimulatedStore, facts, next_token, vector_of
from simulation.plan import Call, Plan, make_plan

END_SECONDS = 300.0
"""Every accepted request ends within so much virtual time: ten times what the heaviest plan needs."""
QUIET_SECONDS = 60.0
LOAD_TIMEOUT = 20.0
SLOW_READS = 40
"""A slow client reads so many deltas slowly, and then the rest, so that its own pauses do not take END_SECONDS."""
PLAN_SECONDS = 50e-6
"""Simulated seconds of one look into the worker's inbox, so that planning without waiting takes time."""
MAX_EMPTY_STEPS = 400
"""In a row while nothing runs: more is a worker that polls."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Outcome:
    """Events that one client saw."""

    call: Call
    request_id: str | None = None
    error: str | None = None
    left: bool = False
    left_unanswered: bool = False
    """The client left before the end of an answer that is sent whole was recorded."""
    replayed: bool = False
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors by the prompt's number."""
    finish: dict[int, str] = field(default_factory=dict)
    generation: Any = None

    @property
    def received(self) -> int:
        return sum(map(len, self.token_ids.values()))

    @property
    def answered_prompts(self) -> int:
        """Prompts of which a choice was answered: a choice whose adapter does not load a second time ends alone."""
        choices = range(self.call.prompts * self.call.n)
        answered = (index for index in choices if self.token_ids.get(index) or self.finish.get(index) != "abort")
        return len({index // self.call.n for index in answered})


class SimulatedChannel:
    """A pipe to a worker on a simulated thread; messages are encoded as for a process and take a while."""

    def __init__(
        self,
        make_engine: Callable[[Callable[[], None]], Any],
        delay: Callable[[], float],
        load: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`load` runs on the worker's thread before it serves, and says why it cannot."""
        self._make_engine = make_engine
        self._load = load
        self._delay = delay
        self._inbox: Queue[Command | None] = Queue(look_seconds=PLAN_SECONDS)
        self._arrives_at = 0.0
        self._reported_at = 0.0
        self._on_report: Callable[[Report], None] = lambda report: None
        self._encoder = msgspec.msgpack.Encoder()
        self._commands = msgspec.msgpack.Decoder(Command)
        self._reports = msgspec.msgpack.Decoder(Report)
        self.thread: Thread | None = None
        self.engine: Any = None

    def open(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self.engine = self._make_engine(lambda: self._inbox.put(None))
        self.thread = Thread(self._serve)
        self.thread.start()

    def send(self, command: Command) -> None:
        """In order, after the pipe's delay."""
        data = self._encoder.encode(command)
        loop = current_loop()
        self._arrives_at = max(self._arrives_at + 1e-6, loop.time() + self._delay())
        loop.call_at(self._arrives_at, lambda: self._inbox.put(self._commands.decode(data)))

    def join(self, timeout: float) -> None:
        """The thread ends with its loop."""

    def kill(self) -> None:
        """Kill the process at its present point; its listener reports it."""
        if self.thread is not None and self.thread.is_alive():
            self.thread.kill()
            self._report(Stopped("the engine's process ended with exit code -9"))

    def _serve(self) -> None:
        from loramux.engine.messages import Ready

        try:
            if problem := self._load():
                self._report(Stopped(problem))
                return
            self._report(Ready(self.engine.facts))
            worker_module._loop(self.engine, cast(Any, self._inbox), self._report)
        except Exception as error:
            self._report(Stopped(f"{type(error).__name__}: {error}"))
            raise
        self._report(Stopped())

    def _report(self, report: Report) -> None:
        data = self._encoder.encode(report)
        loop = current_loop()
        self._reported_at = max(self._reported_at + 1e-6, loop.time() + self._delay())
        loop.call_at(self._reported_at, lambda: self._on_report(self._reports.decode(data)))


class AnyModel:
    """Every name `tenantX/aN` is a revision of that tenant; every other the base."""

    async def resolve(self, principal: Any, model: str, caller: str) -> ResolvedModel:
        digest = model.partition("/")[2]
        revision: Any = SimpleNamespace(digest=digest, engine_key=digest, directory=f"/{digest}") if digest else None
        return ResolvedModel(name=model, base_model="tiny", revision=revision)


class Life:
    """One life of one engine: a process from its start to its death."""

    def __init__(self, world: World, number: int, *, is_first: bool) -> None:
        rng, plan = world.rng, world.plan
        self.number = number
        self.store = SimulatedStore(plan, rng.uniform, rng.random)
        self.runner = SimulatedRunner(plan, self.store)
        self.channel: SimulatedChannel
        self._world = world
        self._is_first = is_first
        self._empty_steps = 0

    @property
    def is_alive(self) -> bool:
        return self.channel.thread is not None and self.channel.thread.is_alive()

    @property
    def state(self) -> str:
        scheduler = self.channel.engine.scheduler
        return (
            f"engine {self.number}: waiting {len(scheduler.queue)}, running {len(scheduler.running)}, "
            f"steps {self.runner.steps}, loads {self.store.loads}"
        )

    def start(self) -> str | None:
        """Load the model; return why it cannot be loaded."""
        plan = self._world.plan
        if self._is_first:
            return None
        sleep(plan.start_seconds)
        return "there is no memory" if self._world.rng.random() < plan.start_failures else None

    def make_engine(self, wake: Callable[[], None]) -> Engine:
        plan = self._world.plan
        settings = msgspec.convert(
            {
                "model": {"path": "/model", "served_model_name": "tiny"},
                "engine": {
                    "max_num_seqs": plan.max_num_seqs,
                    "max_num_batched_tokens": plan.max_num_batched_tokens,
                    "block_size": plan.block_size,
                    "prefix_cache": plan.prefix_cache,
                    "swap_bytes": plan.swap_pages,
                    "speculation": "ngram" if plan.max_draft_tokens else "off",
                    "max_draft_tokens": plan.max_draft_tokens or 1,
                },
                "scheduler": {"max_service_lead": plan.max_service_lead},
                "adapters": {"max_loading": plan.max_loading, "load_timeout_s": LOAD_TIMEOUT},
            },
            Settings,
        )
        parts = EngineParts(
            facts=facts(plan, step_limits(settings.engine, None)),
            runner=cast(Any, self.runner),
            store=self.store,
            host_kv=SimulatedHost(plan.swap_pages, plan.block_size, self.runner.places),
            weight_bytes=1 << 20,
            clock=current_loop().time,
        )
        return self._watch(Engine(parts, settings, wake))

    def _watch(self, engine: Engine) -> Engine:
        step = engine.step

        def counted() -> Any:
            before = self.runner.steps
            report = step()
            idle = self.runner.steps == before and report is None
            self._empty_steps = self._empty_steps + 1 if idle else 0
            if self._empty_steps > MAX_EMPTY_STEPS:
                raise Violation(f"{self._empty_steps} empty steps in a row: the worker spins; {self.state}")
            return report

        engine.step = counted
        return engine


class World:
    """A server, its clients and what they saw."""

    def __init__(self, plan: Plan, template: Template, folder: Path) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed + 1)
        self.template = template
        self.folder = folder
        self.outcomes: list[Outcome] = []
        self.errors: list[str] = []
        self.trace: list[str] = []
        self.lives: list[Life] = []
        self.loop_seconds = 0.0

    async def run(self) -> None:
        """Serve the plan's clients, wait until the server is at rest, and check what is left."""
        plan, rng = self.plan, self.rng
        with simulated_database(self.template, self.folder, Faults(plan, rng)) as database:
            async with self._server(database):
                for at, number in plan.engine_deaths:
                    current_loop().call_later(at, self._kill, number)
                self.outcomes = [Outcome(call) for call in plan.calls]
                async with asyncio.TaskGroup() as actors:
                    for act in self._actors():
                        actors.create_task(act)
                await self._settle_down()
                self._check_engines()
                await self._check_records(database)
            await database.close()

    @property
    def may_log_errors(self) -> bool:
        """True if a fault happened that an operator must learn of."""
        plan = self.plan
        return bool(plan.faults or plan.engine_deaths or (plan.engine_restarts and plan.start_failures))

    @asynccontextmanager
    async def _server(self, database: Database) -> AsyncIterator[None]:
        """Run the part of the server that answers requests; every adapter is there."""
        self.usage = UsageService(database, answers=AnswerStorage(PEPPER))
        await self.usage.start()
        base = BaseSettings(name="tiny", path="/model", engines=EngineRange(min=self.plan.num_engines))
        self.engines = EngineGroup(base, Settings(model=base.model), self._launch, prefix_key=b"simulation")
        facts = await self.engines.start()
        trials = GrammarTrials(TOKENIZER, facts)
        self.service = CompletionService(
            bases=ServedBases({"tiny": ServedBase("tiny", self.engines, facts, TOKENIZER, trials)}),
            resolver=cast(Any, AnyModel()),
            usage=self.usage,
        )
        yield
        await self.service.drain(1)
        trials.close()
        await self.engines.stop()
        await self.usage.stop()

    def _actors(self) -> list[Coroutine[Any, Any, None]]:
        """Everything that acts on the server from outside."""
        actors = [self._client(outcome) for outcome in self.outcomes]
        if self.plan.drains_at is None:  # afterwards the server has no use for an engine
            actors += [self._restart(*restart) for restart in self.plan.engine_restarts]
            return actors
        return [*actors, self._drain(self.plan.drains_at)]

    async def _restart(self, at: float, number: int, seconds: float) -> None:
        await asyncio.sleep(at)
        await self.engines.restart(self.engines.names[number], seconds)

    def _kill(self, number: int) -> None:
        """Kill the present process of an engine; one that is dead already is left alone."""
        lives = [life for life in self.lives if life.number == number]
        if lives:
            lives[-1].channel.kill()

    async def _drain(self, at: float) -> None:
        await asyncio.sleep(at)
        await self.service.drain(2.0)

    async def _client(self, outcome: Outcome) -> None:
        call = outcome.call
        await asyncio.sleep(call.at)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._ask(outcome)
        except TimeoutError:
            raise Violation(f"not ended after {END_SECONDS} s: {self._state()}; {call}") from None
        except (ServingError, LimitsError, IdempotencyMismatch, StillRunning) as error:
            outcome.error = getattr(error, "code", None) or type(error).__name__
        except (Violation, AssertionError):
            raise
        except Exception as error:
            if not self.plan.database_outages:
                raise Violation(f"ended with {type(error).__name__}: {error}; {call}") from error
            outcome.error = type(error).__name__
        self.trace.append(f"{current_loop().time():.6f} {outcome.request_id} {outcome.error} {outcome.token_ids}")

    async def _ask(self, outcome: Outcome) -> None:
        call = outcome.call
        principal = self.template.principals[call.tenant]
        generation = await self.service.begin(principal, self._request(call, self._model_of(call)))
        outcome.generation, outcome.request_id = generation, generation.id
        outcome.replayed = generation.replayed
        count = 0
        async for delta in generation:
            if delta.pooled:
                outcome.vectors[delta.index] = delta.pooled
            outcome.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                outcome.finish[delta.index] = delta.finish_reason
            count += 1
            if call.leaves_after is not None and count > call.leaves_after:
                outcome.left = True
                outcome.left_unanswered = (
                    not call.is_streamed and not call.key and cast(Generation, generation).status == "running"
                )
                generation.abandon()
                return
            if call.reads_every and count <= SLOW_READS:
                await asyncio.sleep(call.reads_every)

    def _request(self, call: Call, model: str) -> GenerationRequest:
        return GenerationRequest(
            kind="cmpl-",
            model=model,
            is_streamed=call.is_streamed,
            prompts=(call.prompt,) * call.prompts,
            sampling=SamplingParams(max_tokens=0),
            max_tokens=None if call.pooling else call.max_tokens,
            pooling=call.pooling,
            n=call.n,
            stop=call.stop,
            deadline_ms=call.deadline_ms,
            service_tier=call.service_tier,
            claim=IdempotencyClaim(f"{call.tenant}-{call.key}", repr(call)) if call.key else None,
        )

    def _model_of(self, call: Call) -> str:
        return "tiny" if call.adapter is None else f"tenant{call.tenant}/a{call.adapter}"

    def _launch(self, _: str, settings: Settings) -> EngineClient:
        """Make one life of one engine: a process with its own pool."""
        rng, plan = self.rng, self.plan
        number = len(self.lives) if len(self.lives) < plan.num_engines else self._next_to_start()
        life = Life(self, number, is_first=len(self.lives) < plan.num_engines)
        life.channel = SimulatedChannel(life.make_engine, lambda: rng.uniform(20e-6, 500e-6), life.start)
        self.lives.append(life)
        return EngineClient(life.channel)

    def _next_to_start(self) -> int:
        """Return the number of an engine that is dead: the group starts no other."""
        latest = {life.number: life for life in self.lives}
        return next(number for number, life in latest.items() if not life.is_alive)

    @property
    def live(self) -> list[Life]:
        """The engines whose processes run."""
        return [life for life in self.lives if life.is_alive]

    def _state(self) -> str:
        return "; ".join(life.state for life in self.live) + f"; at {current_loop().time():.3f} s"

    async def _settle_down(self) -> None:
        """Wait until no work of the server itself is running."""
        async with asyncio.timeout(END_SECONDS):
            while self._is_busy():  # noqa: ASYNC110 (nothing of the server tells when it is at rest)
                await asyncio.sleep(0.05)
        await asyncio.sleep(QUIET_SECONDS)

    def _is_busy(self) -> bool:
        return bool(self.service.running) or any(not life.channel.engine.is_idle for life in self.live)

    def _check_engines(self) -> None:
        if self.service.running:
            raise Violation("a request is still counted as running")
        if held := [status for status in self.engines.statuses() if status.requests]:
            raise Violation(f"engines are counted to have requests and nothing runs: {held}")
        for life in self.live:
            self._check_engine(life.channel.engine)

    def _check_engine(self, real: Engine) -> None:
        scheduler = real.scheduler
        if not real.is_idle:
            raise Violation(f"the engine is not idle: {self._state()}")
        counts = scheduler.memory.counts
        if counts.kv:
            raise Violation(f"{counts.kv} pages of KV are held and nothing runs")
        if counts.adapters:
            raise Violation(f"{counts.adapters} pages of adapters are pinned and nothing runs")
        if counts.free + counts.kv_cached + counts.adapters_idle != counts.total:
            raise Violation(f"pages do not add up: {counts}")
        if scheduler.memory.swap.num_held:
            raise Violation(f"{scheduler.memory.swap.num_held} swapped pages are held and nothing waits")

    async def _check_records(self, database: Database) -> None:
        from sqlalchemy import text

        async with database.read() as session:
            open_rows = (await session.execute(text("SELECT id FROM requests WHERE status = 'open'"))).scalars().all()
            holds = await session.scalar(text("SELECT count(*) FROM limit_holds"))
            rows = (
                await session.execute(
                    text(
                        "SELECT request_id, status, input_tokens, output_tokens, waived_output_tokens "
                        "FROM ledger_entries WHERE kind = 'usage'"
                    )
                )
            ).all()
        if open_rows and not self.plan.database_outages:
            raise Violation(f"requests are still open in the records: {open_rows}")
        if holds and not self.plan.database_outages:
            raise Violation(f"{holds} holds of limits are left")
        await self.usage.verify_chain()
        if self.usage.drift_tokens and not self.plan.database_outages:
            raise Violation(f"the ledger and the engines differ by {self.usage.drift_tokens} tokens")
        entries: dict[str, Any] = {row.request_id: row for row in rows}
        if doubled := [id for id, count in Counter(row.request_id for row in rows).items() if count > 1]:
            raise Violation(f"billed twice: {doubled}")
        for outcome in self.outcomes:
            if outcome.request_id is not None and not outcome.replayed:
                self._check_bill(outcome, entries.get(outcome.request_id))
                self._check_answer(outcome)

    def _check_bill(self, outcome: Outcome, entry: Any) -> None:
        is_survivable = len(self.plan.engine_deaths) < 2 and not self.plan.start_failures
        if outcome.error == "engine_unavailable" and is_survivable:
            raise Violation(f"{outcome.request_id} did not survive the death of one engine")
        if entry is None:
            if not self.plan.database_outages:
                raise Violation(f"{outcome.request_id} is not in the ledger")
            return
        platform_failed = outcome.error in PLATFORM_FAILED
        is_whole = outcome.error is None and not outcome.left
        if is_whole and entry.input_tokens != outcome.answered_prompts * len(context_of(outcome.call)):
            raise Violation(f"{outcome.request_id} is billed {entry.input_tokens} tokens of its prompts")
        if is_whole and entry.output_tokens != outcome.received:
            raise Violation(f"{outcome.request_id} got {outcome.received} tokens and is billed {entry.output_tokens}")
        if platform_failed and entry.output_tokens and not self.plan.database_outages:
            raise Violation(f"{outcome.request_id} failed by our fault and is billed {entry.output_tokens}")
        if outcome.left_unanswered:
            if entry.input_tokens or entry.output_tokens:
                raise Violation(f"{outcome.request_id} could read nothing and is billed {entry.output_tokens}")
            if not entry.waived_output_tokens and not self.plan.faults and outcome.call.pooling is None:
                raise Violation(f"{outcome.request_id} was computed for nothing, and the ledger does not show it")
            return
        if not platform_failed and entry.output_tokens < outcome.received and not self.plan.faults:
            raise Violation(
                f"{outcome.request_id} read {outcome.received} tokens, ended with "
                f"{outcome.error or 'its client leaving'} and is billed {entry.output_tokens}"
            )

    def _check_answer(self, outcome: Outcome) -> None:
        call = outcome.call
        digest = None if call.adapter is None else f"a{call.adapter}"
        context = context_of(call)
        if call.pooling is None:
            self._check_tokens(outcome, digest, context)
        else:
            self._check_vectors(outcome, vector_of(call.pooling, digest, context))

    def _check_vectors(self, outcome: Outcome, expected: bytes) -> None:
        """Every prompt has the vector of its adapter, and an answer has all of them and no token."""
        if any(found != expected for found in outcome.vectors.values()):
            raise Violation(f"{outcome.request_id} has another vector than its prompt: {outcome.vectors}")
        if outcome.error is None and not outcome.left and len(outcome.vectors) != outcome.call.prompts:
            raise Violation(f"{outcome.request_id} has {len(outcome.vectors)} of {outcome.call.prompts} vectors")
        if outcome.received:
            raise Violation(f"{outcome.request_id} asked for vectors and got {outcome.received} tokens")

    def _check_tokens(self, outcome: Outcome, digest: str | None, context: list[int]) -> None:
        """The tokens are those that the adapter gives to the prompt."""
        for index, token_ids in outcome.token_ids.items():
            expected, told = list(context), []
            for token in token_ids:
                told.append(next_token(digest, expected))
                expected.append(token)
            if told != token_ids:
                raise Violation(f"{outcome.request_id} choice {index} of {digest}: {token_ids}, expected {told}")


def context_of(call: Call) -> list[int]:
    """The tokens of a call's prompt."""
    return [257, *call.prompt.encode()] if isinstance(call.prompt, str) else list(call.prompt)


PLATFORM_FAILED = ("internal_error", "engine_unavailable", "server_draining", "adapter_failed", "RecordsUnavailable")
TOKENIZER = Tokenizer(byte_tokenizer())


class _Log(logging.Handler):
    """Errors that the product logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@contextmanager
def _captured_log() -> Iterator[_Log]:
    log, root = _Log(), logging.getLogger("loramux")
    propagate, root.propagate = root.propagate, False
    root.addHandler(log)
    try:
        yield log
    finally:
        root.removeHandler(log)
        root.propagate = propagate


def _run(runner: asyncio.Runner, world: World) -> None:
    """Run the world; the first error of its actors stands for all of them."""
    try:
        runner.run(world.run())
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


def run_seed(seed: int, template: Template, folder: Path, world_of: type[World] = World) -> World:
    """Run one seed; raises Violation (or what the product raised) with the seed in its notes."""
    return run_plan(make_plan(seed), template, folder, world_of)


def run_plan(plan: Plan, template: Template, folder: Path, world_of: type[World] = World) -> World:
    """Run one plan; raises as `run_seed` does."""
    world = world_of(plan, template, folder)
    loop = SimulationLoop(lambda: world.rng.uniform(50e-6, 2e-3))
    failures: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception") or Violation(str(context))))
    gc.disable()
    try:
        with seeded_names(world.rng), _captured_log() as log, asyncio.Runner(loop_factory=lambda: loop) as runner:
            _run(runner, world)
            if failures:
                raise failures[0]
            if log.lines and not world.may_log_errors:
                raise Violation(f"errors were logged: {log.lines[:3]}")
    except BaseException as error:
        for failure in failures:
            error.add_note(f"also: {failure!r}")
        error.add_note(f"seed {plan.seed}: python -m simulation {plan.seed}")
        raise
    finally:
        world.loop_seconds = loop.time()
        gc.enable()
    return world
