"""Every way in which a request can end after it was accepted, and what of it is billed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Harness, in_harness
from sqlalchemy import select

from loramux.common.errors import LoramuxError
from loramux.common.units import TokenCounts
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.ledger import LedgerRow
from loramux.engine.client import ENGINE_DIED, EngineDied, OnEvent
from loramux.engine.messages import EngineCount, EngineFault, Request, TokenEvent
from loramux.money.usage import group_commit
from loramux.money.usage import service as usage_service
from loramux.money.usage.errors import TooManyUnsettled
from loramux.serving import generation as generations
from loramux.serving.errors import Draining
from loramux.serving.generation import Generation

PROMPT = 3
"""Tokens of every prompt."""


@dataclass
class ManualEngine:
    """Sends the events that a test says, when it says so; a cancelled request ends at once unless `deaf`."""

    has_ended: bool = False
    deaf: bool = False
    requests: dict[str, Request] = field(default_factory=dict)
    listeners: dict[str, OnEvent] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    refuse_from: int | None = None

    def submit(self, request: Request, on_event: OnEvent) -> None:
        if self.refuse_from is not None and len(self.requests) >= self.refuse_from:
            raise EngineDied("it died between two submissions")
        self.requests[request.id] = request
        self.listeners[request.id] = on_event
        self.num_tokens[request.id] = 0

    def send(self, index: int, text: bytes = b"", *, end: str | None = None, fault: str | None = None) -> None:
        """Send a choice's tokens, then perhaps its end."""
        id = list(self.requests)[index]
        if id not in self.listeners:
            return
        for token in text:
            self.num_tokens[id] += 1
            self.listeners[id](TokenEvent(request_id=id, token_id=token))
        if fault is not None or end is not None:
            count = self.num_tokens[id]
            tokens = TokenCounts(prompt=PROMPT, output=count) if count else TokenCounts()
            self.listeners.pop(id)(
                TokenEvent(
                    request_id=id,
                    finish_reason=end or "error",
                    fault=None if fault is None else EngineFault(fault, "the test says so"),
                    count=None if fault == ENGINE_DIED else EngineCount(tokens=tokens),
                )
            )

    def cancel(self, request_id: str) -> None:
        if request_id in self.listeners and not self.deaf:
            index = list(self.requests).index(request_id)
            asyncio.get_running_loop().call_soon(lambda: self.send(index, end="cancelled"))

    def forget(self, request_id: str) -> None:
        self.listeners.pop(request_id, None)


@dataclass
class Run:
    """One request of two prompts, a choice each."""

    made: Harness
    engine: ManualEngine
    generation: Generation


Act = Callable[[Run], Awaitable[None] | None]


async def complete(run: Run) -> None:
    run.engine.send(0, b"ab", end="length")
    run.engine.send(1, b"c", end="stop")


async def stop_string(run: Run) -> None:
    run.engine.send(0, b"a#z", end=None)
    run.engine.send(1, b"c", end="stop")


def late_choice(code: str) -> Act:
    """The second choice fails after the first has begun, which goes on."""

    async def act(run: Run) -> None:
        run.engine.send(0, b"a")
        run.engine.send(1, fault=code)
        run.engine.send(0, b"b", end="length")

    return act


def first_choice(code: str) -> Act:
    """A choice fails before any token."""

    async def act(run: Run) -> None:
        run.engine.send(1, fault=code)

    return act


async def leave_after_a_token(run: Run) -> None:
    run.engine.send(0, b"ab")
    run.generation.abandon()


async def leave_before_a_token(run: Run) -> None:
    run.generation.abandon()


async def die(run: Run) -> None:
    run.engine.send(0, b"ab")
    for index in range(2):
        run.engine.send(index, fault=ENGINE_DIED)


async def cut_off(run: Run) -> None:
    run.engine.send(0, b"ab")
    run.generation.abort(Draining())


async def break_the_detokenizer(run: Run) -> None:
    def fail(token_id: int) -> str:
        raise ValueError("no such token")

    run.engine.send(0, b"ab")
    run.generation._choices[1].output._detokenizer.push = fail
    run.engine.send(1, b"x")


async def leave_a_deaf_engine(run: Run) -> None:
    run.engine.deaf = True
    run.engine.send(0, b"ab")
    run.generation.abandon()


async def stop_string_of_a_deaf_engine(run: Run) -> None:
    run.engine.deaf = True
    run.engine.send(0, b"a#")
    run.engine.send(1, b"c#")


