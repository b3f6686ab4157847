"""A request under an idempotency key runs once: repeated it is refused, then told again; after a crash it is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import sqlalchemy as sa

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import SECOND, TokenCounts
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.database import Database
from loramux.data.records.requests import ClaimRow, OpenedRequest
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.limits.errors import RateReached
from loramux.money.limits.limits import Limits
from loramux.money.usage.errors import IdempotencyMismatch, StillRunning
from loramux.money.usage.idempotency import AnswerStorage, StoredAnswer
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import EndedBy, Settlement

pytestmark = pytest.mark.anyio

ENDS: tuple[EndedBy, ...] = ("platform", "caller")
ONE = IdempotencyClaim("one", "body")
ANSWERS = AnswerStorage(b"p" * 32)


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[UsageService]:
    usage = UsageService(database, answers=ANSWERS)
    await usage.start()
    yield usage
    await usage.stop()


def opened(principal: Principal, id: str, claim: IdempotencyClaim = ONE) -> OpenedRequest:
    return OpenedRequest(
        id=id,
        tenant_id=principal.tenant,
        key_id=principal.key_id,
        project_id=principal.project,
        tier="standard",
        model="tiny",
        adapter_digest=None,
        prompt_tokens=1,
        max_tokens=1,
        claim=claim,
    )


async def settle(
    usage: UsageService, id: str, ended_by: EndedBy = "completion", answer: bytes | None = b"said"
) -> None:
    await usage.settle(
        Settlement(
            request_id=id,
            ended_by=ended_by,
            finish_reason="stop",
            delivered=TokenCounts(prompt=1, output=1),
            answer=answer,
        )
    )


async def test_idempotency_key_in_flight_answered_and_with_another_body(usage: UsageService, acme: Principal) -> None:
    assert await usage.open(opened(acme, "r1")) == RateLimitStatus()
    with pytest.raises(StillRunning, match="'one' is still running"):
        await usage.open(opened(acme, "r2"))
    await settle(usage, "r1")
    assert await usage.open(opened(acme, "r3")) == StoredAnswer("r1", b"said")
    with pytest.raises(IdempotencyMismatch, match="with another request"):
        await usage.open(opened(acme, "r4", IdempotencyClaim("one", "other")))
    assert await usage.open(opened(acme, "r5", IdempotencyClaim("two", "body"))) == RateLimitStatus()
    assert [row.requests for row in await usage.rows(acme.tenant)] == [1]


async def test_answers_and_requests_are_not_readable_in_the_database(
    usage: UsageService, acme: Principal, database: Database
) -> None:
    await usage.open(opened(acme, "r1"))
    await settle(usage, "r1", answer=b"the model's secret answer")
    async with database.read() as session:
        row = (await session.scalars(sa.select(ClaimRow))).one()
    assert b"secret" not in row.answer
    assert row.fingerprint != "body"
    assert await usage.open(opened(acme, "r2")) == StoredAnswer("r1", b"the model's secret answer")


async def test_answer_moved_to_another_request_is_not_read(
    usage: UsageService, acme: Principal, database: Database
) -> None:
    two = IdempotencyClaim("two", "body")
    for id, claim in (("r1", ONE), ("r2", two)):
        await usage.open(opened(acme, id, claim))
        await settle(usage, id, answer=id.encode())
    async with database.begin() as session:
        stored = {row.name: row for row in await session.scalars(sa.select(ClaimRow))}
        stored["two"].answer = stored["one"].answer
    with pytest.raises(IdempotencyMismatch, match="cannot be read any more"):
        await usage.open(opened(acme, "r3", two))


async def test_plain_answer_of_an_older_release_is_replayed(
    usage: UsageService, acme: Principal, database: Database
) -> None:
    await usage.open(opened(acme, "r1"))
    await settle(usage, "r1")
    async with database.begin() as session:
        row = (await session.scalars(sa.select(ClaimRow))).one()
        row.answer, row.fingerprint = b'{"text":"old"}', "body"
    assert await usage.open(opened(acme, "r2")) == StoredAnswer("r1", b'{"text":"old"}')


async def test_answers_are_kept_as_long_as_the_setting_says(database: Database, acme: Principal) -> None:
    usage = UsageService(database, answers=AnswerStorage(b"p" * 32, 60 * SECOND))
    await usage.start()
    now = database.now()
    database.now = lambda: now
    await usage.open(opened(acme, "r1"))
    await settle(usage, "r1")
    database.now = lambda: now + 60 * SECOND
    assert await usage.open(opened(acme, "r2")) == RateLimitStatus()
    await usage.stop()


async def test_of_concurrent_requests_under_one_key_one_runs(database: Database, acme: Principal) -> None:
    servers = [UsageService(database, answers=ANSWERS) for _ in range(3)]
    for server in servers:
        await server.start()
    attempts = (server.open(opened(acme, f"r{i}-{j}")) for j in range(5) for i, server in enumerate(servers))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(outcome, RateLimitStatus) for outcome in outcomes) == 1, outcomes
    assert sum(isinstance(outcome, StillRunning) for outcome in outcomes) == 14
    for server in servers:
        await server.stop()


async def test_failed_request_frees_its_idempotency_key(usage: UsageService, acme: Principal) -> None:
    for number, ended_by in enumerate(ENDS):
        await usage.open(opened(acme, f"r{number}"))
        await settle(usage, f"r{number}", ended_by, None)
    assert await usage.open(opened(acme, "again")) == RateLimitStatus()


async def test_crash_frees_the_idempotency_key(usage: UsageService, acme: Principal, database: Database) -> None:
    await usage.open(opened(acme, "r1"))
    await usage.stop()
    other = UsageService(database, answers=ANSWERS)
    await other.start()
    assert await other.sweep() == 1
    assert await other.open(opened(acme, "r2")) == RateLimitStatus()
    await other.stop()


async def test_refused_request_leaves_its_idempotency_key_free(
    usage: UsageService, acme: Principal, tenants: Tenants
) -> None:
    limits = Limits(tenants.changes)
    await limits.put(acme.tenant, acme.tenant, "requests_per_minute", 0)
    with pytest.raises(RateReached):
        await usage.open(opened(acme, "r1"))
    await limits.remove(acme.tenant, acme.tenant, "requests_per_minute")
    assert await usage.open(opened(acme, "r2")) == RateLimitStatus()


async def test_idempotency_keys_expire_and_belong_to_one_caller(
    usage: UsageService, acme: Principal, database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    globex = await enrol("globex")
    await usage.open(opened(acme, "r1"))
    await settle(usage, "r1")
    assert await usage.open(opened(globex, "r2")) == RateLimitStatus()
    now = database.now() + 86_400_000_001
    database.now = lambda: now
    assert await usage.open(opened(acme, "r3")) == RateLimitStatus()
    await usage.forget_answers()
    async with database.read() as session:
        assert (await session.scalars(sa.select(ClaimRow.request_id))).all() == ["r3"]
