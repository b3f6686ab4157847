"""kill -9 in the middle of a batch: every custom_id once, and a bill that is exact at the batch's price."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from peft_uploads import form, make_adapter
from postgres_server import start_postgres
from server_process import Child, Place, served

from loramux.data.records.database import Database, parse_url
from loramux.money.billing.reconcile import reconcile

PLAN = """
[[plans]]
name = "p"
currency = "USD"

[[plans.prices]]
meter = "output"
valid_from = 2020-01-01
price = "2"

[[plans.prices]]
meter = "output"
tier = "*/batch"
valid_from = 2020-01-01
price = "1"
"""


@dataclass(eq=False)
class Chatter(threading.Thread):
    """An interactive caller; remembers the seconds to its first tokens."""

    server: Child
    key: str
    seconds: list[float] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        client = self.server.openai(self.key)
        while not self.stopped:
            began = time.monotonic()
            try:
                with client.completions.create(model="tiny", prompt="hello", max_tokens=8, stream=True) as stream:
                    next(iter(stream))
                    self.seconds.append(time.monotonic() - began)
                    list(stream)
            except openai.APIError:
                return
            time.sleep(0.05)


def run_under_kills(place: Place, base_dir: Path, lines: int, adapters: int, kills: int) -> None:
    place.prepare()
    place.loramux("migrate")
    key = place.key_of("acme")
    (place.folder / "plan.toml").write_text(PLAN)
    place.loramux("price", "apply", str(place.folder / "plan.toml"))
    place.loramux("price", "assign", "p", "--tenant", "acme", "--from", time.strftime("%Y-%m", time.gmtime()))
    names = [f"a{number}" for number in range(adapters)]
    made, chance, batch_id = make_adapter(base_dir, place.folder / "adapter"), random.Random(7), ""
    batch_input = b"".join(_line(number, names[number % len(names)], chance) for number in range(lines))
    told: dict[str, list[float]] = {}
    for life in range(kills + 1):
        with served(place) as server:
            client = server.openai(key)
            if life == 0:
                with server.http(key) as session:
                    for name in names:
                        assert session.post("/v1/adapters", **form(made, name)).status_code == 201
                    told["alone"] = _listen(server, key, 3.0 if lines > 1000 else 0.5)
                file = client.files.create(file=("in.jsonl", batch_input), purpose="batch")
                asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
                batch_id = client.batches.create(input_file_id=file.id, **asked).id
            done = client.batches.retrieve(batch_id).request_counts.completed
            goal = done + lines // (kills + 2)
            chatter = Chatter(server, key)
            chatter.start()
            deadline = time.monotonic() + 600
            while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired"):
                assert time.monotonic() < deadline, batch
                if life < kills and batch.request_counts.completed >= goal:
                    os.killpg(server.process.pid, signal.SIGKILL)
                    break
                time.sleep(0.02)
            chatter.stopped = True
            chatter.join(60)
            told.setdefault("beside", []).extend(chatter.seconds)
            if life < kills:
                assert server.process.wait(30) == -signal.SIGKILL, "the batch ended before the kill"
                continue
            assert batch.status == "completed", batch
            assert (batch.request_counts.completed, batch.request_counts.failed) == (lines, 0)
            output = [
                json.loads(one) for one in client.files.content(batch.output_file_id or "").text.split("\n") if one
            ]
    _check_bill(place, output, lines)
    report = {name: (len(values), *_quantiles(values)) for name, values in told.items() if len(values) > 1}
    print("first token of interactive requests, count, p50, p99:", report)


def _lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(one) for one in client.files.content(file_id or "").text.split("\n") if one]


def _line(number: int, model: str, chance: random.Random) -> bytes:
    body = {"model": model, "prompt": "x" * chance.randint(1, 30), "max_tokens": chance.randint(1, 12)}
    one = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(one).encode() + b"\n"


def _listen(server: Child, key: str, seconds: float) -> list[float]:
    chatter = Chatter(server, key)
    chatter.start()
    time.sleep(seconds)
    chatter.stopped = True
    chatter.join(60)
    return chatter.seconds


def _quantiles(values: list[float]) -> tuple[float, float]:
    ranks = statistics.quantiles(values, n=100)
    return round(ranks[49], 4), round(ranks[98], 4)


def _check_bill(place: Place, output: list[dict], lines: int) -> None:
    """Every line is there once, and the ledger has the output's tokens, each line's once."""
    assert [one["custom_id"] for one in output] == [f"id-{number}" for number in range(lines)]
    told = {one["response"]["request_id"]: one["response"]["body"]["usage"] for one in output}
    assert len(told) == lines, "two lines have one request"
    engine = sa.create_engine(parse_url(f"sqlite:///{place.folder / 'var/loramux.sqlite3'}"), poolclass=sa.NullPool)
    query = (
        "SELECT request_id, input_tokens, output_tokens FROM ledger_entries"
        " WHERE kind = 'usage' AND status = 'completed' AND tier = 'standard/batch'"
    )
    with engine.connect() as connection:
        billed = {row[0]: (row[1], row[2]) for row in connection.execute(sa.text(query))}
        rest = connection.execute(
            sa.text("SELECT sum(output_tokens) FROM ledger_entries WHERE tier = 'standard' AND kind = 'usage'")
        ).scalar()
        claims = connection.execute(sa.text("SELECT count(*) FROM idempotency_claims")).scalar()
    engine.dispose()
    assert billed == {id: (one["prompt_tokens"], one["completion_tokens"]) for id, one in told.items()}
    assert claims == 0
    month = time.strftime("%Y-%m", time.gmtime())
    invoice = place.loramux("usage", "invoice", "--tenant", "acme", "--period", month)
    amounts = {line["tier"]: Decimal(line["amount"]) for line in invoice["lines"] if line["meter"] == "output"}
    assert amounts["*/batch"] == sum(one["completion_tokens"] for one in told.values())
    assert amounts.get("*", 0) == 2 * (rest or 0)
    assert asyncio.run(_drift(place)) == 0


async def _drift(place: Place) -> int:
    database = Database(f"sqlite:///{place.folder / 'var/loramux.sqlite3'}")
    try:
        return (await reconcile(database)).drift_tokens
    finally:
        await database.close()


def test_batch_survives_kills_with_every_line_once_and_an_exact_bill(base_dir: Path, tmp_path: Path) -> None:
    run_under_kills(Place(tmp_path, base_dir, in_process=True), base_dir, lines=300, adapters=3, kills=1)


@pytest.mark.slow
def test_batch_of_a_dead_server_is_ended_by_another_one(base_dir: Path, tmp_path: Path) -> None:
    postgres = start_postgres(Path("/tmp") / f"lm-batch-{os.getpid()}")
    place = Place(tmp_path, base_dir, in_process=True, url=postgres.get_uri()).prepare()
    place.loramux("migrate")
    key, lines = place.key_of("acme"), 600
    try:
        with served(place) as first, served(place) as second:
            client = first.openai(key)
            batch_input = b"".join(_line(number, "tiny", random.Random(number)) for number in range(lines))
            file = client.files.create(file=("in.jsonl", batch_input), purpose="batch")
            asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.batches.create(input_file_id=file.id, **asked)
            deadline = time.monotonic() + 120
            while batch.request_counts is None or not batch.request_counts.completed:
                assert time.monotonic() < deadline, batch
                time.sleep(0.02)
                batch = client.batches.retrieve(batch.id)
            os.killpg(first.process.pid, signal.SIGKILL)
            assert batch.status == "in_progress", "the batch ended before the kill"
            client = second.openai(key)
            while batch.status != "completed":
                assert time.monotonic() < deadline, batch
                time.sleep(0.05)
                batch = client.batches.retrieve(batch.id)
            output = _lines(client, batch.output_file_id)
        assert [one["custom_id"] for one in output] == [f"id-{number}" for number in range(lines)]
        told = {one["response"]["request_id"]: one["response"]["body"]["usage"]["completion_tokens"] for one in output}
        query = "SELECT request_id, output_tokens FROM ledger_entries WHERE kind = 'usage' AND status = 'completed'"
        engine = sa.create_engine(parse_url(postgres.get_uri()), poolclass=sa.NullPool)
        with engine.connect() as connection:
            assert {row[0]: row[1] for row in connection.execute(sa.text(query))} == told
        engine.dispose()
    finally:
        postgres.cleanup()


@pytest.mark.slow
def test_batch_of_ten_thousand_lines_over_fifty_adapters_survives_kills(base_dir: Path, tmp_path: Path) -> None:
    run_under_kills(Place(tmp_path, base_dir, in_process=False), base_dir, lines=10_000, adapters=50, kills=2)