WHOLE = ["length", "stop"]
CASES: dict[str, tuple[Act, str, tuple[int, int], Any]] = {
    "completed": (complete, "completed", (2 * PROMPT, 3), WHOLE),
    "stop string": (stop_string, "completed", (2 * PROMPT, 3), ["stop", "stop"]),
    "late choice misses the deadline": (
        late_choice("deadline_exceeded"),
        "completed",
        (PROMPT, 2),
        ["length", "abort"],
    ),
    "late choice is over capacity": (late_choice("engine_overloaded"), "completed", (PROMPT, 2), ["length", "abort"]),
    "late choice is too long for the pool": (
        late_choice("context_length_exceeded"),
        "completed",
        (PROMPT, 2),
        ["length", "abort"],
    ),
    "late choice of a broken adapter": (
        late_choice("adapter_not_finite"),
        "completed",
        (PROMPT, 2),
        ["length", "abort"],
    ),
    "deadline before the first token": (first_choice("deadline_exceeded"), "failed", (0, 0), "deadline_exceeded"),
    "too long before the first token": (
        first_choice("context_length_exceeded"),
        "failed",
        (0, 0),
        "context_length_exceeded",
    ),
    "late choice whose adapter is deleted": (
        late_choice("adapter_failed"),
        "completed",
        (PROMPT, 2),
        ["length", "abort"],
    ),
    "adapter fails to load before the first token": (
        first_choice("adapter_failed"),
        "failed",
        (0, 0),
        "adapter_failed",
    ),
    "engine fault in the middle": (late_choice("internal_error"), "failed", (0, 0), "internal_error"),
    "engine dies": (die, "failed", (0, 0), "engine_unavailable"),
    "detokenizer fails": (break_the_detokenizer, "failed", (0, 0), "internal_error"),
    "server is stopped": (cut_off, "failed", (0, 0), "server_draining"),
    "reader leaves after a token": (leave_after_a_token, "cancelled", (PROMPT, 2), None),
    "reader leaves before a token": (leave_before_a_token, "cancelled", (0, 0), None),
    "engine never ends a cancelled request": (leave_a_deaf_engine, "cancelled", (0, 0), None),
    "engine never ends a stopped request": (stop_string_of_a_deaf_engine, "completed", (0, 0), ["stop", "stop"]),
}


async def begin(made: Harness, engine: ManualEngine, **changes: object) -> Generation:
    made.service.bases["tiny"] = replace(made.service.bases["tiny"], engines=engine)
    asked = {"prompts": ([1, 2, 3], [4, 5, 6]), "max_tokens": 10, "stop": ("#",)}
    return await made.begin(**(asked | changes))


async def outcome(generation: Generation) -> Any:
    """Read to the end: the choices' finish reasons, or the error's code."""
    reasons: dict[int, str | None] = {}
    try:
        async for delta in generation:
            reasons[delta.index] = delta.finish_reason
    except LoramuxError as error:
        return error.code
    return [reasons[index] for index in sorted(reasons)]


