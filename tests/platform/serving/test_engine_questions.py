"""Questions of uploads' checks to a scripted engine: unbilled, of class batch, in bounded time, and past its death."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from loramux.catalog.validation.jobs import EngineAnswer
from loramux.catalog.validation.validator import Unanswered
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings, EngineRange
from loramux.engine.messages import EngineFault, Request, ServiceClass
from loramux.fleet import member as member_module
from loramux.fleet.group import EngineGroup
from loramux.serving.engine_questions import OUTPUT_TOKENS, EngineQuestions

PROMPTS = [[5, 6, 7], [8] * 21]
LIVE_SECONDS = 600.0
"""Longer than any test: the time is not what ends it."""


def count_up(request: Request) -> list[int | EngineFault]:
    return list(range(len(request.output_token_ids), OUTPUT_TOKENS))


def with_engines(use: Callable[[EngineGroup, list[ScriptedEngine]], Awaitable[None]], *engines: ScriptedEngine) -> None:
    lives = list(engines)

    async def run() -> None:
        base = BaseSettings(name="tiny", path="/model", engines=EngineRange(min=len(engines)))
        waiting = iter(engines)
        launched: list[ScriptedEngine] = []

        def launch(_name: str, _settings: Settings) -> ScriptedEngine:
            launched.append(next(waiting, None) or ScriptedEngine(script=count_up))
            return launched[-1]

        group = EngineGroup(base, Settings(model=base.model, engine=base.engine), launch)
        await group.start()
        try:
            async with asyncio.timeout(60):
                await use(group, lives)
        finally:
            await group.stop()

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so`; the engine has no event for it."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def ask(questions: EngineQuestions, group: EngineGroup) -> asyncio.Future[tuple[EngineAnswer, ...] | Unanswered]:
    return asyncio.ensure_future(asyncio.to_thread(questions.ask, group, Path("/staged"), PROMPTS))


def test_questions_are_of_class_batch_and_of_a_tenant_of_their_own() -> None:
    async def use(group: EngineGroup, engines: list[ScriptedEngine]) -> None:
        answers = await ask(EngineQuestions(LIVE_SECONDS), group)
        assert not isinstance(answers, Unanswered)
        assert [(one.prompt, one.tokens) for one in answers] == [
            (prompt, list(range(OUTPUT_TOKENS))) for prompt in [*PROMPTS, PROMPTS[0]]
        ]
        [engine] = engines
        assert {(one.tenant, one.service_class) for one in engine.requests} == {("upload-checks", ServiceClass.BATCH)}
        adapters = [one.adapter for one in engine.requests]
        assert [one and one.path for one in adapters] == ["/staged", "/staged", None]
        assert engine.retired == [adapters[0].digest]

    with_engines(use, ScriptedEngine(script=count_up))


def test_questions_without_an_answer_in_time_end_and_are_cancelled_in_the_engine() -> None:
    async def use(group: EngineGroup, engines: list[ScriptedEngine]) -> None:
        outcome = await ask(EngineQuestions(0.05), group)
        assert isinstance(outcome, Unanswered)
        assert (outcome.refusal, "no time to answer within 0.05 s" in outcome.reason) == (None, True)
        [engine] = engines
        assert sorted(engine.cancelled) == sorted(one.id for one in engine.requests)
        await until(lambda: not engine.running)
        assert group.unclaimed_tokens == 0
        assert len(engine.retired) == 1

    with_engines(use, ScriptedEngine(script=count_up, pause=1_000))


def test_questions_go_on_at_another_engine_when_theirs_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "FIRST_PAUSE", 0.005)

    async def use(group: EngineGroup, engines: list[ScriptedEngine]) -> None:
        [engine] = engines
        asked = ask(EngineQuestions(LIVE_SECONDS), group)
        await until(lambda: len(engine.requests) == 3)
        engine.died.set()
        answers = await asked
        assert not isinstance(answers, Unanswered)
        assert {len(one.tokens) for one in answers} == {OUTPUT_TOKENS}

    with_engines(use, ScriptedEngine(script=count_up, pause=1_000))


@pytest.mark.parametrize(
    ("code", "refusal"), [("adapter_not_finite", "outputs_not_finite"), ("adapter_failed", None), ("other", None)]
)
def test_questions_refuse_an_adapter_for_its_own_numbers_alone(code: str, refusal: str | None) -> None:
    def fail(request: Request) -> list[int | EngineFault]:
        return [EngineFault(code, "It is so.")] if request.adapter else count_up(request)

    async def use(group: EngineGroup, engines: list[ScriptedEngine]) -> None:
        outcome = await ask(EngineQuestions(LIVE_SECONDS), group)
        assert isinstance(outcome, Unanswered)
        assert (outcome.refusal and outcome.refusal.code) == refusal
        assert "It is so." in outcome.reason

    with_engines(use, ScriptedEngine(script=fail))


def test_questions_end_when_the_server_stops() -> None:
    async def use(group: EngineGroup, engines: list[ScriptedEngine]) -> None:
        questions = EngineQuestions(LIVE_SECONDS)
        asked = ask(questions, group)
        await until(lambda: len(engines[0].requests) == 3)
        questions.stop()
        stopped = Unanswered("the server is being stopped")
        assert await asked == stopped
        assert await ask(questions, group) == stopped

    with_engines(use, ScriptedEngine(script=count_up, pause=1_000))
