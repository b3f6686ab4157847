"""An engine group over scripted engines: requests go on elsewhere, once, with one count; engines come back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from scripted_engine import FACTS, ScriptedEngine

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, ClassDeadlines, EngineRange, EngineSettings, SchedulerSettings
from loramux.common.units import TokenCounts
from loramux.engine.client import ENGINE_DIED, EngineDied
from loramux.engine.messages import (
    AdapterRef,
    EngineFault,
    ModelFacts,
    Request,
    SamplingParams,
    ServiceClass,
    TenantService,
    TokenEvent,
)
from loramux.fleet import group as group_module
from loramux.fleet import member as member_module
from loramux.fleet.group import EngineGroup
from loramux.fleet.member import EngineBusy, UnknownEngine
from loramux.fleet.view import EngineState

PROMPT = [1, 2, 3]
LENGTH = 20


def count_up(request: Request) -> list[int | EngineFault]:
    """Continue with 0, 1, 2, ... wherever the answer stands."""
    return list(range(len(request.output_token_ids), request.sampling.max_tokens))


@dataclass
class Fleet:
    """A group whose engines are scripted; `lives` has every engine that was ever launched."""

    group: EngineGroup
    lives: list[ScriptedEngine]
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)

    def submit(self, name: str, **changes: object) -> None:
        seen = self.events[name] = []
        sampling = SamplingParams(max_tokens=LENGTH)
        fields = {"id": name, "tenant": "t", "prompt_token_ids": PROMPT, "sampling": sampling} | changes
        self.group.submit(Request(**fields), seen.append)

    def tokens(self, name: str) -> list[int]:
        return [event.token_id for event in self.events[name] if event.token_id is not None]

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not happened():  # noqa: ASYNC110  engines have no event for this
                await asyncio.sleep(0.001)

    async def end_of(self, name: str) -> TokenEvent:
        await self.until(lambda: self.events[name] and self.events[name][-1].finish_reason)
        return self.events[name][-1]

    def engine_of(self, name: str) -> ScriptedEngine:
        """The engine that has the request now."""
        return next(engine for engine in reversed(self.lives) if name in engine.tasks and engine.alive)


class FullEngine(ScriptedEngine):
    """Queues requests and begins with none."""

    async def _play(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        await self.died.wait()
        raise EngineDied("the script says so")


class LazyEngine(ScriptedEngine):
    """Begins with every request and sends no token."""

    async def _play(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        if request.report_start:
            on_event(TokenEvent(request_id=request.id, is_worked_on=True))
        await self.died.wait()
        raise EngineDied("the script says so")


class OneByOneEngine(ScriptedEngine):
    """Answers its first request, and queues the others."""

    async def _play(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        if request is not self.requests[0]:
            await self.died.wait()
            raise EngineDied("the script says so")
        await super()._play(request, on_event)


class LateEngine(ScriptedEngine):
    """Takes a while to start."""

    async def start(self) -> ModelFacts:
        await asyncio.sleep(0.1)
        return await super().start()


class CountingEngine(ScriptedEngine):
    """Counts the requests that wait for a first token at a time."""

    most_without_token = 0

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        super().submit(request, on_event)
        self.most_without_token = max(self.most_without_token, sum(not self.told.get(id) for id in self.tasks))


class BrokenEngine(ScriptedEngine):
    """Never loads its model."""

    async def start(self) -> ModelFacts:
        raise EngineDied("there is no memory")


class OtherCheckpoint(ScriptedEngine):
    """Has a fine-tune of the base in its folder."""

    async def start(self) -> ModelFacts:
        await super().start()
        return msgspec.structs.replace(FACTS, weights="fine-tuned")


class OtherCache(ScriptedEngine):
    """Rounds keys and values."""

    async def start(self) -> ModelFacts:
        await super().start()
        return msgspec.structs.replace(FACTS, kv_cache_dtype="fp8")


class SmallerPool(ScriptedEngine):
    """Holds a shorter request than the others."""

    async def start(self) -> ModelFacts:
        await super().start()
        return msgspec.structs.replace(FACTS, pages_total=FACTS.pages_total // 8)


def in_fleet(
    test: Callable[[Fleet], Awaitable[None]],
    *kinds: type[ScriptedEngine],
    in_process: bool = False,
    engines: EngineRange | None = None,
    facts: ModelFacts = FACTS,
    deadlines: ClassDeadlines | None = None,
) -> None:
    """Run `test` over one engine of each kind; those that are started again are ScriptedEngines."""
    lives: list[ScriptedEngine] = []

    def launch(_name: str, _: Settings) -> ScriptedEngine:
        kind = kinds[len(lives)] if len(lives) < len(kinds) else ScriptedEngine
        lives.append(kind(script=count_up, pause=0.002))
        return lives[-1]

    async def run() -> None:
        base = BaseSettings(
            name="tiny",
            path="/model",
            engines=engines or EngineRange(min=len(kinds)),
            engine=EngineSettings(in_process=in_process),
        )
        scheduler = SchedulerSettings(deadlines_ms=deadlines or ClassDeadlines())
        group = EngineGroup(base, Settings(model=base.model, engine=base.engine, scheduler=scheduler), launch)
        assert await group.start() == facts
        try:
            await test(Fleet(group, lives))
        finally:
            await group.stop()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "FIRST_PAUSE", 0.005)


def test_answer_goes_on_at_another_engine_with_one_count() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: len(fleet.tokens("a")) > 4)
        first = fleet.engine_of("a")
        first.died.set()
        last = await fleet.end_of("a")
        assert fleet.tokens("a") == list(range(LENGTH))
        assert last.finish_reason == "length"
        assert last.count is not None
        assert (last.count.tokens.output, last.count.tokens.prompt) == (LENGTH, len(PROMPT))
        (resumed,) = [request for engine in fleet.lives if engine is not first for request in engine.requests]
        assert resumed.output_token_ids == list(range(len(resumed.output_token_ids)))
        assert resumed.group_started

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_single_engine_comes_back_and_goes_on_with_its_requests() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: len(fleet.tokens("a")) > 4)
        fleet.lives[0].died.set()
        await fleet.until(lambda: not fleet.group.alive)
        await fleet.end_of("a")
        assert fleet.tokens("a") == list(range(LENGTH))
        assert [status.starts for status in fleet.group.statuses()] == [2]

    in_fleet(test, ScriptedEngine)


def test_request_that_engines_die_of_ends_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("poison")
        await kill_in_turn(fleet, "poison", 4)
        last = await fleet.end_of("poison")
        assert last.finish_reason == "error"
        assert fleet.group.alive, "the others live"

    in_fleet(test, *[LazyEngine] * 20, engines=EngineRange(min=5))
    assert "request poison ends: 4 engines died under it" in caplog.text


def test_requests_that_waited_with_the_cause_are_tried_one_at_a_time_and_answered() -> None:
    async def test(fleet: Fleet) -> None:
        names = ["a", "b", "c", "d"]
        for name in names:
            fleet.submit(name)
        for life in range(2):
            await fleet.until(lambda life=life: len(fleet.lives) > life and len(fleet.lives[life].tasks) == len(names))
            fleet.lives[life].died.set()
        for name in names:
            assert (await fleet.end_of(name)).finish_reason == "length"
        third = fleet.lives[2]
        assert isinstance(third, CountingEngine)
        assert third.most_without_token == 1

    in_fleet(test, LazyEngine, LazyEngine, CountingEngine, engines=EngineRange(min=1))


async def kill_in_turn(fleet: Fleet, name: str, count: int) -> None:
    """Let the engine that has the request die, `count` times."""
    for number in range(count):
        await fleet.until(lambda number=number: sum(len(engine.requests) for engine in fleet.lives) > number)
        fleet.engine_of(name).died.set()


def test_request_that_only_waited_where_engines_died_is_no_suspect() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("patient")
        await kill_in_turn(fleet, "patient", 5)
        assert (await fleet.end_of("patient")).finish_reason == "length"
        assert [engine.requests[0].report_start for engine in fleet.lives[:6]] == [False] + [True] * 5

    in_fleet(test, *[FullEngine] * 5, engines=EngineRange(min=1))


def test_request_that_eight_engines_lost_ends_though_none_said_that_it_began(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("unlucky")
        await kill_in_turn(fleet, "unlucky", 8)
        assert (await fleet.end_of("unlucky")).finish_reason == "error"

    in_fleet(test, *[FullEngine] * 8, engines=EngineRange(min=1))
    assert "request unlucky ends: 8 engines died under it" in caplog.text


def test_suspect_waits_for_its_trial_as_long_as_an_engine_serves() -> None:
    """The time for which a request waits for an engine is for one that has none to go to."""

    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        fleet.submit("b")
        for life in range(2):
            await fleet.until(lambda life=life: len(fleet.lives) > life and len(fleet.lives[life].tasks) == 2)
            fleet.lives[life].died.set()
        await fleet.until(lambda: len(fleet.lives) > 2 and fleet.lives[2].tasks)
        (waiting,) = fleet.group._waiting.values()
        assert waiting.timeout is not None
        waiting.timeout.cancel()
        fleet.group._end_wait(waiting)  # as after `max_wait_s`
        assert not any(event.finish_reason for events in fleet.events.values() for event in events)
        fleet.lives[2].died.set()
        ends = [await fleet.end_of(name) for name in ("a", "b")]
        assert [end.finish_reason for end in ends] == ["length", "length"], "an engine may die of something else"

    in_fleet(test, LazyEngine, LazyEngine, LazyEngine, engines=EngineRange(min=1))


def test_request_waits_and_is_answered_if_its_engine_dies_with_another_that_had_just_come_back() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: any(engine.tasks for engine in fleet.lives))
        holder = fleet.engine_of("a")
        next(engine for engine in fleet.lives if engine is not holder).died.set()
        await fleet.until(lambda: len(fleet.lives) > 2 and fleet.lives[2].alive)
        await asyncio.sleep(2 * group_module.VIEW_SECONDS)
        for engine in (holder, fleet.lives[2]):
            engine.died.set()
        assert (await fleet.end_of("a")).finish_reason == "length"

    in_fleet(test, LazyEngine, LazyEngine)


def test_request_may_return_to_an_engine_that_died_and_came_back() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: any(engine.tasks for engine in fleet.lives))
        fleet.engine_of("a").died.set()
        await fleet.until(lambda: len(fleet.lives) > 2)
        await fleet.until(lambda: all(status.state is EngineState.READY for status in fleet.group.statuses()))
        (run,) = fleet.group._runs.values()
        fleet.group._collect_views(0.0)
        assert {view.engine for view in fleet.group._views_for(run)} == {"tiny-0", "tiny-1"}

    in_fleet(test, LazyEngine, LazyEngine)


def test_group_does_not_end_while_a_request_may_still_wait_for_an_engine() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: fleet.tokens("a"))
        fleet.lives[0].died.set()
        assert (await fleet.end_of("a")).finish_reason == "length", "the fifth start succeeds"
        assert len(fleet.lives) == 6
        assert not fleet.group.has_ended

    in_fleet(test, ScriptedEngine, *[BrokenEngine] * 4, engines=EngineRange(min=1))


def test_request_that_no_engine_goes_on_with_in_time_ends_with_an_error_and_its_count() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: fleet.tokens("a"))
        fleet.lives[0].died.set()
        fleet.submit("b")
        for name in ("a", "b"):
            end = await fleet.end_of(name)
            assert end.fault.code == ENGINE_DIED
            assert end.count.tokens.output == len(fleet.tokens(name)) < LENGTH

    in_fleet(test, ScriptedEngine, *[BrokenEngine] * 50, engines=EngineRange(min=1, max_wait_s=0.05))


def test_group_whose_engines_cannot_be_started_any_more_ends() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[0].died.set()
        await fleet.until(lambda: fleet.group.has_ended)
        assert "there is no memory" in await fleet.group.wait_end()

    in_fleet(test, ScriptedEngine, *[BrokenEngine] * 20, engines=EngineRange(min=1, max_wait_s=0.01))


def test_choices_of_one_request_share_an_engine() -> None:
    async def test(fleet: Fleet) -> None:
        for name in ("a", "b", "c"):
            fleet.submit(name, group_id="one")
        assert sorted(len(engine.requests) for engine in fleet.lives) == [0, 3]

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_drained_engine_gives_its_requests_back_and_is_started_by_restart() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: len(fleet.tokens("a")) > 4)
        name = fleet.group.names[fleet.lives.index(fleet.engine_of("a"))]
        status = await fleet.group.drain(name, 0.0)
        assert (status.state, status.requests) == (EngineState.LOST, 0)
        last = await fleet.end_of("a")
        assert fleet.tokens("a") == list(range(LENGTH))
        assert last.count is not None
        assert (last.count.tokens.output, last.count.tokens.prompt) == (LENGTH, len(PROMPT))
        assert (await fleet.group.restart(name, 1.0)).state is EngineState.READY
        assert not fleet.group.has_ended
        with pytest.raises(UnknownEngine, match="tiny-0, tiny-1"):
            await fleet.group.drain("tiny-7", 1.0)

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_engine_takes_one_order_at_a_time() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        name = fleet.group.names[fleet.lives.index(fleet.engine_of("a"))]
        assert fleet.group.order(name, restart=True, seconds=30.0).state is EngineState.DRAINING
        with pytest.raises(EngineBusy):
            fleet.group.order(name, restart=False, seconds=0.0)
        await fleet.until(lambda: [status.starts for status in fleet.group.statuses()].count(2))
        assert fleet.tokens("a") == list(range(LENGTH)), "it had the time to end where it was"
        assert sum(len(engine.requests) for engine in fleet.lives) == 1

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_engine_that_does_not_load_leaves_the_others_serving(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet) -> None:
        assert fleet.group.alive
        fleet.submit("a")
        await fleet.end_of("a")
        await fleet.until(lambda: len(fleet.lives) == 3)  # and it is tried again

    in_fleet(test, ScriptedEngine, BrokenEngine)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(OtherCheckpoint, "weights: fine-tuned against tiny"), (OtherCache, "kv_cache_dtype: fp8 against auto")],
)
def test_engine_with_another_checkpoint_is_not_used_and_says_what_differs(
    caplog: pytest.LogCaptureFixture, kind: type[ScriptedEngine], said: str
) -> None:
    async def test(fleet: Fleet) -> None:
        (_, refused) = fleet.group.statuses()
        assert refused.state is EngineState.LOST
        for number in range(6):
            fleet.submit(f"r{number}")
        for number in range(6):
            assert (await fleet.end_of(f"r{number}")).finish_reason == "length"
        assert fleet.lives[1].requests == []
        assert said in refused.problem
        await fleet.until(lambda: fleet.group.statuses()[1].state is EngineState.READY)  # with the right one

    in_fleet(test, ScriptedEngine, kind)
    assert "tiny-1 is not used" in caplog.text


def test_engine_that_comes_back_with_another_checkpoint_is_not_used() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[0].died.set()
        await fleet.until(lambda: "weights" in (fleet.group.statuses()[0].problem or ""))
        fleet.submit("r")
        assert (await fleet.end_of("r")).finish_reason == "length"
        assert fleet.lives[2].requests == []

    in_fleet(test, ScriptedEngine, ScriptedEngine, OtherCheckpoint, engines=EngineRange(min=2))


def test_context_of_a_base_is_that_of_its_smallest_engine_at_the_start() -> None:
    async def test(fleet: Fleet) -> None:
        assert [status.state for status in fleet.group.statuses()] == [EngineState.READY] * 2

    in_fleet(test, ScriptedEngine, SmallerPool, facts=msgspec.structs.replace(FACTS, pages_total=8))


def test_engine_that_comes_back_smaller_than_requests_may_be_is_not_used() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[1].died.set()
        await fleet.until(lambda: "takes 128 tokens a request" in (fleet.group.statuses()[1].problem or ""))

    in_fleet(test, ScriptedEngine, ScriptedEngine, SmallerPool, engines=EngineRange(min=2))


def test_group_of_engines_at_addresses_waits_for_one_however_often_it_fails() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[0].died.set()
        await fleet.until(lambda: len(fleet.lives) == 6)
        assert not fleet.group.has_ended
        fleet.submit("a")
        assert (await fleet.end_of("a")).finish_reason == "length"

    in_fleet(test, ScriptedEngine, *[BrokenEngine] * 4, engines=EngineRange(addresses=("tcp://10.0.0.1:7101",)))


def test_request_that_its_engine_gives_back_continues_after_its_tokens() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: fleet.tokens("a"))
        fleet.engine_of("a").cancel("a")
        last = await fleet.end_of("a")
        assert (last.finish_reason, fleet.tokens("a")) == ("length", list(range(LENGTH)))
        assert sum(len(engine.requests) for engine in fleet.lives) == 2

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_request_given_back_during_prefill_counts_its_prompt_once() -> None:
    async def test(fleet: Fleet) -> None:
        for engine in fleet.lives:
            engine.prefilled, engine.pause = 2, 60.0
        fleet.submit("a")
        first = fleet.engine_of("a")
        first.cancel("a")
        await fleet.until(lambda: sum(len(engine.requests) for engine in fleet.lives) == 2)
        second = fleet.engine_of("a")
        assert second is not first
        second.prefilled = 1
        fleet.group.cancel("a")
        last = await fleet.end_of("a")
        assert (last.finish_reason, fleet.tokens("a")) == ("cancelled", [])
        assert last.count is not None
        assert last.count.tokens == TokenCounts(prompt=2), "the engine that got furthest"

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_request_given_back_during_prefill_and_answered_counts_its_prompt_once() -> None:
    async def test(fleet: Fleet) -> None:
        for engine in fleet.lives:
            engine.prefilled = 2
        fleet.lives[0].pause = fleet.lives[1].pause = 60.0
        fleet.submit("a")
        first = fleet.engine_of("a")
        next(engine for engine in fleet.lives if engine is not first).pause = 0.002
        first.cancel("a")
        last = await fleet.end_of("a")
        assert (last.finish_reason, fleet.tokens("a")) == ("length", list(range(LENGTH)))
        assert last.count is not None
        assert last.count.tokens == TokenCounts(prompt=len(PROMPT), output=LENGTH)

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_group_whose_engine_is_a_thread_ends_with_it() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: fleet.tokens("a"))
        fleet.lives[0].died.set()
        assert (await fleet.end_of("a")).finish_reason == "error"
        assert fleet.group.has_ended
        with pytest.raises(EngineDied):
            fleet.submit("b")

    in_fleet(test, ScriptedEngine, in_process=True)


def test_request_that_was_cancelled_is_not_moved_from_a_drained_engine() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: fleet.tokens("a"))
        name = fleet.group.names[fleet.lives.index(fleet.engine_of("a"))]
        fleet.engine_of("a").overrun = 5  # its engine ends it later than the drain begins
        fleet.group.cancel("a")
        await fleet.group.drain(name, 0.0)
        assert (await fleet.end_of("a")).finish_reason == "cancelled"
        assert sum(len(engine.requests) for engine in fleet.lives) == 1

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_service_of_one_engine_lifts_its_tenants_on_the_others() -> None:
    async def test(fleet: Fleet) -> None:
        service = TenantService("t", "standard", 100.0)
        fleet.lives[0].on_service([service])
        await fleet.until(lambda: fleet.lives[1].lifted)
        assert (fleet.lives[0].lifted, fleet.lives[1].lifted) == ([], [service])

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_pin_is_kept_by_one_engine_and_moves_when_it_dies() -> None:
    async def test(fleet: Fleet) -> None:
        assert await fleet.group.pin(AdapterRef("d", "/d"), "t") is None
        (holder,) = [engine for engine in fleet.lives if engine.pinned]
        holder.died.set()
        await fleet.until(lambda: any(engine.pinned for engine in fleet.lives if engine is not holder))
        fleet.group.unpin("d", "t")
        assert not any(engine.pinned for engine in fleet.lives if engine is not holder)

    in_fleet(test, ScriptedEngine, ScriptedEngine)


def test_new_request_waits_for_an_engine_that_comes_back_and_no_longer_than_its_deadline() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[0].died.set()
        await fleet.until(lambda: not fleet.group.alive)
        fleet.submit("patient")
        fleet.submit("hasty", deadline_ms=1)
        hasty = (await fleet.end_of("hasty")).fault
        assert hasty is not None
        assert (hasty.code, hasty.retry_after) == ("deadline_exceeded", 1)
        assert not re.search(r"\d", hasty.message), "it would be what the earlier waits have left of the deadline"
        assert (await fleet.end_of("patient")).finish_reason == "length"

    in_fleet(test, ScriptedEngine)


def test_deadline_of_a_class_counts_the_wait_for_an_engine() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.lives[0].died.set()
        await fleet.until(lambda: not fleet.group.alive)
        fleet.submit("standard")
        fleet.submit("batch", service_class=ServiceClass.BATCH)
        assert (await fleet.end_of("standard")).finish_reason == "error"
        assert (await fleet.end_of("batch")).finish_reason == "length"

    in_fleet(test, ScriptedEngine, deadlines=ClassDeadlines(standard=1))


def test_deadline_of_a_request_with_a_token_ends_no_choice_that_waits_for_an_engine() -> None:
    async def test(fleet: Fleet) -> None:
        for name in ("first", "second"):
            fleet.submit(name, group_id="one", deadline_ms=1)
        assert (await fleet.end_of("first")).finish_reason == "length"
        fleet.lives[0].died.set()
        assert (await fleet.end_of("second")).finish_reason == "length"
        assert fleet.lives[1].requests[0].group_started

    in_fleet(test, OneByOneEngine, LateEngine, engines=EngineRange(min=1))


def test_engines_are_started_when_requests_wait_and_rest_when_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "SCALE_SECONDS", 0.01)

    async def test(fleet: Fleet) -> None:
        def states() -> list[str]:
            return [status.state.value for status in fleet.group.statuses()]

        assert states() == ["ready", "resting"]
        fleet.lives[0].waits_s = 5.0
        await fleet.until(lambda: states() == ["ready", "ready"])
        fleet.lives[0].waits_s = 0.0
        fleet.group._scaler._changed_at = -1e9  # the cool-down is over
        await fleet.until(lambda: sorted(states()) == ["ready", "resting"])
        fleet.submit("a")
        assert (await fleet.end_of("a")).finish_reason == "length"

    in_fleet(test, ScriptedEngine, engines=EngineRange(min=1, max=2))


def test_base_without_requests_has_no_engine_until_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "SCALE_SECONDS", 0.01)

    async def test(fleet: Fleet) -> None:
        fleet.group._scaler._requested_at = -1e9
        await fleet.until(lambda: fleet.group.statuses()[0].state is EngineState.RESTING)
        assert fleet.group.alive, "a request would be answered"
        assert not fleet.group.has_ended
        fleet.submit("a")
        assert (await fleet.end_of("a")).finish_reason == "length"

    in_fleet(test, ScriptedEngine, engines=EngineRange(min=0))


def test_cancelled_request_without_an_engine_ends_at_once() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.submit("a")
        await fleet.until(lambda: len(fleet.tokens("a")) > 2)
        fleet.lives[0].died.set()
        await fleet.until(lambda: not fleet.lives[0].tasks)
        fleet.group.cancel("a")
        last = fleet.events["a"][-1]
        assert (last.finish_reason, last.count.tokens.output) == ("cancelled", len(fleet.tokens("a")))

    in_fleet(test, ScriptedEngine)
