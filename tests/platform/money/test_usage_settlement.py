"""From a request's open row to its one line on the bill, whatever crashes in between."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext

import msgspec
import pytest
import sqlalchemy as sa

from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.ledger import LedgerRow
from loramux.data.records.requests import OpenedRequest, RequestRow
from loramux.money.usage.errors import RequestRefused, UnknownRequest, UsageClosed
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import EndedBy, Settlement, SettlementOutcome, SettlementWriter, UsageOperation

pytestmark = pytest.mark.anyio


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


Server = Callable[[], Awaitable[UsageService]]


@pytest.fixture
async def server(url: str) -> AsyncIterator[Server]:
    """Start a server with its own connections; all end with the test."""
    async with AsyncExitStack() as servers:

        async def server() -> UsageService:
            database = Database(url)
            servers.push_async_callback(database.close)
            usage = UsageService(database)
            await usage.start()
            servers.push_async_callback(usage.stop)
            return usage

        yield server


@pytest.fixture
async def usage(server: Server) -> UsageService:
    return await server()


def opened(principal: Principal, id: str, **changes: object) -> OpenedRequest:
    request = OpenedRequest(
        id=id,
        tenant_id=principal.tenant,
        key_id=principal.key_id,
        model="acme/upper@1",
        adapter_digest="sha256:" + "a" * 64,
        prompt_tokens=12,
        max_tokens=100,
    )
    return msgspec.structs.replace(request, **changes)


def settlement(id: str, **changes: object) -> Settlement:
    end = Settlement(
        request_id=id,
        ended_by="completion",
        finish_reason="stop",
        delivered=TokenCounts(prompt=12, cached=3, output=7),
    )
    return msgspec.structs.replace(end, **changes)


async def statuses(database: Database) -> dict[str, str]:
    async with database.read() as session:
        return {row.id: row.status for row in await session.execute(sa.select(RequestRow.id, RequestRow.status))}


async def kinds(database: Database) -> list[tuple[str, str, int]]:
    columns = LedgerRow.request_id, LedgerRow.kind, LedgerRow.output_tokens
    async with database.read() as session:
        return [tuple(row) for row in await session.execute(sa.select(*columns).order_by(LedgerRow.sequence))]


async def test_settlement_of_an_opened_request_is_in_the_ledger(
    usage: UsageService, database: Database, acme: Principal
) -> None:
    await usage.open(opened(acme, "r1"))
    assert await statuses(database) == {"r1": "open"}
    entry = await usage.settle(settlement("r1"))
    assert await statuses(database) == {"r1": "settled"}
    assert (entry.sequence, entry.tenant_id, entry.key_id, entry.model) == (1, acme.tenant, acme.key_id, "acme/upper@1")
    assert (entry.input_tokens, entry.cached_tokens, entry.output_tokens) == (12, 3, 7)
    assert (entry.finish_reason, entry.status) == ("stop", "completed")
    assert entry.adapter_digest == "sha256:" + "a" * 64
    assert await usage.verify_chain() == 1


@pytest.mark.parametrize("ended_by", ["completion", "caller", "platform"])
async def test_settlement_bills_what_was_delivered_unless_the_platform_failed(
    usage: UsageService, acme: Principal, ended_by: EndedBy
) -> None:
    """A deadline, a stop or a disconnect is the caller's: it never makes delivered tokens free."""
    await usage.open(opened(acme, "r1"))
    delivered = TokenCounts(prompt=12, cached=3, output=7)
    computed = TokenCounts(prompt=24, cached=6, output=9)
    entry = await usage.settle(
        Settlement(
            request_id="r1",
            ended_by=ended_by,
            finish_reason="deadline",
            delivered=delivered,
            undelivered=computed - delivered,
            adapter_loads=1,
            engine_count=computed,
        )
    )
    is_free = ended_by == "platform"
    assert entry.billed == (TokenCounts() if is_free else delivered)
    assert entry.waived == (computed if is_free else computed - delivered)
    assert entry.adapter_load == (0 if is_free else 1)
    assert entry.status == {"completion": "completed", "caller": "cancelled", "platform": "failed"}[ended_by]
    assert usage.drift_tokens == 0


async def test_settlement_of_a_request_without_an_answer_bills_no_adapter_load(
    usage: UsageService, acme: Principal
) -> None:
    await usage.open(opened(acme, "r1"))
    end = Settlement(request_id="r1", ended_by="caller", finish_reason=None, adapter_loads=3)
    entry = await usage.settle(end)
    assert (entry.adapter_load, entry.billed, entry.waived) == (0, TokenCounts(), TokenCounts())