async def ledger(made: Harness) -> list[tuple[str | None, tuple[int, int]]]:
    async with made.database.read() as session:
        rows = (await session.scalars(select(LedgerRow).order_by(LedgerRow.sequence))).all()
    return [(row.status, (row.input_tokens, row.output_tokens)) for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_ended_request_bills_delivered_tokens_unless_the_server_failed(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, status, billed, ending = CASES[case]
    monkeypatch.setattr(generations, "CANCEL_TIMEOUT_S", 0.05)

    async def test(made: Harness) -> None:
        engine = ManualEngine()
        generation = await begin(made, engine)
        await asyncio.sleep(0)  # the request's task submits
        assert len(engine.requests) == 2
        assert {request.group_id for request in engine.requests.values()} == {generation.id}
        await act(Run(made, engine, generation))
        seen = await outcome(generation)
        if ending is not None:
            assert seen == ending
        assert await ledger(made) == [(status, billed)]
        assert made.service.running == 0

    in_harness(test, tmp_path)


def test_engine_dying_between_submissions_ends_the_request_unbilled(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        generation = await begin(made, ManualEngine(refuse_from=1))
        assert await outcome(generation) == "engine_unavailable"
        assert await ledger(made) == [("failed", (0, 0))]

    in_harness(test, tmp_path)


def test_reader_of_an_idempotent_request_leaves_and_pays_once(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        engine, claim = ManualEngine(), IdempotencyClaim("key", "digest")
        generation = await begin(made, engine, claim=claim)
        await asyncio.sleep(0)
        engine.send(0, b"a")
        generation.abandon()
        engine.send(0, b"b", end="length")
        engine.send(1, fault="deadline_exceeded")
        await generation.task
        replay = await begin(made, engine, claim=claim)
        assert await outcome(replay) == ["length", "abort"]
        assert replay.usage == TokenCounts(prompt=PROMPT, output=2)
        assert await ledger(made) == [("completed", (PROMPT, 2))]

    in_harness(test, tmp_path)


def test_request_that_the_database_does_not_settle_is_settled_later_unbilled(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        engine, settle = ManualEngine(), made.usage.settle

        async def unavailable(_: object, **_options: object) -> None:
            raise RecordsUnavailable("the database does not answer")

        generation = await begin(made, engine)
        await asyncio.sleep(0)
        made.usage.settle = unavailable
        await complete(Run(made, engine, generation))
        assert await outcome(generation) == "database_unavailable"
        await generation.task
        await asyncio.sleep(0)  # the service notes its end
        with pytest.raises(RecordsUnavailable):
            await made.usage.settle_late()
        made.usage.settle = settle
        await made.usage.settle_late()
        assert await ledger(made) == [("failed", (0, 0))]

    in_harness(test, tmp_path)


def test_abandoned_request_whose_opening_lost_its_reply_is_settled_after_the_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "PAUSES", ())

    async def test(made: Harness) -> None:
        claim, writer = IdempotencyClaim("key", "digest"), made.usage._writer
        commit, committed, is_abandoned = writer._commit, asyncio.Event(), asyncio.Event()

        async def lose_replies(operations: Any) -> Any:
            if not committed.is_set():
                await commit(operations)
                committed.set()
                await is_abandoned.wait()
            raise RecordsUnavailable("the database does not answer")

        writer._commit = lose_replies
        beginning = asyncio.create_task(begin(made, ManualEngine(), claim=claim))
        await committed.wait()
        beginning.cancel()
        await asyncio.wait({beginning})
        is_abandoned.set()
        async with asyncio.timeout(30):
            while not made.service.unsettled:  # noqa: ASYNC110  the service has no event for this
                await asyncio.sleep(0.001)
        with pytest.raises(RecordsUnavailable):
            await made.usage.settle_late()
        writer._commit = commit
        await made.usage.settle_late()
        assert (made.service.unsettled, await ledger(made)) == (0, [("cancelled", (0, 0))])
        again = await begin(made, ManualEngine(), claim=claim)  # else StillRunning
        again.abort(Draining())

    in_harness(test, tmp_path)


@pytest.mark.parametrize("committed", [False, True])
def test_request_whose_opening_is_uncertain_leaves_no_open_row(tmp_path: Path, committed: bool) -> None:
    async def test(made: Harness) -> None:
        open_request = made.usage.open

        async def broken(opened: object) -> None:
            if committed:
                await open_request(opened)
            raise RecordsUnavailable("the connection broke")

        made.usage.open = broken
        with pytest.raises(RecordsUnavailable):
            await begin(made, ManualEngine())
        await made.usage.settle_late()
        assert await ledger(made) == ([("failed", (0, 0))] if committed else [])

    in_harness(test, tmp_path)


def test_outage_keeps_a_bounded_number_of_settlements_and_drops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the bound a request is refused before it could have a row; a running one is still settled."""
    monkeypatch.setattr(group_commit, "PAUSES", ())
    monkeypatch.setattr(usage_service, "MAX_UNSETTLED", 5)
    monkeypatch.setattr(usage_service, "SETTLED_TOGETHER", 2)

    async def test(made: Harness) -> None:
        engine, writer = ManualEngine(), made.usage._writer
        running = await begin(made, engine)
        await asyncio.sleep(0)
        commit, ids = writer._commit, []

        async def fail(operations: Any) -> Any:
            ids.extend(getattr(one, "id", None) or one.request_id for one in operations)
            raise RecordsUnavailable("the database does not answer")

        writer._commit = fail
        for _ in range(12):
            with pytest.raises(RecordsUnavailable) as refusal:
                await begin(made, ManualEngine())
            assert (refusal.value.status, refusal.value.code) == (503, "database_unavailable")
        assert (made.service.unsettled, len(set(ids))) == (5, 5)
        assert made.service.counters.requests["failed"] == 12
        await complete(Run(made, engine, running))
        assert await outcome(running) == "database_unavailable"
        await running.task
        await asyncio.sleep(0)  # the service notes its end
        with pytest.raises(RecordsUnavailable):
            await made.usage.settle_late()
        assert made.service.unsettled == 6
        writer._commit = commit
        await made.usage.settle_late()
        assert made.service.unsettled == 0
        again = await begin(made, ManualEngine())
        again.abort(Draining())
        await again.task
        assert await ledger(made) == [("failed", (0, 0)), ("failed", (0, 0))]

    in_harness(test, tmp_path)


def test_callers_that_leave_in_an_outage_are_bounded_before_their_settlements_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_service, "MAX_UNSETTLED", 3)

    async def test(made: Harness) -> None:
        writer, answers = made.usage._writer, asyncio.Event()
        commit = writer._commit

        async def hang(operations: Any) -> Any:
            await answers.wait()
            return await commit(operations)

        writer._commit = hang
        for _ in range(3):
            beginning = asyncio.create_task(begin(made, ManualEngine()))
            while not made.service.running:  # noqa: ASYNC110  the service has no event for this
                await asyncio.sleep(0)
            beginning.cancel()
            await asyncio.wait({beginning})
        try:
            with pytest.raises(TooManyUnsettled):
                await asyncio.wait_for(begin(made, ManualEngine()), 10)
        finally:
            answers.set()
        while made.usage._num_abandoned:  # noqa: ASYNC110  the service has no event for this
            await asyncio.sleep(0.001)
        again = await begin(made, ManualEngine())
        again.abort(Draining())

    in_harness(test, tmp_path)
