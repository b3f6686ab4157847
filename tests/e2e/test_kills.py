"""kill -9 at any moment, under load: what a client was told it used is on the bill, once, and nothing else is.

pytest tests/e2e/test_kills.py --kills 100      # for each database; the default is a small number
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import sqlalchemy as sa
from postgres_server import start_postgres
from server_process import Child, Place, served

from loramux.data.records.database import Database, parse_url
from loramux.money.billing.reconcile import reconcile
from loramux.money.usage.service import UsageService

CLIENTS = 6


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """None: the embedded database that a server makes by itself."""
    if request.param == "sqlite":
        yield None
        return
    server = start_postgres(Path("/tmp") / f"lm-kills-{os.getpid()}")
    yield server.get_uri()
    server.cleanup()


class Customer(threading.Thread):
    """Asks again and again, in all ways, until the server is gone; remembers the usage that it was told."""

    def __init__(self, server: Child, key: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.told: dict[str, tuple[int, int]] = {}
        self._client = server.openai(key)
        self._random = random.Random(seed)
        self.start()

    def run(self) -> None:
        while True:
            try:
                self._ask()
            except (openai.APIError, httpx.HTTPError):
                return

    def _ask(self) -> None:
        prompt = "x" * self._random.randint(1, 40)
        facts = {"model": "tiny", "prompt": prompt, "max_tokens": self._random.randint(1, 30)}
        if self._random.random() < 0.4:
            answer = self._client.completions.create(**facts)
            self._note(answer.id, answer.usage)
            return
        leave_at = self._random.choice([None, None, self._random.randint(1, 10)])
        with self._client.completions.create(**facts, stream=True, stream_options={"include_usage": True}) as stream:
            for number, chunk in enumerate(stream):
                if chunk.usage is not None:
                    self._note(chunk.id, chunk.usage)
                if number == leave_at:
                    return

    def _note(self, id: str, usage: openai.types.CompletionUsage | None) -> None:
        assert usage is not None
        self.told[id] = (usage.prompt_tokens, usage.completion_tokens)


def test_acknowledged_requests_survive_kill(
    base_dir: Path, tmp_path: Path, url: str | None, request: pytest.FixtureRequest
) -> None:
    place = Place(tmp_path, base_dir, in_process=True, url=url).prepare()
    place.loramux("migrate")
    key = place.key_of("acme")
    told: dict[str, tuple[int, int]] = {}
    for kill in range(request.config.getoption("--kills")):
        with served(place) as server:
            customers = [Customer(server, key, 1000 * kill + number) for number in range(CLIENTS)]
            threading.Event().wait(random.Random(kill).uniform(0.05, 2.5))
            os.killpg(server.process.pid, signal.SIGKILL)
            for customer in customers:
                customer.join(60)
                told |= customer.told
        check(place, told)
    assert told, "no client was ever told anything"
    assert place.loramux("usage", "reconcile")["drift_tokens"] == 0


def check(place: Place, told: dict[str, tuple[int, int]]) -> None:
    """The dead server's requests are closed, and the bill is right."""
    url = place.url or f"sqlite:///{place.folder / 'var/loramux.sqlite3'}"
    asyncio.run(sweep(url))
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        usage = "SELECT request_id, input_tokens, output_tokens FROM ledger_entries WHERE kind = 'usage'"
        rows = connection.execute(sa.text(usage)).all()
        left = connection.execute(sa.text("SELECT count(*) FROM requests WHERE status = 'open'")).scalar()
    engine.dispose()
    billed = {row[0]: (row[1], row[2]) for row in rows}
    assert len(billed) == len(rows), "a request is on the bill twice"
    assert {id: billed.get(id) for id in told} == told
    assert left == 0
    assert asyncio.run(drift(url)) == 0


async def drift(url: str) -> int:
    """Return the result of `loramux usage reconcile`, chain included, without a separate process."""
    database = Database(url)
    try:
        return (await reconcile(database)).drift_tokens
    finally:
        await database.close()


async def sweep(url: str) -> None:
    """Sweep as the next server does at its start."""
    database = Database(url)
    usage = UsageService(database)
    try:
        async with asyncio.timeout(30):
            while await usage.sweep() or await _open(database):  # noqa: ASYNC110  PostgreSQL notices a moment later
                await asyncio.sleep(0.05)
    finally:
        await database.close()


async def _open(database: Database) -> int:
    async with database.read() as session:
        return int(await session.scalar(sa.text("SELECT count(*) FROM requests WHERE status = 'open'")) or 0)