async def test_settlement_bills_one_adapter_load_however_often_it_was_preempted(
    usage: UsageService, acme: Principal
) -> None:
    await usage.open(opened(acme, "r1"))
    assert (await usage.settle(settlement("r1", adapter_loads=3))).adapter_load == 1


async def test_settlement_repeated_changes_nothing(usage: UsageService, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    entry = await usage.settle(settlement("r1"))
    assert await usage.settle(settlement("r1", delivered=TokenCounts(output=99))) == entry
    assert await usage.verify_chain() == 1


async def test_settlement_concurrent_bills_once(usage: UsageService, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    entries = await asyncio.gather(*(usage.settle(settlement("r1")) for _ in range(20)))
    assert len(set(entries)) == 1
    assert await usage.verify_chain() == 1


async def test_settlement_on_several_servers_bills_once(server: Server, usage: UsageService, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    others = [await server() for _ in range(4)]
    entries = await asyncio.gather(*(other.settle(settlement("r1")) for other in others for _ in range(5)))
    assert len(set(entries)) == 1
    assert await usage.verify_chain() == 1


async def test_settlement_on_many_servers_leaves_no_gap(server: Server, database: Database, acme: Principal) -> None:
    servers = [await server() for _ in range(4)]

    async def serve(number: int) -> int:
        usage = servers[number % 4]
        await usage.open(opened(acme, f"r{number}"))
        return (await usage.settle(settlement(f"r{number}"))).sequence

    assert sorted(await asyncio.gather(*(serve(number) for number in range(200)))) == list(range(1, 201))
    assert await servers[0].verify_chain() == 200
    assert set((await statuses(database)).values()) == {"settled"}


async def test_settlement_of_an_unknown_request_is_refused_alone(usage: UsageService, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    outcomes = await asyncio.gather(
        usage.settle(settlement("r1")), usage.settle(settlement("r2")), return_exceptions=True
    )
    assert isinstance(outcomes[1], UnknownRequest)
    assert "r2" in str(outcomes[1])
    assert await usage.verify_chain() == 1


async def test_settlement_that_the_database_refuses_harms_no_other(
    usage: UsageService, database: Database, acme: Principal
) -> None:
    for number in range(6):
        await usage.open(opened(acme, f"r{number}"))
    bad = {
        2: {"delivered": TokenCounts(prompt=12, output=-1)},
        4: {"delivered": TokenCounts(prompt=12, cached=13)},
    }
    settlements = [settlement(f"r{number}", **bad.get(number, {})) for number in range(6)]
    outcomes = await asyncio.gather(*map(usage.settle, settlements), return_exceptions=True)
    assert [number for number, outcome in enumerate(outcomes) if isinstance(outcome, RequestRefused)] == [2, 4]
    assert await usage.verify_chain() == 4
    assert [id for id, status in sorted((await statuses(database)).items()) if status == "open"] == ["r2", "r4"]


async def test_open_request_with_another_tenants_project_is_refused(
    usage: UsageService, acme: Principal, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    globex = await enrol("globex")
    with pytest.raises(RequestRefused):
        await usage.open(opened(acme, "r1", project_id=globex.project))


async def test_open_request_with_another_servers_id_is_refused(
    server: Server, usage: UsageService, acme: Principal
) -> None:
    other = await server()
    await usage.open(opened(acme, "r1"))
    with pytest.raises(RequestRefused, match="r1"):
        await other.open(opened(acme, "r1"))


async def test_open_request_cancelled_leaves_nothing_open(
    usage: UsageService, database: Database, acme: Principal
) -> None:
    opening = asyncio.create_task(usage.open(opened(acme, "r1")))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await usage.stop()
    assert await statuses(database) == {"r1": "settled"}
    assert await kinds(database) == [("r1", "usage", 0)]


async def test_settlement_cancelled_is_in_the_ledger(usage: UsageService, database: Database, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    settling = asyncio.create_task(usage.settle(settlement("r1")))
    await asyncio.sleep(0)
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
    await usage.stop()
    assert await kinds(database) == [("r1", "usage", 7)]


async def test_open_request_without_the_writer_is_refused(database: Database, acme: Principal) -> None:
    with pytest.raises(UsageClosed):
        await UsageService(database).open(opened(acme, "r1"))


async def test_sweep_keeps_own_requests(usage: UsageService, database: Database, acme: Principal) -> None:
    await usage.open(opened(acme, "r1"))
    assert await usage.sweep() == 0
    assert await statuses(database) == {"r1": "open"}


async def test_sweep_keeps_requests_of_a_living_server(
    server: Server, usage: UsageService, database: Database, acme: Principal
) -> None:
    other = await server()
    await other.open(opened(acme, "r1"))
    assert await usage.sweep() == 0
    await other.stop()
    assert await usage.sweep() == 1
    assert await statuses(database) == {"r1": "interrupted"}


async def test_settlement_after_a_wrong_sweep_is_billed(
    server: Server, usage: UsageService, database: Database, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.money.usage.service.server_liveness", lambda *_: nullcontext())
    other = await server()
    await other.open(opened(acme, "r1"))
    assert await usage.sweep() == 1
    await other.settle(settlement("r1"))
    assert await kinds(database) == [("r1", "interrupted", 0), ("r1", "usage", 7)]
    assert await statuses(database) == {"r1": "settled"}
    assert [(row.tokens.output, row.requests) for row in await usage.rows(acme.tenant)] == [(7, 1)]


async def test_settlement_replaces_broken_connections(
    backend: str, usage: UsageService, acme: Principal, sql: Callable[[str], None]
) -> None:
    if backend == "sqlite":
        pytest.skip("an embedded database has no connection that breaks")
    await usage.open(opened(acme, "r1"))
    sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert (await usage.settle(settlement("r1"))).sequence == 1
    assert await usage.verify_chain() == 1


async def test_settlement_with_a_lost_commit_answer_is_billed_once(
    server: Server, database: Database, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the commit: the writer cannot know, and tries the whole batch again."""
    commit, lost = SettlementWriter.commit, []

    async def commit_and_lose(
        self: SettlementWriter, batch: Sequence[UsageOperation]
    ) -> list[SettlementOutcome | Exception]:
        outcomes = await commit(self, batch)
        if len(lost) < 2:
            lost.append(batch)
            raise RecordsUnavailable("the connection broke")
        return outcomes

    monkeypatch.setattr(SettlementWriter, "commit", commit_and_lose)
    usage = await server()
    await usage.open(opened(acme, "r1"))
    entry = await usage.settle(settlement("r1"))
    assert len(lost) == 2
    assert entry.sequence == 1
    assert await kinds(database) == [("r1", "usage", 7)]


CRASH = """
import asyncio, os, signal, sys
from loramux.data.records.database import Database
from loramux.common.units import TokenCounts
from loramux.data.records.requests import OpenedRequest
from loramux.money.usage.settlement import Settlement
from loramux.money.usage.service import UsageService

async def main(url, tenant, key):
    usage = UsageService(Database(url))
    await usage.start()

    async def open(id):
        await usage.open(OpenedRequest(
            id=id, tenant_id=tenant, key_id=key, model="m", adapter_digest=None, prompt_tokens=5, max_tokens=5
        ))

    async def settle(id):
        await usage.settle(Settlement(
            request_id=id, ended_by="completion", finish_reason="stop", delivered=TokenCounts(prompt=5, output=2)
        ))

    await asyncio.gather(*(open(f"r{n}") for n in range(40)))
    await asyncio.gather(*(settle(f"r{n}") for n in range(10)))
    print("settled", flush=True)
    rest = [asyncio.create_task(settle(f"r{n}")) for n in range(10, 20)]
    await asyncio.sleep(float(sys.argv[4]))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:4]))
"""


@pytest.mark.parametrize("seconds_into_the_commit", [0, 0.001, 0.004, 0.1])
async def test_settlement_after_a_kill_is_neither_lost_nor_doubled(
    url: str, usage: UsageService, database: Database, acme: Principal, seconds_into_the_commit: float
) -> None:
    """Killed with 10 requests settled, 10 in the middle of a commit, and 20 open."""
    command = [sys.executable, "-c", CRASH, url, acme.tenant, acme.key_id]
    crash = await asyncio.to_thread(
        subprocess.run, [*command, str(seconds_into_the_commit)], capture_output=True, text=True, check=False
    )
    assert crash.returncode == -9, crash.stderr
    assert crash.stdout == "settled\n"
    interrupted = await swept(usage)
    survived = [kind for _, kind, _ in await kinds(database)].count("usage")
    assert survived in (10, 20)
    assert survived + interrupted == 40
    assert await usage.sweep() == 0
    assert await usage.verify_chain() == 40
    [row] = await usage.rows(acme.tenant)
    assert (row.requests, row.tokens.prompt, row.tokens.output) == (survived, 5 * survived, 2 * survived)
    assert sorted(set((await statuses(database)).values())) == ["interrupted", "settled"]


async def swept(usage: UsageService) -> int:
    """Sweep until PostgreSQL has noticed that the killed client's connection is gone."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if number := await usage.sweep():
            return number
        await asyncio.sleep(0.05)
    return 0
