"""Eight processes settling into one PostgreSQL: no gap, nothing twice; an export at the same time sees each entry
once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from loramux.common.identity import Principal
from loramux.data.records.database import Database
from loramux.data.records.usage import Span
from loramux.money.exports.tables import ledger_pages
from loramux.money.usage.service import UsageService

pytestmark = pytest.mark.anyio

PROCESSES, REQUESTS = 8, 60

SERVER = """
import asyncio, sys
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.usage.settlement import Settlement
from loramux.money.usage.service import UsageService
from loramux.common.units import TokenCounts

async def main(url, tenant, key, name, requests):
    usage = UsageService(Database(url))
    await usage.start()

    async def serve(number):
        id = f"{name}-{number}"
        await usage.open(OpenedRequest(
            id=id, tenant_id=tenant, key_id=key, model="m", base_model="m", adapter_digest=None,
            prompt_tokens=5, max_tokens=5,
        ))
        await asyncio.sleep(0.01 * (number % 7))
        await usage.settle(Settlement(
            request_id=id, ended_by="completion", finish_reason="stop", delivered=TokenCounts(prompt=5, output=2),
            engine_count=TokenCounts(prompt=5, output=2),
        ))

    for start in range(0, requests, 15):
        await asyncio.gather(*(serve(number) for number in range(start, start + 15)))
    await usage.stop()

asyncio.run(main(*sys.argv[1:5], int(sys.argv[5])))
"""


def started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def test_ledger_of_eight_processes_has_no_gap_and_exports_exactly(
    request: pytest.FixtureRequest,
    enrol: Callable[[str], Awaitable[Principal]],
    url: str,
    database: Database,
    backend: str,
) -> None:
    if backend == "sqlite":
        pytest.skip("an embedded database has one server")
    acme = await enrol("acme")
    command = [sys.executable, "-c", SERVER, url, acme.tenant, acme.key_id]
    servers = [started([*command, f"server{number}", str(REQUESTS)]) for number in range(PROCESSES)]
    exported: list[int] = []
    while len(exported) < PROCESSES * REQUESTS:
        async for page in ledger_pages(database, Span(len(exported) + 1, None)):
            exported += [row["sequence"] for row in page]
        await asyncio.sleep(0.05)
        assert not any(server.poll() for server in servers)
    assert [server.wait(180) for server in servers] == [0] * PROCESSES
    assert exported == list(range(1, PROCESSES * REQUESTS + 1))
    assert await UsageService(database).verify_chain() == PROCESSES * REQUESTS
