"""A request under an idempotency key runs once: repeated it is refused, then told again; after a crash it is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import sqlalchemy as sa

from loramux.limits import Limits, RateReached, Standing
from loramux.records import Database, Principal
from loramux.records.idempotency_models import ClaimRow
from loramux.tenants import Tenants
from loramux.usage import Answered, Claim, IdempotencyMismatch, OpenedRequest, Settlement, StillRunning, Usage

pytestmark = pytest.mark.anyio

ONE = Claim("one", "body")


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[Usage]:
    usage = Usage(database)
    await usage.start()
    yield usage
    await usage.stop()


def opened(principal: Principal, id: str, claim: Claim = ONE) -> OpenedRequest:
    return OpenedRequest(
        id=id,
        tenant=principal.tenant,
        key_id=principal.key_id,
        project_id=principal.project,
        tier="standard",
        model="tiny",
        adapter_digest=None,
        prompt_tokens=1,
        max_tokens=1,
        claim=claim,
    )


async def settle(usage: Usage, id: str, status: str = "completed", answer: bytes | None = b"said") -> None:
    await usage.settle(
        Settlement(
            request_id=id,
            input_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            finish_reason="stop",
            status=status,
            answer=answer,
        )
    )


async def test_in_flight_done_and_with_another_body(usage: Usage, acme: Principal) -> None:
    assert await usage.open(opened(acme, "r1")) == Standing()
    with pytest.raises(StillRunning, match="'one' is still running"):
        await usage.open(opened(acme, "r2"))
    await settle(usage, "r1")
    assert await usage.open(opened(acme, "r3")) == Answered("r1", b"said")
    with pytest.raises(IdempotencyMismatch, match="with another request"):
        await usage.open(opened(acme, "r4", Claim("one", "other")))
    assert await usage.open(opened(acme, "r5", Claim("two", "body"))) == Standing()
    assert [row.requests for row in await usage.rows(acme.tenant)] == [1]


async def test_of_many_at_once_one_runs(database: Database, acme: Principal) -> None:
    servers = [Usage(database) for _ in range(3)]
    for server in servers:
        await server.start()
    attempts = (server.open(opened(acme, f"r{i}-{j}")) for j in range(5) for i, server in enumerate(servers))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(outcome, Standing) for outcome in outcomes) == 1, outcomes
    assert sum(isinstance(outcome, StillRunning) for outcome in outcomes) == 14
    for server in servers:
        await server.stop()


async def test_what_was_not_completed_can_be_tried_again(usage: Usage, acme: Principal) -> None:
    for number, status in enumerate(("failed", "cancelled")):
        await usage.open(opened(acme, f"r{number}"))
        await settle(usage, f"r{number}", status, None)
    assert await usage.open(opened(acme, "again")) == Standing()


async def test_a_crash_frees_the_key(usage: Usage, acme: Principal, database: Database) -> None:
    await usage.open(opened(acme, "r1"))
    await usage.stop()
    other = Usage(database)
    await other.start()
    assert await other.sweep() == 1
    assert await other.open(opened(acme, "r2")) == Standing()
    await other.stop()


async def test_a_refused_request_leaves_its_key_free(usage: Usage, acme: Principal, tenants: Tenants) -> None:
    limits = Limits(tenants.changes)
    await limits.put(acme.tenant, acme.tenant, "requests_per_minute", 0)
    with pytest.raises(RateReached):
        await usage.open(opened(acme, "r1"))
    await limits.remove(acme.tenant, acme.tenant, "requests_per_minute")
    assert await usage.open(opened(acme, "r2")) == Standing()


async def test_keys_end_after_a_day_and_are_ones_own(
    usage: Usage, acme: Principal, database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    globex = await enrol("globex")
    await usage.open(opened(acme, "r1"))
    await settle(usage, "r1")
    assert await usage.open(opened(globex, "r2")) == Standing()
    now = database.now() + 86_400_000_001
    database.now = lambda: now
    assert await usage.open(opened(acme, "r3")) == Standing()
    await usage.forget_answers()
    async with database.read() as session:
        assert (await session.scalars(sa.select(ClaimRow.request_id))).all() == ["r3"]
